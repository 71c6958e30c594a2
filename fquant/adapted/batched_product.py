"""Products of a batch of matrices, each with a weight of its own, in the layouts in which BLAS is fast.

    y = batched_linear(x, w)        # x f[n rows in], w f[n out in]  ->  f[n rows out]

BLAS takes up to ten times as long for a product of few columns as for its transpose, which has few rows. The gradients
of a low-rank adapter are such products: ``gᵀ·x`` [rank in], which autograd makes as ``xᵀ·g``, and ``g·b`` [rows rank].
So the derivatives of this Function are products of few rows, and so is the product itself. They are plain torch, and
have derivatives of their own. Batched products of torch have no such choice; those of single matrices have.
"""

from typing import Any

import torch
from torch import Tensor

from ..autodiff import forward_mode, to_front

FEW = 16  # columns below which a product is made as a transpose


def batched_linear(x: Tensor, w: Tensor) -> Tensor:
    """Return ``x[i] · w[i]ᵀ`` f[n rows out] of x f[n rows in] and w f[n out in], of one dtype."""
    if torch.compiler.is_dynamo_compiling():
        return _LinearReverse.apply(x.view_as(x), w)  # because torch.compile takes grad's own x for a constant
    return _Linear.apply(x, w)


def _product(a: Tensor, b: Tensor) -> Tensor:
    return (b.mT @ a.mT).mT if b.shape[-1] < min(FEW, a.shape[-2]) else a @ b


class _LinearReverse(torch.autograd.Function):
    """The product without its jvp, which torch.compile refuses."""

    @staticmethod
    def forward(x: Tensor, w: Tensor) -> Tensor:
        return _product(x, w.mT)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*inputs)
        ctx.save_for_forward(*inputs)
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, g: Tensor | None) -> Any:
        if g is None:
            return None, None
        (x, w), need = ctx.saved_tensors, ctx.needs_input_grad
        return _product(g, w) if need[0] else None, _product(g.mT, x) if need[1] else None

    @staticmethod
    def vmap(info: Any, in_dims: Any, x: Tensor, w: Tensor) -> Any:
        x, w = (to_front(t, dim, info.batch_size) for t, dim in zip((x, w), in_dims, strict=True))
        return batched_linear(x.flatten(0, 1), w.flatten(0, 1)).unflatten(0, x.shape[:2]), 0


class _Linear(_LinearReverse):
    @staticmethod
    def jvp(ctx: Any, dx: Tensor | None, dw: Tensor | None) -> Any:
        with forward_mode(ctx.saved_tensors) as (x, w):
            parts = [] if dx is None else [batched_linear(dx, w)]
            parts += [] if dw is None else [batched_linear(x, dw)]
            return sum(parts[1:], parts[0])
