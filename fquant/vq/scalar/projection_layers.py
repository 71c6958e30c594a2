"""Projections in and out of a scalar quantiser, and the row masks, counts and codes that all of them share.

    x [... dim]  ->  live rows  ->  projection  ->  z [... c d]        c codebooks of d scalars
    z [... c d]  ->  projection  ->  x [... dim], in the dtype of the input

A row (all of the last dim) is live unless it is masked out or not finite (``rows.py``). Other rows reach no sum and no
gradient: their code is -1, their output is zero, and :class:`RowCounts` counts them. Projections are the field
``params`` of a state, which a loss is differentiated in, or None if the sizes agree without them. ``fquant.linear``
applies the weights, which may be Packed or Adapted.
"""

import math
from collections.abc import Sequence
from typing import Any, TypeVar

import torch
from einops import rearrange
from torch import Tensor

from ... import random, tree
from ..codebook import rows
from ..precision import linear, matmul
from ..quantized import Mean
from . import mixed_radix

State = TypeVar("State")


@tree.node
class Dense:
    """A weight f32[out in], and a bias f32[out] or None."""

    weight: Any
    bias: Tensor | None = None


@tree.node
class Projections:
    """The layers from dim to the scalars, and back."""

    project_in: Dense
    project_out: Dense


@tree.node
class RowCounts:
    """The numbers of rows in a call, each i64[]: ``bad`` rows are not masked but not finite."""

    kept: Tensor
    masked: Tensor
    bad: Tensor


def init(
    name: str, key: Tensor, dim: int | None, num_codebooks: int, width: int, bias: bool | None, cosine: bool = False
) -> tuple[int, Projections | None]:
    """Return the last dim of x, and projections to ``num_codebooks * width`` scalars if dim differs from that.

    Layers are initialised like torch's nn.Linear; one for :func:`cosine` is normal and has no bias. Raises ValueError
    for sizes below 1, and for ``bias`` (None is the default) or ``cosine`` without projections.
    """
    if num_codebooks < 1 or (dim is not None and dim < 1):
        raise ValueError(f"{name}: dim is {dim} and num_codebooks {num_codebooks}; wanted at least 1 of each")
    inner = num_codebooks * width
    if dim is None or dim == inner:
        if bias is not None or cosine:
            raise ValueError(f"{name}: options of a projection, but dim is that of the scalars, {inner}; omit them")
        return inner, None
    key_in, key_out = random.fold(key, "enter"), random.fold(key, "leave")
    biased = bias is None or bias
    first = Dense(random.normal(key_in, (inner, dim))) if cosine else dense(key_in, inner, dim, biased)
    return dim, Projections(first, dense(key_out, dim, inner, biased))


def dense(key: Tensor, out: int, width: int, bias: bool) -> Dense:
    """Return a layer initialised like torch's nn.Linear: uniform in ±1/sqrt(width)."""
    weight = random.kaiming_uniform(random.fold(key, "weight"), (out, width), width)
    return Dense(weight, random.kaiming_uniform(random.fold(key, "bias"), (out,), width) if bias else None)


def orthogonal(key: Tensor, d: int) -> Tensor:
    """Draw an orthogonal f32[d d] uniformly (Mezzadri 2007: QR with the signs of R's diagonal)."""
    q, r = torch.linalg.qr(random.normal(key, (d, d), torch.float64))
    return (q * torch.where(r.diagonal() < 0, -1.0, 1.0)).float()


def update(state: State, stats: RowCounts) -> State:
    """Return ``state`` itself: gradients alone train a scalar quantiser, so its statistics only count rows."""
    return state


def per_scalar(numbers: Sequence[float], like: Tensor) -> Tensor:
    """Return one number for each scalar, in the dtype and on the device of ``like``."""
    return torch.tensor(numbers, dtype=like.dtype, device=like.device)


