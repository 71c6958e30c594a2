"""The loss of logits, and its gradient."""

from __future__ import annotations

import torch
from torch import Tensor

from .norms import _wide


def nll(logits: Tensor, targets: Tensor, ignore: int) -> Tensor:
    """What rows [c v] say of their targets i64[c], -log softmax: f32[c], f64 of f64, zero where that is ``ignore``."""
    wide, counted = _wide(logits), targets != ignore
    chosen = wide.gather(-1, torch.where(counted, targets, 0)[:, None]).squeeze(-1)
    return torch.where(counted, wide.logsumexp(-1) - chosen, 0.0)


def nll_backward(logits: Tensor, targets: Tensor, ignore: int, factor: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """:func:`nll`, and the gradient of ``(factor · nll).sum()`` with respect to the logits, in their dtype."""
    wide, counted = _wide(logits), (targets != ignore)[:, None]
    minus = wide.new_full((), -1.0).expand(counted.shape)
    slope = wide.softmax(-1).scatter_add(-1, torch.where(counted, targets[:, None], 0), minus)
    slope = slope if factor is None else slope * factor[:, None]
    return nll(logits, targets, ignore), torch.where(counted, slope, 0.0).to(logits.dtype).contiguous()
