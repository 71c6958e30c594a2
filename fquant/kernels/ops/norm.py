"""Root mean square norms of rows as two ops, one pass each way (Zhang & Sennrich 2019).

    rms_norm(x, weight, eps)                  [n d], [d] to [n d] and f32[n]: y = x · scale · weight, and the scale
    rms_norm_backward(g, x, weight, scale)       [n d], [n d], [d], f32[n] to [n d]: the gradient of (g · y).sum()

    scale = 1 / sqrt(mean(x²) + eps)
    dx    = scale · (a - n · mean(a · n))     with n = x · scale and a = g · weight

In plain torch a norm in bfloat16 is a cast, a square, a mean, a root, two products and another cast, each a pass over
memory, and the backward of these reads what they held: two tensors of x's size in float32. Here x is read, y is
written, and what the backward needs beside x and the weight is a number a row.

y is rounded where transformers rounds it, once before the weight and once after; of the same scale it is the same
bits. dx is computed in float32 and rounded once: y's own roundings are taken for none. The sums of squares are taken in
another order than torch's, with fewer roundings, so the scale is within a few of that of ``reference.py``, which
defines what they are; on CPUs every instruction set gives the same bits. What is infinite or not a number comes out as
it does there. Squares are float32: a row of which they overflow is taken for infinite.

The ops are registered beside the others of ``fquant::`` and computed by the same table of backends, on devices that it
does not name, and of float64, by the reference. They have no derivatives: models/norm.py has. Mapped rows are more
rows, mapped weights a loop.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..dispatch import backend, is_direct
from ..registry import register
from ..spec import FLOATS

SCHEMAS = {
    "rms_norm": "(Tensor x, Tensor weight, float eps) -> (Tensor, Tensor)",
    "rms_norm_backward": "(Tensor g, Tensor x, Tensor weight, Tensor scale) -> Tensor",
}
_WEIGHT = {"rms_norm": 1, "rms_norm_backward": 2}  # where it is among the arguments


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """``round(x · scale) · weight`` [n d] in x's dtype, and the scale of every row, f32[n].

    x [n d] in f32, bf16, f16 or f64, of which the scale is f64; weight [d] in any of these, which is cast to x's.

    Raises TypeError for another dtype, ValueError for other shapes or devices.
    """
    return _rms_norm(x, weight, eps) if is_direct(x, weight) else _OPS["rms_norm"](x, weight, eps)


def rms_norm_backward(g: Tensor, x: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
    """The gradient of ``(g · y).sum()`` with respect to x: [n d] in x's dtype, y and scale being those of x.

    g [n d] in x's dtype. Raises what :func:`rms_norm` does.
    """
    return _OPS["rms_norm_backward"](g, x, weight, scale)


def _rms_norm(x: Tensor, weight: Tensor, eps: float, **out: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    _check("rms_norm", x, weight)
    return backend(x.device.type)[1].rms_norm(x, weight, eps, **out)


def _rms_norm_fake(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    _check("rms_norm", x, weight)
    return x.new_empty(x.shape), x.new_empty(len(x), dtype=_wide(x))


def _slope(g: Tensor, x: Tensor, weight: Tensor, scale: Tensor, **out: Tensor) -> Tensor:
    _check("rms_norm_backward", x, weight, g, scale)
    return backend(x.device.type)[1].rms_norm_backward(g, x, weight, scale, **out)


def _slope_fake(g: Tensor, x: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
    _check("rms_norm_backward", x, weight, g, scale)
    return x.new_empty(x.shape)


def _check(name: str, x: Tensor, weight: Tensor, g: Tensor | None = None, scale: Tensor | None = None) -> None:
    floats = (*FLOATS, torch.float64)
    if x.dtype not in floats:
        raise TypeError(f"{name} got x {x.dtype}; wanted f32, bf16, f16 or f64")
    if x.ndim != 2:
        raise ValueError(f"{name} got x {tuple(x.shape)}; wanted [n d]")
    parts = (("weight", weight, x.shape[1:], floats), ("g", g, x.shape, (x.dtype,)))
    for part, t, shape, dtypes in (*parts, ("scale", scale, x.shape[:1], (_wide(x),))):
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
    b, at, op = info.batch_size, _WEIGHT[name], _OPS[name]
    if in_dims[at] is not None:
        own = lambda i: (t if dim is None else t.select(dim, i) for t, dim in zip(args, in_dims, strict=True))
        each = [op(*own(i)) for i in range(b)]
        if isinstance(each[0], Tensor):
            return torch.stack(each), 0
        return tuple(map(torch.stack, zip(*each, strict=True))), (0, 0)
    front = lambda t, dim: t.expand(b, *t.shape) if dim is None else t.movedim(dim, 0)
    rows = [
        front(t, dim) if isinstance(t, Tensor) and i != at else t
        for i, (t, dim) in enumerate(zip(args, in_dims, strict=True))
    ]
    out = op(*(t.flatten(0, 1) if isinstance(t, Tensor) and i != at else t for i, t in enumerate(rows)))
    back = lambda t: t.unflatten(0, rows[0].shape[:2])
    return (back(out), 0) if isinstance(out, Tensor) else (tuple(map(back, out)), (0, 0))


def _wide(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


_FIX = (
    "it computes values only: differentiate models.norm.rms_norm, or fquant.kernels.reference.rms_norm, the same in "
    "plain torch"
)
_VERBS = {"rms_norm": (_rms_norm, _rms_norm_fake), "rms_norm_backward": (_slope, _slope_fake)}
_OPS = {
    name: register(name, SCHEMAS[name], real, fake, partial(_vmap, name), _FIX) for name, (real, fake) in _VERBS.items()
}
OP = _OPS["rms_norm"]
