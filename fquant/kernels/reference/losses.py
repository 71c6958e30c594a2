"""The negative log likelihood of logits and its gradient."""

from __future__ import annotations

import torch
from torch import Tensor

from ..arguments import widened


def nll(logits: Tensor, targets: Tensor, ignore: int) -> Tensor:
    """Return -log softmax of rows [c v] at their targets i64[c]: f32[c], f64 for f64, zero for targets ``ignore``."""
    wide, counted = widened(logits), targets != ignore
    chosen = wide.gather(-1, torch.where(counted, targets, 0)[:, None]).squeeze(-1)
    return torch.where(counted, wide.logsumexp(-1) - chosen, 0.0)


def nll_backward(logits: Tensor, targets: Tensor, ignore: int, factor: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return :func:`nll`, and the gradient of ``(factor · nll).sum()`` with respect to the logits, in their dtype."""
    wide, counted = widened(logits), (targets != ignore)[:, None]
    minus = wide.new_full((), -1.0).expand(counted.shape)
    slope = wide.softmax(-1).scatter_add(-1, torch.where(counted, targets[:, None], 0), minus)
    slope = slope if factor is None else slope * factor[:, None]
    return nll(logits, targets, ignore), torch.where(counted, slope, 0.0).to(logits.dtype).contiguous()
