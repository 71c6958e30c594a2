"""Finite scalar quantisation (Mentzer et al. 2023).

    state = fsq.init(key, levels=(8, 5, 5, 5))           # 1000 codes, dim 4, nothing to train
    state = fsq.init(key, levels=(8, 5, 5, 5), dim=64)   # with projections to train, state.params

Every scalar is bounded and rounded to a few levels, with a straight-through gradient of the rounding. With L levels and
half = L // 2 a scalar z becomes

    plain       round(tanh(z + shift) · h - o) / half       h = (L - 1) · 1.001 / 2, o = ½ for even L, else 0,
                                                            shift = atanh(o / h), so that 0 stays 0
    symmetric   2 / (L - 1) · floor((L - 1) · (tanh(z) + 1) / 2 + ½) - 1      (Parker et al. 2024, section 3.2)

The plain bound overshoots by a thousandth, which is a level from 1001 levels on, so these are refused. ``hard_clamp``
replaces tanh by a clamp to [-1, 1]. ``noise_dropout`` is the share of quantised scalars that training moves by uniform
noise in ±½, within [-1, 1], which leaves their codes.
"""

import torch
from torch import Tensor

from ... import random, tree
from ..codebook import rows
from ..codebook.gradient_estimators import straight_through
from ..quantized import Key, Mask, Quantized, Seed
from . import projection_layers
from .projection_layers import Projections, per_scalar

OVERSHOOT = 1e-3  # of the plain form's bound
MOST_PLAIN = 1000  # levels; for more the overshoot is half a level
MOST = 2**22  # levels, up to which float32 represents half a level
update = projection_layers.update


@tree.node
class FSQ:
    """``num_codebooks`` codes of ``len(levels)`` scalars each, quantised in units of ``scale`` (a residual layer's)."""

    params: Projections | None  # the trained leaves
    rotation: Tensor | None  # f32[d d], fixed
    levels: tuple[int, ...] = tree.static()
    dim: int = tree.static()
    num_codebooks: int = tree.static(default=1)
    symmetric: bool = tree.static(default=False)
    hard_clamp: bool = tree.static(default=False)
    noise_dropout: float = tree.static(default=0.0)
    scale: tuple[float, ...] | None = tree.static(default=None)


def init(
    key: Seed,
    levels: tuple[int, ...],
    dim: int | None = None,
    *,
    num_codebooks: int = 1,
    bias: bool | None = None,
    symmetric: bool = False,
    hard_clamp: bool = False,
    noise_dropout: float = 0.0,
    rotation: bool = False,
) -> FSQ:
    """Return a state for x f[... dim], by default ``num_codebooks * len(levels)``; another dim is projected.

    2 levels and ``noise_dropout`` need ``symmetric``. ``bias`` False omits the
    projections' biases, and ``rotation`` draws a fixed one.
    """
    levels = projection_layers.check_levels("fsq.init", levels, MOST if symmetric else MOST_PLAIN)
    if not symmetric and min(levels) == 2:
        raise ValueError(f"fsq.init: levels {levels} have a 2, which the plain form makes -1 and 0; use symmetric=True")
    if not 0.0 <= noise_dropout <= 1.0:
        raise ValueError(f"fsq.init: noise_dropout is {noise_dropout}; wanted a probability in [0, 1]")
    if noise_dropout and not symmetric:
        raise ValueError("fsq.init: noise_dropout moves codes of the plain form off centre; use symmetric=True")
    key = random.key(key)
    dim, params = projection_layers.init("fsq.init", key, dim, num_codebooks, len(levels), bias)
    matrix = projection_layers.orthogonal(random.fold(key, "rotation"), len(levels)) if rotation else None
    return FSQ(params, matrix, levels, dim, num_codebooks, symmetric, hard_clamp, noise_dropout)


def encode(state: FSQ, x: Tensor) -> Tensor:
    """Return codes i64[...] of x f[... dim], or [... c] of several codebooks; -1 for a row that is not finite."""
    z, live = _project_in("fsq.encode", state, x, None)
    return projection_layers.encode_digits(_round(state, _bound(state, z))[1], state.levels, live)


