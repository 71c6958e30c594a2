"""silu, and its product with another tensor, with derivatives of every order.

    silu(x)     x · s, s = 1 / (1 + exp(-x))
    silu'(x)    s · (1 + x · (1 - s))                by a kernel too
    silu''(x)   s · (1 - s) · (2 + x · (1 - 2 s))    and from here on in plain torch

``F.silu`` has all of them. But under torch.func, whose backwards are made to be differentiated again, its gradient is a
chain of six operations, each of which walks memory and rounds to the dtype of ``x``; here it is one product. And the
ops (``fquant/kernels/ops/silu.py``) may be steps of a program in a captured graph, where ``F.silu`` may not.

A gated layer multiplies: ``silu(gate) · up``. Its backward makes ``silu(gate)`` again rather than keeping it, where it
makes the slope: so captured, both gradients are one program, which reads three tensors and writes two.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fquant.autodiff import forward_mode
from fquant.kernels.ops import silu as ops


def gated(gate: Tensor, up: Tensor) -> Tensor:
    """``silu(gate) * up``: two tensors f[...] of one shape in f32, bf16, f16 or f64 to a third.

    Where torch.compile traces it is that of ``F.silu``, within rounding the same, which Inductor fuses with all around.

    Raises ValueError for different shapes, TypeError for another dtype.
    """
    if gate.shape != up.shape:
        raise ValueError(f"silu(gate) * up got gate {tuple(gate.shape)} and up {tuple(up.shape)}; wanted one shape")
    return F.silu(gate) * up if torch.compiler.is_dynamo_compiling() else _Gated.apply(gate, up)


class _Elementwise(torch.autograd.Function):
    """A function of tensors of one shape, element by element; ``slope`` is its derivative with respect to the i-th."""

    @staticmethod
    def slope(i: int, *given: Tensor) -> Tensor:
        raise NotImplementedError

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*inputs)
        ctx.save_for_forward(*inputs)
        ctx.set_materialize_grads(False)  # a tangent that is not None is one that somebody asked for

    @classmethod
    def backward(cls, ctx: Any, g: Tensor | None) -> Any:
        if g is None:
            return (None,) * len(ctx.needs_input_grad)
        wanted = ctx.needs_input_grad
        return tuple(g * cls.slope(i, *ctx.saved_tensors) if want else None for i, want in enumerate(wanted))

    @classmethod
    def jvp(cls, ctx: Any, *tangents: Tensor | None) -> Any:
        with forward_mode(ctx.saved_tensors) as given:
            first, *rest = [t * cls.slope(i, *given) for i, t in enumerate(tangents) if t is not None]
            return sum(rest, first)

    @classmethod
    def vmap(cls, info: Any, in_dims: Any, *tensors: Tensor) -> Any:
        front = (
            t.expand(info.batch_size, *t.shape) if dim is None else t.movedim(dim, 0)
            for t, dim in zip(tensors, in_dims, strict=True)
        )
        return cls.apply(*front), 0


class _Gated(_Elementwise):
    @staticmethod
    def forward(gate: Tensor, up: Tensor) -> Tensor:
        return ops.silu(gate) * up

    @staticmethod
    def slope(i: int, gate: Tensor, up: Tensor) -> Tensor:
        return _Silu.apply(gate) if i else up * _Slope.apply(gate)


class _Silu(_Elementwise):
    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return ops.silu(x)

    @staticmethod
    def slope(_: int, x: Tensor) -> Tensor:
        return _Slope.apply(x)


class _Slope(_Elementwise):
    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return ops.silu_derivative(x)

    @staticmethod
    def slope(_: int, x: Tensor) -> Tensor:
        return _curve(x)


def _curve(x: Tensor) -> Tensor:
    """The second derivative, in float32 at least, rounded once."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    s = wide.sigmoid()
    return (s * (1 - s) * (2 + wide * (1 - 2 * s))).to(x.dtype)
