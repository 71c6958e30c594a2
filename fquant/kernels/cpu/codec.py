"""Quantise and dequantise on the CPU."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

from ...format import Format, num_blocks, num_bytes
from .. import reference
from ..spec import Spec, scales, split
from .library import DTYPES, Encoding, Packed, call, empty
from .packed_arrays import _dims, _known


def encode(rows: Tensor, format: Format) -> tuple[Tensor, Tensor]:
    """See ``fquant.kernels.encode``."""
    *outer, width = rows.shape
    x = rows.reshape(-1, width).contiguous()
    codes = empty(*outer, num_bytes(format, width), dtype=torch.int8 if format.table is None else torch.uint8)
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
    stack = buffers[0].shape[: buffers[0].ndim - _dims(spec)]
    values = empty(*stack, *spec.shape, dtype=out)
    if stack and (spec.format.flat or spec.format.center):  # what is one for each of the stack
        flat = [b.flatten(0, len(stack) - 1) for b in buffers]
        for i, into in enumerate(values.flatten(0, len(stack) - 1)):
            into.copy_(decode([b[i] for b in flat], spec, out))
    elif values.numel():
        w, keep = _packed(buffers, spec)
        call("decode", w, 0, w.rows, 0, w.width, DTYPES[out], values.data_ptr(), w.width)
        del keep
    return values


@lru_cache(maxsize=256)
def _encoding(format: Format) -> tuple[bytes, tuple[Tensor, ...]]:
    """What of an Encoding the format alone says, and the tables that it points to."""
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


def _packed(buffers: Sequence[Tensor], spec: Spec) -> tuple[Packed, tuple[object, ...]]:
    """The array for C, and what has to live as long; a stack is so many more rows."""
    known = _known(spec)
    w = Packed.from_buffer_copy(known.static)
    codes, scale, offset, _ = split(spec, buffers)
    nested = known.nested
    if spec.format.scale is not None and (nested is None or codes.ndim > known.dims):
        scale, nested = [decode(scale, scales(spec), torch.float32)], None
    codes, scale = codes.contiguous(), [s.contiguous() for s in scale]
    w.codes, w.scale, w.rows = codes.data_ptr(), scale[0].data_ptr(), codes.numel() // known.row
    if nested is not None:
        w.nested = scale[1].data_ptr()
        w.nested_offset = scale[2].data_ptr() if nested.center else None
    if offset is not None:
        w.offset = offset.data_ptr()
    return w, (codes, *scale, offset, known.tables)
