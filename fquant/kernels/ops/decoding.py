"""Ops of decoding a token at a time, which are bound by one read of the cache, or of a weight.

    cached_attention(q, k, v, position, ...)      [b h e], [b s k e] twice, i64[b] to [b h e]
    dense_matmul(x, w)                            [m in], [out in] to [m out]

``cached_attention`` is that of one token of each sequence to the slots up to its position, all of them beyond the last.
Head i of h reads head i // (h / k) of k. ``scale``, ``cap`` and ``sinks`` f32[b h] are those of ``ops.attention``. C
keeps weights in float32; the reference rounds them to the dtype of the values.

``dense_matmul`` is ``x @ w.mT`` for few rows. torch reads a bf16 weight at half the speed of the memory there.

The ops have no derivatives. Under vmap, examples are merged into the first dim.
"""

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from ..arguments import check_beside, check_floats, sum_dtype
from ..registry import map_rows, register


def cached_attention(
    q: Tensor, k: Tensor, v: Tensor, position: Tensor, scale: float | None = None, cap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Return y [b h e] in q's dtype: softmax(q·kᵀ · scale) · v over the slots up to ``position``.

    q [b h e], k and v [b s k e] in f32, bf16, f16 or f64, one dtype, h a multiple of k; position i64[b], at least 0;
    sinks f32[b h] (f64 for f64). Raises TypeError for other dtypes, ValueError for other shapes, devices or caps.
    """
    return _CACHED(q, k, v, position, scale, cap, sinks)


def dense_matmul(x: Tensor, w: Tensor) -> Tensor:
    """Return ``x · wᵀ`` f[m out] of x f[m in] and w f[out in], of one dtype.

    Raises TypeError for other dtypes, and ValueError for other shapes or devices.
    """
    return _DENSE(x, w)


def _check_cached(
    op: str, q: Tensor, k: Tensor, v: Tensor, position: Tensor, scale: float | None = None, cap: float | None = None,
    sinks: Tensor | None = None,
) -> None:  # fmt: skip
    check_floats(op, q, "q")
    if cap is not None and not cap > 0:
        raise ValueError(f"{op} got cap {cap}; wanted a positive number or None")
    if q.ndim != 3 or k.ndim != 4 or not k.shape[2] or q.shape[1] % k.shape[2] or not k.shape[1] or not q.shape[2]:
        got = f"q {tuple(q.shape)} and k {tuple(k.shape)}"
        raise ValueError(f"{op} got {got}; wanted [b h e] and [b s k e], h a multiple of k")
    (b, h, e), kind = q.shape, q.dtype
    slots = b, *k.shape[1:3], e
    others = {"position": (position, (b,), torch.int64), "sinks": (sinks, (b, h), sum_dtype(q))}
    check_beside(op, "q", q, k=(k, slots, kind), v=(v, slots, kind), **others)


def _check_dense(op: str, x: Tensor, w: Tensor) -> None:
    check_floats(op, x)
    if x.ndim != 2 or w.ndim != 2:
        raise ValueError(f"{op} got x {tuple(x.shape)} and w {tuple(w.shape)}; wanted [m in] and [out in]")
    check_beside(op, "x", x, w=(w, (len(w), x.shape[1]), x.dtype))


_FIX = "it computes values only: differentiate fquant.kernels.reference.decoding, the same in plain torch"
_CACHED = register(cached_attention, _check_cached, lambda q, *_: torch.empty_like(q).contiguous(), map_rows, _FIX)
_DENSE = register(dense_matmul, _check_dense, lambda x, w: x.new_empty(len(x), len(w)), None, _FIX)
register_flop_formula(torch.ops.fquant.cached_attention)(lambda q, k, *_, **__: 4 * q[0] * q[1] * q[2] * k[1])
register_flop_formula(torch.ops.fquant.dense_matmul)(lambda x, w, *_, **__: 2 * x[0] * x[1] * w[0])
