"""The kernels of cpu.c: what they are told, and the few products that they leave to torch.

A product never makes a dense weight: cpu.c decodes what it multiplies with next, and tells how much room it needs for
that and for a copy of x, which is the same for weights of any size. It computes in float32, or in bfloat16 with float32
sums where the machine can. Where blocks straddle rows, or x is float64, ``TILE`` bytes of rows are decoded at a time
and torch multiplies; sums over them are kept in float32 at least.
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
from .cpu_attention import attention, attention_slope
from .cpu_library import DTYPES, Encoding, Packed, call, empty, isas, load, result
from .cpu_norm import rms_norm, rms_norm_slope
from .cpu_pointwise import pointwise, silu, silu_slope
from .spec import Spec, scales, split

__all__ = [
    "DEVICES", "attention", "attention_slope", "bernoulli", "bits", "decode", "encode", "fold", "isas", "load",
    "matmul", "matmul_t", "nll", "nll_slope", "pointwise", "rms_norm", "rms_norm_slope", "silu", "silu_slope",
]  # fmt: skip

DEVICES = ("cpu",)
TILE = 2 << 20  # bytes of a decoded tile
ALIGNED = 32  # columns: a decoded part starts at a multiple of this


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


def matmul(x: Tensor, buffers: Sequence[Tensor], spec: Spec, out: Tensor | None = None) -> Tensor:
    """See ``fquant.kernels.matmul``."""
    return _product("matmul", x, buffers, spec, out)


def matmul_t(g: Tensor, buffers: Sequence[Tensor], spec: Spec, out: Tensor | None = None) -> Tensor:
    """See ``fquant.kernels.matmul_t``."""
    return _product("matmul_t", g, buffers, spec, out)


def fold(key: Tensor, data: Tensor) -> Tensor:
    """See ``fquant.kernels.threefry.fold``."""
    key, data = (t.contiguous() for t in torch.broadcast_tensors(key, data))
    out = empty(*key.shape, dtype=torch.int64)
    if out.numel():
        call("fold", key.data_ptr(), data.data_ptr(), out.numel(), out.data_ptr())
    return out


def bits(key: Tensor, shape: Sequence[int]) -> Tensor:
    """See ``fquant.kernels.threefry.bits``."""
    key, out = key.contiguous(), empty(*key.shape, *shape, dtype=torch.int64)
    if out.numel():
        call("bits", key.data_ptr(), key.numel(), math.prod(shape), out.data_ptr())
    return out


def bernoulli(key: Tensor, threshold: int, shape: Sequence[int]) -> Tensor:
    """See ``fquant.kernels.threefry.bernoulli``."""
    key, out = key.contiguous(), empty(*key.shape, *shape, dtype=torch.bool)
    if out.numel():
        call("bernoulli", key.data_ptr(), key.numel(), threshold, math.prod(shape), out.data_ptr())
    return out


def nll(logits: Tensor, targets: Tensor, ignore: int, out: Tensor | None = None) -> Tensor:
    """See ``fquant.kernels.nll.nll``."""
    if logits.dtype not in DTYPES:
        return reference.nll(logits, targets, ignore)
    out = result(out, len(logits), dtype=torch.float32)
    _losses(logits, targets, ignore, None, out, None)
    return out


def nll_slope(
    logits: Tensor, targets: Tensor, ignore: int, factor: Tensor | None, out: Sequence[Tensor | None] = (None, None)
) -> tuple[Tensor, Tensor]:
    """See ``fquant.kernels.nll.nll_slope``."""
    if logits.dtype not in DTYPES:
        return reference.nll_slope(logits, targets, ignore, factor)
    losses = result(out[0], len(logits), dtype=torch.float32)
    slope = result(out[1], *logits.shape, dtype=logits.dtype)
    _losses(logits, targets, ignore, factor, losses, slope)
    return losses, slope


def _losses(
    logits: Tensor, targets: Tensor, ignore: int, factor: Tensor | None, out: Tensor, slope: Tensor | None
) -> None:
    rows = logits if logits.stride(1) == 1 else logits.contiguous()
    targets, factor = targets.contiguous(), None if factor is None else factor.contiguous()
    if len(rows):
        what = rows.data_ptr(), DTYPES[rows.dtype], *rows.shape, rows.stride(0), targets.data_ptr(), ignore
        results = out.data_ptr(), None if slope is None else slope.data_ptr()
        call("nll", *what, None if factor is None else factor.data_ptr(), *results)


def _product(name: str, x: Tensor, buffers: Sequence[Tensor], spec: Spec, out: Tensor | None = None) -> Tensor:
    *stack, rows, _ = x.shape
    y = result(out, *stack, rows, spec.shape[name == "matmul_t"], dtype=x.dtype)
    if not x.numel() or not y.numel():
        return y.zero_()
    if stack:
        flat = [b.flatten(0, len(stack) - 1) for b in buffers]
        for i, (part, into) in enumerate(zip(x.flatten(0, -3), y.flatten(0, -3), strict=True)):
            _product(name, part, [b[i] for b in flat], spec, into)
        return y
    w, keep = _packed(buffers, spec)
    if x.dtype in DTYPES and w.width == spec.shape[1]:
        x = x.contiguous()
        args = (w, x.data_ptr(), rows, y.data_ptr(), DTYPES[x.dtype])
        if size := call(name, *args, None):
            room = torch.empty(size, dtype=torch.uint8, device="cpu")
            call(name, *args, room.data_ptr())
    elif name == "matmul":
        for start, stop, tile in _tiles(w, spec, x.dtype):
            torch.mm(x, tile.mT, out=y[:, start:stop])
    else:
        wide = torch.promote_types(x.dtype, torch.float32)
        total = torch.zeros(y.shape, dtype=wide, device="cpu")
        for start, stop, tile in _tiles(w, spec, x.dtype):
            total.addmm_(x[:, start:stop].to(wide), tile.to(wide))
        y.copy_(total)
    del keep
    return y


def _tiles(w: Packed, spec: Spec, dtype: torch.dtype) -> Iterator[tuple[int, int, Tensor]]:
    """(start, stop, the rows between them in ``dtype``), each tile valid until the next."""
    out, width = spec.shape
    decoded = dtype if dtype in DTYPES else spec.dtype
    step = min(out, max(1, TILE // (width * max(decoded.itemsize, dtype.itemsize))))
    tile = torch.empty(step * width + ALIGNED, dtype=decoded, device="cpu")
    for start in range(0, out, step):
        stop = min(out, start + step)
        if w.width == width:
            skip, where = 0, (start, stop - start, 0, width)
        else:  # one long row: from the last place before it where decoding may start
            skip = start * width % ALIGNED
            where = (0, 1, start * width - skip, (stop - start) * width + skip)
        call("decode", w, *where, DTYPES[decoded], tile.data_ptr(), where[3])
        yield start, stop, tile[skip : skip + (stop - start) * width].view(-1, width).to(dtype)


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
    nested_bytes = None if nested_table is None else nested_table.view(torch.uint8).view(-1, 4).mT.contiguous()
    if table is not None:
        values = [abs(v) for v in table.tolist() if v != 0]
        w.table, w.least = table.data_ptr(), 2.0**-125 / min(values, default=1.0)
    if nested_table is not None and nested_bytes is not None and format.scale:
        w.nested_table, w.nested_bytes = nested_table.data_ptr(), nested_bytes.data_ptr()
        w.nested_block = format.scale.block or 0
    nested = format.scale if format.scale is not None and _in_one_pass(format.scale) else None
    return _Known(bytes(w), (table, nested_table, nested_bytes), max(1, num_bytes(format, width)), _dims(spec), nested)


def _dims(spec: Spec) -> int:
    """How many dims the codes have, without those of a stack."""
    return 1 if spec.format.flat and spec.format.bits == 4 else len(spec.shape)


def _in_one_pass(scale: Format) -> bool:
    """Whether cpu.c decodes scales of this format on the way; others are decoded before."""
    return scale.flat and scale.bits == 8 and scale.table is not None and bool(scale.block) and scale.scale is None


@lru_cache(maxsize=256)
def _table(format: Format) -> Tensor | None:
    return None if format.table is None else torch.tensor(format.table, dtype=torch.float32, device="cpu")


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
