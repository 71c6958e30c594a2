"""Packed arrays on the CPU: quantisation, dequantisation and products.

The C is quantize, dequantize, additive, gemv and gemm of csrc.

Most of the description of a format or of a packed array is kept between calls; pointers of buffers are filled in.
Where blocks straddle rows, or x is float64, a tile is decoded at a time and multiplied as a dense weight.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache, partial

import torch
from torch import Tensor

from ...format import Format, num_blocks, num_bytes
from .. import reference
from ..arguments import multiply_tiles
from ..spec import Spec, code_dtype, layout, scales, split, stack
from .library import DTYPES, Encoding, Packed, call, empty, result
from .ordered import ordered_matmul

TILE = 2 << 20  # bytes of a decoded tile
ALIGNED = 32  # columns: a decoded part starts at a multiple of this


def encode(rows: Tensor, format: Format) -> tuple[Tensor, Tensor]:
    *outer, width = rows.shape
    x = rows.reshape(math.prod(outer), width).contiguous()
    codes = empty(*outer, num_bytes(format, width), dtype=code_dtype(format))
    absmax = empty(*outer, num_blocks(format, width), dtype=torch.float32)
    if x.numel():
        call("encode", x, DTYPES[x.dtype], *x.shape, _encoding(format, format.block or width), codes, absmax)
    return codes, absmax


def decode(buffers: Sequence[Tensor], spec: Spec, out: torch.dtype) -> Tensor:
    if out not in DTYPES:
        return decode(buffers, spec, spec.dtype).to(out)
    outer = stack(spec, buffers)
    values = empty(*outer, *spec.shape, dtype=out)
    own_parts = spec.format.flat or spec.format.center or spec.format.vectors is not None
    if outer and own_parts:  # each array has scales, offsets or vectors of its own
        for array, *own in flattened(len(outer), values, *buffers):
            array.copy_(decode(own, spec, out))
    elif values.numel():
        w = packed(buffers, spec)
        call("decode", w, 0, w.rows, 0, w.width, DTYPES[out], values, w.width)
    return values


def _product(name: str, x: Tensor, buffers: Sequence[Tensor], spec: Spec, out: Tensor | None = None) -> Tensor:
    *outer, rows, _ = x.shape
    y = result(out, *outer, rows, spec.shape[name == "matmul_t"], dtype=x.dtype)
    if not x.numel() or not y.numel():
        return y.zero_()
    if outer:
        for x_, y_, *own in flattened(len(outer), x, y, *buffers):
            _product(name, x_, own, spec, y_)
        return y
    w = packed(buffers, spec)
    if x.dtype in DTYPES and w.width == spec.shape[1]:
        args = w, x.contiguous(), rows, y, DTYPES[x.dtype]
        if size := call(name, *args, None):
            call(name, *args, torch.empty(size, dtype=torch.uint8, device="cpu"))
    else:
        multiply = _multiply_in_order if x.dtype in DTYPES else multiply_tiles
        multiply(x, _tiles(w, spec, x.dtype), y, name == "matmul_t")
    return y


def _multiply_in_order(x: Tensor, tiles: Iterable[tuple[int, int, Tensor]], y: Tensor, by_columns: bool) -> None:
    """Do what :func:`multiply_tiles` does, with sums of a row that do not depend on other rows."""
    if not by_columns:
        for start, stop, tile in tiles:
            y[:, start:stop] = ordered_matmul(x, tile.mT)
        return
    total = torch.zeros_like(y, dtype=torch.float32)
    for start, stop, tile in tiles:
        total += ordered_matmul(x[:, start:stop].float(), tile.float())
    y.copy_(total)


matmul, matmul_t = partial(_product, "matmul"), partial(_product, "matmul_t")


def byte_planes(table: Tensor) -> Tensor:
    """Return the bytes u8[4 256] of a table f32[256]: byte i of all values in row i."""
    return table.view(torch.uint8).view(-1, 4).mT.contiguous()


def flattened(dims: int, *stacked: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Yield the tensors of each array of a stack with ``dims`` dims."""
    return zip(*(t.flatten(0, dims - 1) for t in stacked), strict=True)


