"""Vector quantisation: codebooks and scalar quantisers as states, and pure functions over them."""

from . import random_projection, sharded
from .codebook import implicit, simvq
from .codebook.apply import apply
from .codebook.book import Affine, Book, Moments, code_vectors, decode, init, moments, restart, shift
from .codebook.encode import encode, encode_among, sample
from .codebook.gradient_estimators import direct, directional, gumbel, rotation, straight_through
from .codebook.kmeans import kmeans
from .codebook.losses import commitment, cross_entropy, diversity, orthogonal
from .codebook.rows import mask
from .codebook.update import Stats, add, ema, expire, move, perplexity, refresh, stats, update
from .composite import beam, grouped, hierarchical, residual
from .quantized import Mean, Quantized, mean
from .scalar import binary, fsp, fsq, latent, lfq

__all__ = [
    "Affine", "Book", "Mean", "Moments", "Quantized", "Stats", "add", "apply", "beam", "binary", "code_vectors",
    "commitment", "cross_entropy", "decode", "direct", "directional", "diversity", "ema", "encode", "encode_among",
    "expire", "fsp", "fsq", "grouped", "gumbel", "hierarchical", "implicit", "init", "kmeans", "latent", "lfq",
    "mask", "mean", "moments", "move", "orthogonal", "perplexity", "random_projection", "refresh", "residual",
    "restart", "rotation", "sample", "sharded", "shift", "simvq", "stats", "straight_through", "update",
]  # fmt: skip
