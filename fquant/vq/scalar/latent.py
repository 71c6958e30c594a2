"""Latent quantisation: every scalar takes the nearest of a few values of its own, which are learned (Hsu et al. 2023).

    state = latent.init(key, levels=(5, 5, 8))       # params.values: f32[5], f32[5], f32[8], evenly spaced in ±1/2

The gradient of what comes out passes straight through to x, and none of it reaches the values. So there are two losses,
of the scalars z and their values q, each to be weighted (0.1 in the paper) and added:

    commitment      mean of (z - sg(q))²       brings scalars to their values
    quantisation    mean of (sg(z) - q)²       brings values to their scalars

Both are of the scalars, behind the projection where there is one. Codes are the nearest values' places, and decoding
looks up the values as they are now.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from ... import random, tree
from ..codebook.gradient_estimators import straight_through
from ..quantized import Mean, Quantized
from . import mixed_radix, projection_layers
from .projection_layers import Projections, RowCounts


@tree.node
class LatentParams:
    """What trains: the values of each scalar, f32[level], and the projections."""

    values: list[Tensor]
    projections: Projections | None


@tree.node
class Latent:
    """``num_codebooks`` codes of ``len(levels)`` scalars each, which have the same values in every one."""

    params: LatentParams
    levels: tuple[int, ...] = tree.static()
    dim: int = tree.static()
    num_codebooks: int = tree.static(default=1)


def init(
    key: int | Tensor,
    levels: tuple[int, ...],
    dim: int | None = None,
    *,
    num_codebooks: int = 1,
    bias: bool | None = None,
) -> Latent:
    """A state for x f[... dim], which by default is ``num_codebooks * len(levels)`` and is projected otherwise.

    Of an odd number of values one is zero and the ends are ±1/2; of an even number zero is one, too, and 1/2 is left
    out. Raises ValueError for levels below 2, sizes below 1, and ``bias`` where nothing is projected.
    """
    levels = mixed_radix.check("latent.init", levels, 2**16)  # each row is compared with so many
    key = random.key(key)
    dim, ends = projection_layers.init("latent.init", key, dim, num_codebooks, len(levels), bias)
    kind: Any = {"dtype": torch.float32, "device": key.device}
    values = [torch.linspace(-0.5, 0.5, n, **kind) if n % 2 else torch.arange(n, **kind) / n - 0.5 for n in levels]
    return Latent(LatentParams(values, ends), levels, dim, num_codebooks)


def encode(state: Latent, x: Tensor) -> Tensor:
    """x f[... dim] -> codes i64[...], or [... c] of several codebooks; -1 for a row that is not finite."""
    z, kept, _ = _enter("latent.encode", state, x, None)
    return projection_layers.joined(mixed_radix.encode(_nearest(state, z), state.levels), kept)


def decode(state: Latent, codes: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """codes i[...], or [... c] -> x [... dim] in ``dtype``; zero for -1. Raises IndexError for one that is none."""
    codes, known = projection_layers.split("latent.decode", codes, state.num_codebooks, math.prod(state.levels))
    return projection_layers.leave(
        _values(state, mixed_radix.decode(codes, state.levels), dtype), state.params.projections, known
    )


def apply(state: Latent, x: Tensor, key: Tensor | None = None, mask: Tensor | None = None) -> Quantized:
    """x f[... dim] quantised, its gradient passed straight through; two losses, and a RowCounts as statistics.

    Nothing is random, so ``key`` is not used. ``mask`` bool[...] is True for the rows that count.
    """
    z, kept, counts = _enter("latent.apply", state, x, mask)
    digits = _nearest(state, z)
    q = _values(state, digits, z.dtype)
    out = projection_layers.leave(straight_through(z, q), state.params.projections, kept[..., None])
    count = kept.sum().to(z.dtype) * (z.shape[-2] * z.shape[-1])
    far = lambda a, b: Mean(torch.where(kept[..., None, None], (a - b).square(), 0.0).sum(), count)
    losses = {"commitment": far(z, q.detach()), "quantisation": far(z.detach(), q)}
    codes = projection_layers.joined(mixed_radix.encode(digits, state.levels), kept)
    return Quantized(out.to(x.dtype), codes, losses, counts)


def update(state: Latent, stats: RowCounts) -> Latent:
    """The state itself: its values are learned by gradients."""
    return state


def _enter(name: str, state: Latent, x: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor, RowCounts]:
    x, kept = projection_layers.start(name, x, state.dim, mask)
    z, kept = projection_layers.enter(x, kept, state.params.projections, state.num_codebooks)
    return z, kept, projection_layers.counted(kept, mask)


def _nearest(state: Latent, z: Tensor) -> Tensor:
    """Which value each of z [... c d] is nearest to, the first of equals."""
    each = zip(z.detach().unbind(-1), state.params.values, strict=True)
    return torch.stack([(some[..., None] - values.detach().to(z.dtype)).abs().argmin(-1) for some, values in each], -1)


def _values(state: Latent, digits: Tensor, dtype: torch.dtype) -> Tensor:
    """The value of each of digits i64[... c d]."""
    each = zip(digits.unbind(-1), state.params.values, strict=True)
    return torch.stack([values.to(dtype)[some] for some, values in each], -1)
