"""Projections, rows and codes that all scalar quantisers share.

    x [... dim]  ->  live rows  ->  projection  ->  z [... c d]        c codebooks of d scalars
    z [... c d]  ->  projection  ->  x [... dim], in the dtype of the input
    levels (8, 5, 5)     digits [... 3] of a code in a mixed radix     code = d0 + 8·d1 + 40·d2

A row (all of the last dim) is live unless it is masked out or not finite (``rows.py``). Other rows reach no sum and no
gradient: their code is -1, their output is zero, and :class:`RowCounts` counts them. Projections are the field
``params`` of a state, or None if the sizes agree without them; their weights may be Packed or Adapted. Codes are exact
in int64, because the product of the levels stays below 2^63.
"""

import itertools
import math
import operator
from collections.abc import Sequence
from typing import Any, TypeVar

import torch
from einops import rearrange
from torch import Tensor

from ... import random, tree
from ...kernels.dispatch import is_direct
from ..codebook import rows
from ..precision import linear, matmul
from ..quantized import Mask

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

    With ``cosine`` the first is normal and has no bias. ValueError for sizes below 1, and options without projections.
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


def prepare_rows(name: str, x: Tensor, dim: int, mask: Mask) -> tuple[Tensor, Tensor]:
    """Return the rows ``x`` [... dim] in float32 or wider, zeros where not live, and which are live, bool[...]."""
    if not x.is_floating_point():
        raise TypeError(f"{name}: x is {x.dtype}; wanted floats")
    if not x.ndim or x.shape[-1] != dim:
        raise ValueError(f"{name}: x is {tuple(x.shape)}; wanted {dim} in the last dim, the dim of the state")
    return rows.zero_invalid(rows.at_least_float32(x), None if mask is None else rows.row_mask(mask, x, f"{name}: "))


def count_rows(live: Tensor, mask: Mask) -> RowCounts:
    """Count the rows of a call from its ``live`` rows bool[...] and its mask."""
    asked = torch.ones_like(live) if mask is None else rows.expand_mask(mask, live)
    return RowCounts(live.sum(), (~asked).sum(), (asked & ~live).sum())


def project_in(
    name: str, x: Tensor, dim: int, mask: Mask, params: Projections | None, num_codebooks: int = 1
) -> tuple[Tensor, Tensor]:
    """Project :func:`prepare_rows` of x to z [... c d]; also return the live rows: one that overflows is not live."""
    x, live = prepare_rows(name, x, dim, mask)
    z = x if params is None else linear(x, params.project_in.weight, params.project_in.bias)
    return rows.zero_invalid(rearrange(z, "... (c d) -> ... c d", c=num_codebooks), live, 2)


def project_out(z: Tensor, params: Projections | None, known: Tensor, rotation: Tensor | None = None) -> Tensor:
    """Rotate z [... c d] back and project it to x [... dim]. Codebooks without a code (``known`` False) add zero."""
    z = torch.where(known[..., None], rotate(z, rotation, back=True), 0.0)
    flat = rearrange(z, "... c d -> ... (c d)")
    x = flat if params is None else linear(flat, params.project_out.weight, params.project_out.bias)
    return torch.where(known.any(-1, keepdim=True), x, 0.0)


def rotate(z: Tensor, rotation: Tensor | None, back: bool = False) -> Tensor:
    """Multiply z [... d] by the rotation f32[d d], or its inverse, if there is one."""
    return z if rotation is None else matmul(z, (rotation.mT if back else rotation).to(z.dtype))


def join_codes(codes: Tensor, live: Tensor) -> Tensor:
    """Return codes [... c], or [...] of one codebook, with -1 in rows that are not ``live``."""
    codes = torch.where(live[..., None], codes, -1)
    return codes.squeeze(-1) if codes.shape[-1] == 1 else codes


def split_codes(name: str, codes: Tensor, num_codebooks: int, size: int) -> tuple[Tensor, Tensor]:
    """Invert :func:`join_codes`: return checked codes i64[... c], and bool[... c], False for -1."""
    codes = check_codes(name, codes, size)
    if num_codebooks == 1:
        codes = codes[..., None]
    elif not codes.ndim or codes.shape[-1] != num_codebooks:
        raise ValueError(f"{name}: codes are {tuple(codes.shape)}; wanted {num_codebooks} codebooks in the last dim")
    return codes, codes != -1


def encode_digits(digits: Tensor, levels: tuple[int, ...], live: Tensor) -> Tensor:
    """Return the codes of digits i64[... c d], as :func:`join_codes` does."""
    return join_codes((digits * _place_values(levels, digits)).sum(-1), live)


def decode_digits(name: str, codes: Tensor, levels: tuple[int, ...], num_codebooks: int = 1) -> tuple[Tensor, Tensor]:
    """Return the digits i64[... c d] of codes, and bool[... c], False for -1. Raises as :func:`split_codes` does."""
    codes, known = split_codes(name, codes, num_codebooks, math.prod(levels))
    return digits_of(codes, levels), known


def digits_of(codes: Tensor, levels: tuple[int, ...]) -> Tensor:
    """Return the digits i64[... d] of codes i64[...]; those of -1 are meaningless."""
    sizes = torch.tensor(levels, dtype=torch.int64, device=codes.device)
    return codes[..., None].div(_place_values(levels, codes), rounding_mode="floor") % sizes


def check_levels(name: str, levels: tuple[int, ...], most: int) -> tuple[int, ...]:
    """Return ``levels`` as ints; ValueError for none, one outside [2, ``most``], or a product of 2^63 or more."""
    levels = tuple(int(n) for n in levels)
    if not levels or min(levels) < 2 or max(levels) > most:
        raise ValueError(f"{name}: levels are {levels}; wanted one number a scalar, each from 2 to {most}")
    if math.prod(levels) >= 2**63:
        raise ValueError(f"{name}: levels {levels} make 2^{math.log2(math.prod(levels)):.0f} codes; use codebooks")
    return levels


def check_codes(name: str, codes: Tensor, size: int) -> Tensor:
    """Return ``codes`` as int64; TypeError unless integers, IndexError unless each is in [0, size) or -1.

    On CUDA a device assertion replaces the IndexError; in a transform or a trace the check runs with the computation.
    """
    if not isinstance(codes, Tensor) or codes.dtype is torch.bool or codes.is_floating_point() or codes.is_complex():
        got = codes.dtype if isinstance(codes, Tensor) else type(codes).__name__
        raise TypeError(f"{name}: codes are {got}; wanted a tensor of integers, as encode returns them")
    if not is_direct(codes) or codes.is_meta:
        return within(codes.long(), size)
    wrong, wanted = (codes < -1) | (codes >= size), f"wanted one in [0, {size}), or -1 for none"
    if codes.is_cuda:
        torch._assert_async(~wrong.any(), f"{name} got another code; {wanted}")  # does not synchronise with the device
    elif wrong.any():
        at = tuple(wrong.nonzero()[0].tolist())
        raise IndexError(f"{name}: the code at {at} is {int(codes[at])}; {wanted}: is it of this state?")
    return codes.long()


def within(codes: Tensor, size: int) -> Tensor:
    """Return ``codes`` i64[...] plus a lookup that fails for a code out of range when the graph runs."""
    wrong = (codes < -1) | (codes >= size)
    return codes + torch.zeros(1, dtype=torch.int64, device=codes.device)[wrong.long()]


def _place_values(levels: tuple[int, ...], like: Tensor) -> Tensor:
    return torch.tensor([1, *itertools.accumulate(levels[:-1], operator.mul)], dtype=torch.int64, device=like.device)
