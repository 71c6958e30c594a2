"""Finite scalar quantisation: every scalar is bounded and rounded to a few levels (Mentzer et al. 2023).

    state = fsq.init(key, levels=(8, 5, 5, 5))           # 1000 codes, dim 4, nothing to train
    state = fsq.init(key, levels=(8, 5, 5, 5), dim=64)   # with projections to train, state.params

There is no codebook to learn, to update or to collapse: a code is its scalars' levels in a mixed radix (``radix.py``).
Of L levels a scalar z becomes, half being L // 2,

    plain       round(tanh(z + shift) · h - o) / half       h = (L - 1) · 1.001 / 2, o = ½ where L is even,
                                                            shift = atanh(o / h), so that 0 stays 0
    symmetric   2 / (L - 1) · floor((L - 1) · (tanh(z) + 1) / 2 + ½) - 1      (Parker et al. 2024, section 3.2)

with the gradient of what is rounded. The bound of the plain form overshoots by a thousandth, and from 1001 levels on
that is a level: then it is refused. ``hard_clamp`` has a clamp to [-1, 1] for tanh. ``rotation`` quantises the scalars
turned by a fixed random matrix. ``noise_dropout`` is for training: with that probability a scalar, already quantised,
is moved by a uniform number in ±½, and clamped to [-1, 1]; its code is that of before.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ... import random, tree
from ..codebook import rows
from ..codebook.gradient_estimators import straight_through
from ..quantized import Quantized
from . import mixed_radix, projection_layers
from .projection_layers import Projections, RowCounts, row

OVERSHOOT = 1e-3  # of the plain form's bound
MOST_PLAIN = 1000  # levels; of more the overshoot is half a level
MOST = 2**22  # levels between which float32 has a half


@tree.node
class FSQ:
    """``num_codebooks`` codes of ``len(levels)`` scalars each; ``scale`` multiplies what the scalars become, and of
    what they are quantised as the last layers of a residual are (``residual.py``)."""

    params: Projections | None  # what trains
    rotation: Tensor | None  # f32[d d], fixed
    levels: tuple[int, ...] = tree.static()
    dim: int = tree.static()
    num_codebooks: int = tree.static(default=1)
    symmetric: bool = tree.static(default=False)
    hard_clamp: bool = tree.static(default=False)
    noise_dropout: float = tree.static(default=0.0)
    scale: tuple[float, ...] | None = tree.static(default=None)


def init(
    key: int | Tensor,
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
    """A state for x f[... dim], which by default is ``num_codebooks * len(levels)`` and is projected otherwise.

    ``bias`` False leaves out those of the projections.

    Raises ValueError for levels below 2 or too many, 2 levels or ``noise_dropout`` without ``symmetric``, a probability
    outside [0, 1], sizes below 1, and ``bias`` where nothing is projected.
    """
    levels = mixed_radix.check("fsq.init", levels, MOST if symmetric else MOST_PLAIN)
    if not symmetric and min(levels) == 2:
        raise ValueError(f"fsq.init: levels {levels} have a 2, which the plain form makes -1 and 0; use symmetric=True")
    if not 0.0 <= noise_dropout <= 1.0:
        raise ValueError(f"fsq.init: noise_dropout is {noise_dropout}; wanted a probability in [0, 1]")
    if noise_dropout and not symmetric:
        raise ValueError("fsq.init: noise_dropout moves codes of the plain form off centre; use symmetric=True")
    key = random.key(key)
    dim, params = projection_layers.init("fsq.init", key, dim, num_codebooks, len(levels), bias)
    turn = projection_layers.orthogonal(random.fold(key, "rotation"), len(levels)) if rotation else None
    return FSQ(params, turn, levels, dim, num_codebooks, symmetric, hard_clamp, noise_dropout)


def encode(state: FSQ, x: Tensor) -> Tensor:
    """x f[... dim] -> codes i64[...], or [... c] of several codebooks; -1 for a row that is not finite."""
    z, kept, _ = _enter("fsq.encode", state, x, None)
    return projection_layers.joined(mixed_radix.encode(_round(state, _bound(state, z))[1], state.levels), kept)


def decode(state: FSQ, codes: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """codes i[...], or [... c] -> x [... dim] in ``dtype``; zero for -1. Raises IndexError for one that is none."""
    codes, known = _split("fsq.decode", state, codes)
    return _leave(state, _value(state, mixed_radix.decode(codes, state.levels).to(dtype)), known)


def decode_levels(state: FSQ, codes: Tensor) -> Tensor:
    """codes i[...] -> the level of each scalar from 0, i64[... d], or of [... c] [... c d]: for factorised embeddings.

    They are -1 for -1. Raises IndexError for a code that there is not.
    """
    codes, known = _split("fsq.decode_levels", state, codes)
    digits = torch.where(known[..., None], mixed_radix.decode(codes, state.levels), mixed_radix.NONE)
    return digits.squeeze(-2) if state.num_codebooks == 1 else digits


def apply(state: FSQ, x: Tensor, key: Tensor | None = None, mask: Tensor | None = None) -> Quantized:
    """x f[... dim] quantised, with the gradient of the bound; no losses, and a RowCounts as statistics.

    ``key``, whose shape leads x's, turns ``noise_dropout`` on. ``mask`` bool[...] is True for the rows that count.
    """
    z, kept, counts = _enter("fsq.apply", state, x, mask)
    bounded = _bound(state, z)
    rounded, digits = _round(state, bounded)
    q = _value(state, straight_through(bounded, rounded), digits=False)
    if key is not None and state.noise_dropout:
        moved = random.bernoulli(random.fold(key, "where"), state.noise_dropout, q.shape)
        noise = random.uniform(random.fold(key, "noise"), q.shape, q.dtype) - 0.5
        q = torch.where(moved, q + noise, q).clamp(-1.0, 1.0)
    out = _leave(state, q, kept[..., None])
    return Quantized(
        out.to(x.dtype), projection_layers.joined(mixed_radix.encode(digits, state.levels), kept), {}, counts
    )


def update(state: FSQ, stats: RowCounts) -> FSQ:
    """The state itself: nothing of it is a statistic."""
    return state


def _enter(name: str, state: FSQ, x: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor, RowCounts]:
    x, kept = projection_layers.start(name, x, state.dim, mask)
    z, kept = projection_layers.enter(x, kept, state.params, state.num_codebooks)  # [... c d]
    if state.scale is not None:
        z = z / row(state.scale, z)
    z, kept = rows.zero_invalid(projection_layers.turn(z, state.rotation), kept, 2)
    return z, kept, projection_layers.counted(kept, mask)


def _split(name: str, state: FSQ, codes: Tensor) -> tuple[Tensor, Tensor]:
    return projection_layers.split(name, codes, state.num_codebooks, math.prod(state.levels))


def _leave(state: FSQ, q: Tensor, known: Tensor) -> Tensor:
    q = projection_layers.turn_back(q, state.rotation)
    if state.scale is not None:
        q = q * row(state.scale, q)
    return projection_layers.leave(q, state.params, known)


def _bound(state: FSQ, z: Tensor) -> Tensor:
    """What is to be rounded: to the nearest in the plain form, down in the symmetric one."""
    levels = row(state.levels, z)
    if state.symmetric:
        return (levels - 1) * (_squash(state, z) + 1.0) / 2.0 + 0.5
    half = (levels - 1) * (1 + OVERSHOOT) / 2
    offset = torch.where(levels % 2 == 0, 0.5, 0.0)
    shift = offset / half if state.hard_clamp else torch.atanh(offset / half)
    return _squash(state, z + shift) * half - offset


def _squash(state: FSQ, z: Tensor) -> Tensor:
    return z.clamp(-1.0, 1.0) if state.hard_clamp else torch.tanh(z)


def _round(state: FSQ, bounded: Tensor) -> tuple[Tensor, Tensor]:
    """``bounded`` rounded, and the digits i64 that it makes."""
    if state.symmetric:
        rounded = bounded.floor()
        return rounded, rounded.long()
    rounded = bounded.round()
    return rounded, rounded.long() + _half(state, bounded).long()


def _value(state: FSQ, of: Tensor, digits: bool = True) -> Tensor:
    """What digits, or what was rounded, stand for: in [-1, 1]."""
    if state.symmetric:
        return 2.0 / (row(state.levels, of) - 1) * of - 1.0
    half = _half(state, of)
    return ((of - half) if digits else of) / half


def _half(state: FSQ, like: Tensor) -> Tensor:
    return row(tuple(n // 2 for n in state.levels), like)
