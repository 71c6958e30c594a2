"""Fused causal softmax attention: neither the scores nor the mask ever exist whole.

    y = attention(q, k, v, runs)        # softmax(q·kᵀ / sqrt(e)) · v over the visible tokens

A token sees the tokens of its own document up to itself, or the last ``window`` of these.
``fquant.kernels.ops.attention`` makes the scores ``[b h t s]`` tile by tile and keeps only their log-sum-exp (Dao et
al. 2022, "FlashAttention"). First-order gradients cost what the kernels cost. Forward mode, higher orders and
torch.compile use the dense formula and make whole scores (see ``models.reference_gradient``).
"""

import math
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fquant.autodiff import forward_mode
from fquant.kernels.ops import attention as kernel
from fquant.kernels.reference.causal_attention import by_tokens, capped, dense, mixed, scores, visible

from .reference_gradient import Implementations, KernelWithReferenceGradient


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    runs: Tensor | None = None,
    window: int | None = None,
    scale: float | None = None,
    cap: float | None = None,
) -> Tensor:
    """Compute causal softmax attention: q ``[... t h e]``, k and v ``[... t k e]`` -> ``[... t h e]``, in q's dtype.

    Head i reads key-value head ``i // (h / k)``. ``runs`` int ``[... t]`` are the document numbers of ``blocks.runs``.
    A token sees at most ``window`` tokens, itself included. ``scale`` multiplies the scores, by default 1 / sqrt(e).
    ``cap`` limits them to ``cap * tanh(score / cap)``. Raises ValueError if the shapes do not fit, and for a window or
    a cap that is not positive.
    """
    alike = k.shape == v.shape and q.shape[:-2] == k.shape[:-2] and q.shape[-1] == k.shape[-1]
    if not alike or q.shape[-2] % k.shape[-2]:
        got = f"q {tuple(q.shape)}, k {tuple(k.shape)} and v {tuple(v.shape)}"
        raise ValueError(f"attention: {got}; want q [... t h e], k and v [... t k e], h a multiple of k")
    if runs is not None and runs.shape != q.shape[:-2]:
        raise ValueError(f"runs: shape {tuple(runs.shape)}, want the tokens' {tuple(q.shape[:-2])}")
    batch = math.prod(q.shape[:-3])
    inputs: list[Any] = [t.reshape(batch, *t.shape[-3:]).transpose(1, 2) for t in (q, k, v)]
    if runs is not None:
        inputs.append(runs.reshape(batch, runs.shape[-1]).long())
    computed, formula = (partial(f, window=window, scale=scale, cap=cap) for f in (kernel.attention, dense))
    fused = partial(_Attention.apply, Implementations(computed, formula, len(inputs)))
    y, _ = formula(*inputs) if torch.compiler.is_dynamo_compiling() else fused(*inputs)
    return y.transpose(1, 2).reshape(q.shape)


class _Attention(KernelWithReferenceGradient):
    """Attention and its log-sum-exp, of which only the backward makes use."""

    saved_results = (0, 1)

    @staticmethod
    def backward(ctx: Any, g: Tensor | None, _: Tensor | None) -> Any:
        *inputs, y, lse = ctx.saved_tensors
        if g is None:
            return None, *[None] * len(inputs)
        backwards = (partial(f, **ctx.functions.kernel.keywords) for f in (kernel.attention_backward, _dense_backward))
        functions = Implementations(*backwards, num_batched=3 + len(inputs))
        grads = KernelWithReferenceGradient.apply(functions, g, y, lse, *inputs)
        return None, *grads, *[None] * (len(inputs) - 3)  # runs, if there are any, have no gradient

    @staticmethod
    def jvp(ctx: Any, _: Any, *tangents: Any) -> Any:
        with forward_mode(ctx.saved_tensors[: len(tangents)]) as (q, k, v, *runs):
            moving = (torch.zeros_like(t) if dt is None else dt for t, dt in zip((q, k, v), tangents, strict=False))
            return _dense_jvp(q, k, v, *moving, *runs, **ctx.functions.kernel.keywords)


def _dense_jvp(
    q: Tensor, k: Tensor, v: Tensor, dq: Tensor, dk: Tensor, dv: Tensor, runs: Tensor | None = None, *,
    window: int | None, scale: float | None, cap: float | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Compute the tangents of :func:`dense` by hand: torch.func.jvp does not work inside torch.autograd.forward_ad."""
    seen = visible(slice(0, q.shape[2]), q, runs, window)
    limited = capped(scores(q, k, scale), cap)
    p = limited.masked_fill(~seen, -math.inf).softmax(-1)
    moved = scores(dq, k, scale) + scores(q, dk, scale)
    ds = torch.where(seen, moved if cap is None else moved * (1 - (limited / cap) ** 2), 0.0)
    mean = (p * ds).sum(-1, keepdim=True)
    return by_tokens(mixed(p * (ds - mean), v) + mixed(p, dv)), mean[..., 0].flatten(1, 2)  # in y's memory layout


def _dense_backward(
    g: Tensor, y: Tensor, lse: Tensor, q: Tensor, k: Tensor, v: Tensor, *runs: Any, **options: Any
) -> Any:
    """Recompute the gradients of q, k and v by the formula, so that derivatives flow through these and not y or lse."""
    _, pull, *_ = torch.func.vjp(lambda q, k, v: dense(q, k, v, *runs, **options)[0], q, k, v)
    return pull(g)
