"""Latent quantisation: every scalar takes the nearest of a few learned values of its own (Hsu et al. 2023).

    state = latent.init(key, levels=(5, 5, 8))       # params.values: f32[5], f32[5], f32[8], evenly spaced in ±1/2

The gradient of the output passes straight through to x, and none of it reaches the values. Two losses of the scalars z,
behind the projection, and their values q are therefore added, each with a weight (0.1 in the paper): ``commitment``,
mean of (z - sg(q))², moves scalars to their values, ``quantisation``, mean of (sg(z) - q)², values to their scalars.
"""

from typing import Any

import torch
from torch import Tensor

from ... import random, tree
from ..codebook.gradient_estimators import straight_through
from ..codebook.losses import commitment
from ..quantized import Key, Mask, Quantized, Seed
from . import projection_layers
from .projection_layers import Projections, project_in

update = projection_layers.update


@tree.node
class LatentParams:
    """The trained leaves: the values of each scalar, f32[level], and the projections."""

    values: list[Tensor]
    projections: Projections | None


@tree.node
class Latent:
    """``num_codebooks`` codes of ``len(levels)`` scalars each; all codebooks share the values."""

    params: LatentParams
    levels: tuple[int, ...] = tree.static()
    dim: int = tree.static()
    num_codebooks: int = tree.static(default=1)


def init(
    key: Seed, levels: tuple[int, ...], dim: int | None = None, *, num_codebooks: int = 1, bias: bool | None = None
) -> Latent:
    """Return a state for x f[... dim], by default ``num_codebooks * len(levels)``; another dim is projected."""
    levels = projection_layers.check_levels("latent.init", levels, 2**16)  # each row is compared with as many values
    key = random.key(key)
    dim, ends = projection_layers.init("latent.init", key, dim, num_codebooks, len(levels), bias)
    kind: Any = {"dtype": torch.float32, "device": key.device}
    values = [torch.linspace(-0.5, 0.5, n, **kind) if n % 2 else torch.arange(n, **kind) / n - 0.5 for n in levels]
    return Latent(LatentParams(values, ends), levels, dim, num_codebooks)


def encode(state: Latent, x: Tensor) -> Tensor:
    """Return codes i64[...] of x f[... dim], or [... c] of several codebooks; -1 for a row that is not finite."""
    z, live = project_in("latent.encode", x, state.dim, None, state.params.projections, state.num_codebooks)
    return projection_layers.encode_digits(_nearest(state, z), state.levels, live)


def decode(state: Latent, codes: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return x [... dim] of codes i[...] or [... c]; zero for -1."""
    digits, known = projection_layers.decode_digits("latent.decode", codes, state.levels, state.num_codebooks)
    return projection_layers.project_out(_values(state, digits, dtype), state.params.projections, known)


def apply(state: Latent, x: Tensor, key: Key = None, mask: Mask = None) -> Quantized:
    """Quantise x f[... dim] with a straight-through gradient, two losses, and a RowCounts; ``key`` is not used."""
    z, live = project_in("latent.apply", x, state.dim, mask, state.params.projections, state.num_codebooks)
    digits = _nearest(state, z)
    q = _values(state, digits, z.dtype)
    out = projection_layers.project_out(straight_through(z, q), state.params.projections, live[..., None])
    losses = {"commitment": commitment(z, q.detach(), live), "quantisation": commitment(z.detach(), q, live)}
    codes = projection_layers.encode_digits(digits, state.levels, live)
    return Quantized(out.to(x.dtype), codes, losses, projection_layers.count_rows(live, mask))


def _nearest(state: Latent, z: Tensor) -> Tensor:
    """Return the index of the value nearest to each of z [... c d], the first of equals."""
    each = zip(z.detach().unbind(-1), state.params.values, strict=True)
    return torch.stack([(some[..., None] - values.detach().to(z.dtype)).abs().argmin(-1) for some, values in each], -1)


def _values(state: Latent, digits: Tensor, dtype: torch.dtype) -> Tensor:
    """Look up the values of digits i64[... c d]."""
    each = zip(digits.unbind(-1), state.params.values, strict=True)
    return torch.stack([values.to(dtype)[some] for some, values in each], -1)
