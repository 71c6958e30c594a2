"""The autograd Function of products with a packed weight; ``packed_linear.linear`` calls it.

    y = matmul(x, Product(spec), *buffers)       x f[... in], padded with None to SLOTS buffers

The backward is the product with the same codes in the other orientation. Nothing dense is saved: residuals are the
packed buffers. A Packed is a constant, and a derivative with respect to it raises TypeError.
"""

import math
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad

from .autodiff import to_front
from .format import read
from .kernels import integer_ops, packed_ops
from .kernels.spec import SLOTS, Spec


class Product(NamedTuple):
    """The static half of a product: the spec of the weight, ``x · W`` or ``x · Wᵀ``, and the number of stacked dims.

    ``act`` is the text of the format to which x is quantised first; derivatives are those without.

    A tuple, because torch.compile loses other objects that are created while tracing and passed to a Function.
    """

    spec: Spec
    transposed: bool = False
    stacked: int = 0
    act: str = ""


class _ReverseOnly(torch.autograd.Function):
    """The product ``x · Wᵀ`` f[*stack ... out], or ``x · W``, of x f[*stack ... in] and the buffers of a Packed.

    It takes exactly ``SLOTS`` buffers, absent ones None, because torch.compile miscounts variadic arguments.
    """

    @staticmethod
    def forward(
        x: Tensor, product: Product,
        b0: Tensor, b1: Tensor, b2: Tensor | None, b3: Tensor | None,
        b4: Tensor | None, b5: Tensor | None, b6: Tensor | None, b7: Tensor | None,
    ) -> Tensor:  # fmt: skip
        present = [b for b in (b0, b1, b2, b3, b4, b5, b6, b7) if b is not None]
        op, k = packed_ops.matmul_t if product.transposed else packed_ops.matmul, product.stacked
        if product.act:
            op = partial(integer_ops.integer_matmul, act=read(product.act))
        if x.ndim == k + 2:
            return op(x, present, product.spec)
        rows = x.reshape(*x.shape[:k], math.prod(x.shape[k:-1]), x.shape[-1])  # [*stack m in]
        y = op(rows, present, product.spec)
        return y.reshape(*x.shape[:-1], y.shape[-1])

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.product = inputs[1]
        ctx.save_for_backward(*inputs[2:])
        ctx.save_for_forward(*inputs[2:])
        ctx.set_materialize_grads(False)  # so that only requested tangents are not None

    @staticmethod
    def backward(ctx: Any, g: Tensor | None) -> Any:
        if any(ctx.needs_input_grad[2:]):
            raise TypeError(CONSTANT.format("gradient"))
        if g is None:
            return (None,) * (2 + SLOTS)
        product = ctx.product._replace(transposed=not ctx.product.transposed, act="")
        return matmul(g, product, *ctx.saved_tensors), *(None,) * (1 + SLOTS)

    @staticmethod
    def vmap(info: Any, in_dims: Any, x: Tensor, product: Product, *buffers: Tensor | None) -> tuple[Tensor, int]:
        at, _, *dims = in_dims
        k = product.stacked
        if all(dim is None for dim in dims):  # the weight is shared: the mapped dim is one more dim of rows
            return matmul(x.movedim(at, k), product, *buffers), k
        n = info.batch_size
        stacked = [t if t is None else to_front(t, dim, n) for t, dim in zip(buffers, dims, strict=True)]
        return matmul(to_front(x, at, n), product._replace(stacked=k + 1), *stacked), 0


class _Matmul(_ReverseOnly):
    """The product with a forward derivative."""

    @staticmethod
    def jvp(ctx: Any, dx: Tensor, _: Any, *tangents: Any) -> Tensor:
        if any(t is not None for t in tangents):
            raise TypeError(CONSTANT.format("tangent"))
        return matmul(dx, ctx.product._replace(act=""), *ctx.saved_tensors)


def matmul(x: Tensor, *rest: Any) -> Tensor:
    """Apply the Function without its jvp under torch.compile, which refuses one; call the kernel if it suffices."""
    if torch.compiler.is_dynamo_compiling():
        return _ReverseOnly.apply(x.view_as(x), *rest)  # because torch.compile takes grad's own x for a constant
    # Outside of differentiation and vmap the kernel suffices; applying takes as long as the product of a row.
    plain = not (x.requires_grad and torch.is_grad_enabled()) and forward_ad._current_level < 0
    if plain and not torch._C._are_functorch_transforms_active():
        return _ReverseOnly.forward(x, *rest)
    return _Matmul.apply(x, *rest)


CONSTANT = (
    "the {} of a packed weight was asked for, but a Packed is a constant; "
    "train a Lora beside it (fquant.lora.init, attach) or dequantize it first"
)
