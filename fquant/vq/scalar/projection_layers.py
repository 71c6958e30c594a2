"""The way into a scalar quantiser and out of it, which all of them share.

    x [... dim]  ->  rows that count  ->  projected  ->  z [... c d]        c codebooks of d scalars
    z [... c d]  ->  projected back   ->  x [... dim], in the dtype that came

A row (all of the last dim) that is masked out, or holds a number that is not finite, is no row (``rows.py``): it
reaches no sum and no gradient. Its code is -1, what it becomes is zero, and it is counted (:class:`RowCounts`).

Projections are what a scalar quantiser has to train, and stand in the field ``params`` of its state, None where the
sizes fit without: a tree of floats, to be differentiated as an argument:

    grads = grad(lambda params: loss(replace(state, params=params)))(state.params)

They are applied as ``fquant.linear`` applies weights, so one may be Packed or Adapted, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from einops import rearrange
from torch import Tensor

from ... import random, tree
from ..codebook import rows
from ..precision import linear, matmul
from . import mixed_radix


@tree.node
class Dense:
    """A weight f32[out in], and a bias f32[out] or none."""

    weight: Any
    bias: Tensor | None = None


@tree.node
class Projections:
    """From dim to the scalars, and back."""

    enter: Dense
    leave: Dense


@tree.node
class RowCounts:
    """How many rows a call was given, each i64[]: those it ``kept``, and those that were ``masked`` out, or ``bad``,
    which is not masked out but not finite."""

    kept: Tensor
    masked: Tensor
    bad: Tensor


def init(
    name: str, key: Tensor, dim: int | None, num_codebooks: int, width: int, bias: bool | None, cosine: bool = False
) -> tuple[int, Projections | None]:
    """The last dim of x, and projections to ``num_codebooks * width`` scalars where it is another.

    They begin as torch's nn.Linear does; one for :func:`cosine` begins as a normal one, and has no bias. ``bias`` is
    None where nothing was asked for. Raises ValueError for sizes below 1, and for options of projections where none
    are needed.
    """
    if num_codebooks < 1 or (dim is not None and dim < 1):
        raise ValueError(f"{name}: dim is {dim} and num_codebooks {num_codebooks}; wanted at least 1 of each")
    inner = num_codebooks * width
    if dim is None or dim == inner:
        if bias is not None or cosine:
            raise ValueError(f"{name}: options of a projection, but dim is that of the scalars, {inner}; omit them")
        return inner, None
    to, back = random.fold(key, "enter"), random.fold(key, "leave")
    biased = bias is None or bias
    first = Dense(random.normal(to, (inner, dim))) if cosine else dense(to, inner, dim, biased)
    return dim, Projections(first, dense(back, dim, inner, biased))


def dense(key: Tensor, out: int, width: int, bias: bool) -> Dense:
    """As torch's nn.Linear begins: uniform in ±1/sqrt(width)."""
    weight = random.kaiming_uniform(random.fold(key, "weight"), (out, width), width)
    return Dense(weight, random.kaiming_uniform(random.fold(key, "bias"), (out,), width) if bias else None)


def orthogonal(key: Tensor, d: int) -> Tensor:
    """An orthogonal f32[d d], uniform among all (Mezzadri 2007: QR with the signs of R's diagonal)."""
    q, r = torch.linalg.qr(random.normal(key, (d, d), torch.float64))
    return (q * torch.where(r.diagonal() < 0, -1.0, 1.0)).float()


def row(numbers: Sequence[float], like: Tensor) -> Tensor:
    """A number for each scalar, of the dtype and on the device of ``like``."""
    return torch.tensor(numbers, dtype=like.dtype, device=like.device)


def start(name: str, x: Tensor, dim: int, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """``x`` [... dim], at least float32, with zeros for the rows that do not count, and which do, bool[...].

    ``mask`` bool has the first dims of x. Raises ValueError for another last dim, or a mask of another shape; TypeError
    for what is no float or no mask.
    """
    if not x.is_floating_point():
        raise TypeError(f"{name}: x is {x.dtype}; wanted floats")
    if not x.ndim or x.shape[-1] != dim:
        raise ValueError(f"{name}: x is {tuple(x.shape)}; wanted {dim} in the last dim, as init was told")
    return rows.zero_invalid(rows.at_least_float32(x), None if mask is None else rows.row_mask(mask, x, f"{name}: "))


def counted(kept: Tensor, mask: Tensor | None) -> RowCounts:
    """The counts of rows of which those ``kept`` are left."""
    asked = torch.ones_like(kept) if mask is None else rows.expand_mask(mask, kept)
    return RowCounts(kept.sum(), (~asked).sum(), (asked & ~kept).sum())


def enter(x: Tensor, kept: Tensor, params: Projections | None, num_codebooks: int) -> tuple[Tensor, Tensor]:
    """x [... dim] -> z [... c d], settled."""
    z = x if params is None else linear(x, params.enter.weight, params.enter.bias)
    return rows.zero_invalid(rearrange(z, "... (c d) -> ... c d", c=num_codebooks), kept, 2)


def cosine(x: Tensor, params: Projections, num_codebooks: int) -> Tensor:
    """x [... dim] -> z [... c d], the cosines of the angles between x and the rows of the weight, a Tensor."""
    z = linear(rows.direction(x), rows.direction(params.enter.weight))
    return rearrange(z, "... (c d) -> ... c d", c=num_codebooks)


def leave(z: Tensor, params: Projections | None, known: Tensor) -> Tensor:
    """z [... c d] -> x [... dim], of the codes that are ``known`` bool[... c]; without one it is zero."""
    flat = rearrange(torch.where(known[..., None], z, 0.0), "... c d -> ... (c d)")
    x = flat if params is None else linear(flat, params.leave.weight, params.leave.bias)
    return torch.where(known.any(-1, keepdim=True), x, 0.0)


def turn(z: Tensor, rotation: Tensor | None) -> Tensor:
    """z [... d] times the rotation f32[d d], if there is one."""
    if rotation is None:
        return z
    return matmul(z, rotation.to(z.dtype))


def turn_back(z: Tensor, rotation: Tensor | None) -> Tensor:
    """What :func:`turn` has turned, as it was."""
    return turn(z, None if rotation is None else rotation.mT)


def joined(codes: Tensor, kept: Tensor) -> Tensor:
    """codes [... c] -> [... c], or [...] of one codebook; -1 in rows that are not ``kept``."""
    codes = torch.where(kept[..., None], codes, mixed_radix.NONE)
    return codes.squeeze(-1) if codes.shape[-1] == 1 else codes


def split(name: str, codes: Tensor, num_codebooks: int, size: int) -> tuple[Tensor, Tensor]:
    """Checked codes of :func:`joined` -> i64[... c], and which of them are any, bool[... c]."""
    codes = mixed_radix.checked(name, codes, size)
    if num_codebooks == 1:
        codes = codes[..., None]
    elif not codes.ndim or codes.shape[-1] != num_codebooks:
        raise ValueError(f"{name}: codes are {tuple(codes.shape)}; wanted {num_codebooks} codebooks in the last dim")
    return codes, codes != mixed_radix.NONE
