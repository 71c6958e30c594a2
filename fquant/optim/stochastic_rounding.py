"""Stochastic rounding of float32 to bf16 and f16: to one of two neighbours, so that the mean is the number.

An update of bf16 parameters that is below half a step in the last place would be lost by rounding to nearest. The
random bits of an element are a function of a key and its position (:mod:`fquant.random`).
"""

import torch
from torch import Tensor

from ..kernels.ops import random_bits


def round_stochastically(x: Tensor, dtype: torch.dtype, key: Tensor, start: int = 0) -> Tensor:
    """Round ``x`` f32 to ``dtype`` bf16 or f16; cast to any other dtype. The result has the shape of ``x``.

    Element i of the flattened x takes the bits of ``key`` i64[] at ``start + i``. Values that are not finite are kept.
    Probabilities are exact for bf16, and to 24 bits for f16. f16 does not exceed 65504.
    """
    if dtype not in (torch.bfloat16, torch.float16):
        return x.to(dtype)
    place = torch.arange(start, start + x.numel(), dtype=torch.int64, device=x.device).reshape(x.shape)
    words = random_bits.fold(key, place) & 0xFFFFFF
    return _to_bf16(x, words) if dtype is torch.bfloat16 else _to_f16(x, words)


def _to_bf16(x: Tensor, words: Tensor) -> Tensor:
    """Add 16 random bits below the last place, and cut."""
    raised = (x.float().view(torch.int32) + (words & 0xFFFF).int()) & -0x10000
    return torch.where(x.isfinite(), raised.view(torch.float32), x.float()).to(torch.bfloat16)


def _to_f16(x: Tensor, words: Tensor) -> Tensor:
    """Compare the distance from the neighbour towards zero with a uniform number."""
    size, near = x.abs(), x.abs().half()
    bits = near.view(torch.int16)
    low = torch.where(near.float() > size, bits - 1, bits)
    below, above = low.view(torch.float16).float(), (low + 1).view(torch.float16).float()
    up = words.float() * 2.0**-24 < (size - below) / (above - below)
    rounded = torch.where(up, low + 1, low).view(torch.float16)
    return torch.where(x.isfinite(), rounded.copysign(x.half()), x.half())
