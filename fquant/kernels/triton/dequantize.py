"""Dequantisation in Triton.

* A thread decodes two words, and stores 16 bytes of bf16 for each. From NF4 to bf16 an H200 has time for 20
  instructions an element (4.3 TB/s). The kernel has 8, or 10 with packed scales (counted, Triton 3.6 and 3.9 alike).
* Scales that are packed themselves are decoded in the same pass, once a block.

The results equal the reference to the bit (codes.py).
"""

# pyright: reportInvalidTypeForm=false
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from ...format import num_blocks
from ..arguments import dense_rows
from ..spec import Spec, scales, split

from .codes import (  # isort: skip
    DTYPES, EXACT, MOST, Rows, constants, load_units, look_up, lookup, narrow, on, scaled, tensors, tl, triton, unpack,
    widen, words,
)  # fmt: skip

TILE = 2048  # elements of a program: 16 for each thread of 4 warps


def decode(buffers: Sequence[Tensor], spec: Spec, out: torch.dtype) -> Tensor:
    stack = _stack(buffers, spec)
    values = buffers[0].new_empty(*stack, *spec.shape, dtype=out if out in DTYPES else _rounded_to(spec))
    if values.numel():
        w = rows_of(buffers, spec)
        decode_into(w, values.view(*w.codes.shape[:2], w.width))
    return values.to(out)


def rows_of(buffers: Sequence[Tensor], spec: Spec) -> Rows:
    """Return a packed array, not empty, as Rows; a flat one is a single row if blocks straddle rows of its shape."""
    format, shape, _ = spec
    codes, scale, offset, zero = split(spec, buffers)
    width = shape[-1]
    if format.flat and width % (format.block or math.prod(shape)):
        width = math.prod(shape)
    num, rows, blocks = math.prod(_stack(buffers, spec)), math.prod(shape) // width, num_blocks(format, width)
    nested, inner = None, format.scale
    usual = inner and inner.flat and inner.center and inner.block and inner.bits == 8 and not inner.scale
    if inner and usual and (table := lookup(inner, codes.device)) is not None:
        nested = scale[1].reshape(num, -1).contiguous(), scale[2].reshape(num).contiguous(), table
    elif inner:  # in a pass of their own
        scale = [decode(scale, scales(spec), torch.float32)]
    codes, absmax = codes.reshape(num, rows, -1), scale[0].reshape(num, rows, blocks)
    if offset is not None:
        offset = offset.reshape(num).contiguous()
    if zero is not None:
        zero = dense_rows(zero.reshape(num, rows, blocks))
    rest = nested, offset, width, format, _rounded_to(spec), blocks, 0, zero
    return Rows(words(dense_rows(codes), format.bits), dense_rows(absmax), *rest)


