"""Attention and its gradients as two ops.

    attention(q, k, v, runs=None, ...)                       [b h t e], [b k t e] to y [b h t e], lse f32[b h t]
    attention_backward(g, y, lse, q, k, v, runs=None, ...)    the gradients of q, k and v for the gradient g of y

``y`` is softmax(q·kᵀ · scale) · v over the tokens that a token sees: those up to itself if ``causal``, and of its own
document if ``runs`` i64[b t] numbers documents. ``scale`` is 1 / sqrt(e) by default. ``lse`` is the log-sum-exp of its
scores. Head i of h reads head i // (h / k) of k (Ainslie et al. 2023, "GQA"). Neither the scores nor a mask exist whole
(Dao et al. 2022, "FlashAttention").

With ``window`` a token sees so many tokens, itself included (Beltagy et al. 2020, "Longformer"). ``cap`` limits scores
to ``cap * tanh(score / cap)`` (Gemma 2).

``sinks`` f32[b h] are scores of one more key for each head, whose value is 0 (OpenAI 2025, "gpt-oss model card"). The
backward finds them in ``lse``. Their own gradient is the sum of ``-exp(sinks - lse) * (g * y).sum(-1)`` over tokens.

On CPUs C (csrc/attention.h) multiplies bf16 as bf16 where the machine can, and computes in float32 otherwise. float64,
capped scores and other devices take the reference, which defines both ops. Both round weights to bf16 before they
multiply them with bf16 values. A value that is not finite may give nan for tokens that do not see it, as in the
formula.

Results are contiguous as [b t h e]. The ops have no derivatives: the second is the derivative of the first. For higher
orders, differentiate ``reference.causal_attention.dense``. Under vmap, examples are merged into ``b``.
"""

from collections.abc import Sequence
from typing import TypeAlias

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from ..arguments import check_beside, check_floats, sum_dtype
from ..registry import map_rows, register

Count: TypeAlias = int | None
Factor: TypeAlias = float | None


def attention(
    q: Tensor, k: Tensor, v: Tensor, runs: Tensor | None = None, window: Count = None, scale: Factor = None,
    cap: Factor = None, causal: bool = True, sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return y [b h t e] in q's dtype, and the log-sum-exp of the scores, f32[b h t] (f64 for f64).

    q [b h t e], k and v [b k t e] in f32, bf16, f16 or f64, one dtype, h a multiple of k; runs i64[b t]; sinks
    f32[b h] (f64 for f64). Raises TypeError for other dtypes. Raises ValueError for other shapes or
    devices, for a window or cap that is not positive, and for a window that is not causal.
    """
    return _ATTENTION(q, k, v, runs, window, scale, cap, causal, sinks)


def attention_backward(
    g: Tensor, y: Tensor, lse: Tensor, q: Tensor, k: Tensor, v: Tensor, runs: Tensor | None = None,
    window: Count = None, scale: Factor = None, cap: Factor = None, causal: bool = True,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Return the gradients of ``(g * y).sum()`` with respect to q, k and v, for y and lse of :func:`attention`.

    Each is rounded once, from sums in float32. Raises what :func:`attention` does.
    """
    return _BACKWARD(g, y, lse, q, k, v, runs, window, scale, cap, causal)


def _like(t: Tensor) -> Tensor:
    b, h, n, e = t.shape
    return t.new_empty(b, n, h, e).transpose(1, 2)


def _check(
    op: str, q: Tensor, k: Tensor, v: Tensor, runs: Tensor | None = None, window: Count = None, scale: Factor = None,
    cap: Factor = None, causal: bool = True, sinks: Tensor | None = None, **rest: Tensor,
) -> None:  # fmt: skip
    check_floats(op, q, "q")
    if (window is not None and window < 1) or (cap is not None and not cap > 0):
        raise ValueError(f"{op} got window {window} and cap {cap}; wanted positive numbers or None")
    if window is not None and not causal:
        raise ValueError(f"{op} got window {window} and causal False; windows look back only, wanted None")
    if q.ndim != 4 or k.ndim != 4 or not k.shape[1] or q.shape[1] % k.shape[1] or not q.shape[3]:
        raise ValueError(
            f"{op} got q {tuple(q.shape)} and k {tuple(k.shape)}; wanted [b h t e] and [b k t e], h a multiple of k"
        )
    (b, h, t, e), kind = q.shape, q.dtype
    keys = b, k.shape[1], t, e
    wanted = {"g": (q.shape, kind), "y": (q.shape, kind), "lse": ((b, h, t), sum_dtype(q))}
    parts = {name: (x, *wanted[name]) for name, x in rest.items()}
    parts |= {"runs": (runs, (b, t), torch.int64), "sinks": (sinks, (b, h), sum_dtype(q))}
    check_beside(op, "q", q, k=(k, keys, kind), v=(v, keys, kind), **parts)


def _products(count: int, q: Sequence[int], causal: bool = True) -> int:
    """Count products of queries with what they see."""
    b, h, t, e = q
    return count * 2 * b * h * e * (t * (t + 1) // 2 if causal else t * t)


_FIX = (
    "it computes values only: differentiate fquant.kernels.reference.causal_attention.dense, the same in plain torch, "
    "or call models.attention, which has derivatives of every order"
)
_ATTENTION = register(
    attention, _check, lambda q, *_: (_like(q), q.new_empty(q.shape[:-1], dtype=sum_dtype(q))), map_rows, _FIX
)
_BACKWARD = register(
    attention_backward,
    lambda op, g, y, lse, *rest: _check(op, *rest, g=g, y=y, lse=lse),
    lambda g, y, lse, q, k, v, *_: (_like(q), _like(k), _like(v)), map_rows, _FIX,
)  # fmt: skip
register_flop_formula(torch.ops.fquant.attention)(lambda q, *a, **__: _products(2, q, *a[6:7]))  # shapes
# the scores again, the gradients of weights and values, and of the scores to q and k
register_flop_formula(torch.ops.fquant.attention_backward)(lambda g, *a, **__: _products(5, g, *a[9:10]))
