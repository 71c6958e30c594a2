"""Products ``x · Wᵀ`` of few rows of x in Triton: one pass over the packed bytes.

A program has 16 rows of the weight, and each of its warps has a part of their columns. So enough programs run at once,
no sum is split between them, and the order of sums is fixed. The four threads that share a row in the tensor core's
operand load 16 bytes of it each. Columns are permuted within a part, in x as well, so that these bytes *are* the
operand; x is loaded in that order, 4 or 8 bytes at a time. Codes are decoded, scaled, rounded and multiplied in the
registers that they were loaded to. Codes, scales and x are copied asynchronously, steps ahead.

Codes of 4 bits with a table are decoded by byte permutes (codes.py). That takes 5.3 instructions an element (NF4; 5.8
with packed scales; counted in the machine code, Triton 3.6 and 3.9 alike), most of which a multiprocessor issues at
half of its rate. On an H200 it reads NF4_DQ at 1.2 TB/s of packed bytes, and with look-ups at 0.9. Shared memory was
busy for 83 % of the time then (measured by ``ncu``). Half of that was x, whose columns were permuted behind its load.
16 rows take 1.3 times as long as 8, which cost as much as one, and 32 twice that.
"""

# pyright: reportInvalidTypeForm=false

from torch import Tensor

from ..cuda_plans import Few

from .codes import (  # isort: skip
    EXACT, Rows, constants, decode_words, dot, load, load_units, look_up, narrow, on, permutes, scaled, tensors, tl,
    triton, unpack, widen, words,
)  # fmt: skip


def multiply(x: Tensor, w: Rows, y: Tensor, plan: Few) -> None:
    """Compute ``x · Wᵀ`` into y [stack m out]; x [stack m in], whose last dim has no gaps."""
    num, m, width = x.shape
    rows, units = w.codes.shape[1:]
    step = plan.parts * 16 * w.per
    scales = step // w.format.block if w.format.block and w.format.block < step else 1  # of a row in a step
    if w.nested and scales % 4 == 0:
        w = w._replace(scale=words(w.scale))
    grid = num * triton.cdiv(rows, 16), triton.cdiv(m, plan.rows)
    sizes = m, rows, width, units, w.scale.shape[2], *x.stride()[:2]
    with on(x):
        _few[grid](
            *tensors(w), x, y, *sizes, *constants(w), scales, w.scale.itemsize if w.nested else 1, plan.rows,
            plan.parts, width % step == 0, permutes(w), num_warps=plan.parts, num_stages=plan.stages, **EXACT,
        )  # fmt: skip


@triton.jit
def _beside(t, SCALES: tl.constexpr, SHARE: tl.constexpr, PARTS: tl.constexpr, EACH: tl.constexpr):
    """Return numbers [16 SCALES] of blocks with the dims of the values of their codes."""
    if SHARE > 1:
        t = tl.reshape(tl.broadcast_to(t[:, :, None], [16, SCALES, SHARE]), [16, PARTS])
    return tl.permute(tl.reshape(t, [2, 8, PARTS, EACH]), (0, 2, 1, 3))[:, :, :, :, None]