def prepare_rows(name: str, x: Tensor, dim: int, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return ``x`` [... dim] in float32 or wider, zeros in rows that are not live, and the live rows bool[...].

    ``mask`` bool has leading dims of x. Raises ValueError for wrong shapes, TypeError for wrong dtypes.
    """
    if not x.is_floating_point():
        raise TypeError(f"{name}: x is {x.dtype}; wanted floats")
    if not x.ndim or x.shape[-1] != dim:
        raise ValueError(f"{name}: x is {tuple(x.shape)}; wanted {dim} in the last dim, the dim of the state")
    return rows.zero_invalid(rows.at_least_float32(x), None if mask is None else rows.row_mask(mask, x, f"{name}: "))


def count_rows(live: Tensor, mask: Tensor | None) -> RowCounts:
    """Count the rows of a call from its ``live`` rows bool[...] and its mask."""
    asked = torch.ones_like(live) if mask is None else rows.expand_mask(mask, live)
    return RowCounts(live.sum(), (~asked).sum(), (asked & ~live).sum())


def project_in(
    name: str, x: Tensor, dim: int, mask: Tensor | None, params: Projections | None, num_codebooks: int = 1
) -> tuple[Tensor, Tensor]:
    """Project :func:`prepare_rows` of x to z [... c d]; also return the live rows: one that overflows is not live."""
    x, live = prepare_rows(name, x, dim, mask)
    z = x if params is None else linear(x, params.project_in.weight, params.project_in.bias)
    return rows.zero_invalid(rearrange(z, "... (c d) -> ... c d", c=num_codebooks), live, 2)


def cosine(x: Tensor, params: Projections, num_codebooks: int) -> Tensor:
    """Project x [... dim] to z [... c d], the cosines between x and the rows of the weight, which is a Tensor."""
    z = linear(rows.direction(x), rows.direction(params.project_in.weight))
    return rearrange(z, "... (c d) -> ... c d", c=num_codebooks)


def project_out(z: Tensor, params: Projections | None, known: Tensor) -> Tensor:
    """Project z [... c d] back to x [... dim]. Codebooks without a code (``known`` bool[... c] False) add zero."""
    flat = rearrange(torch.where(known[..., None], z, 0.0), "... c d -> ... (c d)")
    x = flat if params is None else linear(flat, params.project_out.weight, params.project_out.bias)
    return torch.where(known.any(-1, keepdim=True), x, 0.0)


def rotate(z: Tensor, rotation: Tensor | None, back: bool = False) -> Tensor:
    """Multiply z [... d] by the rotation f32[d d], or its inverse, if there is one."""
    return z if rotation is None else matmul(z, (rotation.mT if back else rotation).to(z.dtype))


def join_codes(codes: Tensor, live: Tensor) -> Tensor:
    """Return codes [... c], or [...] of one codebook, with -1 in rows that are not ``live``."""
    codes = torch.where(live[..., None], codes, mixed_radix.NONE)
    return codes.squeeze(-1) if codes.shape[-1] == 1 else codes


def split_codes(name: str, codes: Tensor, num_codebooks: int, size: int) -> tuple[Tensor, Tensor]:
    """Invert :func:`join_codes`: return checked codes i64[... c], and bool[... c], False for -1."""
    codes = mixed_radix.checked(name, codes, size)
    if num_codebooks == 1:
        codes = codes[..., None]
    elif not codes.ndim or codes.shape[-1] != num_codebooks:
        raise ValueError(f"{name}: codes are {tuple(codes.shape)}; wanted {num_codebooks} codebooks in the last dim")
    return codes, codes != mixed_radix.NONE


def encode_digits(digits: Tensor, levels: tuple[int, ...], live: Tensor) -> Tensor:
    """Return the codes of digits i64[... c d], as :func:`join_codes` does."""
    return join_codes(mixed_radix.encode(digits, levels), live)


def decode_digits(name: str, codes: Tensor, levels: tuple[int, ...], num_codebooks: int = 1) -> tuple[Tensor, Tensor]:
    """Return the digits i64[... c d] of codes, and bool[... c], False for -1. Raises as :func:`split_codes` does."""
    codes, known = split_codes(name, codes, num_codebooks, math.prod(levels))
    return mixed_radix.decode(codes, levels), known


def squared_error(a: Tensor, b: Tensor, live: Tensor) -> Mean:
    """Return the mean squared difference of the scalars a and b [... c d] over the live rows."""
    error = torch.where(live[..., None, None], (a - b).square(), 0.0)
    return Mean(error.sum(), live.sum().to(a.dtype) * (a.shape[-2] * a.shape[-1]))
