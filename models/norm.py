"""The root mean square norm (Zhang & Sennrich 2019) as one fused pass each way; and the norm of layers.

    y = rms_norm(x, weight, eps)

A value and its first reverse derivative are the two ops of ``fquant.kernels.ops.norm``. The backward holds x [... d],
the weight and one number a row. The autograd Function also returns that scale of every row, hidden from the caller, so
that a second derivative reaches x through it. The derivatives of the backward are those of the formula in
``fquant.kernels.reference``. Forward mode and torch.compile see the formula alone.
"""

import math
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import forward_ad

from fquant.kernels import reference
from fquant.kernels.dispatch import is_direct
from fquant.kernels.ops import norm

from .reference_gradient import Implementations, KernelWithReferenceGradient, at_least_float32


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Compute ``x / rms(x) * weight`` over the last dim: x ``[... d]``, weight ``[d]`` -> ``[... d]`` in x's dtype.

    Computed in float32 (float64 for float64 ``x``) and rounded before and after the weight, which is cast to x's dtype,
    as in transformers. Raises ValueError for a weight of another shape.
    """
    if not x.ndim or weight.shape != x.shape[-1:]:
        raise ValueError(f"weight: shape {tuple(weight.shape)}, want the last dim of x {tuple(x.shape)}")
    rows = x.reshape(math.prod(x.shape[:-1]), x.shape[-1])  # [n d]
    if _uses_formula():  # on rows too: by torch's jvp a scalar's tangent is in f64 after a product with a number
        y, _ = reference.rms_norm(rows, weight, eps)
    elif is_direct(rows, weight):  # in generation a Function takes as long as the norm of one token
        y, _ = norm.rms_norm(rows, weight, eps)
    else:
        kernel, formula = (partial(module.rms_norm, eps=eps) for module in (norm, reference))
        y, _ = _RmsNorm.apply(Implementations(kernel, formula, num_batched=1), rows, weight)
    return y.reshape(x.shape)


def rms_norm_wide(x: Tensor, weight: Tensor, eps: float, plus_one: bool = False) -> Tensor:
    """Compute :func:`rms_norm` with a weight, or one more than it, in float32, and round once to x's dtype.

    Gemma (Gemma Team 2024) stores the weight less one.
    """
    wide = at_least_float32(weight)
    return rms_norm(at_least_float32(x), wide + 1 if plus_one else wide, eps).to(x.dtype)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """Compute ``(x - mean) / std * weight + bias`` over the last dim (Ba et al. 2016): x ``[... d]``, in x's dtype.

    Computed in float32 (float64 for float64 ``x``) and rounded once. The weight and the bias ``[d]`` are cast to x's
    dtype. Raises ValueError for a weight or bias of another shape.
    """
    if not x.ndim or not weight.shape == bias.shape == x.shape[-1:]:
        got = f"shapes {tuple(weight.shape)} and {tuple(bias.shape)}"
        raise ValueError(f"weight and bias: {got}, want the last dim of x {tuple(x.shape)}")
    return F.layer_norm(x, x.shape[-1:], weight.to(x.dtype), bias.to(x.dtype), eps)


def _uses_formula() -> bool:  # in forward mode, and in torch.compile, which refuses a Function with a jvp
    return torch.compiler.is_dynamo_compiling() or forward_ad._current_level >= 0


def _backward(module: Any, g: Tensor, x: Tensor, scale: Tensor, weight: Tensor) -> tuple[Tensor]:
    return (module.rms_norm_backward(g, x, weight, scale),)


_BACKWARD = Implementations(partial(_backward, norm), partial(_backward, reference), num_batched=3)


class _RmsNorm(KernelWithReferenceGradient):
    """The norm and the scale f[n] of rows x [n d] and a weight [d]."""

    saved_results = (1,)

    @staticmethod
    def backward(ctx: Any, g: Tensor | None, g_scale: Tensor | None) -> Any:
        x, weight, scale = ctx.saved_tensors
        dx, dweight = None, None
        if g is not None and ctx.needs_input_grad[1]:
            apply = _BACKWARD.reference if _uses_formula() else partial(KernelWithReferenceGradient.apply, _BACKWARD)
            (dx,) = apply(g, x, scale, weight)
        if g_scale is not None and ctx.needs_input_grad[1]:  # a derivative of this backward
            through_scale = g_scale * scale**3 / -x.shape[1]
            through_scale = through_scale[:, None] * at_least_float32(x)
            dx = (through_scale if dx is None else dx + through_scale).to(x.dtype)
        if g is not None and ctx.needs_input_grad[2]:
            normed = (at_least_float32(x) * scale[:, None]).to(x.dtype)
            dweight = (at_least_float32(g) * normed).sum(0).to(weight.dtype)
        return None, dx, dweight