def cut(w: Rows, rows: slice, columns: slice | None = None) -> Rows:
    """Return some rows of ``w``, and some of their columns, which begin and end between blocks or with the row."""
    first, width = w.first + rows.start * w.pitch, w.width
    codes, scale, zero = w.codes[:, rows], w.scale[:, rows], None if w.zero is None else w.zero[:, rows]
    if columns is not None:
        width = columns.stop - columns.start
        unit = 8 * codes.itemsize
        codes = codes[..., columns.start * w.format.bits // unit : -(-columns.stop * w.format.bits // unit)]
        if block := w.format.block:
            first += columns.start // block
            blocks = slice(columns.start // block, -(-columns.stop // block))
            scale, zero = scale[..., blocks], None if zero is None else zero[..., blocks]
    return w._replace(codes=codes, scale=scale, width=width, first=first, zero=zero)


def decode_into(w: Rows, out: Tensor, tile: int = TILE, warps: int = 4) -> None:
    """Decode ``w`` into ``out`` f[stack rows width], whose last dim has no gaps."""
    w, out = _joined(w, out)
    num, rows, units = w.codes.shape
    size = min(tile, max(2 * w.per, triton.next_power_of_2(w.width)))
    chunk = min(size // 2, w.format.block or size)  # a chunk is within one block
    grid = (triton.cdiv(w.width, size), min(num * rows, MOST))
    sizes = num * rows, rows, w.width, units, w.scale.shape[2], *out.stride()[:2]
    chunks = chunk, size // chunk // 2, w.width % size == 0
    with on(out):
        _decode[grid](*tensors(w), out, *sizes, *constants(w), *chunks, num_warps=warps, **EXACT)


def _stack(buffers: Sequence[Tensor], spec: Spec) -> torch.Size:
    codes, format = buffers[0], spec.format
    return codes.shape[: codes.ndim - (1 if format.flat and format.bits != 8 else len(spec.shape))]


def _rounded_to(spec: Spec) -> torch.dtype:
    """Return the dtype of the array, or float32 for float64, which has the same values."""
    return spec.dtype if spec.dtype in DTYPES else torch.float32


def _joined(w: Rows, out: Tensor) -> tuple[Rows, Tensor]:
    """Merge rows without gaps between them to one row, and likewise the arrays of a stack."""
    if not w.format.block or w.width % w.format.block:
        return w, out
    parts = [w.codes, w.scale, out, *([] if w.zero is None else [w.zero])]
    if all(t.stride(1) == t.shape[2] for t in parts):
        parts = [t.flatten(1)[:, None] for t in parts]
    if w.nested is None and w.offset is None and all(t.is_contiguous() for t in parts):
        parts = [t.view(1, 1, -1) for t in parts]
    codes, scale, out, *zero = parts
    pitch = scale.shape[2] if codes is not w.codes else w.pitch
    zero = zero[0] if zero else None
    return w._replace(codes=codes, scale=scale, width=out.shape[2], pitch=pitch, zero=zero), out


@triton.jit
def _decode(
    codes, scale, nested, mean, nested_table, offset, table, zero,
    codes_stack, codes_row, scale_stack, scale_row, nested_stack, zero_stack, zero_row, pitch, first,
    out, num_rows, rows, width, units, blocks, out_stack, out_row,
    PER: tl.constexpr, BITS: tl.constexpr, BLOCK: tl.constexpr, NESTED: tl.constexpr, DTYPE: tl.constexpr,
    C: tl.constexpr, NUM: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """Decode tile ``program_id(0)``, twice NUM chunks of C elements, of each row of ``program_id(1)``."""
    start = tl.program_id(0).to(tl.int64) * (2 * NUM)
    chunk = start + tl.arange(0, 2 * NUM)[:, None]
    column = chunk * C + tl.arange(0, C)[None, :]
    block = chunk // (BLOCK // C) if BLOCK else chunk * 0
    unit = (start + tl.arange(0, NUM)[:, None]) * (C // PER) + tl.arange(0, C // PER)[None, :]
    half = NUM * C // PER  # a thread decodes a unit of each half, which are loaded together and looked up together
    for i in range(tl.program_id(1), num_rows, tl.num_programs(1)):
        s, r = tl.cast(i // rows, tl.int64), tl.cast(i % rows, tl.int64)
        row = codes + s * codes_stack + r * codes_row
        packed = tl.join(load_units(row, unit, units, EVEN, BITS), load_units(row, unit + half, units, EVEN, BITS))
        absmax = tl.load(scale + s * scale_stack + r * scale_row + block, mask=block < blocks, other=0)
        if NESTED:
            outer = nested + s * nested_stack + (first + r * pitch + block) // NESTED
            absmax = tl.load(nested_table + absmax.to(tl.int32)) * tl.load(outer, mask=block < blocks, other=0)
            absmax += tl.load(mean + s)
        points = zero  # None, or those of the blocks
        if zero is not None:
            points = tl.load(zero + s * zero_stack + r * zero_row + block, mask=block < blocks, other=0)
        values = look_up(unpack(packed, PER, BITS), table, 2 * NUM * C, BITS)
        values = tl.permute(tl.reshape(values, [NUM, C // PER, 2, PER]), (2, 0, 1, 3))
        values = tl.reshape(values, [2 * NUM, C])
        values = narrow(scaled(values, absmax, points, offset + s if offset is not None else offset, table), DTYPE)
        if DTYPE != out.dtype.element_ty:
            values = narrow(widen(values), out.dtype.element_ty)
        at = out + s * out_stack + r * out_row + column
        if EVEN:
            tl.store(at, values)
        else:
            tl.store(at, values, mask=column < width)
