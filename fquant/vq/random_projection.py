"""Random-projection quantisation, whose codes are targets to predict, as in BEST-RQ (Chiu et al. 2022).

    state = random_projection.init(key, dim=80, num_codes=8192, width=16)
    targets = random_projection.encode(state, features)     # i64[...], with several codebooks [... heads]

Each row is normalised to mean 0 and variance 1 and projected by a random matrix (Xavier). Its code is the vector of a
random codebook, of length 1, with the smallest angle to the projection. Nothing is trained or has a gradient.
"""

import torch
from einops import rearrange
from torch import Tensor

from .. import random, tree
from .codebook import rows
from .codebook.book import constant
from .codebook.encode import search
from .codebook.rows import direction
from .precision import matmul
from .quantized import Key, Mask, Quantized, Seed
from .scalar import projection_layers

update = projection_layers.update


@tree.node
class RandomProjection:
    """Random projections, each with a random codebook of its own (``heads`` of them)."""

    weight: Tensor  # f32[heads width dim]
    vectors: Tensor  # f32[heads codes width], of length 1
    norm: bool = tree.static(default=True)


def init(
    key: Seed, dim: int, num_codes: int, width: int, *, num_codebooks: int = 1, norm: bool = True
) -> RandomProjection:
    """Create a state for x f[... dim], projected to ``width``; with ``norm`` False rows are not normalised."""
    sizes = {"dim": dim, "num_codes": num_codes, "width": width, "num_codebooks": num_codebooks}
    if wrong := [f"{name} is {n}" for name, n in sizes.items() if n < 1]:
        raise ValueError(f"random_projection.init: {', '.join(wrong)}; wanted at least 1")
    if norm and dim == 1:
        raise ValueError("random_projection.init: dim is 1, and a row of one number has no variance; use norm=False")
    key = random.key(key)
    weight = random.normal(random.fold(key, "weight"), (num_codebooks, width, dim)) * (2 / (dim + width)) ** 0.5
    vectors = random.normal(random.fold(key, "vectors"), (num_codebooks, num_codes, width))
    return RandomProjection(weight, direction(vectors), norm)


def encode(state: RandomProjection, x: Tensor) -> Tensor:
    """Return codes i64[...], of several codebooks [... heads], for x f[... dim]; -1 for a row that is not finite."""
    z, kept = _project("random_projection.encode", state, x, None)
    return projection_layers.join_codes(_nearest(state, z), kept)


def decode(state: RandomProjection, codes: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Look up codes i[...] or [... heads]: vectors [... heads·width] in ``dtype``; zeros for -1; IndexError beyond."""
    heads, num_codes, _ = state.vectors.shape
    codes, known = projection_layers.split_codes("random_projection.decode", codes, heads, num_codes)
    pairs = zip(codes.clamp(min=0).unbind(-1), state.vectors.to(dtype), strict=True)
    found = torch.stack([vectors[codes] for codes, vectors in pairs], -2)  # [... heads width]
    return rearrange(torch.where(known[..., None], found, 0.0), "... h e -> ... (h e)")


def apply(state: RandomProjection, x: Tensor, key: Key = None, mask: Mask = None) -> Quantized:
    """Return the codes of x f[... dim] and their vectors [... heads·width], without gradient or losses."""
    z, kept = _project("random_projection.apply", state, x, mask)
    codes = projection_layers.join_codes(_nearest(state, z), kept)
    return Quantized(decode(state, codes, x.dtype), codes, {}, projection_layers.count_rows(kept, mask))


def logits(state: RandomProjection, x: Tensor) -> Tensor:
    """Return the cosines to all code vectors, f32[... heads codes], with their gradients; not in tiles."""
    z, _ = _project("random_projection.logits", state, x, None)
    cosines = matmul(rearrange(direction(z), "... h e -> h (...) e"), state.vectors.to(z.dtype).mT)
    return rows.unflatten_heads(cosines, z)


def _project(name: str, state: RandomProjection, x: Tensor, mask: Mask) -> tuple[Tensor, Tensor]:
    """Return z [... heads width], and which of its rows are valid."""
    x, kept = projection_layers.prepare_rows(name, x, state.weight.shape[-1], mask)
    if state.norm:
        x = torch.nn.functional.layer_norm(x, x.shape[-1:])
    z = matmul(x, state.weight.to(x.dtype).flatten(0, 1).mT).unflatten(-1, state.weight.shape[:2])
    return rows.zero_invalid(z, kept, 2)


def _nearest(state: RandomProjection, z: Tensor) -> Tensor:
    """Return the code of the smallest angle to z [... heads width], the first of equals: [... heads]."""
    codes, _ = search(constant(state.vectors, "cosine"), direction(z.detach()))
    return rows.unflatten_heads(codes[..., 0], z)
