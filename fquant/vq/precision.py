"""exact: products in the dtype of their factors, where autocast would make them in bfloat16.

A code is the nearest of many, so a product that is a thousandth off is another code, and what a loss is made of may be
nothing but such thousandths. So whatever multiplies matrices here does it by

    inner = product(x, codes.mT)
    y     = times(x, weight, bias)               # linear, of any kind of weight

which are exact, and have exact derivatives wherever these are taken. Within autocast the backward of ``@`` would be
made in bfloat16, too, and there ``torch.func.grad`` of a whole step may well be taken. What is no such product is in

    with exact(x):

which turns autocast off, forwards and where a tile is made again for a backward. That of a convolution is exact by
itself, and so is that of a Packed weight; that of an Adapted one is as autocast makes it.
"""

from __future__ import annotations

import math
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from ..autodiff import forward_mode
from ..packed_linear import Weight, linear


def exact(x: Tensor) -> AbstractContextManager[Any]:
    """Without autocast on the device of ``x``."""
    if not _cast(x):
        return nullcontext()
    return torch.autocast(x.device.type, enabled=False)


def product(a: Tensor, b: Tensor) -> Tensor:
    """``a @ b``, f[... n k] and f[... k m] of one dtype, whose first dims broadcast."""
    if b.ndim == 2 and a.ndim != 2:
        return product(a.reshape(math.prod(a.shape[:-1]), a.shape[-1]), b).reshape(*a.shape[:-1], b.shape[-1])
    if not _cast(a):
        return a @ b
    if torch.compiler.is_dynamo_compiling():  # which refuses to trace a Function that has a jvp
        with exact(a):
            return a @ b
    return _Product.apply(a, b)


def times(x: Tensor, w: Weight, bias: Tensor | None = None) -> Tensor:
    """What ``linear`` is, within autocast too."""
    if not isinstance(w, Tensor):
        with exact(x):
            return linear(x, w, bias)
    if not _cast(x):
        return linear(x, w, bias)
    y = product(x, w.to(x.dtype).mT)
    return y if bias is None else y + bias.to(y.dtype)


class _Product(torch.autograd.Function):
    """``a @ b`` without autocast, and so are its derivatives, of every order."""

    @staticmethod
    def forward(a: Tensor, b: Tensor) -> Tensor:
        with exact(a):
            return a @ b

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*inputs)
        ctx.save_for_forward(*inputs)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor]:
        a, b = ctx.saved_tensors
        return product(g, b.mT).sum_to_size(a.shape), product(a.mT, g).sum_to_size(b.shape)

    @staticmethod
    def vmap(info: Any, in_dims: Any, a: Tensor, b: Tensor) -> tuple[Tensor, int]:
        given = tuple(zip((a, b), in_dims, strict=True))
        most = max(t.ndim - (at is not None) for t, at in given)  # dims beside the mapped one, aligned at the last
        front = lambda t, at: t.movedim(at, 0)[:, *[None] * (most + 1 - t.ndim)]
        return product(*(t if at is None else front(t, at) for t, at in given)), 0

    @staticmethod
    def jvp(ctx: Any, da: Tensor, db: Tensor) -> Tensor:
        with forward_mode(ctx.saved_tensors) as (a, b):
            return product(da, b) + product(a, db)


def _cast(x: Tensor) -> bool:
    device = x.device.type
    return torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)
