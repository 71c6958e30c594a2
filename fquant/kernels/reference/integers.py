"""Products of integers: rows of x are quantised, and codes of both are multiplied exactly."""

from collections.abc import Sequence

import torch
from torch import Tensor

from ...format import Format, num_blocks
from ...format.bits import unpack
from ..spec import Spec, scales, split
from .codec import decode

TINY = 2.0**-126  # the least normal float32


def quantize_rows(x: Tensor, act: Format) -> tuple[Tensor, Tensor]:
    """Return x f[... width] as integers f64[... width], codes minus their zero point, and scales f32[... 1].

    Rows that are not finite have a scale that is not.
    """
    if act.table is None:
        x = x.half().float()
        top = x.abs().amax(-1, keepdim=True)
        q = torch.where(top > 0, torch.round(x * (127.0 / top)), 0.0).clamp(-127, 127)
        return q.nan_to_num().double(), top * (1 / 127)
    assert act.integers is not None
    x, (first, last) = x.float(), act.integers
    if act.zero:
        low, high = x.amin(-1, keepdim=True).clamp(max=0.0), x.amax(-1, keepdim=True).clamp(min=0.0)
        scale = _at_least_tiny((high - low) / (last - first))
        zero = (first - torch.round(low / scale.clamp(min=TINY))).clamp(first, last)
    else:
        scale = _at_least_tiny(x.abs().amax(-1, keepdim=True) / (act.unit or last))
        zero = torch.zeros_like(scale)
    q = (torch.round(x * (1.0 / scale.clamp(min=TINY))) + zero).clamp(first, last) - zero
    return q.nan_to_num().double(), scale


def _at_least_tiny(scale: Tensor) -> Tensor:
    return scale.where(~((scale > 0) & (scale < TINY)), TINY)


def integer_matmul(x: Tensor, buffers: Sequence[Tensor], spec: Spec, act: Format) -> Tensor:
    """Return the product with sums of integers in float64, block by block."""
    q, scale_of_x = quantize_rows(x, act)
    format, (_, width), _ = spec
    codes, scale, _, zero = split(spec, buffers)
    absmax = scale[0] if format.scale is None else decode(scale, scales(spec), torch.float32)
    if format.table is None:
        w = codes.double()
    else:
        assert format.levels is not None
        levels = torch.tensor(format.levels, dtype=torch.float64, device=codes.device)
        w = levels[unpack(codes, format.bits, width).int()]
    if format.integers is None:
        absmax = absmax * (1 / 127)
    total, block = 0.0, format.block or width
    for i in range(num_blocks(format, width)):
        some = slice(i * block, (i + 1) * block)
        part = (q[..., some] @ w[..., some].mT).float()  # exact, because float64 holds the sum
        if zero is not None:
            part = part - zero[..., None, :, i] * q[..., some].sum(-1, keepdim=True).float()
        total = total + part * absmax[..., None, :, i]
    assert isinstance(total, Tensor)
    return (total * scale_of_x).to(x.dtype)


def integer_mm(a: Tensor, b: Tensor, act_a: Format, act_b: Format) -> Tensor:
    """Return the product with sums of integers in float64."""
    (q, scale), (r, scale_of_b) = quantize_rows(a, act_a), quantize_rows(b, act_b)
    return ((q @ r.mT).float() * scale_of_b.mT * scale).to(a.dtype)
