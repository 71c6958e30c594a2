"""Vector quantisation: codebooks and scalar quantisers as states, and pure functions over them."""

from . import beam, binary, fsp, fsq, grouped, hierarchical, implicit, latent, lfq, parted, projection, residual, simvq
from .affine import Affine, Moments, moments, shift
from .apply import apply
from .book import Book, codebook, decode, init, restart
from .encode import encode, encode_among, sample
from .gradient import direct, directional, gumbel, rotation, straight_through
from .kmeans import kmeans
from .losses import commitment, cross_entropy, diversity, orthogonal
from .parted import Across
from .quantized import Mean, Quantized, mean
from .rows import mask
from .update import Stats, add, ema, expire, move, perplexity, refresh, stats, update

__all__ = [
    "Across", "Affine", "Book", "Mean", "Moments", "Quantized", "Stats", "add", "apply", "beam", "binary", "codebook",
    "commitment", "cross_entropy", "decode", "direct", "directional", "diversity", "ema", "encode", "encode_among",
    "expire", "fsp", "fsq", "grouped", "gumbel", "hierarchical", "implicit", "init", "kmeans", "latent", "lfq",
    "mask", "mean", "moments", "move", "orthogonal", "parted", "perplexity", "projection", "refresh", "residual",
    "restart", "rotation", "sample", "shift", "simvq", "stats", "straight_through", "update",
]  # fmt: skip
