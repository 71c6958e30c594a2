"""Softmax attention whose scores, and whose mask, never exist whole.

    y = attention(q, k, v, runs)        # softmax(q·kᵀ / sqrt(e)) · v, of what each token may see

A token sees the tokens of its own document up to itself. Scores are the largest tensor of a block, ``[b h t s]``; what
computes here (``fquant.kernels.ops.attention``) makes them a tile at a time, and keeps of all of them only their
log-sum-exp, from which the backward makes them again.

*Transforms.* The ops have neither a forward derivative nor a second one. The pair of them is therefore two autograd
Functions, whose own derivatives are those of ``dense``, the formula, with whole scores (see ``models.reference_gradient``):
gradients of first order cost what the ops cost, all else what the formula does. What torch.compile traces is the
formula.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from fquant.autodiff import forward_mode
from fquant.kernels.ops import attention as kernel
from fquant.kernels.reference.causal_attention import by_tokens, dense, masked_scores, mixed, scores, visible

from .reference_gradient import Batched, Pair


def attention(q: Tensor, k: Tensor, v: Tensor, runs: Tensor | None = None) -> Tensor:
    """Causal softmax attention: q ``[... t h e]``, k and v ``[... t k e]`` -> ``[... t h e]``, in q's dtype.

    Head i reads key-value head ``i // (h / k)``. ``runs`` int ``[... t]`` numbers the documents of a sequence, as
    ``blocks.runs`` does; a token sees those of its own. Raises ValueError where shapes do not fit.
    """
    alike = k.shape == v.shape and q.shape[:-2] == k.shape[:-2] and q.shape[-1] == k.shape[-1]
    if not alike or q.shape[-2] % k.shape[-2]:
        raise ValueError(
            f"attention: q {tuple(q.shape)}, k {tuple(k.shape)} and v {tuple(v.shape)}; want q [... t h e], "
            "k and v [... t k e], h a multiple of k"
        )
    if runs is not None and runs.shape != q.shape[:-2]:
        raise ValueError(f"runs: shape {tuple(runs.shape)}, want the tokens' {tuple(q.shape[:-2])}")
    batch = math.prod(q.shape[:-3])
    given = [t.reshape(batch, *t.shape[-3:]).transpose(1, 2) for t in (q, k, v)]
    if runs is not None:
        given.append(runs.reshape(batch, runs.shape[-1]).long())
    compiling = torch.compiler.is_dynamo_compiling()
    y, _ = dense(*given) if compiling else _Attention.apply(Pair(kernel.attention, dense), *given)
    return y.transpose(1, 2).reshape(q.shape)


class _Attention(Batched):
    """The attention and its log-sum-exp, which the backward needs and nobody else gets."""

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        Batched.setup_context(ctx, inputs, output)
        ctx.save_for_backward(*output, *inputs[1:])

    @staticmethod
    def backward(ctx: Any, g: Tensor | None, _: Tensor | None) -> Any:
        absent = [None] * (len(ctx.saved_tensors) - 5)  # of runs
        if g is None:
            return None, None, None, None, *absent
        return None, *Batched.apply(Pair(kernel.attention_backward, _dense_backward), g, *ctx.saved_tensors), *absent

    @staticmethod
    def jvp(ctx: Any, _: Any, *tangents: Any) -> Any:
        with forward_mode(ctx.saved_tensors[-len(tangents) :]) as (q, k, v, *runs):
            moving = (torch.zeros_like(t) if dt is None else dt for t, dt in zip((q, k, v), tangents, strict=False))
            return _dense_jvp(q, k, v, *moving, *runs)


def _dense_jvp(
    q: Tensor, k: Tensor, v: Tensor, dq: Tensor, dk: Tensor, dv: Tensor, runs: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The tangents of :func:`dense`, written out: torch.func.jvp does not work inside torch.autograd.forward_ad."""
    seen = visible(slice(0, q.shape[2]), q, runs)
    p = masked_scores(q, k, seen).softmax(-1)
    ds = torch.where(seen, scores(dq, k) + scores(q, dk), 0.0)
    mean = (p * ds).sum(-1, keepdim=True)
    return by_tokens(mixed(p * (ds - mean), v) + mixed(p, dv)), mean[..., 0].flatten(1, 2)  # as y lies


def _dense_backward(
    g: Tensor, y: Tensor, lse: Tensor, q: Tensor, k: Tensor, v: Tensor, runs: Tensor | None = None
) -> tuple[Tensor, ...]:
    """Of ``y`` and ``lse`` it is no function: they are functions of the others, through which derivatives go."""
    _, pull, *_ = torch.func.vjp(lambda q, k, v: dense(q, k, v, runs)[0], q, k, v)
    return pull(g)
