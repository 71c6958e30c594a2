"""Root mean square norms of rows and their gradient."""

from __future__ import annotations

import torch
from torch import Tensor

from ..arguments import widened


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
