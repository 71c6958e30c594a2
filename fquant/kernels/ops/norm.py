"""Root mean square norms of rows and their gradient as two ops, one pass each (Zhang & Sennrich 2019).

    rms_norm(x, weight, eps)                  [n d], [d] to [n d] and f32[n]: y = x · scale · weight, and the scale
    rms_norm_backward(g, x, weight, scale)    [n d], [n d], [d], f32[n] to [n d]: the gradient of (g · y).sum()

    scale = 1 / sqrt(mean(x²) + eps)
    dx    = scale · (a - n · mean(a · n))     with n = x · scale and a = g · weight

In plain torch a bfloat16 norm is seven operations, each a pass over memory, and its backward reads two float32 tensors
of x's size. Here the backward needs x, the weight and a number a row.

y is rounded where transformers rounds it, before and after the weight; with the same scale it has the same bits. dx is
computed in float32 and rounded once, as if y were not rounded. The reference defines the results. Sums of squares are
taken in another order, so the scale is within a few roundings of the reference's. On CPUs all instruction sets give the
same bits. Infinities and NaN come out as in the reference. A row whose squares overflow float32 counts as infinite.

float64 and devices without a kernel take the reference. The ops have no derivatives; models/norm.py has. Under vmap,
rows are merged, and mapped weights are a loop.
"""

from typing import Any

import torch
from torch import Tensor

from ..arguments import check_beside, check_floats, sum_dtype
from ..dispatch import is_direct
from ..registry import by_backend, map_rows, register


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return ``round(x · scale) · weight`` [n d] in x's dtype, and the scale of each row, f32[n].

    x [n d] in f32, bf16, f16 or f64 (the scale is then f64); weight [d] in any of these, which is cast to x's.
    Raises TypeError for another dtype, ValueError for other shapes or devices.
    """
    if not is_direct(x, weight):
        return OP(x, weight, eps)
    _check("rms_norm", x, weight)
    return by_backend("rms_norm", x, weight, eps)


def rms_norm_backward(g: Tensor, x: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
    """Return the gradient of ``(g · y).sum()`` with respect to x, [n d] in x's dtype, for y and scale of x.

    g [n d] in x's dtype. Raises what :func:`rms_norm` does.
    """
    return _BACKWARD(g, x, weight, scale)


def _check(
    op: str, x: Tensor, weight: Tensor, eps: float = 0.0, g: Tensor | None = None, scale: Tensor | None = None
) -> None:
    check_floats(op, x)
    if x.ndim != 2:
        raise ValueError(f"{op} got x {tuple(x.shape)}; wanted [n d]")
    check_floats(op, weight, "weight")
    parts = {"weight": (weight, x.shape[1:], weight.dtype), "g": (g, x.shape, x.dtype)}
    check_beside(op, "x", x, **parts, scale=(scale, x.shape[:1], sum_dtype(x)))


def _vmap(op: Any, info: Any, in_dims: Any, *args: Any) -> Any:
    at = 1 if op is OP else 2  # the place of the weight
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
_scaled = lambda x, *_: (x.new_empty(x.shape), x.new_empty(len(x), dtype=sum_dtype(x)))
_checked_backward = lambda op, g, x, weight, scale: _check(op, x, weight, 0.0, g, scale)
OP = register(rms_norm, _check, _scaled, _vmap, _FIX)
_BACKWARD = register(rms_norm_backward, _checked_backward, lambda g, x, *_: x.new_empty(x.shape), _vmap, _FIX)
