"""Products with packed weights in Triton: one pass over the packed bytes for few rows of x, torch's own for many.

**Few rows** of ``x · Wᵀ``, up to ``FEW``. A program has 16 rows of the weight, and each of its warps has a part of
their columns. So enough programs run at once, no sum is split between them, and the order of sums is fixed. The four
threads that share a row in the tensor core's operand load 16 bytes of it each. Columns are permuted within a part, in x
as well, so that these bytes *are* the operand. Codes are unpacked, looked up, scaled, rounded and multiplied in the
registers that they were loaded to. Codes, scales and x are copied asynchronously, steps ahead.

That takes 5.6 instructions an element (NF4; 6.3 with packed scales; counted in the machine code, Triton 3.6 and 3.9
alike). By the look-ups in shared memory, 8.4e12 a second on an H200, the limit is 2.7 TB/s of packed bytes: 64 % of a
copy, and less than half the time of reading a bf16 weight. 8 rows cost as much as one, and 32 a fifth more.

**Many rows.** A tile of the weight is decoded, multiplied by torch, and overwritten. To decode an element takes 0.3e-12
s if the tile stays in cache, 0.6e-12 s in memory, and to multiply it 2.5e-15 s a row. So ``TILE`` is what 50 MB of
cache hold beside x and y. By estimate that takes 1.23 (512 rows) to 1.03 (4096) times as long as bf16's product. Tiles
are rows of the weight for ``x · Wᵀ`` and columns for ``g · W``, so each gives a complete part of the result.

All these are estimates. tests/bench/gpu measures, and tries the ``CANDIDATES``.
"""

# pyright: reportInvalidTypeForm=false
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..arguments import dense_rows, multiply_tiles
from ..spec import Spec

from .dequantize import (  # isort: skip
    DTYPES, EXACT, INTERPRETED, Rows, constants, cut, decode_into, load, look_up, narrow, on, rows_of, scaled, tensors,
    tl, triton, unpack, widen, words,
)  # fmt: skip

FEW = 64  # rows of x up to which a product is one pass over packed bytes; there it costs as much as decoding once
FEW_F32 = 16  # the same without tensor cores
TILE = 32 << 20  # bytes of a decoded tile


class Few(NamedTuple):
    """One pass over the weight."""

    rows: int  # of x at a time
    parts: int  # warps that share 16 rows of the weight
    stages: int  # of the pipeline


class Tiled(NamedTuple):
    """torch's product with tiles of ``size`` bytes."""

    size: int = TILE


Plan = Few | Tiled
CANDIDATES: tuple[Plan, ...] = (
    *(Few(rows, parts, stages) for rows in (8, 16, 32) for parts in (4, 8) for stages in (2, 3, 4)),
    *(Tiled(mib << 20) for mib in (16, 32, 64, 128)),
)


def matmul(x: Tensor, buffers: Sequence[Tensor], spec: Spec, plan: Plan | None = None) -> Tensor:
    """Compute the op with another plan than that for x."""
    y = x.new_empty(*x.shape[:-1], spec.shape[0])
    if not x.numel() or not y.numel():
        return y.zero_()
    w, xs, ys = rows_of(buffers, spec), dense_rows(x.reshape(-1, *x.shape[-2:])), y.view(-1, *y.shape[-2:])
    few = x.dtype in DTYPES and w.codes.dtype == torch.int32 and w.width == spec.shape[1]
    if plan is None:
        plan = _plan(x) if few else Tiled()
    if isinstance(plan, Tiled):
        for i in range(xs.shape[0]):
            multiply_tiles(xs[i], _row_tiles(_at(w, i), spec, x.dtype, plan.size), ys[i], by_columns=False)
    elif few:
        _one_pass(xs, w, ys, plan)
    else:
        raise ValueError(f"{plan} needs rows of whole 32-bit words and x in f32, bf16 or f16; leave the plan out")
    return y


