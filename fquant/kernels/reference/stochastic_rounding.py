"""Stochastic rounding of float32 to bf16 and f16 by random words: to one of two neighbours."""

import torch
from torch import Tensor

LOW_BITS = 0xFFFFFF  # of a random word, which rounding uses


def round_by(x: Tensor, dtype: torch.dtype, words: Tensor) -> Tensor:
    """Round ``x`` f32 to ``dtype`` bf16 or f16 by ``words`` i64 of its shape, of which it uses the lower 24 bits."""
    return _to_bf16(x, words & LOW_BITS) if dtype is torch.bfloat16 else _to_f16(x, words & LOW_BITS)


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
