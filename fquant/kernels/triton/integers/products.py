"""Products of integers on CUDA: what their kernels are given.

Codes of a weight become signed bytes plus a number, their shift (rows.py). Codes of integers in steps of one are those
bytes, but for the highest bit of codes of 8 bits. Other levels are looked up. A dense operand is quantised by rows.

The reference computes weights whose levels are more than 255 apart, which no format with a name has.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from ....format import Format
from ... import reference
from ...arguments import dense_rows
from ...integer_plans import Integral, plan_for
from ...spec import Spec, scales, split
from ..codes import generation
from ..dequantize import decode
from .multiply import Codes, multiply
from .rows import Order, quantize_rows, range_of, shift_of


class Levels(NamedTuple):
    """The bytes of codes: ``table[code]``, or ``code ^ flip`` without a table; an integer is ``byte + shift``."""

    table: tuple[int, ...] | None
    flip: int
    shift: int


def integer_matmul(
    x: Tensor, buffers: Sequence[Tensor], spec: Spec, act: Format, plan: Integral | None = None
) -> Tensor:
    """Compute the op with another plan than that for x."""
    format, (out, width), _ = spec
    y = x.new_empty(*x.shape[:-1], out)
    if not x.numel() or not y.numel():
        return y.zero_()
    if (levels := levels_of(format)) is None:
        return reference.integer_matmul(x, buffers, spec, act)
    xs, (codes, scale, _, zero) = x.reshape(-1, *x.shape[-2:]), split(spec, buffers)
    num, m = xs.shape[:2]
    plan = plan or plan_for(m, width, out, format.bits, format.block, generation(x.device))
    order = order_of(plan, format.bits, format.block, width)
    q = quantize_rows(xs, act, order, format.block, sums=zero is not None or levels.shift != 0)
    absmax = scale[0] if format.scale is None else decode(scale, scales(spec), torch.float32)
    of_rows = lambda t: dense_rows(t.reshape(num, out, -1))
    w = Codes(
        of_rows(codes), of_rows(absmax), None if zero is None else of_rows(zero), _on(levels.table, x.device), None,
        None, levels.flip, levels.shift, format.bits, format.block, format.integers is None,
    )  # fmt: skip
    long = format.block is None and is_long(width, act, max(map(abs, format.levels or (128,))))
    multiply(q, w, y.view(num, m, out), width, order, plan, long)
    return y


def integer_mm(a: Tensor, b: Tensor, act_a: Format, act_b: Format, plan: Integral | None = None) -> Tensor:
    """Compute the op with another plan than that for a."""
    (m, width), n = a.shape, b.shape[0]
    y = a.new_empty(m, n)
    if not a.numel() or not y.numel():
        return y.zero_()
    plan = plan or plan_for(m, width, n, 8, None, generation(a.device), dense=True)
    order = order_of(plan, 8, None, width)
    shifted = [act.zero or shift_of(*range_of(act)) != 0 for act in (act_a, act_b)]
    q = quantize_rows(a[None], act_a, order, sums=shifted[1])
    r = quantize_rows(b[None], act_b, order, sums=shifted[0])
    w = Codes(
        r.bytes.view(torch.uint8)[None], r.scale[None, :, None], None, None, r.shift, r.sums, 0, 0, 8, None, False
    )
    multiply(q, w, y[None], width, order, plan, is_long(width, act_a, largest(act_b)))
    return y


def order_of(plan: Integral, bits: int, block: int | None, width: int) -> Order:
    """Return the order of the bytes of x for a weight of ``bits``."""
    depth = max(32, min(plan.depth, block or plan.depth))
    return Order(bits, min(depth, block or depth), depth, -(-width // plan.depth) * plan.depth)


def largest(act: Format) -> int:
    """Return a bound of the magnitudes of the integers of ``act``."""
    first, last = range_of(act)
    return last - first if act.zero else max(-first, last)


def is_long(width: int, act: Format, most: int) -> bool:
    """Return True if int32 may not hold a sum over ``width`` columns with integers of the weight up to ``most``.

    Tensor cores saturate, so it has to hold that of the bytes too.
    """
    return width * max(largest(act) * most, 128 * 128) >= 2**31


@lru_cache(maxsize=64)
def levels_of(format: Format) -> Levels | None:
    """Return how the codes of ``format`` become bytes; None for levels that are more than 255 apart."""
    levels, table = format.levels, format.table
    if levels is None or table is None:
        return Levels(None, 0, 0)
    if all(x != x or n == levels[0] + i for i, (x, n) in enumerate(zip(table, levels, strict=True))):
        return Levels(None, 128, levels[0] + 128) if format.bits == 8 else Levels(None, 0, levels[0])
    if max(levels) - min(levels) > 255:
        return None
    shift = shift_of(min(levels), max(levels))
    bytes_ = tuple(n - shift for n in levels)
    return Levels((*bytes_, *[0] * (16 - len(bytes_))), 0, shift)


@lru_cache(maxsize=64)
def _on(table: tuple[int, ...] | None, device: torch.device) -> Tensor | None:
    return None if table is None else torch.tensor(table, dtype=torch.int32, device=device)
