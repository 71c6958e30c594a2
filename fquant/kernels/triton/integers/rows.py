"""Rows of activations as integers of 8 bits in Triton, with the bits of the reference.

A program reads its rows twice: for their scales, and to round them. Nothing is fused, quotients are rounded to nearest,
and adding 1.5 · 2^23 rounds to nearest even.

The integers of a row reach 255 if it has a zero point. Tensor cores multiply signed bytes, so a row is kept as bytes
and one number, its *shift*, which all of them lack: ``integer = byte + shift``. Sums of integers then correct the
product (multiply.py). Those of x are found here.

Bytes are in the order in which codes of the weight are unpacked. A byte of the weight has two codes of 4 bits, say: the
first codes of some bytes are columns of a tile, and their second codes the columns after those. To move x once costs
less than to interleave the codes of every tile.

Rows may be columns of memory, as those of a transposed matrix are. Then a program has 64 of them, and reads along
memory.
"""

# pyright: reportInvalidTypeForm=false

from typing import NamedTuple

import torch
from torch import Tensor

from ....format import Format
from ...reference.integers import TINY as LEAST
from ..codes import EXACT, on, tl, triton, widen

SIZE = 4096  # elements that a program holds
TINY = tl.constexpr(LEAST)
HALVES = (-127, 127)  # the first and the last integer of rows that are rounded to float16 first


class Order(NamedTuple):
    """The order of bytes in rows of x: that of codes of ``bits`` that are unpacked ``group`` columns at a time."""

    bits: int
    group: int
    depth: int  # columns that are multiplied at a time
    padded: int  # bytes in a row; the last are zeros


class Integers(NamedTuple):
    """Rows of integers; those of a stack follow each other."""

    bytes: Tensor  # i8[rows padded]
    scale: Tensor  # f32[rows]
    sums: Tensor | None  # i32[rows blocks], of integers
    shift: Tensor | None  # i32[rows]; None: zero


def range_of(act: Format) -> tuple[int, int]:
    """Return the first and the last code of ``act``."""
    return act.integers or HALVES


def shift_of(first: int, last: int) -> int:
    """Return what is subtracted from codes from ``first`` to ``last``, 255 apart at most, to make them signed bytes."""
    return 0 if first >= -128 and last <= 127 else first + 128


