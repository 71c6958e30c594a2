"""The root mean square norm, in one pass each way where it can be, and in plain tensor operations where it has to be.

    y = norm.rms_norm(x, weight, eps)

Computed and differentiated in reverse once, as a training step does, it is the two ops of ``fquant.kernels.ops.norm``: of
x [... d] and the weight nothing is held for the backward but themselves and a number a row. The gradient of the weight
is made in plain tensor operations, and only where it is asked for.

The autograd Function returns y and the scale of every row. The second is not shown to the caller, but is a function of
x: the backward is one of g, x, the weight and the scale, and whoever differentiates it reaches x by that way too, as in
``models/fused_cross_entropy.py``. Its own derivatives are those of the formula (``fquant.kernels.reference``). In forward mode, and in
what torch.compile traces, there is the formula alone. So every transform is there, of any order.

Examples mapped over one weight are so many more rows, several weights are a loop.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from fquant.kernels import reference
from fquant.kernels.dispatch import is_direct
from fquant.kernels.ops import norm

from .reference_gradient import Again, Pair


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """``x / rms(x) * weight`` over the last dim: x ``[... d]``, weight ``[d]``; x's dtype (Zhang & Sennrich 2019).

    Computed in float32 (float64 for float64 ``x``) and rounded before and after the weight, which is cast to x's dtype,
    as transformers does it. Raises ValueError for a weight of another shape.
    """
    if not x.ndim or weight.shape != x.shape[-1:]:
        raise ValueError(f"weight: shape {tuple(weight.shape)}, want the last dim of x {tuple(x.shape)}")
    rows = x.reshape(math.prod(x.shape[:-1]), x.shape[-1])  # [n d]
    if _is_plain():  # of rows too: by torch's jvp a scalar's tangent is in f64 after a product with a number
        y, _ = reference.rms_norm(rows, weight, eps)
    elif is_direct(rows, weight):  # a token that is generated, of which a Function takes as long as the norm
        y, _ = norm.rms_norm(rows, weight, eps)
    else:
        y, _ = _Norm.apply(Pair(partial(_norm, norm, eps), partial(_norm, reference, eps)), rows, weight)
    return y.reshape(x.shape)


def _is_plain() -> bool:
    """Whether the formula is wanted: torch.compile takes no Function with a jvp, and in forward mode it is the jvp."""
    return torch.compiler.is_dynamo_compiling() or forward_ad._current_level >= 0


def _norm(by: Any, eps: float, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    return by.rms_norm(x, weight, eps)


def _slope(by: Any, g: Tensor, x: Tensor, scale: Tensor, weight: Tensor) -> tuple[Tensor]:
    return (by.rms_norm_backward(g, x, weight, scale),)


_SLOPE = Pair(partial(_slope, norm), partial(_slope, reference))


class _Rows(Again):
    """``f(*rows, weight)`` row by row: mapped over one weight, it has more rows."""

    @classmethod
    def vmap(cls, info: Any, in_dims: Any, pair: Pair, *tensors: Tensor) -> Any:
        *rows, weight = tensors
        if in_dims[-1] is not None:
            return super().vmap(info, in_dims, pair, *tensors)
        front = [
            t.expand(info.batch_size, *t.shape) if dim is None else t.movedim(dim, 0)
            for t, dim in zip(rows, in_dims[1:-1], strict=True)
        ]
        out = cls.apply(pair, *(t.flatten(0, 1) for t in front), weight)
        return tuple(t.unflatten(0, front[0].shape[:2]) for t in out), (0,) * len(out)


class _Norm(_Rows):
    """y and the scale of rows x and a weight."""

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        _Rows.setup_context(ctx, inputs, output)
        ctx.save_for_backward(*inputs[1:], output[1])

    @staticmethod
    def backward(ctx: Any, g: Tensor | None, g_scale: Tensor | None) -> Any:
        x, weight, scale = ctx.saved_tensors
        dx, dweight = None, None
        if g is not None and ctx.needs_input_grad[1]:
            (dx,) = _slope(reference, g, x, scale, weight) if _is_plain() else _Rows.apply(_SLOPE, g, x, scale, weight)
        if g_scale is not None and ctx.needs_input_grad[1]:  # somebody differentiates this backward
            more = g_scale * scale**3 / -x.shape[1]
            more = more[:, None] * _wide(x)
            dx = (more if dx is None else dx + more).to(x.dtype)
        if g is not None and ctx.needs_input_grad[2]:
            normed = (_wide(x) * scale[:, None]).to(x.dtype)
            dweight = (_wide(g) * normed).sum(0).to(weight.dtype)
        return None, dx, dweight


def _wide(x: Tensor) -> Tensor:
    """At least float32."""
    return x.to(torch.promote_types(x.dtype, torch.float32))
