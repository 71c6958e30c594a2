"""Dense products whose elements are sums in order, in plain torch."""

import torch
from torch import Tensor

from ..arguments import sum_dtype, widened


def ordered_matmul(a: Tensor, b: Tensor) -> Tensor:
    total = torch.zeros(*a.shape[:-1], b.shape[-1], dtype=sum_dtype(a), device=a.device)
    for i in range(a.shape[-1]):
        total = torch.addcmul(total, widened(a[..., i : i + 1]), widened(b[..., i : i + 1, :]))
    return total.to(a.dtype)
