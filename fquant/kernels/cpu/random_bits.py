"""Random bits on the CPU, by csrc/threefry.h."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from .library import call, empty


def fold(key: Tensor, data: Tensor) -> Tensor:
    """See ``fquant.kernels.ops.random_bits.fold``."""
    key, data = (t.contiguous() for t in torch.broadcast_tensors(key, data))
    out = empty(*key.shape, dtype=torch.int64)
    if out.numel():
        call("fold", key.data_ptr(), data.data_ptr(), out.numel(), out.data_ptr())
    return out


def bits(key: Tensor, shape: Sequence[int]) -> Tensor:
    """See ``fquant.kernels.ops.random_bits.bits``."""
    key, out = key.contiguous(), empty(*key.shape, *shape, dtype=torch.int64)
    if out.numel():
        call("bits", key.data_ptr(), key.numel(), math.prod(shape), out.data_ptr())
    return out


def bernoulli(key: Tensor, threshold: int, shape: Sequence[int]) -> Tensor:
    """See ``fquant.kernels.ops.random_bits.bernoulli``."""
    key, out = key.contiguous(), empty(*key.shape, *shape, dtype=torch.bool)
    if out.numel():
        call("bernoulli", key.data_ptr(), key.numel(), threshold, math.prod(shape), out.data_ptr())
    return out
