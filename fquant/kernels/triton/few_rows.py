"""Products ``x · Wᵀ`` of few rows of x in Triton: one pass over the packed bytes.

A program has 16 rows of the weight, and each of its warps has a part of their columns. So enough programs run at once,
no sum is split between them, and the order of sums is fixed. The four threads that share a row in the tensor core's
operand load 16 bytes of it each. Columns are permuted within a part, in x as well, so that these bytes *are* the
operand. Codes are unpacked, looked up, scaled, rounded and multiplied in the registers that they were loaded to. Codes,
scales and x are copied asynchronously, steps ahead.

That takes 5.6 instructions an element (NF4; 6.3 with packed scales; counted in the machine code, Triton 3.6 and 3.9
alike). 128 instructions of threads a clock, 30e12 a second on an H200, would limit NF4 to 2.7 TB/s of packed bytes. It
reaches 1.1 there, and 0.9 with packed scales, because shared memory is busy for 83 % of the time (measured by ``ncu``).
Each element is a look-up, and about as many accesses meet another in their bank. The look-ups do not: 16 numbers of
float32 are in 16 banks. So it is likely to be x, whose columns are permuted. 8 rows cost as much as one, 32 twice that.

A table of pairs is no way out. 32 random addresses of 256 words meet 3.5 times in one bank, so 64 values take 3.5
clocks instead of 2. Pairs of float32 take 6. Pairs of bf16, whose product with the scale is rounded again, do not give
the dequantised weight.
"""

# pyright: reportInvalidTypeForm=false

from torch import Tensor

from ..cuda_plans import Few

from .codes import (  # isort: skip
    EXACT, Rows, constants, dot, load, load_units, look_up, narrow, on, scaled, tensors, tl, triton, unpack, widen,
    words,
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
            plan.parts, width % step == 0, num_warps=plan.parts, num_stages=plan.stages, **EXACT,
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
):  # fmt: skip
    """Compute y [m out] = x · Wᵀ for 16 rows of W and M of x, PARTS · C columns at a time."""
    C: tl.constexpr = 16 * PER  # columns of a part: 16 words, 4 for each of the 4 threads that share a row
    STEP: tl.constexpr = PARTS * C
    SHARE: tl.constexpr = PARTS // SCALES if SCALES < PARTS else 1  # parts that share a scale
    EACH: tl.constexpr = SCALES * SHARE // PARTS  # scales of a part
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
    column = line // M * C + tl.arange(0, C)[None, :]
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
        values = look_up(unpack(packed, PER, BITS), table, 16 * STEP, BITS)
        values = tl.reshape(values, [2, PARTS, 8, EACH, C // EACH])
        offset_s = offset + s if offset is not None else offset
        w = narrow(scaled(values, absmax, points, offset_s, table), DTYPE)
        if DTYPE != x.dtype.element_ty:
            w = narrow(widen(w), x.dtype.element_ty)
        # Column 2j + e of thread q's 16 bytes is in the operand column 8j + 2q + e.
        w = tl.permute(tl.reshape(w, [2, PARTS, 8, 4, C // 8, 2]), (1, 0, 2, 4, 3, 5))
        xs = tl.permute(tl.reshape(xs, [PARTS, M, 4, C // 8, 2]), (0, 1, 3, 2, 4))
        acc = dot(tl.reshape(w, [PARTS, 16, C]), tl.permute(tl.reshape(xs, [PARTS, M, C]), (0, 2, 1)), acc)
    i = tl.program_id(1) * M + tl.arange(0, M)[None, :]
    row = n + tl.arange(0, 16)[:, None]
    at = y + (s * m + i) * rows + row
    tl.store(at, narrow(tl.sum(acc, 0), y.dtype.element_ty), mask=(i < m) & (row < rows))
