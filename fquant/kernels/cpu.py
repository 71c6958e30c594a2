"""The kernels of cpu.c: what they are told, and how a product is cut so that no dense weight exists.

* A product of few rows of x reads the packed bytes once: cpu.c decodes some rows of the weight into cache and
  multiplies. It computes in float32, or in bfloat16 with float32 sums where the machine can.
* A product of many rows is torch's own, a tile of the weight at a time: ``TILE`` bytes are decoded, multiplied and
  decoded over. The tile is rows of the weight for ``x · Wᵀ`` and columns for ``g · W``, so that each tile gives its
  part of the result whole, and nothing is rounded that torch would not round.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from ..format import Format, num_blocks, num_bytes
from . import reference
from .cpu_library import DTYPES, Encoding, Packed, call, empty, isa, isas, load
from .spec import Spec, scales, split

__all__ = ["DEVICES", "decode", "encode", "isas", "load", "matmul", "matmul_t"]

DEVICES = ("cpu",)
TILE = 4 << 20  # bytes of a decoded tile: smaller ones take more calls, larger ones leave the cache
SLAB = 256  # rows and columns of a part of a weight so tall that a tile holds no whole columns
ALIGNED = 32  # columns: a decoded part starts at a multiple of this
CHUNK = 96  # rows of x that cpu.c is given at a time, if its copy of them is no more than a tile


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


def matmul(x: Tensor, buffers: Sequence[Tensor], spec: Spec) -> Tensor:
    """See ``fquant.kernels.matmul``."""
    return _product("matmul", x, buffers, spec)


def matmul_t(g: Tensor, buffers: Sequence[Tensor], spec: Spec) -> Tensor:
    """See ``fquant.kernels.matmul_t``."""
    return _product("matmul_t", g, buffers, spec)


def _product(name: str, x: Tensor, buffers: Sequence[Tensor], spec: Spec) -> Tensor:
    stack, rows = x.shape[:-2], x.shape[-2]
    y = empty(*stack, rows, spec.shape[name == "matmul_t"], dtype=x.dtype)
    if not x.numel() or not y.numel():
        return y.zero_()
    if stack:
        flat = [b.flatten(0, len(stack) - 1) for b in buffers]
        for i, (part, into) in enumerate(zip(x.flatten(0, -3), y.flatten(0, -3), strict=True)):
            into.copy_(_product(name, part, [b[i] for b in flat], spec))
        return y
    w, keep = _packed(buffers, spec)
    if rows <= _few(name, x.dtype, w, spec):
        x, number = x.contiguous(), DTYPES[x.dtype]
        chunk = max(1, min(CHUNK, TILE // (4 * x.shape[1])))
        for start in range(0, rows, chunk):  # pointers, not views, which would take longer than a row's product allows
            at, to = (t.data_ptr() + start * t.shape[1] * t.itemsize for t in (x, y))
            call(name, w, at, min(chunk, rows - start), to, number)
    elif name == "matmul":
        _by_rows(x, w, spec, y)
    else:
        _by_columns(x, w, spec, y)
    del keep
    return y


def _few(name: str, dtype: torch.dtype, w: Packed, spec: Spec) -> float:
    """Up to how many rows of x a product is cpu.c's; from there torch's, with a decoded tile, was measured faster."""
    mixed = torch.float32 not in (dtype, spec.dtype) and dtype != spec.dtype  # two roundings of a weight
    if dtype not in DTYPES or mixed or w.width != spec.shape[1]:
        return 0
    if dtype == torch.float16:
        return math.inf  # torch's takes five times as long, and a hundred times for g · W
    if dtype == torch.float32:
        return 64
    if load().fquant_deals(isa(), w, DTYPES[dtype]):
        return 32 if name == "matmul" else 96
    return 8


def _by_rows(x: Tensor, w: Packed, spec: Spec, y: Tensor) -> None:
    """``x · Wᵀ`` into y, so many rows of the weight at a time as fit a tile."""
    out, width = spec.shape
    for start, stop, tile in _row_tiles(w, spec, x, x.dtype):
        torch.mm(x, tile.mT, out=y[:, start:stop])


def _by_columns(g: Tensor, w: Packed, spec: Spec, y: Tensor) -> None:
    """``g · W`` into y, so many columns of the weight at a time as fit a tile."""
    (out, width), wide = spec.shape, torch.promote_types(g.dtype, torch.float32)
    dtype, size = _decoded(spec, g, g.dtype)
    if w.width != width:  # blocks straddle rows, and columns cannot be had: sum over tiles of rows, in float32 at least
        total = y.zero_() if y.dtype == wide else torch.zeros(y.shape, dtype=wide)
        for start, stop, tile in _row_tiles(w, spec, g, wide):
            total.addmm_(g[:, start:stop].to(wide), tile)
        y.copy_(total)
    elif size * 2 // out < ALIGNED:  # not even the fewest columns: parts of more of them, summed as well
        for start in range(0, width, SLAB):
            columns = min(SLAB, width - start)
            total = torch.zeros(y.shape[0], columns, dtype=wide)
            for row in range(0, out, SLAB):
                part = torch.empty(min(SLAB, out - row), columns, dtype=dtype)
                call("decode", w, row, part.shape[0], start, columns, DTYPES[dtype], part.data_ptr(), columns)
                total.addmm_(g[:, row : row + SLAB].to(wide), part.to(g.dtype).to(wide))
            y[:, start : start + columns] = total
    else:
        step = min(width, max(ALIGNED, size // out // ALIGNED * ALIGNED))
        tile = torch.empty(out * step, dtype=dtype)
        for start in range(0, width, step):
            columns = min(step, width - start)
            part = tile[: out * columns].view(out, columns)
            call("decode", w, 0, out, start, columns, DTYPES[dtype], part.data_ptr(), columns)
            torch.mm(g, part.to(g.dtype), out=y[:, start : start + columns])


def _row_tiles(w: Packed, spec: Spec, x: Tensor, wanted: torch.dtype) -> Iterator[tuple[int, int, Tensor]]:
    """(start, stop, the rows between them in x's dtype and then in ``wanted``), each tile valid until the next."""
    out, width = spec.shape
    dtype, size = _decoded(spec, x, wanted)
    step = min(out, max(1, size // width))
    step = step // 16 * 16 or step
    tile = torch.empty(step * width + ALIGNED, dtype=dtype)
    for start in range(0, out, step):
        stop = min(out, start + step)
        if w.width == width:
            skip, where = 0, (start, stop - start, 0, width)
        else:  # one long row: from the last place before it where decoding may start
            skip = start * width % ALIGNED
            where = (0, 1, start * width - skip, (stop - start) * width + skip)
        call("decode", w, *where, DTYPES[dtype], tile.data_ptr(), where[3])
        yield start, stop, tile[skip : skip + (stop - start) * width].view(-1, width).to(x.dtype).to(wanted)


def _decoded(spec: Spec, x: Tensor, wanted: torch.dtype) -> tuple[torch.dtype, int]:
    """The dtype that a tile is decoded to, and how many elements, with their casts to others, ``TILE`` bytes hold."""
    dtype = x.dtype if x.dtype in DTYPES else spec.dtype
    each = sum(t.itemsize for t in {dtype, x.dtype, wanted})
    return dtype, TILE // each


def _packed(buffers: Sequence[Tensor], spec: Spec) -> tuple[Packed, tuple[object, ...]]:
    """The array for C, and what has to live as long; a stack is so many more rows."""
    known = _known(spec)
    w = Packed.from_buffer_copy(known.static)
    codes, scale, offset = split(spec, buffers)
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


class _Known(NamedTuple):
    """What of a packed array its spec alone says; ``static`` points into the tables."""

    static: bytes
    tables: tuple[Tensor | None, ...]
    row: int  # bytes of codes in a row
    dims: int  # of the codes, without those of a stack
    nested: Format | None  # of the scales, where cpu.c decodes them on the way


@lru_cache(maxsize=1024)
def _known(spec: Spec) -> _Known:
    format, shape, dtype = spec
    width = math.prod(shape) if format.flat else shape[-1]
    if format.flat and shape[-1] % (format.block or width) == 0:
        width = shape[-1]  # no block straddles a row, and the flat layout is that by rows
    table, nested_table = _table(format), _table(format.scale) if format.scale else None
    w = Packed(width=width, block=format.block or width, bits=format.bits, dtype=DTYPES[dtype])
    w.table = table.data_ptr() if table is not None else None
    if nested_table is not None and format.scale:
        w.nested_table, w.nested_block = nested_table.data_ptr(), format.scale.block or 0
    nested = format.scale if format.scale is not None and _in_one_pass(format.scale) else None
    return _Known(bytes(w), (table, nested_table), max(1, num_bytes(format, width)), _dims(spec), nested)


def _dims(spec: Spec) -> int:
    """How many dims the codes have, without those of a stack."""
    return 1 if spec.format.flat and spec.format.bits == 4 else len(spec.shape)


def _in_one_pass(scale: Format) -> bool:
    """Whether cpu.c decodes scales of this format on the way; others are decoded before."""
    return scale.flat and scale.bits == 8 and scale.table is not None and bool(scale.block) and scale.scale is None


@lru_cache(maxsize=256)
def _table(format: Format) -> Tensor | None:
    return None if format.table is None else torch.tensor(format.table)


@lru_cache(maxsize=256)
def _encoding(format: Format) -> tuple[bytes, tuple[Tensor, ...]]:
    """What of an Encoding the format alone says, and the tables that it points to."""
    how = Encoding(block=format.block or 0, bits=format.bits)
    tables: tuple[Tensor, ...] = ()
    if format.bits == 4:
        order, middles = reference.midpoints(format)
        tables = (middles, torch.tensor(order, dtype=torch.uint8))
        how.middles, how.order, how.sorted = tables[0].data_ptr(), tables[1].data_ptr(), order == sorted(order)
    elif format.table is not None:
        tables = (reference.grid(format),)
        how.grid = tables[0].data_ptr()
    return bytes(how), tables
