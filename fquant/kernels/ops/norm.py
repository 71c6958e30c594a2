"""Root mean square norms of rows and their gradient as two ops, one pass each (Zhang & Sennrich 2019).

    rms_norm(x, weight, eps)                  [n d], [d] to [n d] and f32[n]: y = x · scale · weight, and the scale
    rms_norm_backward(g, x, weight, scale)    [n d], [n d], [d], f32[n] to [n d]: the gradient of (g · y).sum()

    scale = 1 / sqrt(mean(x²) + eps)
    dx    = scale · (a - n · mean(a · n))     with n = x · scale and a = g · weight

In plain torch a bfloat16 norm is a cast, a square, a mean, a root, two products and another cast, each a pass over
memory. Its backward reads two float32 tensors of x's size. Here the backward needs x, the weight and a number a row.

y is rounded where transformers rounds it, before and after the weight; with the same scale it has the same bits. dx is
computed in float32 and rounded once, as if y were not rounded. The reference defines the results. Sums of squares are
taken in another order, with fewer roundings, so the scale is within a few roundings of the reference's. On CPUs all
instruction sets give the same bits. Infinities and NaN come out as in the reference. Squares are float32: a row whose
squares overflow counts as infinite.

float64 and devices without a kernel take the reference. The ops have no derivatives; models/norm.py has. Under vmap,
rows are merged, and mapped weights are a loop.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..arguments import COMPUTED, sum_dtype
from ..dispatch import backend, is_direct
from ..registry import map_rows, register

SCHEMAS = {
    "rms_norm": "(Tensor x, Tensor weight, float eps) -> (Tensor, Tensor)",
    "rms_norm_backward": "(Tensor g, Tensor x, Tensor weight, Tensor scale) -> Tensor",
}
_WEIGHT = {"rms_norm": 1, "rms_norm_backward": 2}  # its place among the arguments


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return ``round(x · scale) · weight`` [n d] in x's dtype, and the scale of each row, f32[n].

    x [n d] in f32, bf16, f16 or f64 (the scale is then f64); weight [d] in any of these, which is cast to x's.

    Raises TypeError for another dtype, ValueError for other shapes or devices.
    """
    return _rms_norm(x, weight, eps) if is_direct(x, weight) else _OPS["rms_norm"](x, weight, eps)


def rms_norm_backward(g: Tensor, x: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
    """Return the gradient of ``(g · y).sum()`` with respect to x, [n d] in x's dtype, for y and scale of x.

    g [n d] in x's dtype. Raises what :func:`rms_norm` does.
    """
    return _OPS["rms_norm_backward"](g, x, weight, scale)


def _rms_norm(x: Tensor, weight: Tensor, eps: float, **out: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    _check("rms_norm", x, weight)
    return backend(x.device.type)[1].rms_norm(x, weight, eps, **out)


def _rms_norm_fake(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    _check("rms_norm", x, weight)
    return x.new_empty(x.shape), x.new_empty(len(x), dtype=sum_dtype(x))


def _backward(g: Tensor, x: Tensor, weight: Tensor, scale: Tensor, **out: Tensor) -> Tensor:
    _check("rms_norm_backward", x, weight, g, scale)
    return backend(x.device.type)[1].rms_norm_backward(g, x, weight, scale, **out)


def _backward_fake(g: Tensor, x: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
    _check("rms_norm_backward", x, weight, g, scale)
    return x.new_empty(x.shape)


def _check(name: str, x: Tensor, weight: Tensor, g: Tensor | None = None, scale: Tensor | None = None) -> None:
    if x.dtype not in COMPUTED:
        raise TypeError(f"{name} got x {x.dtype}; wanted f32, bf16, f16 or f64")
    if x.ndim != 2:
        raise ValueError(f"{name} got x {tuple(x.shape)}; wanted [n d]")
    parts = (("weight", weight, x.shape[1:], COMPUTED), ("g", g, x.shape, (x.dtype,)))
    for part, t, shape, dtypes in (*parts, ("scale", scale, x.shape[:1], (sum_dtype(x),))):
        if t is None:
            continue
        if t.dtype not in dtypes:
            wanted = dtypes[0] if len(dtypes) == 1 else "f32, bf16, f16 or f64"
            raise TypeError(f"{name} got {part} {t.dtype} beside x {x.dtype}; wanted {wanted}")
        if t.shape != shape:
            raise ValueError(f"{name} got {part} {tuple(t.shape)} and x {tuple(x.shape)}; wanted {part} {tuple(shape)}")
        if t.device != x.device:
            raise ValueError(f"{name} got x on {x.device} and {part} on {t.device}; move one")


def _vmap(name: str, info: Any, in_dims: Any, *args: Any) -> Any:
    at, op = _WEIGHT[name], _OPS[name]
    if in_dims[at] is None:
        return map_rows(op, info, in_dims, *args, shared=(at,))
    example = lambda i: (t if dim is None else t.select(dim, i) for t, dim in zip(args, in_dims, strict=True))
    each = [op(*example(i)) for i in range(info.batch_size)]
    if isinstance(each[0], Tensor):
        return torch.stack(each), 0
    return tuple(map(torch.stack, zip(*each, strict=True))), (0, 0)


_FIX = (
    "it computes values only: differentiate models.norm.rms_norm, or fquant.kernels.reference.rms_norm, the same in "
    "plain torch"
)
_VERBS = {"rms_norm": (_rms_norm, _rms_norm_fake), "rms_norm_backward": (_backward, _backward_fake)}
_OPS = {
    name: register(name, SCHEMAS[name], real, fake, partial(_vmap, name), _FIX) for name, (real, fake) in _VERBS.items()
}
OP = _OPS["rms_norm"]