def _tiles(w: Packed, spec: Spec, dtype: torch.dtype) -> Iterator[tuple[int, int, Tensor]]:
    """Yield (start, stop, those rows in ``dtype``); a tile is valid until the next."""
    out, width = spec.shape
    decoded = dtype if dtype in DTYPES else spec.dtype
    step = min(out, max(1, TILE // (width * max(decoded.itemsize, dtype.itemsize))))
    tile = torch.empty(step * width + ALIGNED, dtype=decoded, device="cpu")
    for start in range(0, out, step):
        stop = min(out, start + step)
        if w.width == width:
            skip, where = 0, (start, stop - start, 0, width)
        else:  # one long row: decode from the aligned column before the tile
            skip = start * width % ALIGNED
            where = (0, 1, start * width - skip, (stop - start) * width + skip)
        call("decode", w, *where, DTYPES[decoded], tile, where[3])
        yield start, stop, tile[skip : skip + (stop - start) * width].view(-1, width).to(dtype)


@lru_cache(maxsize=256)
def _encoding(format: Format, block: int) -> Encoding:
    how = Encoding(block=block, bits=format.bits)
    if format.bits == 4:
        order, middles = reference.midpoints(format)
        how.tables = middles, torch.tensor(order, dtype=torch.uint8, device="cpu")
        how.middles, how.order = (t.data_ptr() for t in how.tables)
        how.sorted = order == list(range(len(order)))
    elif format.table is not None:
        how.tables = reference.grid(format)
        how.grid = how.tables.data_ptr()
    return how


def packed(buffers: Sequence[Tensor], spec: Spec) -> Packed:
    """Return the array for C, which reads the memory of ``buffers``; a stack becomes more rows."""
    if all(b.is_contiguous() for b in buffers):
        found = in_place(spec, buffers[0].numel(), *[b.data_ptr() for b in buffers])
        if found is not None:
            return found
    return _copied(buffers, spec)


@lru_cache(maxsize=4096)
def in_place(spec: Spec, num_codes: int, *addresses: int) -> Packed | None:
    """Return the array at these addresses, of which it is a function; None if C cannot read its scales there."""
    static, row, nested = _static(spec)
    is_stack = num_codes != math.prod(layout(spec)[0].shape)
    if spec.format.scale is not None and (nested is None or is_stack):
        return None
    w = Packed.from_buffer_copy(static)
    if spec.format.vectors is not None:
        addresses, w.vectors = addresses[:-1], addresses[-1]
    w.codes, scale, w.offset, w.zero = split(spec, addresses)  # type: ignore[arg-type]
    w.scale, w.rows, w.keep = scale[0], num_codes // row, static
    if nested is not None:
        w.nested, w.nested_offset = scale[1], scale[2] if nested.center else None
    return w


def _copied(buffers: Sequence[Tensor], spec: Spec) -> Packed:
    """Return the array for C, which keeps its memory."""
    static, row, nested = _static(spec)
    w = Packed.from_buffer_copy(static)
    vectors = None
    if spec.format.vectors is not None:
        *buffers, vectors = buffers
    codes, scale, *others = split(spec, buffers)
    others = [None if t is None else t.contiguous() for t in (*others, vectors)]
    if spec.format.scale is not None and (nested is None or stack(spec, buffers)):
        scale, nested = [decode(scale, scales(spec), torch.float32)], None
    codes, scale = codes.contiguous(), [s.contiguous() for s in scale]
    w.codes, w.scale, w.rows = codes.data_ptr(), scale[0].data_ptr(), codes.numel() // row
    if nested is not None:
        w.nested = scale[1].data_ptr()
        w.nested_offset = scale[2].data_ptr() if nested.center else None
    w.offset, w.zero, w.vectors = (None if t is None else t.data_ptr() for t in others)
    w.keep = codes, scale, others, static
    return w


@lru_cache(maxsize=1024)
def _static(spec: Spec) -> tuple[Packed, int, Format | None]:
    """Return the array without buffers, the bytes of a row of codes, and the format of scales that C decodes."""
    format, shape, dtype = spec
    width = math.prod(shape) if format.flat else shape[-1]
    if format.flat and shape[-1] % (format.block or width) == 0:
        width = shape[-1]  # no block straddles a row, so the flat layout is the layout by rows
    block = format.block or width
    if format.bits < 8 and format.block is None:
        block = 1 << max(6, (width - 1).bit_length())  # because C shifts by the block size: one that holds a row
    w = Packed(width=width, block=block, bits=format.bits, dtype=DTYPES[dtype])
    nested = format.scale
    if format.vectors is not None:
        w.stages, w.dim = format.vectors.stages, format.vectors.dim
    if format.table is not None:
        padding = [0.0] * (16 - len(format.table))  # C widens codes of fewer bits to 4
        w.table_memory = torch.tensor([*format.table, *padding], dtype=torch.float32, device="cpu")
        values = [abs(v) for v in format.table if v == v and v != 0]
        w.table, w.least = w.table_memory.data_ptr(), 2.0**-125 / min(values, default=1.0)
        w.plain = format.bits == 8 and all(v == format.table[0] + i for i, v in enumerate(format.table))
        if format.zero:  # of integers up to 255, no difference from a tame zero point is below 2^-33 but 0
            tame = all(abs(v) < 256 and v == round(v) for v in format.table)
            w.least = 2.0**-92 if tame else math.inf
    if nested is None or not (nested.flat and nested.bits == 8 and nested.table and nested.block) or nested.scale:
        nested = None  # C decodes no other scales within a product
    else:
        w.nested_memory = torch.tensor(nested.table, dtype=torch.float32, device="cpu")
        w.byte_planes = byte_planes(w.nested_memory)
        w.nested_table, w.nested_bytes = w.nested_memory.data_ptr(), w.byte_planes.data_ptr()
        w.nested_block = nested.block
    return w, max(1, num_bytes(format, width)), nested
