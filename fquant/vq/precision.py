"""Matrix products in the dtype of their factors, also within autocast.

A code is the nearest of many, so a product in bfloat16 gives another code, and a loss may consist of rounding errors
alone. Every product of a quantiser is therefore a :func:`matmul` or a :func:`linear`. Their derivatives are as precise
even if ``torch.func.grad`` of a whole step runs within autocast. Other products run in :func:`no_autocast`. The
backward of a convolution, or of a Packed weight, is exact by itself; that of an Adapted weight follows autocast.
"""

import math
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from .. import packed_linear
from ..autodiff import forward_mode


def no_autocast(x: Tensor) -> AbstractContextManager[Any]:
    """Turn autocast off for the device of ``x``."""
    return torch.autocast(x.device.type, enabled=False) if _autocasts(x) else nullcontext()


def matmul(a: Tensor, b: Tensor) -> Tensor:
    """Multiply ``a @ b``, f[... n k] and f[... k m] of one dtype, whose leading dims broadcast."""
    if b.ndim == 2 and a.ndim != 2:
        return matmul(a.reshape(math.prod(a.shape[:-1]), a.shape[-1]), b).reshape(*a.shape[:-1], b.shape[-1])
    if not _autocasts(a):
        return a @ b
    if torch.compiler.is_dynamo_compiling():  # Dynamo cannot trace a Function that has a jvp
        with no_autocast(a):
            return a @ b
    return _Matmul.apply(a, b)


def linear(x: Tensor, w: packed_linear.Weight, bias: Tensor | None = None) -> Tensor:
    """Apply ``fquant.linear``, also within autocast in the dtype of ``x``."""
    if not isinstance(w, Tensor) or not _autocasts(x):
        with no_autocast(x):
            return packed_linear.linear(x, w, bias)
    y = matmul(x, w.to(x.dtype).mT)
    return y if bias is None else y + bias.to(y.dtype)


class _Matmul(torch.autograd.Function):
    """``a @ b`` without autocast, with derivatives of every order without it."""

    @staticmethod
    def forward(a: Tensor, b: Tensor) -> Tensor:
        with no_autocast(a):
            return a @ b

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*inputs)
        ctx.save_for_forward(*inputs)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor]:
        a, b = ctx.saved_tensors
        return matmul(g, b.mT).sum_to_size(a.shape), matmul(a.mT, g).sum_to_size(b.shape)

    @staticmethod
    def vmap(info: Any, in_dims: Any, a: Tensor, b: Tensor) -> tuple[Tensor, int]:
        factors = tuple(zip((a, b), in_dims, strict=True))
        ndim = max(t.ndim - (dim is not None) for t, dim in factors)  # without the mapped dim; the last dims align
        front = lambda t, dim: t.movedim(dim, 0)[:, *[None] * (ndim + 1 - t.ndim)]
        return matmul(*(t if dim is None else front(t, dim) for t, dim in factors)), 0

    @staticmethod
    def jvp(ctx: Any, da: Tensor, db: Tensor) -> Tensor:
        with forward_mode(ctx.saved_tensors) as (a, b):
            return matmul(da, b) + matmul(a, db)


def _autocasts(x: Tensor) -> bool:
    return torch.amp.is_autocast_available(x.device.type) and torch.is_autocast_enabled(x.device.type)