@triton.jit
def _few(
    codes, scale, nested, mean, nested_table, offset, table, zero,
    codes_stack, codes_row, scale_stack, scale_row, nested_stack, zero_stack, zero_row, pitch, first,
    x, y, m, rows, width, units, scale_units, x_stack, x_row,
    PER: tl.constexpr, BITS: tl.constexpr, BLOCK: tl.constexpr, NESTED: tl.constexpr, DTYPE: tl.constexpr,
    SCALES: tl.constexpr, SCALES_PER: tl.constexpr, M: tl.constexpr, PARTS: tl.constexpr, EVEN: tl.constexpr,
    PTX: tl.constexpr,
):  # fmt: skip
    """Compute y [m out] = x · Wᵀ for 16 rows of W and M of x, PARTS · C columns at a time."""
    C: tl.constexpr = 16 * PER  # columns of a part: 16 words, 4 for each of the 4 threads that share a row
    STEP: tl.constexpr = PARTS * C
    SHARE: tl.constexpr = PARTS // SCALES if SCALES < PARTS else 1  # parts that share a scale
    EACH: tl.constexpr = SCALES * SHARE // PARTS  # scales of a part
    K: tl.constexpr = 2 if PTX is None and table is not None else 4  # neighbours in an operand, by Triton's choice
    # Tiles are loaded with two dims and reshaped later, so that Triton has one way to spread them over threads.
    s = (tl.program_id(0) // tl.cdiv(rows, 16)).to(tl.int64)
    n = tl.program_id(0) % tl.cdiv(rows, 16) * 16
    row = tl.minimum(n + tl.arange(0, 16)[:, None], rows - 1).to(tl.int64)
    scale += s * scale_stack + row * scale_row
    if zero is not None:
        zero += s * zero_stack + row * zero_row
    unit, number = tl.arange(0, SCALES // SCALES_PER)[None, :], tl.arange(0, SCALES)[None, :]
    line = tl.arange(0, 16 * PARTS)[:, None]  # (half of the rows, part, row of the half)
    row_of_line = tl.minimum(n + line // (8 * PARTS) * 8 + line % 8, rows - 1).to(tl.int64)
    codes += s * codes_stack + row_of_line * codes_row
    word = line // 8 % PARTS * 16 + tl.arange(0, 16)[None, :]
    line = tl.arange(0, PARTS * M)[:, None]  # (part, row of x)
    i = tl.program_id(1) * M + line % M
    x += s * x_stack + i.to(tl.int64) * x_row
    c = tl.arange(0, C)[None, :]
    # Column K j + e of thread q's bytes is the operand's column 4 K j + K q + e.
    column = line // M * C + c // K % 4 * (C // 4) + c // (4 * K) * K + c % K
    acc = tl.zeros([PARTS, 16, M], tl.float32)
    for k in range(0, width, STEP):
        at, b = k // PER + word, k // BLOCK if BLOCK else 0
        packed = load_units(codes, at, units, EVEN, BITS)
        xs = tl.load(x + (k + column), mask=(i < m) if EVEN else (i < m) & (k + column < width), other=0.0)
        absmax = load(scale + (b // SCALES_PER + unit), b // SCALES_PER + unit < scale_units, EVEN)
        if NESTED:
            index = first + row * pitch + (b + number)
            outer = load(nested + s * nested_stack + index // NESTED, b + number < pitch, EVEN)
            absmax = look_up(unpack(absmax, SCALES_PER, 8), nested_table, 16 * SCALES, 8)
            absmax = tl.reshape(absmax, [16, SCALES]) * outer + tl.load(mean + s)
        absmax = _beside(absmax, SCALES, SHARE, PARTS, EACH)
        points = zero  # None, or those of the blocks
        if zero is not None:
            points = _beside(load(zero + (b + number), b + number < pitch, EVEN), SCALES, SHARE, PARTS, EACH)
        offset_s = offset + s if offset is not None else offset
        if PTX is None:
            values = look_up(unpack(packed, PER, BITS), table, 16 * STEP, BITS)
            values = tl.reshape(values, [2, PARTS, 8, EACH, C // EACH])
            w = narrow(scaled(values, absmax, points, offset_s, table), DTYPE)
        else:
            absmax = tl.reshape(tl.broadcast_to(absmax, [2, PARTS, 8, EACH, 4 // EACH]), [16 * PARTS, 4])
            if zero is not None:
                points = tl.reshape(tl.broadcast_to(points, [2, PARTS, 8, EACH, 4 // EACH]), [16 * PARTS, 4])
            w = decode_words(packed, absmax, points, offset_s, PTX, DTYPE, 16 * PARTS, 4)
        if DTYPE != x.dtype.element_ty:
            w = narrow(widen(w), x.dtype.element_ty)
        w = tl.permute(tl.reshape(w, [2, PARTS, 8, 4, C // (4 * K), K]), (1, 0, 2, 4, 3, 5))
        acc = dot(tl.reshape(w, [PARTS, 16, C]), tl.permute(tl.reshape(xs, [PARTS, M, C]), (0, 2, 1)), acc)
    i = tl.program_id(1) * M + tl.arange(0, M)[None, :]
    row = n + tl.arange(0, 16)[:, None]
    at = y + (s * m + i) * rows + row
    tl.store(at, narrow(tl.sum(acc, 0), y.dtype.element_ty), mask=(i < m) & (row < rows))
