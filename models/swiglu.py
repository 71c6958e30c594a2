"""SwiGLU's gate (Shazeer 2020), ``silu(gate) · up``, with derivatives of every order.

    silu(x)     x · s, s = 1 / (1 + exp(-x))
    silu'(x)    s · (1 + x · (1 - s))                by a kernel too
    silu''(x)   s · (1 - s) · (2 + x · (1 - 2 s))    and higher orders in plain torch

torch.func makes every backward differentiable, and then the gradient of ``F.silu`` is a chain of six operations, each
of which walks memory and rounds; here it is one product. The ops (``fquant/kernels/ops/silu.py``) may be steps of a
pointwise program in a captured graph, unlike ``F.silu``. The backward recomputes ``silu(gate)``. Captured, both
gradients are one program, which reads three tensors and writes two.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fquant.autodiff import forward_mode, to_front
from fquant.kernels.ops import silu as ops

from .reference_gradient import at_least_float32


def gated(gate: Tensor, up: Tensor) -> Tensor:
    """Compute ``silu(gate) * up`` of two tensors f[...] of one shape (else ValueError) in f32, bf16, f16 or f64.

    torch.compile traces ``F.silu``, which is equal within rounding and which Inductor fuses with its neighbours.
    """
    if gate.shape != up.shape:
        raise ValueError(f"silu(gate) * up got gate {tuple(gate.shape)} and up {tuple(up.shape)}; wanted one shape")
    return F.silu(gate) * up if torch.compiler.is_dynamo_compiling() else _Gated.apply(gate, up)


class _Elementwise(torch.autograd.Function):
    """A pointwise function of tensors of one shape; ``derivative`` is its partial derivative by the i-th."""

    @staticmethod
    def derivative(i: int, *inputs: Tensor) -> Tensor:
        raise NotImplementedError

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*inputs)
        ctx.save_for_forward(*inputs)
        ctx.set_materialize_grads(False)  # so that jvp skips the inputs without a tangent

    @classmethod
    def backward(cls, ctx: Any, g: Tensor | None) -> Any:
        wanted = ctx.needs_input_grad
        if g is None:
            return (None,) * len(wanted)
        return tuple(g * cls.derivative(i, *ctx.saved_tensors) if want else None for i, want in enumerate(wanted))

    @classmethod
    def jvp(cls, ctx: Any, *tangents: Tensor | None) -> Any:
        with forward_mode(ctx.saved_tensors) as inputs:
            first, *rest = [t * cls.derivative(i, *inputs) for i, t in enumerate(tangents) if t is not None]
            return sum(rest, first)

    @classmethod
    def vmap(cls, info: Any, in_dims: Any, *tensors: Tensor) -> Any:
        return cls.apply(*(to_front(t, dim, info.batch_size) for t, dim in zip(tensors, in_dims, strict=True))), 0


class _Gated(_Elementwise):
    @staticmethod
    def forward(gate: Tensor, up: Tensor) -> Tensor:
        return ops.silu(gate) * up

    @staticmethod
    def derivative(i: int, gate: Tensor, up: Tensor) -> Tensor:
        return _Silu.apply(gate) if i else up * _SiluDerivative.apply(gate)


class _Silu(_Elementwise):
    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return ops.silu(x)

    @staticmethod
    def derivative(_: int, x: Tensor) -> Tensor:
        return _SiluDerivative.apply(x)


class _SiluDerivative(_Elementwise):
    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return ops.silu_derivative(x)

    @staticmethod
    def derivative(_: int, x: Tensor) -> Tensor:
        wide = at_least_float32(x)  # rounded once
        s = wide.sigmoid()
        return (s * (1 - s) * (2 + wide * (1 - 2 * s))).to(x.dtype)
