"""Causal attention as two ops: what it mixes, and its gradients.

    attention(q, k, v, runs=None)                      [b h t e], [b k t e] to y [b h t e], lse f32[b h t]
    attention_backward(g, y, lse, q, k, v, runs=None)     the gradients of q, k and v, for g that of y

``y`` is softmax(q·kᵀ / sqrt(e)) · v, of what each token sees: the tokens up to itself, of its own document where
``runs`` i64[b t] numbers documents; ``lse`` is the log-sum-exp of its scores. Head i of h reads head i // (h / k) of k
(Ainslie et al. 2023, "GQA"). Scores never exist whole, nor does a mask (Dao et al. 2022, "FlashAttention").

On CPUs it is C (csrc/attention.h) that multiplies bf16 as bf16 where the machine can, and otherwise computes in float32;
float64 and other devices take ``reference_attention.py``, which defines both. Weights are rounded to bf16 before they
are multiplied with bf16 values, as they are there. What of the values a token does not see is not finite may make its
result nan, as in the formula.

Results lie by tokens, [b t h e] in memory. The ops have no derivatives: the second is that of the first, and whoever
wants all orders differentiates ``reference_attention.dense``. Mapped examples are more of ``b``.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from .. import reference
from ..dispatch import backend
from ..registry import register
from ..spec import FLOATS

SCHEMAS = {
    "attention": "(Tensor q, Tensor k, Tensor v, Tensor? runs=None) -> (Tensor, Tensor)",
    "attention_backward": (
        "(Tensor g, Tensor y, Tensor lse, Tensor q, Tensor k, Tensor v, Tensor? runs=None) -> (Tensor, Tensor, Tensor)"
    ),
}


def attention(q: Tensor, k: Tensor, v: Tensor, runs: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The mixed values [b h t e] in q's dtype, and the log-sum-exp of the scores, f32[b h t] (f64 of f64).

    q [b h t e], k and v [b k t e] in f32, bf16, f16 or f64, one dtype, h a multiple of k; runs i64[b t].

    Raises TypeError for other dtypes, ValueError for other shapes or devices.
    """
    return _OPS["attention"](q, k, v, runs)


def attention_backward(
    g: Tensor, y: Tensor, lse: Tensor, q: Tensor, k: Tensor, v: Tensor, runs: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of ``(g * y).sum()`` with respect to q, k and v, for y and lse of :func:`attention`.

    Each is rounded once, from sums in float32. Raises what :func:`attention` does.
    """
    return _OPS["attention_backward"](g, y, lse, q, k, v, runs)


def _attention(
    q: Tensor, k: Tensor, v: Tensor, runs: Tensor | None = None, **out: Sequence[Tensor]
) -> tuple[Tensor, Tensor]:
    _check("attention", q, k, v, runs)
    return _backend(q).attention(q, k, v, runs, **out)


def _attention_fake(q: Tensor, k: Tensor, v: Tensor, runs: Tensor | None = None) -> tuple[Tensor, Tensor]:
    _check("attention", q, k, v, runs)
    return _like(q), q.new_empty(q.shape[:-1], dtype=_wide(q))


def _slope(
    g: Tensor,
    y: Tensor,
    lse: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    runs: Tensor | None = None,
    **out: Sequence[Tensor],
) -> tuple[Tensor, Tensor, Tensor]:
    _check("attention_backward", q, k, v, runs, g=g, y=y, lse=lse)
    return _backend(q).attention_backward(g, y, lse, q, k, v, runs, **out)


def _slope_fake(
    g: Tensor, y: Tensor, lse: Tensor, q: Tensor, k: Tensor, v: Tensor, runs: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    _check("attention_backward", q, k, v, runs, g=g, y=y, lse=lse)
    return _like(q), _like(k), _like(v)


def _backend(q: Tensor) -> Any:
    return reference if q.dtype == torch.float64 else backend(q.device.type)[1]


def _like(t: Tensor) -> Tensor:
    b, h, n, e = t.shape
    return t.new_empty(b, n, h, e).transpose(1, 2)


def _check(name: str, q: Tensor, k: Tensor, v: Tensor, runs: Tensor | None, **rest: Tensor) -> None:
    if q.dtype not in (*FLOATS, torch.float64):
        raise TypeError(f"{name} got q {q.dtype}; wanted f32, bf16, f16 or f64")
    if q.ndim != 4 or k.ndim != 4 or not k.shape[1] or q.shape[1] % k.shape[1] or not q.shape[3]:
        raise ValueError(
            f"{name} got q {tuple(q.shape)} and k {tuple(k.shape)}; wanted [b h t e] and [b k t e], h a multiple of k"
        )
    b, h, t, e = q.shape
    alike = (b, k.shape[1], t, e), q.dtype
    wanted = {"g": (tuple(q.shape), q.dtype), "y": (tuple(q.shape), q.dtype), "lse": ((b, h, t), _wide(q))}
    wanted |= {"k": alike, "v": alike, "runs": ((b, t), torch.int64)}
    given = {"k": k, "v": v, **rest} | ({} if runs is None else {"runs": runs})
    for part, x in given.items():
        shape, dtype = wanted[part]
        if x.dtype != dtype:
            raise TypeError(f"{name} got {part} {x.dtype} beside q {q.dtype}; wanted {dtype}")
        if tuple(x.shape) != shape:
            raise ValueError(f"{name} got {part} {tuple(x.shape)} beside q {tuple(q.shape)}; wanted {shape}")
        if x.device != q.device:
            raise ValueError(f"{name} got q on {q.device} and {part} on {x.device}; move one")


def _vmap(name: str, info: Any, in_dims: Any, *args: Any) -> Any:
    rows = [
        arg if not isinstance(arg, Tensor) else (arg.movedim(at, 0) if at is not None else arg.expand(b, *arg.shape))
        for arg, at, b in ((arg, at, info.batch_size) for arg, at in zip(args, in_dims, strict=True))
    ]
    out = _OPS[name](*(t.flatten(0, 1) if isinstance(t, Tensor) else t for t in rows))
    return tuple(t.unflatten(0, rows[0].shape[:2]) for t in out), (0,) * len(out)


def _wide(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


def _products(count: int, q: Any) -> int:
    b, h, t, e = q
    return count * 2 * b * h * e * (t * (t + 1) // 2)


def _flops(q: Any, *_: Any, **__: Any) -> int:
    """Two products of queries and what they see; torch's counter gives shapes for tensors."""
    return _products(2, q)


def _slope_flops(g: Any, *_: Any, **__: Any) -> int:
    """Five: the scores again, the gradients of weights and values, and of these scores to q and to k."""
    return _products(5, g)


_FIX = (
    "it computes values only: differentiate fquant.kernels.reference.causal_attention.dense, the same in plain torch, or call "
    "models.attention, which has derivatives of every order"
)
_VERBS = {"attention": (_attention, _attention_fake), "attention_backward": (_slope, _slope_fake)}
_OPS = {
    name: register(name, SCHEMAS[name], real, fake, partial(_vmap, name), _FIX) for name, (real, fake) in _VERBS.items()
}
register_flop_formula(torch.ops.fquant.attention)(_flops)
register_flop_formula(torch.ops.fquant.attention_backward)(_slope_flops)