def quantize_rows(x: Tensor, act: Format, order: Order, block: int | None = None, sums: bool = False) -> Integers:
    """Return the rows of x f[stack rows width] as integers; ``sums`` asks for those of each ``block`` columns."""
    (num, rows, width), (first, last) = x.shape, range_of(act)
    shift, total = shift_of(first, last), num * rows
    make = lambda *shape, dtype: torch.empty(shape, dtype=dtype, device=x.device)
    found = Integers(
        make(total, order.padded, dtype=torch.int8),
        make(total, dtype=torch.float32),
        make(total, triton.cdiv(width, block or width), dtype=torch.int32) if sums else None,
        make(total, dtype=torch.int32) if act.zero or shift else None,
    )
    if x.stride(2) != 1 and x.stride(1) == 1 and block is None:
        tile = (64, 64)
    else:
        columns = min(SIZE, max(block or 64, triton.next_power_of_2(order.padded)))
        tile = min(SIZE // columns, triton.next_power_of_2(rows)), columns
    numbers = total, rows, width, order.padded, triton.cdiv(width, block or width), *x.stride()
    rounding = float(first), float(last), float(act.unit or last), act.zero, act.integers is None, shift
    with on(x):
        _quantize[(triton.cdiv(total, tile[0]),)](
            x, *found, *numbers, *rounding, order.bits, order.group, block or 0, *tile, num_warps=8, **EXACT
        )
    return found


@triton.jit
def _rounded(x):
    """Return x, whose magnitude is below 2^22, rounded to nearest even."""
    return (x + 12582912.0) - 12582912.0


@triton.jit
def _read(x, column, width, x_column, there, HALF: tl.constexpr):
    """Return a tile of x f32 with zeros outside, and the bits of its magnitudes, whose order has NaN last."""
    x = widen(tl.load(x + column.to(tl.int64) * x_column, mask=there & (column < width), other=0.0))
    if HALF:
        x = x.to(tl.float16).to(tl.float32)
    return x, x.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def _quantize(
    x, codes, scale, sums, shift, num, rows, width, padded, blocks, x_stack, x_row, x_column,
    FIRST: tl.constexpr, LAST: tl.constexpr, UNIT: tl.constexpr, ZERO: tl.constexpr, HALF: tl.constexpr,
    SHIFT: tl.constexpr, BITS: tl.constexpr, GROUP: tl.constexpr, BLOCK: tl.constexpr, R: tl.constexpr,
    C: tl.constexpr,
):  # fmt: skip
    """Quantise R rows, C columns at a time."""
    PER: tl.constexpr = 8 // BITS if BITS != 3 else 8  # codes of a unit
    EACH: tl.constexpr = GROUP // PER
    row = tl.program_id(0).to(tl.int64) * R + tl.arange(0, R)
    there = (row < num)[:, None]
    x += ((row // rows) * x_stack + (row % rows) * x_row)[:, None]
    place = tl.arange(0, C)
    column = (place // GROUP * GROUP + place % EACH * PER + place % GROUP // EACH)[None, :]
    top = tl.zeros([R, C], tl.int32)
    low, high = tl.zeros([R, C], tl.float32), tl.zeros([R, C], tl.float32)
    for k in range(0, width, C):
        v, bits = _read(x, column + k, width, x_column, there, HALF)
        top = tl.maximum(top, bits)
        if ZERO:
            low, high = tl.minimum(low, v), tl.maximum(high, v)
    most = tl.max(top, 1)
    absmax = most.to(tl.float32, bitcast=True)
    zero = tl.zeros([R], tl.float32)
    if HALF:
        by = tl.div_rn(1.0, tl.where(absmax > 0, absmax, 1.0)) * 127.0
        step = absmax * (1 / 127)
    else:
        if ZERO:
            least = tl.min(low, 1)
            step = tl.div_rn(tl.max(high, 1) - least, tl.full([R], LAST - FIRST, tl.float32))
            step = tl.where(most > 0x7F800000, float("nan"), step)
        else:
            step = tl.div_rn(absmax, tl.full([R], UNIT, tl.float32))
        step = tl.where((step > 0) & (step < TINY), TINY, step)
        divisor = tl.where(step > TINY, step, TINY)
        by = tl.div_rn(1.0, divisor)
        if ZERO:
            zero = tl.minimum(tl.maximum(FIRST - _rounded(tl.div_rn(least, divisor)), FIRST), LAST)
    tl.store(scale + row, step, mask=row < num)
    finite = step < float("inf")  # rows that are not are zeros
    if shift is not None:
        tl.store(shift + row, tl.where(finite, SHIFT - zero, 0.0).to(tl.int32), mask=row < num)
    total = tl.zeros([R, C], tl.int32)
    for k in range(0, padded, C):
        v = _read(x, column + k, width, x_column, there, HALF)[0]
        v = tl.minimum(tl.maximum(_rounded(v * by[:, None]) + zero[:, None], FIRST), LAST)
        inside = finite[:, None] & (column + k < width)
        byte = tl.where(inside, v - SHIFT, 0.0).to(tl.int32).to(tl.int8)
        tl.store(codes + row[:, None] * padded + (k + place)[None, :], byte, mask=there & (k + place < padded)[None, :])
        if sums is not None:
            q = tl.where(inside, v - zero[:, None], 0.0).to(tl.int32)
            if BLOCK == 0:
                total += q
            else:
                block = k // BLOCK + tl.arange(0, C // BLOCK)[None, :]
                each = tl.sum(tl.reshape(q, [R, C // BLOCK, BLOCK]), 2)
                tl.store(sums + row[:, None] * blocks + block, each, mask=there & (block < blocks))
    if sums is not None and BLOCK == 0:
        tl.store(sums + row, tl.sum(total, 1), mask=row < num)
