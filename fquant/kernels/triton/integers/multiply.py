"""The product of rows of integers with codes in Triton, by the int8 tensor cores.

    y[m n] = (sum over blocks of (sum of x · w - zero · sum of x) · scale) · scale of the row of x

A program has BM rows of x and BN rows of the weight. Tensor cores sum the products of a block in int32, exactly in any
order. The sum is scaled in float32 and added to those of the blocks before it, as the reference does, so the bits are
equal. Blocks are never split among programs, because that would change the order.

Both operands are bytes that lack a number each, their shifts s and t. From the sum of the products of bytes,

    sum of (x + s) · (w + t) = sum of x · w  +  s · sum of w  +  t · sum of (x + s)

The last sum is that of the row's integers in a block. The sum of w is taken from the tile if s is not zero.

Codes of 4, 2 and 3 bits are unpacked without look-ups: a unit of codes is shifted, and masked. The bytes of x are in
the order of what comes out (rows.py). Blocks of 16 are shorter than what the tensor cores multiply, so two of them are
multiplied with the other half of x zero.
"""

# pyright: reportInvalidTypeForm=false

from typing import NamedTuple

import torch
from torch import Tensor

from ...integer_plans import Integral
from ..codes import EXACT, load_units, narrow, on, tl, triton
from .rows import Integers, Order

PIECE = tl.constexpr(1 << 16)  # columns whose sum of products of bytes int32 holds


class Codes(NamedTuple):
    """A packed weight as the kernel reads it, or a dense operand that is quantised by rows."""

    codes: Tensor  # u8 or i8[stack out bytes]
    scale: Tensor  # f32[stack out blocks]
    zero: Tensor | None  # f32[stack out blocks]
    table: Tensor | None  # i32[16 or 256], the byte of each code
    shifts: Tensor | None  # i32[out], of a dense operand that has them
    sums: Tensor | None  # i32[out], of the integers of a dense operand, if rows of x have shifts
    flip: int
    shift: int
    bits: int
    block: int | None
    in_127ths: bool  # the unit of the levels is scale / 127


def multiply(q: Integers, w: Codes, y: Tensor, width: int, order: Order, plan: Integral, long: bool) -> None:
    """Compute the product into y f[stack m out]. ``long`` says that int32 may not hold a sum over a row."""
    num, m, out = y.shape
    grid = triton.cdiv(m, plan.rows) * triton.cdiv(out, plan.columns), num
    strides = *w.codes.stride()[:2], *w.scale.stride()[:2], *((0, 0) if w.zero is None else w.zero.stride()[:2])
    numbers = m, out, width, w.codes.shape[2], w.scale.shape[2], order.padded, *strides
    codes = w.codes.view(torch.int8 if w.bits == 8 and not w.flip and w.table is None else torch.uint8)
    constants = w.bits, w.block or 0, w.flip, w.shift, w.in_127ths, long, order.group, order.depth, *plan[:3]
    with on(y):
        _multiply[grid](
            *q, codes, *w[1:6], y, *numbers, *constants, width % plan.depth == 0,
            num_warps=plan.warps, num_stages=plan.stages, **EXACT,
        )  # fmt: skip


@triton.jit
def unpack_units(units, BITS: tl.constexpr):
    """Return the codes of units [...] in order, with 0, 1, 2 or 3 more dims of 2."""
    if BITS == 4:
        return tl.join(units >> 4, units & 15)
    elif BITS == 2:
        two = tl.join(units >> 4, units)
        return tl.join(two >> 2, two) & 3
    elif BITS == 3:
        two = tl.join(units >> 12, units)
        four = tl.join(two >> 6, two)
        return tl.join(four >> 3, four) & 7
    else:
        return units


