"""Mixed-input matrix products in Triton: packed weights decoded beside the tensor cores.

    x · Wᵀ     a tile of W is [BN rows, BK columns], the operand is its transpose
    g · W      a tile of W is [BK rows, BN columns], the operand itself

A program multiplies BM rows of x with BN columns of the operand, BK at a time. The words of the next tiles of x and W
are copied to shared memory meanwhile. A word is unpacked, looked up, scaled, and rounded to the weight's dtype, so a
decoded tile equals the dequantised weight to the bit. It goes to the tensor cores through shared memory. Sums are
float32. Scales of the next step are loaded a step ahead into registers, because copies to shared memory take 4 bytes or
more.

Codes of 4 bits with a table are decoded by byte permutes (codes.py) from sm_90 on. There the operand is in shared
memory, or tensor memory, while sm_80 has it in the registers of threads that other words are loaded to.

If tiles are fewer than the multiprocessors, programs share the reduction of a tile. Each writes a part of the sum, and
:func:`_add` adds the parts in their order. There are no atomics, so a product has the same bits in each run.

The weights of groups of rows are a stack. Then a program finds its group and its rows in ``counts``, which the host
never reads. There are as many programs as the counts could need, and those that none needs do nothing.
"""

# pyright: reportInvalidTypeForm=false

import torch
from torch import Tensor

from ..cuda_plans import Fused

from .codes import (  # isort: skip
    EXACT, Rows, constants, decode_words, dot, generation, load, load_units, look_up, narrow, on, permutes, scaled,
    tensors, tl, triton, unpack, widen,
)  # fmt: skip

SIZE = 1024  # elements of a sum of parts that a program adds


def multiply(x: Tensor, w: Rows, y: Tensor, plan: Fused, across: bool) -> None:
    """Compute ``x · Wᵀ`` into y [stack m out], or ``x · W`` into y [stack m in] if across; x has no gaps in its rows.

    ``w`` has rows of whole 32-bit words, and x is in bf16 or f16.
    """
    num, m, depth = x.shape
    width = y.shape[2]
    steps = triton.cdiv(depth, plan.depth)
    each = triton.cdiv(steps, plan.splits)
    splits = triton.cdiv(steps, each)  # none of them empty
    into = y if splits == 1 else y.new_empty(splits, *y.shape, dtype=torch.float32)
    grid = triton.cdiv(m, plan.rows) * triton.cdiv(width, plan.columns), splits, num
    sizes = m, *w.codes.shape[1:], w.scale.shape[2], width, depth, *x.stride()[:2], each, into[0].numel()
    even = depth % plan.depth == 0, width % plan.columns == 0
    with on(x):
        _multiply[grid](
            *tensors(w), x, into, None, 0, 0, *sizes, *constants(w), *plan[:3], across, *even, 0,
            of_tiles(w, x, all(even)), num_warps=plan.warps, num_stages=plan.stages, **EXACT,
        )  # fmt: skip
        if splits > 1:
            _add[(triton.cdiv(y.numel(), SIZE),)](into, y, y.numel(), splits, SIZE, **EXACT)


def of_tiles(w: Rows, x: Tensor, even: bool) -> str | None:
    """Return the PTX that decodes tiles of ``w`` on the device of x; None to look codes up.

    That is for weights of whole tiles, since masks beside it would spill registers.
    """
    return permutes(w) if even and generation(x.device) > 80 else None