def matmul_t(g: Tensor, buffers: Sequence[Tensor], spec: Spec, plan: Tiled | None = None) -> Tensor:
    y = g.new_empty(*g.shape[:-1], spec.shape[1])
    if not g.numel() or not y.numel():
        return y.zero_()
    w, gs, ys = rows_of(buffers, spec), dense_rows(g.reshape(-1, *g.shape[-2:])), y.view(-1, *y.shape[-2:])
    for i in range(gs.shape[0]):
        _by_columns(gs[i], _at(w, i), spec, ys[i], (plan or Tiled()).size)
    return y


def _plan(x: Tensor) -> Plan:
    """Return the best plan by estimate for ``x``, f32, bf16 or f16."""
    rows = x.shape[-2]
    if x.dtype == torch.float32:
        return Few(8, 4, 3) if rows <= FEW_F32 else Tiled()
    if rows > FEW:
        return Tiled()
    return Few(8, 8, 3) if rows <= 8 else Few(16 if rows <= 16 else 32, 4, 3)


def _at(w: Rows, i: int) -> Rows:
    """Return the i-th array of a stack, as a stack of one."""
    at = slice(i, i + 1)
    nested = w.nested and (w.nested[0][at], w.nested[1][at], w.nested[2])
    offset = None if w.offset is None else w.offset[at]
    zero = None if w.zero is None else w.zero[at]
    return w._replace(codes=w.codes[at], scale=w.scale[at], nested=nested, offset=offset, zero=zero)


def _by_columns(g: Tensor, w: Rows, spec: Spec, y: Tensor, size: int) -> None:
    """Compute ``g · W`` into y, a tile of columns of the weight at a time."""
    out, width = spec.shape
    if w.width != width:  # blocks straddle rows, so no tile is columns: sum over tiles of rows, in float32 at least
        return multiply_tiles(g, _row_tiles(w, spec, g.dtype, size), y, by_columns=True)
    dtype = g.dtype if g.dtype in DTYPES else w.dtype
    unit = max(w.format.block or 0, 64)
    step = min(width, max(1, size // (out * dtype.itemsize) // unit) * unit)
    buffer = w.codes.new_empty(out * step, dtype=dtype)
    for start in range(0, width, step):
        stop = min(width, start + step)
        tile = buffer[: out * (stop - start)].view(out, stop - start)
        decode_into(cut(w, slice(0, out), slice(start, stop)), tile[None])
        torch.mm(g, tile.to(g.dtype), out=y[:, start:stop])


def _row_tiles(w: Rows, spec: Spec, wanted: torch.dtype, size: int) -> Iterator[tuple[int, int, Tensor]]:
    """Yield (start, stop, those rows in dtype ``wanted``); a tile is valid until the next."""
    out, width = spec.shape
    dtype = wanted if wanted in DTYPES else w.dtype
    step = max(1, size // (width * dtype.itemsize))
    step = min(out, step // 128 * 128 or step)
    block = w.format.block or 32
    buffer = w.codes.new_empty(step * width + block, dtype=dtype)
    for start in range(0, out, step):
        stop, skip = min(out, start + step), 0
        if w.width == width:
            part = cut(w, slice(start, stop))
        else:  # one long row: decode from the beginning of a block
            skip = start * width % block
            part = cut(w, slice(0, 1), slice(start * width - skip, stop * width))
        tile = buffer[: skip + (stop - start) * width]
        decode_into(part, tile.view(1, part.codes.shape[1], -1))
        yield start, stop, tile[skip:].view(-1, width).to(wanted)


def _one_pass(x: Tensor, w: Rows, y: Tensor, plan: Few) -> None:
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
def _dot(a, b, acc):
    if INTERPRETED:
        a, b = widen(a), widen(b)  # the interpreter multiplies the bits of bfloat16
    return tl.dot(a, b, acc, input_precision="ieee")


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
        packed = load(codes + at, at < units, EVEN)
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
        acc = _dot(tl.reshape(w, [PARTS, 16, C]), tl.permute(tl.reshape(xs, [PARTS, M, C]), (0, 2, 1)), acc)
    i = tl.program_id(1) * M + tl.arange(0, M)[None, :]
    row = n + tl.arange(0, 16)[:, None]
    at = y + (s * m + i) * rows + row
    tl.store(at, narrow(tl.sum(acc, 0), y.dtype.element_ty), mask=(i < m) & (row < rows))