def decode(state: FSQ, codes: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return x [... dim] of codes i[...] or [... c]; zero for -1."""
    digits, known = projection_layers.decode_digits("fsq.decode", codes, state.levels, state.num_codebooks)
    rounded = digits.to(dtype)
    if not state.symmetric:
        rounded = rounded - _half(state, rounded)
    return _project_out(state, _value(state, rounded), known)


def decode_levels(state: FSQ, codes: Tensor) -> Tensor:
    """Return the levels i64[... d] from 0 of codes i[...], or [... c d] of [... c]; -1 for -1."""
    digits, known = projection_layers.decode_digits("fsq.decode_levels", codes, state.levels, state.num_codebooks)
    digits = torch.where(known[..., None], digits, -1)
    return digits.squeeze(-2) if state.num_codebooks == 1 else digits


def apply(state: FSQ, x: Tensor, key: Key = None, mask: Mask = None) -> Quantized:
    """Quantise x f[... dim] with the gradient of the bound; no losses, and a RowCounts as statistics.

    ``key``, whose shape leads x's, turns ``noise_dropout`` on.
    """
    z, live = _project_in("fsq.apply", state, x, mask)
    bounded = _bound(state, z)
    rounded, digits = _round(state, bounded)
    q = _value(state, straight_through(bounded, rounded))
    if key is not None and state.noise_dropout:
        noisy = random.bernoulli(random.fold(key, "where"), state.noise_dropout, q.shape)
        noise = random.uniform(random.fold(key, "noise"), q.shape, q.dtype) - 0.5
        q = torch.where(noisy, q + noise, q).clamp(-1.0, 1.0)
    out = _project_out(state, q, live[..., None])
    codes = projection_layers.encode_digits(digits, state.levels, live)
    return Quantized(out.to(x.dtype), codes, {}, projection_layers.count_rows(live, mask))


def _project_in(name: str, state: FSQ, x: Tensor, mask: Mask) -> tuple[Tensor, Tensor]:
    z, live = projection_layers.project_in(name, x, state.dim, mask, state.params, state.num_codebooks)  # [... c d]
    if state.scale is not None:
        z = z / per_scalar(state.scale, z)
    return rows.zero_invalid(projection_layers.rotate(z, state.rotation), live, 2)


def _project_out(state: FSQ, q: Tensor, known: Tensor) -> Tensor:
    q = projection_layers.rotate(q, state.rotation, back=True)
    if state.scale is not None:
        q = q * per_scalar(state.scale, q)
    return projection_layers.project_out(q, state.params, known)


def _bound(state: FSQ, z: Tensor) -> Tensor:
    """Bound z. The plain form then rounds to the nearest integer, the symmetric one down."""
    squash = (lambda z: z.clamp(-1.0, 1.0)) if state.hard_clamp else torch.tanh
    levels = per_scalar(state.levels, z)
    if state.symmetric:
        return (levels - 1) * (squash(z) + 1.0) / 2.0 + 0.5
    half = (levels - 1) * (1 + OVERSHOOT) / 2
    offset = torch.where(levels % 2 == 0, 0.5, 0.0)
    shift = offset / half if state.hard_clamp else torch.atanh(offset / half)
    return squash(z + shift) * half - offset


def _round(state: FSQ, bounded: Tensor) -> tuple[Tensor, Tensor]:
    """Return the rounded numbers and their digits i64."""
    rounded = bounded.floor() if state.symmetric else bounded.round()
    return rounded, rounded.long() if state.symmetric else rounded.long() + _half(state, bounded).long()


def _value(state: FSQ, rounded: Tensor) -> Tensor:
    """Map rounded numbers to [-1, 1]."""
    if state.symmetric:
        return 2.0 / (per_scalar(state.levels, rounded) - 1) * rounded - 1.0
    return rounded / _half(state, rounded)


def _half(state: FSQ, like: Tensor) -> Tensor:
    return per_scalar(tuple(n // 2 for n in state.levels), like)
