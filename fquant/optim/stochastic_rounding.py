"""Stochastic rounding of float32 to bf16 and f16: to one of two neighbours, so that the mean is the number.

An update of bf16 parameters that is below half a step in the last place would be lost by rounding to nearest. The
random bits of an element are a function of a key and its position (:mod:`fquant.random`).
"""

import torch
from torch import Tensor

from ..kernels.ops import random_bits
from ..kernels.reference.stochastic_rounding import round_by

HALVES = (torch.bfloat16, torch.float16)


def round_stochastically(x: Tensor, dtype: torch.dtype, key: Tensor, start: int = 0) -> Tensor:
    """Round ``x`` f32 to ``dtype`` bf16 or f16; cast to any other dtype. The result has the shape of ``x``.

    Element i of the flattened x takes the bits of ``key`` i64[] at ``start + i``. Values that are not finite are kept.
    Probabilities are exact for bf16, and to 24 bits for f16. f16 does not exceed 65504.
    """
    if dtype not in HALVES:
        return x.to(dtype)
    place = torch.arange(start, start + x.numel(), dtype=torch.int64, device=x.device).reshape(x.shape)
    return round_by(x, dtype, random_bits.fold(key, place))