@triton.jit
def load_scales(
    scale, nested, zero, scale_row, zero_row, pitch, first, row, start, blocks,
    NUM: tl.constexpr, BLOCK: tl.constexpr, NESTED: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """Load the scales, the scales of those, and the zero points of rows [R 1] from column ``start`` on: [R NUM]."""
    block = (start // BLOCK if BLOCK else start * 0) + tl.arange(0, NUM)[None, :]
    there = block < blocks
    absmax = load(scale + row * scale_row + block, there, EVEN)
    outer, points = absmax, absmax
    if NESTED:
        outer = load(nested + (first + row * pitch + block) // NESTED, there, EVEN)
    if zero is not None:
        points = load(zero + row * zero_row + block, there, EVEN)
    return absmax, outer, points


@triton.jit
def decode_tile(
    packed, absmax, outer, points, mean, nested_table, offset, table, zero,
    R: tl.constexpr, C: tl.constexpr, NUM: tl.constexpr, PER: tl.constexpr, BITS: tl.constexpr, NESTED: tl.constexpr,
    DTYPE: tl.constexpr, TO: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """Return the values [R C] in TO of units [R C/PER], with what :func:`load_scales` gives for them."""
    if NESTED:
        absmax = tl.reshape(look_up(absmax.to(tl.int32), nested_table, R * NUM, 8), [R, NUM])
        absmax = absmax * outer + tl.load(mean)
    PERMUTED: tl.constexpr = PTX is not None and C % 32 == 0
    EACH: tl.constexpr = C // 32 // NUM if PERMUTED else C // NUM  # fours of words, or elements, with one scale
    absmax = tl.reshape(tl.broadcast_to(absmax[:, :, None], [R, NUM, EACH]), [R, NUM * EACH])
    if zero is not None:
        zero = tl.reshape(tl.broadcast_to(points[:, :, None], [R, NUM, EACH]), [R, NUM * EACH])
    if PERMUTED:
        values = tl.reshape(decode_words(packed, absmax, zero, offset, PTX, DTYPE, R, NUM * EACH), [R, C])
    else:
        values = tl.reshape(look_up(unpack(packed, PER, BITS), table, R * C, BITS), [R, C])
        values = narrow(scaled(values, absmax, zero, offset, table), DTYPE)
    if DTYPE != TO:
        values = narrow(widen(values), TO)
    return values


@triton.jit
def _multiply(
    codes, scale, nested, mean, nested_table, offset, table, zero,
    codes_stack, codes_row, scale_stack, scale_row, nested_stack, zero_stack, zero_row, pitch, first,
    x, y, counts, groups, scales_apart, m, rows, units, blocks, width, depth, x_stack, x_row, each, part,
    PER: tl.constexpr, BITS: tl.constexpr, BLOCK: tl.constexpr, NESTED: tl.constexpr, DTYPE: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, ACROSS: tl.constexpr, EVEN_DEPTH: tl.constexpr,
    EVEN_WIDTH: tl.constexpr, SLOTS: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """Compute a tile of y [m width]: ``each`` steps of the reduction over x [m depth], from program_id(1) · each on.

    With ``counts`` i64[groups], SLOTS at most, rows are those of groups. Scales of one array of all groups are numbered
    ``scales_apart`` from group to group; that is 0 if each group is an array by itself. A weight with PER 0 is dense.
    """
    R: tl.constexpr = BK if ACROSS else BN  # rows and columns of a tile of the weight
    C: tl.constexpr = BN if ACROSS else BK
    NUM: tl.constexpr = C // BLOCK if BLOCK and BLOCK < C else 1  # scales of a row of it
    EVEN: tl.constexpr = EVEN_WIDTH if ACROSS else EVEN_DEPTH  # columns are whole tiles
    TO: tl.constexpr = x.dtype.element_ty
    begin = tl.program_id(1) * each * BK
    end = tl.minimum(begin + each * BK, depth)
    if SLOTS == 0:
        s, tiles, stop = tl.program_id(2).to(tl.int64), tl.cdiv(m, BM), m
        i = tl.program_id(0) % tiles * BM + tl.arange(0, BM)
        array = s
    else:
        tiles = tl.cdiv(m, BM) + groups
        tile, slot = tl.program_id(0) % tiles, tl.arange(0, SLOTS)
        sizes = tl.load(counts + slot, mask=slot < groups, other=0).to(tl.int32)
        used = (sizes + (BM - 1)) // BM
        group = tl.sum((tl.cumsum(used, 0) <= tile).to(tl.int32), 0)
        start = tl.sum(tl.where(slot < group, sizes, 0), 0)
        i = start + (tile - tl.sum(tl.where(slot < group, used, 0), 0)) * BM + tl.arange(0, BM)
        stop = start + tl.sum(tl.where(slot == group, sizes, 0), 0)
        if group >= groups:
            stop, end = 0, begin  # there is no such tile
        s = tl.minimum(group, groups - 1).to(tl.int64)
        first += s * scales_apart
        array = s if scales_apart == 0 else s * 0
    n = tl.program_id(0) // tiles * BN
    codes += s * codes_stack
    if PER > 0:
        scale += s * scale_stack
    if NESTED:
        nested += array * nested_stack
        mean += array
    if zero is not None:
        zero += s * zero_stack
    if offset is not None:
        offset += array
    if SLOTS == 0:
        x += s * x_stack
        y += s * m * width
    x += tl.maximum(tl.minimum(i, m - 1), 0)[:, None].to(tl.int64) * x_row
    line, unit = tl.arange(0, R)[:, None], tl.arange(0, C // PER if PER else C)[None, :]
    if PER > 0:
        row = tl.minimum((begin if ACROSS else n) + line, rows - 1).to(tl.int64)
        absmax, outer, points = load_scales(
            scale, nested, zero, scale_row, zero_row, pitch, first, row, n if ACROSS else begin, blocks, NUM, BLOCK,
            NESTED, EVEN,
        )  # fmt: skip
    acc = tl.zeros([BM, BN], tl.float32)
    for k in range(begin, end, BK):
        column = k + tl.arange(0, BK)[None, :]
        xs = tl.load(x + column) if EVEN_DEPTH else tl.load(x + column, mask=column < depth, other=0.0)
        start = n if ACROSS else k
        row = tl.minimum((k if ACROSS else n) + line, rows - 1).to(tl.int64)
        if PER == 0:
            w = load(codes + row * codes_row + (start + unit), start + unit < units, EVEN)
        else:
            packed = load_units(codes + row * codes_row, start // PER + unit, units, EVEN, BITS)
            ahead = tl.minimum(k + BK, depth - 1)  # of the last step, which uses no more
            row = tl.minimum((ahead if ACROSS else n) + line, rows - 1).to(tl.int64)
            next_absmax, next_outer, next_points = load_scales(
                scale, nested, zero, scale_row, zero_row, pitch, first, row, n if ACROSS else ahead // C * C, blocks,
                NUM, BLOCK, NESTED, EVEN,
            )  # fmt: skip
            w = decode_tile(
                packed, absmax, outer, points, mean, nested_table, offset, table, zero, R, C, NUM, PER, BITS, NESTED,
                DTYPE, TO, PTX,
            )  # fmt: skip
            absmax, outer, points = next_absmax, next_outer, next_points
        if ACROSS and not EVEN_DEPTH:
            w = tl.where(k + line < rows, w, tl.zeros([R, C], TO))  # 0 times an infinite value would be NaN
        acc = dot(xs, w if ACROSS else tl.trans(w), acc)
    column = n + tl.arange(0, BN)[None, :]
    at = y + (tl.program_id(1) * tl.cast(part, tl.int64) + i[:, None].to(tl.int64) * width + column)
    tl.store(at, narrow(acc, y.dtype.element_ty), mask=(i[:, None] < stop) & (column < width))


@triton.jit
def _add(parts, y, size, num, SIZE: tl.constexpr):
    """Add ``num`` parts of a sum in order, SIZE elements of each."""
    at = tl.program_id(0).to(tl.int64) * SIZE + tl.arange(0, SIZE)
    there = at < size
    total = tl.load(parts + at, mask=there, other=0.0)
    for _ in range(1, num):
        parts += size
        total += tl.load(parts + at, mask=there, other=0.0)
    tl.store(y + at, narrow(total, y.dtype.element_ty), mask=there)