@triton.jit
def as_bytes(
    units, table, FLIP: tl.constexpr, BITS: tl.constexpr, BN: tl.constexpr, D: tl.constexpr, GROUP: tl.constexpr
):  # fmt: skip
    """Return the signed bytes [BN D] of units, in the order of x."""
    PER: tl.constexpr = 8 // BITS if BITS != 3 else 8
    codes = unpack_units(units, BITS)
    if PER > 1:
        codes = tl.permute(tl.reshape(codes, [BN, D // GROUP, GROUP // PER, PER]), (0, 1, 3, 2))
    codes = tl.reshape(codes, [BN, D])
    if table is not None:
        values = tl.load(table + tl.arange(0, 256 if BITS == 8 else 16))
        return tl.reshape(tl.gather(values, tl.reshape(codes.to(tl.int32), [BN * D]), 0), [BN, D]).to(tl.int8)
    elif FLIP != 0:
        return (codes ^ FLIP).to(tl.int8, bitcast=True)
    else:
        return codes.to(tl.int8)


@triton.jit
def _steps(
    x, codes, table, shift, acc, own, column, start, stop, width, units,
    BITS: tl.constexpr, FLIP: tl.constexpr, BN: tl.constexpr, D: tl.constexpr, GROUP: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """Add products of columns from ``start`` to ``stop`` to acc [BM BN], and the bytes to own [BN] if x has shifts."""
    PER: tl.constexpr = 8 // BITS if BITS != 3 else 8
    unit = tl.arange(0, D // PER)[None, :]
    for k in range(start, stop, D):
        w = as_bytes(load_units(codes, k // PER + unit, units, EVEN, BITS), table, FLIP, BITS, BN, D, GROUP)
        if shift is not None:
            own += tl.sum(tl.where(k + column < width, w, 0).to(tl.int32), 1)
        acc = tl.dot(tl.load(x + k), tl.trans(w), acc, out_dtype=tl.int32)
    return acc, own


@triton.jit
def _scaled(
    acc, own, b, there, sums, shift, scale, zero, shifts, SHIFT: tl.constexpr, IN_127THS: tl.constexpr
):  # fmt: skip
    """Return the sums [BM BN] of bytes of block ``b`` as those of integers, scaled; zeros if it is not ``there``."""
    if shift is not None:
        acc += shift[:, None].to(acc.dtype) * own[None, :].to(acc.dtype)
    if sums is not None:
        whole = tl.load(sums + b)[:, None]
        if SHIFT != 0:
            acc += whole.to(acc.dtype) * SHIFT
        if shifts is not None:
            acc += whole.to(acc.dtype) * shifts[None, :].to(acc.dtype)
    part = acc.to(tl.float32)
    if zero is not None:
        part = part - tl.load(zero + b)[None, :] * whole.to(tl.float32)
    by = tl.where(there, tl.load(scale + b), 0.0)
    if IN_127THS:
        by = by * (1 / 127)
    return part * by[None, :]


@triton.jit
def _multiply(
    x, x_scale, x_sums, x_shift, codes, scale, zero, table, w_shifts, w_sums, y,
    m, out, width, units, blocks, padded,
    codes_stack, codes_row, scale_stack, scale_row, zero_stack, zero_row,
    BITS: tl.constexpr, BLOCK: tl.constexpr, FLIP: tl.constexpr, SHIFT: tl.constexpr, IN_127THS: tl.constexpr,
    LONG: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, STEP: tl.constexpr,
    EVEN: tl.constexpr,
):  # fmt: skip
    """Compute a tile of y [m out] of the product ``program_id(1)``: STEP columns at a time, D of them in a product."""
    s, tiles = tl.program_id(1).to(tl.int64), tl.cdiv(m, BM)
    i = tl.program_id(0) % tiles * BM + tl.arange(0, BM)
    n = tl.program_id(0) // tiles * BN + tl.arange(0, BN)
    line, row = s * m + tl.minimum(i, m - 1), tl.minimum(n, out - 1).to(tl.int64)
    within = tl.arange(0, D)[None, :]
    x += line[:, None] * padded + within
    codes += s * codes_stack + row[:, None] * codes_row
    scale += s * scale_stack + row * scale_row
    shift, shifts, sums = x_shift, w_shifts, x_sums  # None, or those of the tile
    if zero is not None:
        zero += s * zero_stack + row * zero_row
    if x_sums is not None:
        sums = x_sums + line * blocks
    if x_shift is not None:
        shift = tl.load(x_shift + line)
    if w_shifts is not None:
        shifts = tl.load(w_shifts + row)
    PER: tl.constexpr = 8 // BITS if BITS != 3 else 8
    EACH: tl.constexpr = GROUP // PER
    unit = tl.arange(0, D // PER)[None, :]
    column = within // GROUP * GROUP + within % EACH * PER + within % GROUP // EACH
    total = tl.zeros([BM, BN], tl.float32)
    if BLOCK == 0:
        acc, own = tl.zeros([BM, BN], tl.int32), tl.zeros([BN], tl.int32)
        if LONG:
            whole = tl.zeros([BM, BN], tl.int64)
            for start in range(0, padded, PIECE):
                acc, own = _steps(
                    x, codes, table, x_shift if w_sums is None else None, tl.zeros([BM, BN], tl.int32), own, column,
                    start, tl.minimum(start + PIECE, padded), width, units, BITS, FLIP, BN, D, GROUP, EVEN,
                )  # fmt: skip
                whole += acc.to(tl.int64)
        else:
            whole, own = _steps(
                x, codes, table, x_shift if w_sums is None else None, acc, own, column, 0, padded, width, units, BITS,
                FLIP, BN, D, GROUP, EVEN,
            )  # fmt: skip
        if w_sums is not None:
            own = tl.load(w_sums + row)
            if w_shifts is not None:
                own -= shifts * width
        total += _scaled(whole, own, 0, True, sums, shift, scale, zero, shifts, SHIFT, IN_127THS)
    elif BLOCK <= D:
        for k in range(0, padded, STEP):
            for u in tl.static_range(STEP // D):
                at = k + u * D
                w = as_bytes(load_units(codes, at // PER + unit, units, EVEN, BITS), table, FLIP, BITS, BN, D, GROUP)
                xs = tl.load(x + at)
                for j in tl.static_range(D // BLOCK):
                    some, first = within // BLOCK == j, at + j * BLOCK  # the columns of a block
                    own = shift  # None, or the sums of the block's bytes
                    if x_shift is not None:
                        own = tl.sum(tl.where(some & (at + column < width), w, 0).to(tl.int32), 1)
                    part = tl.where(some, xs, 0) if D > BLOCK else xs
                    acc = tl.dot(part, tl.trans(w), out_dtype=tl.int32)
                    b, there = tl.minimum(first // BLOCK, blocks - 1), first < width
                    total += _scaled(acc, own, b, there, sums, shift, scale, zero, shifts, SHIFT, IN_127THS)
    else:
        for start in range(0, padded, BLOCK):
            acc, own = _steps(
                x, codes, table, x_shift, tl.zeros([BM, BN], tl.int32), tl.zeros([BN], tl.int32), column, start,
                tl.minimum(start + BLOCK, padded), width, units, BITS, FLIP, BN, D, GROUP, EVEN,
            )  # fmt: skip
            total += _scaled(acc, own, start // BLOCK, True, sums, shift, scale, zero, shifts, SHIFT, IN_127THS)
    total = total * tl.load(x_scale + line)[:, None]
    at = y + (s * m + i)[:, None] * out + n[None, :]
    tl.store(at, narrow(total, y.dtype.element_ty), mask=(i < m)[:, None] & (n < out)[None, :])
