"""SwiGLU's gate (Shazeer 2020), ``silu(gate) · up``, with derivatives of every order.

    silu(x)     x · s, s = 1 / (1 + exp(-x))
    silu'(x)    s · (1 + x · (1 - s))                by a kernel too
    silu''(x)   s · (1 - s) · (2 + x · (1 - 2 s))    and higher orders in plain torch

torch.func makes every backward differentiable, and then the gradient of ``F.silu`` is a chain of six operations, each
of which walks memory and rounds; here it is one product. The ops (``fquant/kernels/ops/silu.py``) may be steps of a
pointwise program in a captured graph, unlike ``F.silu``. The backward recomputes ``silu(gate)``. Captured, both
gradients are one program, which reads three tensors and writes two.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fquant.autodiff import forward_mode, to_front
from fquant.kernels.ops import silu as ops

from .reference_gradient import KernelWithReferenceGradient, at_least_float32


def gated(gate: Tensor, up: Tensor) -> Tensor:
    """Compute ``silu(gate) * up`` of two tensors f[...] of one shape (else ValueError) in f32, bf16, f16 or f64.

    torch.compile traces ``F.silu``, which is equal within rounding and which Inductor fuses with its neighbours.
    """
    if gate.shape != up.shape:
        raise ValueError(f"silu(gate) * up got gate {tuple(gate.shape)} and up {tuple(up.shape)}; wanted one shape")
    return F.silu(gate) * up if torch.compiler.is_dynamo_compiling() else _gated(gate, up)


class _Pointwise(NamedTuple):
    """A function of tensors of one shape; ``derivative(i, *inputs)`` is its partial derivative by the i-th."""

    kernel: Callable[..., Tensor]
    derivative: Callable[..., Tensor]


class _Apply(KernelWithReferenceGradient):
    @staticmethod
    def backward(ctx: Any, g: Tensor | None) -> Any:  # type: ignore[override]
        inputs, derivative = ctx.saved_tensors, ctx.functions.derivative
        wanted = [need and g is not None for need in ctx.needs_input_grad[1:]]
        return None, *(g * derivative(i, *inputs) if want else None for i, want in enumerate(wanted))

    @staticmethod
    def jvp(ctx: Any, _: Any, *tangents: Tensor | None) -> Any:
        with forward_mode(ctx.saved_tensors) as inputs:
            products = [t * ctx.functions.derivative(i, *inputs) for i, t in enumerate(tangents) if t is not None]
            return sum(products[1:], products[0])

    @staticmethod
    def vmap(info: Any, in_dims: Any, f: Any, *tensors: Tensor) -> Any:
        front = [to_front(t, dim, info.batch_size) for t, dim in zip(tensors, in_dims[1:], strict=True)]
        return _Apply.apply(f, *front), 0


def _second_derivative(_: int, x: Tensor) -> Tensor:
    wide = at_least_float32(x)  # rounded once
    s = wide.sigmoid()
    return (s * (1 - s) * (2 + wide * (1 - 2 * s))).to(x.dtype)


def _gated_derivative(i: int, gate: Tensor, up: Tensor) -> Tensor:
    return _silu(gate) if i else up * _silu_derivative(gate)


_silu_derivative = partial(_Apply.apply, _Pointwise(ops.silu_derivative, _second_derivative))
_silu = partial(_Apply.apply, _Pointwise(ops.silu, lambda _, x: _silu_derivative(x)))
_gated = partial(_Apply.apply, _Pointwise(lambda gate, up: ops.silu(gate) * up, _gated_derivative))
