"""Blocks of values so small that the kernels' recipes lose them: they are encoded again here, on any device.

* int8 codes. Rows are rounded to float16 first, as in LLM.int8(), whose values below 2^-14 lose bits and below 2^-25
  vanish. Such a block is multiplied by a power of two before, and its scale by the inverse after. So its error is that
  of other blocks. bitsandbytes gives zeros, or codes that are as coarse as float16 is there.
* 8-bit tables, which hold nested scales. The kernels divide by at least 1e-38, and bitsandbytes by the absmax: a block
  of zeros has code 0 and scale 0. Those bytes are bitsandbytes' on the CPU, for infinite reciprocals too.

Neither occurs in a common weight, and then the cost is one comparison for each scale. While a CUDA graph is recorded
nothing can be read. Then all blocks are encoded by both recipes, and each keeps the codes of its own.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache, partial

import torch
import torch.nn.functional as F
from torch import Tensor

from ..device import is_recording
from ..format import Format, num_blocks
from ..kernels import packed_ops, reference
from ..kernels.dispatch import has_no_values

CHUNK = 1 << 20  # elements encoded at a time
LEAST_HALF = 2.0**-14  # the least float16 with all bits
LEAST_DIVISOR = 1e-38  # of the kernels


def encode(rows: Tensor, format: Format) -> tuple[Tensor, Tensor]:
    """Quantise ``rows`` f[rows width] to codes and absmax f32[rows blocks], as ``kernels.packed_ops.encode`` does."""
    codes, absmax = packed_ops.encode(rows, format)
    is_int8 = format.table is None
    if has_no_values(absmax) or format.bits == 4 or (is_int8 and rows.dtype == torch.float16):
        return codes, absmax
    below = absmax < LEAST_HALF if is_int8 else absmax <= LEAST_DIVISOR
    again = partial(_again, format=format, recipe=_scaled if is_int8 else _looked_up)
    step = max(1, CHUNK // max(rows.shape[1], 1))
    if is_recording(absmax.device):
        parts = zip(*(t.split(step) for t in (rows, codes, absmax, below)), strict=True)
        codes, absmax = map(torch.cat, zip(*(again(*part, every=True) for part in parts), strict=True))
        return codes, absmax
    for some in below.any(-1).nonzero()[:, 0].split(step):
        codes[some], absmax[some] = again(rows[some], codes[some], absmax[some], below[some])
    return codes, absmax


def _again(
    rows: Tensor,
    codes: Tensor,
    absmax: Tensor,
    below: Tensor,
    format: Format,
    recipe: Callable[..., tuple[Tensor, Tensor]],
    every: bool = False,
) -> tuple[Tensor, Tensor]:
    """Encode the blocks ``below`` of some rows by ``recipe``; if ``every``, all, so that no number is read."""
    width = rows.shape[1]
    count, block = num_blocks(format, width), format.block or width
    padded = lambda t: F.pad(t, (0, count * block - width)).unflatten(1, (count, block))  # [rows blocks block]
    x, codes = padded(rows), padded(codes)
    x = (x.flatten(0, 1) if every else x[below]).float()
    found, scales = recipe(x, x.abs().amax(-1, keepdim=True), format)
    if every:
        codes = found.view_as(codes).where(below[..., None], codes)
        absmax = scales.view_as(absmax).where(below, absmax)
    else:
        codes[below], absmax[below] = found, scales
    return codes.flatten(1)[:, :width], absmax


def _scaled(x: Tensor, top: Tensor, format: Format) -> tuple[Tensor, Tensor]:
    """Encode blocks [n block] after a multiplication by a power of two that makes ``top`` [n 1] one half to one."""
    power = torch.frexp(top).exponent.double()
    codes, absmax = packed_ops.encode((x.double() * torch.exp2(-power)).float(), replace(format, block=None))
    return codes, (absmax.double() * torch.exp2(power)).float()[:, 0]


def _looked_up(x: Tensor, top: Tensor, format: Format) -> tuple[Tensor, Tensor]:
    """Encode blocks [n block] by the grid of an 8-bit table, with the reciprocal of ``top`` [n 1] as it is."""
    point = ((x * (1.0 / top)).clamp(-1, 1) + 1.0) * 0.5 * 65535.0 + 0.5
    codes = _grid(format, x.device)[point.nan_to_num().int()]
    return codes.where(top > 0, 0), top[:, 0]


@lru_cache(maxsize=64)
def _grid(format: Format, device: torch.device) -> Tensor:
    """Return the grid on ``device``, where it stays, because a CUDA graph cannot record the copy."""
    return reference.grid(format).to(device)
