"""The negative log likelihood of logits, root mean square norms of rows, and their gradients."""

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


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return ``x / rms(x)``, rounded, times weight [d], and the scale 1 / rms of x [... d], f32[...] (f64 for f64)."""
    wide = widened(x)
    scale = torch.rsqrt(wide.square().mean(-1) + eps)
    return (weight.to(x.dtype) * (wide * scale[..., None]).to(x.dtype)).contiguous(), scale


def rms_norm_backward(g: Tensor, x: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
    """Return the gradient of ``(g · y).sum()`` with respect to x, in its dtype, for y and scale of :func:`rms_norm`."""
    normed, along = widened(x) * scale[..., None], widened(g) * widened(weight.to(x.dtype))
    slope = (along - normed * (along * normed).mean(-1, keepdim=True)) * scale[..., None]
    return slope.to(x.dtype).contiguous()
