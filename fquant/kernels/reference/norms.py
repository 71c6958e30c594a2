"""Root mean square norms, and their gradient."""

from __future__ import annotations

import torch
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """``x / rms(x)``, rounded, times the weight [d], and what x [... d] was multiplied by: f32[...], f64 of f64."""
    wide = _wide(x)
    scale = torch.rsqrt(wide.square().mean(-1) + eps)
    return (weight.to(x.dtype) * (wide * scale[..., None]).to(x.dtype)).contiguous(), scale


def rms_norm_backward(g: Tensor, x: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
    """The gradient of ``(g · y).sum()`` with respect to x, of whose :func:`rms_norm` y and scale are; in x's dtype."""
    normed, along = _wide(x) * scale[..., None], _wide(g) * _wide(weight.to(x.dtype))
    slope = (along - normed * (along * normed).mean(-1, keepdim=True)) * scale[..., None]
    return slope.to(x.dtype).contiguous()


def _wide(x: Tensor) -> Tensor:
    """At least float32."""
    return x.to(torch.promote_types(x.dtype, torch.float32))
