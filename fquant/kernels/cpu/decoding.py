"""Decoding a token at a time on the CPU, by csrc/decoding.h."""

from torch import Tensor

from .. import reference
from .library import DTYPES, call, result


def cached_attention(
    q: Tensor, k: Tensor, v: Tensor, position: Tensor, scale: float | None = None, cap: float | None = None,
    sinks: Tensor | None = None, out: Tensor | None = None,
) -> Tensor:  # fmt: skip
    (b, heads, e), (_, slots, kv, _) = q.shape, k.shape
    y = result(out, b, heads, e, dtype=q.dtype)
    q, k, v, position = (t.contiguous() for t in (q, k, v, position))
    sinks = None if sinks is None else sinks.contiguous()
    if y.numel():
        scale = e**-0.5 if scale is None else scale
        call(
            "cached_attention", q, k, v, position, sinks, y, b, slots, kv, heads, e, scale, cap or 0.0, DTYPES[q.dtype]
        )
    return y


def dense_matmul(x: Tensor, w: Tensor, out: Tensor | None = None) -> Tensor:
    if x.shape[1] % 64:
        y = reference.dense_matmul(x, w)
        return y if out is None else out.copy_(y)
    y = result(out, len(x), len(w), dtype=x.dtype)
    if y.numel():
        call("dense_matmul", x.contiguous(), w.contiguous(), y, *x.shape[:1], *w.shape, DTYPES[x.dtype])
    return y
