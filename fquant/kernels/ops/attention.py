"""Causal attention and its gradients as two ops.

    attention(q, k, v, runs=None)                       [b h t e], [b k t e] to y [b h t e], lse f32[b h t]
    attention_backward(g, y, lse, q, k, v, runs=None)    the gradients of q, k and v for the gradient g of y

``y`` is softmax(q·kᵀ / sqrt(e)) · v over the tokens that a token sees: those up to itself, and of its own document if
``runs`` i64[b t] numbers documents. ``lse`` is the log-sum-exp of its scores. Head i of h reads head i // (h / k) of k
(Ainslie et al. 2023, "GQA"). Neither the scores nor a mask exist whole (Dao et al. 2022, "FlashAttention").

On CPUs C (csrc/attention.h) multiplies bf16 as bf16 where the machine can, and computes in float32 otherwise. float64
and other devices take the reference, which defines both ops. Both round weights to bf16 before they multiply them with
bf16 values. A value that is not finite may give nan for tokens that do not see it, as in the formula.

Results are contiguous as [b t h e]. The ops have no derivatives: the second is the derivative of the first. For higher
orders, differentiate ``reference.causal_attention.dense``. Under vmap, examples are merged into ``b``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from .. import reference
from ..arguments import COMPUTED, sum_dtype
from ..dispatch import backend
from ..registry import map_rows, register

SCHEMAS = {
    "attention": "(Tensor q, Tensor k, Tensor v, Tensor? runs=None) -> (Tensor, Tensor)",
    "attention_backward": (
        "(Tensor g, Tensor y, Tensor lse, Tensor q, Tensor k, Tensor v, Tensor? runs=None) -> (Tensor, Tensor, Tensor)"
    ),
}


def attention(q: Tensor, k: Tensor, v: Tensor, runs: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return y [b h t e] in q's dtype, and the log-sum-exp of the scores, f32[b h t] (f64 for f64).

    q [b h t e], k and v [b k t e] in f32, bf16, f16 or f64, one dtype, h a multiple of k; runs i64[b t].

    Raises TypeError for other dtypes, ValueError for other shapes or devices.
    """
    return _OPS["attention"](q, k, v, runs)


def attention_backward(
    g: Tensor, y: Tensor, lse: Tensor, q: Tensor, k: Tensor, v: Tensor, runs: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of ``(g * y).sum()`` with respect to q, k and v, for y and lse of :func:`attention`.

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
    return _like(q), q.new_empty(q.shape[:-1], dtype=sum_dtype(q))


def _backward(
    g: Tensor, y: Tensor, lse: Tensor, q: Tensor, k: Tensor, v: Tensor, runs: Any = None, **out: Sequence[Tensor]
) -> tuple[Tensor, Tensor, Tensor]:
    _check("attention_backward", q, k, v, runs, g=g, y=y, lse=lse)
    return _backend(q).attention_backward(g, y, lse, q, k, v, runs, **out)


def _backward_fake(
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
    if q.dtype not in COMPUTED:
        raise TypeError(f"{name} got q {q.dtype}; wanted f32, bf16, f16 or f64")
    if q.ndim != 4 or k.ndim != 4 or not k.shape[1] or q.shape[1] % k.shape[1] or not q.shape[3]:
        raise ValueError(
            f"{name} got q {tuple(q.shape)} and k {tuple(k.shape)}; wanted [b h t e] and [b k t e], h a multiple of k"
        )
    b, h, t, e = q.shape
    alike = (b, k.shape[1], t, e), q.dtype
    wanted = {"g": (tuple(q.shape), q.dtype), "y": (tuple(q.shape), q.dtype), "lse": ((b, h, t), sum_dtype(q))}
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


def _products(count: int, q: Any) -> int:
    b, h, t, e = q
    return count * 2 * b * h * e * (t * (t + 1) // 2)


def _flops(q: Any, *_: Any, **__: Any) -> int:
    """Count two products of queries with what they see; torch's counter gives shapes for tensors."""
    return _products(2, q)


def _backward_flops(g: Any, *_: Any, **__: Any) -> int:
    """Count five products: the scores again, the gradients of weights and values, and of the scores to q and k."""
    return _products(5, g)


_FIX = (
    "it computes values only: differentiate fquant.kernels.reference.causal_attention.dense, the same in plain torch, "
    "or call models.attention, which has derivatives of every order"
)
_VERBS = {"attention": (_attention, _attention_fake), "attention_backward": (_backward, _backward_fake)}
_OPS = {
    name: register(name, SCHEMAS[name], real, fake, lambda *args, name=name: map_rows(_OPS[name], *args), _FIX)
    for name, (real, fake) in _VERBS.items()
}
register_flop_formula(torch.ops.fquant.attention)(_flops)
register_flop_formula(torch.ops.fquant.attention_backward)(_backward_flops)
