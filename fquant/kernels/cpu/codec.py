"""Quantisation and dequantisation on the CPU, by csrc/quantize.h and csrc/dequantize.h.

Most of the description of a format or of a packed array is kept between calls; pointers of buffers are filled in.
"""

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from ...format import Format, num_blocks, num_bytes
from .. import reference
from ..spec import Spec, code_dtype, scales, split
from .library import DTYPES, Encoding, Packed, call, empty


def encode(rows: Tensor, format: Format) -> tuple[Tensor, Tensor]:
    """See ``fquant.kernels.encode``."""
    *outer, width = rows.shape
    x = rows.reshape(-1, width).contiguous()
    codes = empty(*outer, num_bytes(format, width), dtype=code_dtype(format))
    absmax = empty(*outer, num_blocks(format, width), dtype=torch.float32)
    if x.numel():
        static, tables = _encoding(format)
        how = Encoding.from_buffer_copy(static)
        how.block = format.block or width
        call("encode", x.data_ptr(), DTYPES[x.dtype], *x.shape, how, codes.data_ptr(), absmax.data_ptr())
        del tables
    return codes, absmax


def decode(buffers: Sequence[Tensor], spec: Spec, out: torch.dtype) -> Tensor:
    """See ``fquant.kernels.decode``."""
    if out not in DTYPES:
        return decode(buffers, spec, spec.dtype).to(out)
    stack = buffers[0].shape[: buffers[0].ndim - code_dims(spec)]
    values = empty(*stack, *spec.shape, dtype=out)
    if stack and (spec.format.flat or spec.format.center):  # each array has scales or offsets of its own
        flat = [b.flatten(0, len(stack) - 1) for b in buffers]
        for i, array in enumerate(values.flatten(0, len(stack) - 1)):
            array.copy_(decode([b[i] for b in flat], spec, out))
    elif values.numel():
        w, keep = packed_array(buffers, spec)
        call("decode", w, 0, w.rows, 0, w.width, DTYPES[out], values.data_ptr(), w.width)
        del keep
    return values


@lru_cache(maxsize=256)
def _encoding(format: Format) -> tuple[bytes, tuple[Tensor, ...]]:
    """Return the Encoding of a format as bytes, and the tables that it points to."""
    how = Encoding(block=format.block or 0, bits=format.bits)
    tables: tuple[Tensor, ...] = ()
    if format.bits == 4:
        order, middles = reference.midpoints(format)
        tables = (middles, torch.tensor(order, dtype=torch.uint8, device="cpu"))
        how.middles, how.order, how.sorted = tables[0].data_ptr(), tables[1].data_ptr(), order == sorted(order)
    elif format.table is not None:
        tables = (reference.grid(format),)
        how.grid = tables[0].data_ptr()
    return bytes(how), tables


def packed_array(buffers: Sequence[Tensor], spec: Spec) -> tuple[Packed, tuple[object, ...]]:
    """Return the array for C, and the objects that must live as long; a stack becomes more rows."""
    static = _static(spec)
    w = Packed.from_buffer_copy(static.fields)
    codes, scale, offset, _ = split(spec, buffers)
    nested = static.nested
    if spec.format.scale is not None and (nested is None or codes.ndim > code_dims(spec)):
        scale, nested = [decode(scale, scales(spec), torch.float32)], None
    codes, scale = codes.contiguous(), [s.contiguous() for s in scale]
    w.codes, w.scale, w.rows = codes.data_ptr(), scale[0].data_ptr(), codes.numel() // static.row
    if nested is not None:
        w.nested = scale[1].data_ptr()
        w.nested_offset = scale[2].data_ptr() if nested.center else None
    if offset is not None:
        w.offset = offset.data_ptr()
    return w, (codes, *scale, offset, static.tables)


def code_dims(spec: Spec) -> int:
    """Return how many dims the codes have, without those of a stack."""
    return 1 if spec.format.flat and spec.format.bits == 4 else len(spec.shape)


class _Static(NamedTuple):
    """The part of a packed array that depends on its spec only; ``fields`` points into the tables."""

    fields: bytes
    tables: tuple[Tensor | None, ...]
    row: int  # bytes of codes in a row
    nested: Format | None  # of the scales, if C decodes them within a product


@lru_cache(maxsize=1024)
def _static(spec: Spec) -> _Static:
    format, shape, dtype = spec
    width = math.prod(shape) if format.flat else shape[-1]
    if format.flat and shape[-1] % (format.block or width) == 0:
        width = shape[-1]  # no block straddles a row, so the flat layout is the layout by rows
    table, nested_table = _table(format), _table(format.scale) if format.scale else None
    nested_bytes = None if nested_table is None else nested_table.view(torch.uint8).view(-1, 4).mT.contiguous()
    w = Packed(width=width, block=format.block or width, bits=format.bits, dtype=DTYPES[dtype])
    if table is not None:
        values = [abs(v) for v in table.tolist() if v != 0]
        w.table, w.least = table.data_ptr(), 2.0**-125 / min(values, default=1.0)
    if nested_table is not None and nested_bytes is not None and format.scale:
        w.nested_table, w.nested_bytes = nested_table.data_ptr(), nested_bytes.data_ptr()
        w.nested_block = format.scale.block or 0
    nested = format.scale if format.scale is not None and _in_one_pass(format.scale) else None
    return _Static(bytes(w), (table, nested_table, nested_bytes), max(1, num_bytes(format, width)), nested)


def _in_one_pass(scale: Format) -> bool:
    """Return True if C decodes scales of this format within a product; others are decoded before."""
    return scale.flat and scale.bits == 8 and scale.table is not None and bool(scale.block) and scale.scale is None


@lru_cache(maxsize=256)
def _table(format: Format) -> Tensor | None:
    return None if format.table is None else torch.tensor(format.table, dtype=torch.float32, device="cpu")
