"""States of all quantisers without a learned codebook."""

from fquant.vq import random_projection
from fquant.vq.composite import residual
from fquant.vq.scalar import binary, fsp, fsq, latent, lfq

CASES = {  # verbs, a state, and its number of codes
    "fsq": (fsq, fsq.init(0, (8, 5, 5)), 200),
    "fsq, projected": (fsq, fsq.init(1, (5, 5, 5), 7, num_codebooks=2, rotation=True), 125),
    "fsq, noisy": (fsq, fsq.init(2, (5, 4), 6, symmetric=True, noise_dropout=0.5), 20),
    "fsp": (fsp, fsp.init(3, (8, 5, 5), moments=fsp.KURT), 200),
    "fsp, projected": (fsp, fsp.init(4, (8, 5, 5), 6, inverse=True, distribution="normal", quantize_rate=0.3), 200),
    "lfq": (lfq, lfq.init(5, 5, offset=2.0), 32),
    "lfq, projected": (lfq, lfq.init(6, 4, 6, num_codebooks=2, spherical=True, rotation=True, share=0.6), 16),
    "lfq, cosine": (lfq, lfq.init(7, 4, 6, cosine=1.0, clamp=1.5, activation="tanh", group=2), 16),
    "residual fsq": (residual, residual.init_fsq(8, (5, 4, 3), 3, 6, dropout=True), 60),
    "residual lfq": (residual, residual.init_lfq(9, 4, 3, dropout=True), 16),
    "latent": (latent, latent.init(10, (8, 5, 5)), 200),
    "latent, projected": (latent, latent.init(11, (4, 5), 6, num_codebooks=2), 20),
    "projection": (random_projection, random_projection.init(12, 6, 30, 4, num_codebooks=2), 30),
    "binary": (binary, binary.init(13, 4, free=0.1), 16),
}


def width(state):
    """Return the last dim of x."""
    if isinstance(state, random_projection.RandomProjection):
        return state.weight.shape[-1]
    return state.bits if isinstance(state, binary.Binary) else state.dim
