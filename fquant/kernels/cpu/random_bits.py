"""Random bits on the CPU, by csrc/threefry.h."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from .library import call, empty


def fold(key: Tensor, data: Tensor) -> Tensor:
    key, data = (t.contiguous() for t in torch.broadcast_tensors(key, data))
    out = empty(*key.shape, dtype=torch.int64)
    if out.numel():
        call("fold", key, data, out.numel(), out)
    return out


def bits(key: Tensor, shape: Sequence[int]) -> Tensor:
    return _drawn("bits", key, empty(*key.shape, *shape, dtype=torch.int64), math.prod(shape))


def bernoulli(key: Tensor, threshold: int, shape: Sequence[int]) -> Tensor:
    return _drawn("bernoulli", key, empty(*key.shape, *shape, dtype=torch.bool), threshold, math.prod(shape))


def _drawn(name: str, key: Tensor, out: Tensor, *arguments: int) -> Tensor:
    if out.numel():
        call(name, key.contiguous(), key.numel(), *arguments, out)
    return out
