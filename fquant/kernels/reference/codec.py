"""Quantisation and dequantisation of rows, and products with a dequantised weight."""

import math
from collections.abc import Callable, Sequence
from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor

from ...format import Format, num_blocks
from ...format.bits import unpack
from ..spec import Spec, scales, split

CHUNK = 1 << 20  # elements quantised at a time, which bounds the memory beside the weight
TINY = 1e-38  # keeps the reciprocal of an all-zero block finite


def encode(rows: Tensor, format: Format) -> tuple[Tensor, Tensor]:
    *outer, width = rows.shape
    parts = rows.reshape(-1, width).split(max(1, CHUNK // max(width, 1)))
    codes, absmax = zip(*[_encode_rows(part, format) for part in parts], strict=True)
    join = lambda parts: (torch.cat(parts) if len(parts) > 1 else parts[0]).reshape(*outer, parts[0].shape[-1])
    return join(codes), join(absmax)


def _encode_rows(rows: Tensor, format: Format) -> tuple[Tensor, Tensor]:
    plain = format.table is None
    x = (rows.half() if plain else rows).float()
    width = x.shape[-1]
    block = format.block or max(width, 1)
    whole = width - width % block
    blocks, short = x[..., :whole].unflatten(-1, (whole // block, block)), x[..., whole:]
    absmax = blocks.abs().amax(-1)  # [... whole / block]
    scaled = _round(blocks, absmax[..., None]) if plain else blocks * (1.0 / absmax.clamp(min=TINY))[..., None]
    scaled = scaled.flatten(-2)
    if whole < width:
        last = short.abs().amax(-1, keepdim=True).clamp(min=0.0 if plain else TINY)
        scaled = torch.cat([scaled, _round(short, last) if plain else short / last], -1)
        absmax = torch.cat([absmax, last], -1)
    if plain:
        return scaled, absmax
    if format.bits == 4 and width % 2:
        scaled = F.pad(scaled, (0, 1))
    index = _nearest(scaled.clamp(-1, 1), format)
    return index if format.bits == 8 else index[..., 0::2] << 4 | index[..., 1::2], absmax


def decode(buffers: Sequence[Tensor], spec: Spec, out: torch.dtype) -> Tensor:
    format, shape, dtype = spec
    codes, scale, offset, zero = split(spec, buffers)
    absmax = scale[0] if format.scale is None else decode(scale, scales(spec), torch.float32)
    if format.flat:
        codes = codes.flatten(-len(shape)) if format.bits == 8 else codes
        values = _decode_rows(codes, absmax, None, format, math.prod(shape)).unflatten(-1, shape)
    else:
        values = _decode_rows(codes, absmax, zero, format, shape[-1])
    if offset is not None:
        values = values + offset.reshape(offset.shape + (1,) * len(shape))
    return values.to(dtype).to(out)


def matmul(x: Tensor, buffers: Sequence[Tensor], spec: Spec) -> Tensor:
    return x @ decode(buffers, spec, x.dtype).mT


def matmul_t(g: Tensor, buffers: Sequence[Tensor], spec: Spec) -> Tensor:
    return g @ decode(buffers, spec, g.dtype)


def _decode_rows(codes: Tensor, absmax: Tensor, zero: Tensor | None, format: Format, width: int) -> Tensor:
    """Dequantise codes, scales and zero points f32[... blocks] to f32[... width]."""
    if format.table is None:
        values = codes.float()
    elif format.bits != 4:
        table = torch.tensor(format.table, dtype=torch.float32, device=codes.device)
        values = table[unpack(codes, format.bits, width).int()]
    else:
        # Both values of a byte at once: half as many look-ups, and no unpacked indices.
        pairs = [(high, low) for high in format.table for low in format.table]
        table = torch.tensor(pairs, dtype=torch.float32, device=codes.device)
        values = F.embedding(codes.int(), table).flatten(-2)[..., :width]
    if zero is not None:
        values = _by_block(torch.sub, values, zero, format, width)
    values = times_scale(values, absmax, format, width)
    return values * (1 / 127) if format.table is None else values


def times_scale(values: Tensor, absmax: Tensor, format: Format, width: int) -> Tensor:
    """Multiply values f32[... width] by the absmax f32[... blocks] of their blocks."""
    return _by_block(torch.mul, values, absmax, format, width)


def _by_block(op: Callable[[Tensor, Tensor], Tensor], values: Tensor, by: Tensor, format: Format, width: int) -> Tensor:
    """Apply ``op`` to values f32[... width] and the number ``by`` f32[... blocks] of their blocks."""
    if not width:
        return values
    block = format.block or width
    if width % block == 0:
        return op(values.unflatten(-1, (num_blocks(format, width), block)), by[..., None]).flatten(-2)
    return op(values, by.repeat_interleave(block, -1)[..., :width])


def _round(x: Tensor, absmax: Tensor) -> Tensor:
    """Round to the nearest of -127 .. 127, as LLM.int8() does; a block of zeros gives zeros."""
    return torch.where(absmax > 0, torch.round(x * (127.0 / absmax)), 0.0).to(torch.int8)


def _nearest(x: Tensor, format: Format) -> Tensor:
    """Return the u8 index of the table value nearest to ``x`` f32 in [-1, 1]."""
    if format.bits == 8:
        at = (x + 1.0) * 0.5 * 65535.0 + 0.5
        return grid(format).to(x.device)[at.nan_to_num().int()]  # quantize refuses NaN later, by its absmax
    order, middles = midpoints(format)
    index = torch.bucketize(x.contiguous(), middles.to(x.device), out_int32=True)
    if order != sorted(order):
        index = torch.tensor(order, dtype=torch.int64, device=x.device)[index]
    return index.to(torch.uint8)


@lru_cache(maxsize=256)
def midpoints(format: Format) -> tuple[list[int], Tensor]:
    """Return the codes in the order of their values, and the midpoints between those, f32[codes - 1].

    Codes that are no number are left out. The last code and an infinite midpoint stand in their places.
    """
    assert format.table is not None
    order = sorted((i for i, x in enumerate(format.table) if x == x), key=format.table.__getitem__)
    table = torch.tensor([format.table[i] for i in order], dtype=torch.float32, device="cpu")
    rest = len(format.table) - len(order)
    return order + order[-1:] * rest, F.pad((table[:-1] + table[1:]) / 2, (0, rest), value=math.inf)


@lru_cache(maxsize=256)
def grid(format: Format) -> Tensor:
    """Return the code nearest to each of 65536 points in [-1, 1], u8."""
    order, middles = midpoints(format)
    points = torch.arange(65536, dtype=torch.float32, device="cpu") * 2.0 / 65535.0 - 1.0
    return torch.tensor(order, dtype=torch.uint8, device="cpu")[torch.bucketize(points, middles)]
