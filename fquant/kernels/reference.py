"""The codec of one row, in plain torch: what every other kernel must equal bit for bit.

Everything here works on rows, the last dim, with any dims in front, and runs under every transform and on meta and
fake tensors. The arithmetic is that of bitsandbytes to the bit:

* absmax is taken in float32; elements are multiplied by its float32 reciprocal, except in a short last block, where
  they are divided by it; the nearest table value is found between midpoints, a tie going to the smaller value.
* The dynamic 8-bit map is looked up on a grid of 65536 points. (bitsandbytes on CUDA takes the exact nearest
  instead, which moves about one code in a thousand by one step.)
* Codes without a table are those of LLM.int8(): rounded to float16 first, then ``round(x * (127 / absmax))``.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ..format import Format, num_blocks

TINY = 1e-38  # keeps the reciprocal of an all-zero block finite


def encode(rows: Tensor, format: Format) -> tuple[Tensor, Tensor]:
    """``rows`` f[... n] to (codes u8[... n·bits/8] or i8[... n], absmax f32[... blocks])."""
    x = rows.float()
    if format.table is None:
        x = rows.half().float()
    width = x.shape[-1]
    block = format.block or max(width, 1)
    whole = width - width % block
    blocks = x[..., :whole].unflatten(-1, (whole // block, block))
    absmax = blocks.abs().amax(-1)  # [... whole / block]
    if format.table is None:
        codes = _round(blocks, absmax[..., None]).flatten(-2)
        if whole < width:
            last = x[..., whole:].abs().amax(-1, keepdim=True)
            codes = torch.cat([codes, _round(x[..., whole:], last)], -1)
            absmax = torch.cat([absmax, last], -1)
        return codes, absmax
    scaled = (blocks * (1.0 / absmax.clamp(min=TINY))[..., None]).flatten(-2)
    if whole < width:
        last = x[..., whole:].abs().amax(-1, keepdim=True).clamp(min=TINY)
        scaled = torch.cat([scaled, x[..., whole:] / last], -1)
        absmax = torch.cat([absmax, last], -1)
    index = _nearest(scaled.clamp(-1, 1), format)
    if format.bits == 8:
        return index, absmax
    if width % 2:
        zero = _nearest(scaled.new_zeros((*scaled.shape[:-1], 1)), format)
        index = torch.cat([index, zero], -1)
    return index[..., 0::2] << 4 | index[..., 1::2], absmax


def decode(codes: Tensor, absmax: Tensor, format: Format, width: int) -> Tensor:
    """Codes and absmax f32[... blocks] of :func:`encode` to f32[... width]."""
    if format.table is None:
        values = codes.float()
    elif format.bits == 8:
        values = torch.tensor(format.table, device=codes.device)[codes.int()]
    else:
        # Both values of a byte at once: half as many look-ups, and no unpacked indices.
        pairs = [(high, low) for high in format.table for low in format.table]
        values = F.embedding(codes.int(), torch.tensor(pairs, device=codes.device)).flatten(-2)[..., :width]
    values = _scale(values, absmax, format, width)
    return values * (1 / 127) if format.table is None else values


def _scale(values: Tensor, absmax: Tensor, format: Format, width: int) -> Tensor:
    block = format.block or max(width, 1)
    if width % block == 0:
        return (values.unflatten(-1, (num_blocks(format, width), block)) * absmax[..., None]).flatten(-2)
    return values * absmax.repeat_interleave(block, -1)[..., :width]


def _round(x: Tensor, absmax: Tensor) -> Tensor:
    """LLM.int8: nearest of -127 .. 127, a block of zeros giving zeros."""
    return torch.where(absmax > 0, torch.round(x * (127.0 / absmax)), 0.0).to(torch.int8)


def _nearest(x: Tensor, format: Format) -> Tensor:
    """u8 index of the table value nearest to ``x`` f32 in [-1, 1]."""
    assert format.table is not None
    order = sorted(range(len(format.table)), key=format.table.__getitem__)
    table = torch.tensor([format.table[i] for i in order], device=x.device)
    middles = (table[:-1] + table[1:]) / 2
    if format.bits == 8:
        grid = torch.arange(65536, device=x.device, dtype=torch.float32) * 2.0 / 65535.0 - 1.0
        index = torch.bucketize(grid, middles)[((x + 1.0) * 0.5 * 65535.0 + 0.5).int()]
    else:
        index = torch.bucketize(x.contiguous(), middles, out_int32=True)
    if order != list(range(len(order))):
        index = torch.tensor(order, device=x.device)[index]
    return index.to(torch.uint8)
