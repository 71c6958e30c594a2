"""silu with derivatives of every order, each of the first two a kernel of its own.

    silu(x)     x · s, s = 1 / (1 + exp(-x))
    silu'(x)    s · (1 + x · (1 - s))                by :class:`_Slope`, which the derivative of :class:`_Silu` calls
    silu''(x)   s · (1 - s) · (2 + x · (1 - 2 s))    and from here on in plain torch

``F.silu`` has all of them too. But under torch.func, whose backwards are made to be differentiated again, its gradient
is a chain of ten operations, each of which walks memory and rounds to the dtype of ``x``; here it is one product. The
two ops (``fquant/kernels/silu.py``) may be steps of a program in a captured graph, where ``F.silu`` may not.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fquant.kernels import silu as ops


def silu(x: Tensor) -> Tensor:
    """``x · sigmoid(x)``: x f[...] in f32, bf16, f16 or f64; its dtype and shape.

    Where torch.compile traces it is ``F.silu``, to within rounding the same, which Inductor fuses with what is around.

    Raises TypeError for another dtype.
    """
    return F.silu(x) if torch.compiler.is_dynamo_compiling() else _Silu.apply(x)


class _Elementwise(torch.autograd.Function):
    """A function of one tensor, element by element: mapped it is itself."""

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*inputs)
        ctx.save_for_forward(*inputs)

    @classmethod
    def jvp(cls, ctx: Any, dx: Tensor) -> Any:
        return cls.backward(ctx, dx)  # the derivative of an element is a number, whichever way

    @classmethod
    def vmap(cls, info: Any, in_dims: Any, x: Tensor) -> Any:
        return cls.apply(x), in_dims[0]


class _Silu(_Elementwise):
    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return ops.silu(x)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return g * _Slope.apply(*ctx.saved_tensors)


class _Slope(_Elementwise):
    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return ops.silu_slope(x)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return g * _curve(*ctx.saved_tensors)


def _curve(x: Tensor) -> Tensor:
    """The second derivative, in float32 at least, rounded once."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    s = wide.sigmoid()
    return (s * (1 - s) * (2 + wide * (1 - 2 * s))).to(x.dtype)
