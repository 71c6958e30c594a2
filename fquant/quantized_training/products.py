"""The three products of a linear layer with quantised operands, as one autograd Function.

    y = product(a, b, Products(...))       a f[... m k] · b f[n k]ᵀ, differentiable with respect to both

A product of two integer formats by rows is ``kernels.integer_ops.integer_mm``. Any other pair multiplies the values of
its formats in a's dtype. The gradients are products of the same kind, by the recipe. Second derivatives and tangents
are those of the product without rounding.
"""

import math
from typing import Any

import torch
from torch import Tensor

from ..dynamic_quantization import fake_quantize
from ..kernels import integer_ops
from .recipes import Pair, Products

PLAIN = Products()


def product(a: Tensor, b: Tensor, recipe: Products) -> Tensor:
    """Return ``a · bᵀ`` f[... n] in a's dtype, for a f[... k] and b f[n k], which is cast to that dtype."""
    rows = a.reshape(math.prod(a.shape[:-1]), a.shape[-1])
    return _Product.apply(rows, b.to(a.dtype), recipe).reshape(*a.shape[:-1], b.shape[0])


def _multiply(a: Tensor, b: Tensor, pair: Pair | None) -> Tensor:
    if pair is None or not (a.numel() and b.numel()):
        return a @ b.mT
    if all(integer_ops.is_integer(format, rows=True) for format in pair):
        return integer_ops.integer_mm(a, b, *pair)
    return fake_quantize(a, pair[0]) @ fake_quantize(b, pair[1]).mT


class _Product(torch.autograd.Function):
    """``a · bᵀ`` f[m n] by ``recipe.output``; its gradients by the two others."""

    @staticmethod
    def forward(a: Tensor, b: Tensor, recipe: Products) -> Tensor:
        return _multiply(a, b, recipe.output)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        a, b, ctx.recipe = inputs
        ctx.save_for_backward(a, b)
        ctx.save_for_forward(a, b)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        a, b = ctx.saved_tensors
        by = lambda pair: Products(output=pair)
        of_a = _Product.apply(g, b.mT, by(ctx.recipe.grad_input)) if ctx.needs_input_grad[0] else None
        of_b = _Product.apply(g.mT, a.mT, by(ctx.recipe.grad_weight)) if ctx.needs_input_grad[1] else None
        return of_a, of_b, None

    @staticmethod
    def jvp(ctx: Any, da: Tensor | None, db: Tensor | None, _: None) -> Tensor | None:
        a, b = ctx.saved_tensors
        parts = [] if da is None else [_Product.apply(da, b, PLAIN)]
        parts += [] if db is None else [_Product.apply(a, db, PLAIN)]
        return sum(parts[1:], parts[0]) if parts else None

    @staticmethod
    def vmap(info: Any, in_dims: Any, a: Tensor, b: Tensor, recipe: Products) -> tuple[Tensor, int]:
        n, (at, of_b, _) = info.batch_size, in_dims
        alone = all(format.rows_alone and format.scale is None for format in recipe.output or ())
        if of_b is None and (alone or not n):  # rows are independent, so examples are rows
            rows = a.movedim(at, 0)
            return _Product.apply(rows.flatten(0, 1), b, recipe).unflatten(0, rows.shape[:2]), 0
        each = lambda t, dim: [t] * n if dim is None else t.unbind(dim)
        return torch.stack([_Product.apply(x, y, recipe) for x, y in zip(each(a, at), each(b, of_b), strict=True)]), 0
