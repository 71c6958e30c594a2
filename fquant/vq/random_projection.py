"""Random-projection quantisation, whose codes are targets to predict, as in BEST-RQ (Chiu et al. 2022).

    state = projection.init(key, dim=80, num_codes=8192, width=16)
    targets = projection.encode(state, features)            # i64[... heads], or [...] of one

Each row is normalised to mean 0 and variance 1, projected by a random matrix (Xavier), and its code is that of the
vector of a random codebook with the smallest angle to it. Nothing is trained, and nothing has a gradient: what comes
out, and what codes decode to, are vectors of that codebook, of length 1.
"""

from __future__ import annotations

import math

import torch
from einops import rearrange
from torch import Tensor

from .. import random, tree
from ..kernels.ops.nearest import nearest
from .codebook.rows import direction, settle
from .precision import product
from .quantized import Quantized
from .scalar import projection_layers
from .scalar.projection_layers import RowCounts


@tree.node
class RandomProjection:
    """``heads`` projections, each with a codebook of its own."""

    weight: Tensor  # f32[heads width dim]
    vectors: Tensor  # f32[heads codes width], of length 1
    norm: bool = tree.static(default=True)


def init(
    key: int | Tensor, dim: int, num_codes: int, width: int, *, num_codebooks: int = 1, norm: bool = True
) -> RandomProjection:
    """A state for x f[... dim], projected to ``width``; ``norm`` False takes rows as they are.

    Raises ValueError for sizes below 1, and for rows of one number, of which the norm leaves nothing.
    """
    sizes = {"dim": dim, "num_codes": num_codes, "width": width, "num_codebooks": num_codebooks}
    if wrong := [f"{name} is {n}" for name, n in sizes.items() if n < 1]:
        raise ValueError(f"random_projection.init: {', '.join(wrong)}; wanted at least 1")
    if norm and dim == 1:
        raise ValueError("projection.init: dim is 1, and a row of one number has no variance; use norm=False")
    key = random.key(key)
    weight = random.normal(random.fold(key, "weight"), (num_codebooks, width, dim)) * (2 / (dim + width)) ** 0.5
    vectors = random.normal(random.fold(key, "vectors"), (num_codebooks, num_codes, width))
    return RandomProjection(weight, direction(vectors), norm)


def encode(state: RandomProjection, x: Tensor) -> Tensor:
    """x f[... dim] -> codes i64[...], or [... heads] of several; -1 for a row that is not finite."""
    z, kept, _ = _enter("random_projection.encode", state, x, None)
    return projection_layers.join_codes(_nearest(state, z), kept)


def decode(state: RandomProjection, codes: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """codes i[...], or [... heads] -> their vectors [... heads·width], side by side, in ``dtype``; zero for -1.

    Raises IndexError for one that is none.
    """
    heads, num_codes, _ = state.vectors.shape
    codes, known = projection_layers.split_codes("random_projection.decode", codes, heads, num_codes)
    each = zip(codes.clamp(min=0).unbind(-1), state.vectors.to(dtype), strict=True)
    found = torch.stack([vectors[some] for some, vectors in each], -2)  # [... heads width]
    return rearrange(torch.where(known[..., None], found, 0.0), "... h e -> ... (h e)")


def apply(state: RandomProjection, x: Tensor, key: Tensor | None = None, mask: Tensor | None = None) -> Quantized:
    """The codes of x f[... dim], and their vectors [... heads·width], which have no gradient; no losses.

    Nothing is random, so ``key`` is not used. ``mask`` bool[...] is True for the rows that count.
    """
    z, kept, counts = _enter("random_projection.apply", state, x, mask)
    codes = projection_layers.join_codes(_nearest(state, z), kept)
    return Quantized(decode(state, codes, x.dtype), codes, {}, counts)


def logits(state: RandomProjection, x: Tensor) -> Tensor:
    """The cosines that codes are chosen by, f32[... heads codes], with their gradients: all of them at once."""
    z, _, _ = _enter("random_projection.logits", state, x, None)
    each = product(_by_head(direction(z)), state.vectors.to(z.dtype).mT)  # [heads n codes]
    return each.transpose(0, 1).reshape(*z.shape[:-1], each.shape[-1])


def update(state: RandomProjection, stats: RowCounts) -> RandomProjection:
    """The state itself: nothing of it is learned."""
    return state


def _enter(name: str, state: RandomProjection, x: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor, RowCounts]:
    """z [... heads width]."""
    x, kept = projection_layers.prepare_rows(name, x, state.weight.shape[-1], mask)
    if state.norm:
        x = torch.nn.functional.layer_norm(x, x.shape[-1:])
    z = product(x, state.weight.to(x.dtype).flatten(0, 1).mT).unflatten(-1, state.weight.shape[:2])
    z, kept = settle(z, kept, 2)
    return z, kept, projection_layers.count_rows(kept, mask)


def _nearest(state: RandomProjection, z: Tensor) -> Tensor:
    """The code of the smallest angle to z [... heads width], the first of equals: [... heads]."""
    vectors = state.vectors.detach().to(z.dtype)
    which, _ = nearest(_by_head(direction(z.detach())), vectors, torch.zeros_like(vectors[..., 0]))
    return which.squeeze(-1).transpose(0, 1).reshape(z.shape[:-1])


def _by_head(z: Tensor) -> Tensor:
    """z [... heads width] as [heads n width]."""
    return z.reshape(math.prod(z.shape[:-2]), *z.shape[-2:]).transpose(0, 1)
