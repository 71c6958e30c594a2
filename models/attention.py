"""Fused softmax attention: neither the scores nor the mask ever exist whole.

    y = attention(q, k, v, runs)        # softmax(q·kᵀ / sqrt(e)) · v over the visible tokens

A token sees the tokens of its own document up to itself, or the last ``window`` of these. Without ``causal`` it sees
all tokens of its document.
``fquant.kernels.ops.attention`` makes the scores ``[b h t s]`` tile by tile and keeps only their log-sum-exp (Dao et
al. 2022, "FlashAttention"). First-order gradients cost what the kernels cost. Forward mode, higher orders and
torch.compile use the dense formula and make whole scores (see ``models.reference_gradient``).
"""

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fquant.autodiff import forward_mode
from fquant.kernels.ops import attention as kernel
from fquant.kernels.reference.causal_attention import by_tokens, capped, dense, mixed, scores, visible, with_sinks

from .reference_gradient import Implementations, KernelWithReferenceGradient


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    runs: Tensor | None = None,
    window: int | None = None,
    scale: float | None = None,
    cap: float | None = None,
    causal: bool = True,
    sinks: Tensor | None = None,
) -> Tensor:
    """Compute softmax attention: q ``[... t h e]``, k and v ``[... t k e]`` -> ``[... t h e]``, in q's dtype.

    Head i reads key-value head ``i // (h / k)``. ``runs`` int ``[... t]`` are the document numbers of ``blocks.runs``.
    A token sees at most ``window`` tokens, itself included. ``scale`` multiplies the scores, by default 1 / sqrt(e).
    ``cap`` limits them to ``cap * tanh(score / cap)``. ``sinks [h]`` are scores of one more key for each head, whose
    value is 0 (OpenAI 2025, "gpt-oss model card"). Raises ValueError if the shapes do not fit, and for a window or cap
    that is not positive, or a window that is not causal.
    """
    alike = k.shape == v.shape and q.shape[:-2] == k.shape[:-2] and q.shape[-1] == k.shape[-1]
    if not alike or q.shape[-2] % k.shape[-2]:
        got = f"q {tuple(q.shape)}, k {tuple(k.shape)} and v {tuple(v.shape)}"
        raise ValueError(f"attention: {got}; want q [... t h e], k and v [... t k e], h a multiple of k")
    if runs is not None and runs.shape != q.shape[:-2]:
        raise ValueError(f"runs: shape {tuple(runs.shape)}, want the tokens' {tuple(q.shape[:-2])}")
    if sinks is not None and sinks.shape != q.shape[-2:-1]:
        raise ValueError(f"sinks: shape {tuple(sinks.shape)}, want one score for each head, ({q.shape[-2]},)")
    batch = math.prod(q.shape[:-3])
    heads = (t.reshape(batch, *t.shape[-3:]).transpose(1, 2) for t in (q, k, v))
    inputs: dict[str, Tensor] = dict(zip("qkv", heads, strict=True))
    if sinks is not None:  # of each example, so that examples can be mapped
        inputs["sinks"] = sinks.to(torch.promote_types(q.dtype, torch.float32)).expand(batch, -1)
    if runs is not None:
        inputs["runs"] = runs.reshape(batch, runs.shape[-1]).long()
    options = {"window": window, "scale": scale, "cap": cap, "causal": causal}
    computed, formula = (partial(_call, f, tuple(inputs), **options) for f in (kernel.attention, dense))
    fused = partial(_Attention.apply, Implementations(computed, formula, len(inputs)))
    y, _ = (formula if torch.compiler.is_dynamo_compiling() else fused)(*inputs.values())
    return y.transpose(1, 2).reshape(q.shape)


def _call(function: Any, names: Sequence[str], *tensors: Tensor, **options: Any) -> Any:
    """Call ``function`` with tensors by their names, because some of them are optional."""
    return function(**dict(zip(names, tensors, strict=True)), **options)


class _Attention(KernelWithReferenceGradient):
    """Attention and its log-sum-exp, of which only the backward makes use."""

    saved_results = (0, 1)

    @staticmethod
    def backward(ctx: Any, g: Tensor | None, _: Tensor | None) -> Any:
        *inputs, y, lse = ctx.saved_tensors
        if g is None:
            return None, *[None] * len(inputs)
        (_, names), options = ctx.functions.kernel.args, ctx.functions.kernel.keywords
        backwards = (partial(f, names, **options) for f in (_backward, _dense_backward))
        functions = Implementations(*backwards, num_batched=3 + len(inputs))
        grads = KernelWithReferenceGradient.apply(functions, g, y, lse, *inputs)
        return None, *grads, *[None] * (len(inputs) - len(grads))  # runs, if there are any, have no gradient

    @staticmethod
    def jvp(ctx: Any, _: Any, *tangents: Any) -> Any:
        (_, names), options = ctx.functions.kernel.args, ctx.functions.kernel.keywords
        with forward_mode(ctx.saved_tensors[: len(tangents)]) as inputs:
            still = lambda t, dt: torch.zeros_like(t) if dt is None else dt
            moving = {"d" + name: still(t, dt) for name, t, dt in zip(names, inputs, tangents, strict=True)}
            moving.pop("druns", None)
            return _dense_jvp(**dict(zip(names, inputs, strict=True)), **moving, **options)


def _dense_jvp(
    q: Tensor, k: Tensor, v: Tensor, dq: Tensor, dk: Tensor, dv: Tensor, sinks: Tensor | None = None,
    dsinks: Tensor | None = None, runs: Tensor | None = None, *, window: int | None, scale: float | None,
    cap: float | None, causal: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Compute the tangents of :func:`dense` by hand: torch.func.jvp does not work inside torch.autograd.forward_ad."""
    seen = visible(slice(0, q.shape[2]), q, runs, window, causal)
    limited = capped(scores(q, k, scale), cap)
    p = with_sinks(limited.masked_fill(~seen, -math.inf), sinks).softmax(-1)
    moved = scores(dq, k, scale) + scores(q, dk, scale)
    ds = torch.where(seen, moved if cap is None else moved * (1 - (limited / cap) ** 2), 0.0)
    mean = (p * with_sinks(ds, dsinks)).sum(-1, keepdim=True)
    p = p[..., : k.shape[2]]
    return by_tokens(mixed(p * (ds - mean), v) + mixed(p, dv)), mean[..., 0].flatten(1, 2)  # in y's memory layout


def _backward(names: Sequence[str], g: Tensor, y: Tensor, lse: Tensor, *tensors: Tensor, **options: Any) -> Any:
    """Compute the gradients of q, k, v and, if there are any, of the sinks, which the kernel finds in ``lse``."""
    inputs = dict(zip(names, tensors, strict=True))
    sinks = inputs.pop("sinks", None)
    grads = kernel.attention_backward(g, y, lse, **inputs, **options)
    if sinks is None:
        return grads
    weight = (sinks[..., None] - lse).exp()  # of a sink for each token [b h t]
    return *grads, -(weight * (g.to(lse.dtype) * y).sum(-1)).sum(-1)


def _dense_backward(names: Sequence[str], g: Tensor, y: Tensor, lse: Tensor, *tensors: Tensor, **options: Any) -> Any:
    """Recompute the gradients by the formula, so that derivatives flow through the inputs and not y or lse."""
    inputs = dict(zip(names, tensors, strict=True))
    runs = inputs.pop("runs", None)
    formula = lambda *moving: dense(**dict(zip(inputs, moving, strict=True)), runs=runs, **options)[0]
    _, pull, *_ = torch.func.vjp(formula, *inputs.values())
    return pull(g)
