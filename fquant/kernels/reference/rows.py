"""The negative log likelihood of logits, root mean square norms of rows, and their gradients."""

from __future__ import annotations

import torch
from torch import Tensor

from ..arguments import widened


def nll(logits: Tensor, targets: Tensor, ignore: int) -> Tensor:
    wide, counted = widened(logits), targets != ignore
    chosen = wide.gather(-1, torch.where(counted, targets, 0)[:, None]).squeeze(-1)
    return torch.where(counted, wide.logsumexp(-1) - chosen, 0.0)


def nll_backward(logits: Tensor, targets: Tensor, ignore: int, factor: Tensor | None = None) -> tuple[Tensor, Tensor]:
    wide, counted = widened(logits), (targets != ignore)[:, None]
    minus = wide.new_full((), -1.0).expand(counted.shape)
    slope = wide.softmax(-1).scatter_add(-1, torch.where(counted, targets[:, None], 0), minus)
    slope = slope if factor is None else slope * factor[:, None]
    return nll(logits, targets, ignore), torch.where(counted, slope, 0.0).to(logits.dtype).contiguous()


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    wide = widened(x)
    scale = torch.rsqrt(wide.square().mean(-1) + eps)
    return (weight.to(x.dtype) * (wide * scale[..., None]).to(x.dtype)).contiguous(), scale


def rms_norm_backward(g: Tensor, x: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
    normed, along = widened(x) * scale[..., None], widened(g) * widened(weight.to(x.dtype))
    slope = (along - normed * (along * normed).mean(-1, keepdim=True)) * scale[..., None]
    return slope.to(x.dtype).contiguous()
