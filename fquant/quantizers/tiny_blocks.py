"""Blocks of values so small that the kernels' recipes lose them: they are encoded again here, on any device.

* int8 codes. Rows are rounded to float16 first, as in LLM.int8(), whose values below 2^-14 lose bits and below 2^-25
  vanish. Such a block is multiplied by a power of two before, and its scale by the inverse after. So its error is that
  of other blocks. bitsandbytes gives zeros, or codes that are as coarse as float16 is there.
* 8-bit tables, which hold nested scales. The kernels divide by at least 1e-38, and bitsandbytes by the absmax: a block
  of zeros has code 0 and scale 0. Those bytes are bitsandbytes' on the CPU, for infinite reciprocals too.

Neither occurs in a common weight, and then the cost is one comparison for each scale.
"""

from collections.abc import Callable
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

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
    affected = below.any(-1).nonzero()[:, 0]
    for some in affected.split(max(1, CHUNK // max(rows.shape[1], 1))):
        found = _again(rows[some], codes[some], absmax[some], below[some], format, _scaled if is_int8 else _looked_up)
        codes[some], absmax[some] = found
    return codes, absmax


def _again(
    rows: Tensor,
    codes: Tensor,
    absmax: Tensor,
    below: Tensor,
    format: Format,
    recipe: Callable[..., tuple[Tensor, Tensor]],
) -> tuple[Tensor, Tensor]:
    """Encode the blocks ``below`` of some rows by ``recipe``."""
    width = rows.shape[1]
    count, block = num_blocks(format, width), format.block or width
    padded = lambda t: F.pad(t, (0, count * block - width)).unflatten(1, (count, block))  # [rows blocks block]
    x, codes = padded(rows)[below].float(), padded(codes)
    codes[below], absmax[below] = recipe(x, x.abs().amax(-1, keepdim=True), format)
    return codes.flatten(1)[:, :width], absmax


def _scaled(x: Tensor, top: Tensor, format: Format) -> tuple[Tensor, Tensor]:
    """Encode blocks [n block] after a multiplication by a power of two that makes ``top`` [n 1] one half to one."""
    power = torch.frexp(top).exponent.double()
    codes, absmax = packed_ops.encode((x.double() * torch.exp2(-power)).float(), replace(format, block=None))
    return codes, (absmax.double() * torch.exp2(power)).float()[:, 0]


def _looked_up(x: Tensor, top: Tensor, format: Format) -> tuple[Tensor, Tensor]:
    """Encode blocks [n block] by the grid of an 8-bit table, with the reciprocal of ``top`` [n 1] as it is."""
    point = ((x * (1.0 / top)).clamp(-1, 1) + 1.0) * 0.5 * 65535.0 + 0.5
    codes = reference.grid(format).to(x.device)[point.nan_to_num().int()]
    return codes.where(top > 0, 0), top[:, 0]
