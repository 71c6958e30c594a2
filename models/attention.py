"""Softmax attention whose scores, and whose mask, never exist whole.

    y = attention(q, k, v, runs)        # softmax(q·kᵀ / sqrt(e)) · v, of what each token may see

A token sees the tokens of its own document up to itself. Scores are the largest tensor of a block, ``[b h t s]``; here
they are made for some queries at a time, with the mask of those queries alone, and of all of them only their
log-sum-exp is kept, from which the backward makes them again (Dao et al. 2022, "FlashAttention"). Products are in the
dtype of ``q``, the softmax and the sums are in float32 at least.

On CPUs that is torch's fused kernel, which needs no mask for whole causal sequences, and reads heads that share keys
(Ainslie et al. 2023) without repeating these; elsewhere the same in plain torch. Where several documents lie in a
sequence, ``CHUNK_BYTES`` bound the mask, or elsewhere the scores, that are made at a time.

*Transforms.* The fused kernel has neither a forward derivative nor a second one. The pair of ``forward`` and
``backward`` is therefore two autograd Functions, whose own derivatives are those of :func:`dense`, the formula, with
whole scores (see ``models.again``): gradients of first order cost what the kernel costs, all else what the formula
does. What torch.compile traces is the formula.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .again import Batched, Pair

CHUNK_BYTES = 8 * 2**20  # of the mask, or of the scores, made at a time
FUSED = ("cpu",)  # the devices that have the kernel

_aten = torch.ops.aten
_fused = _aten._scaled_dot_product_flash_attention_for_cpu.default
_fused_backward = _aten._scaled_dot_product_flash_attention_for_cpu_backward.default


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
    given = [t.reshape(-1, *t.shape[-3:]).transpose(1, 2) for t in (q, k, v)]
    if runs is not None:
        given.append(runs.reshape(-1, runs.shape[-1]))
    compiling = torch.compiler.is_dynamo_compiling()
    y, _ = dense(*given) if compiling else _Attention.apply(Pair(_forward, dense), *given)
    return y.transpose(1, 2).reshape(q.shape)


def dense(q: Tensor, k: Tensor, v: Tensor, runs: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The formula: q ``[b h t e]``, k and v ``[b k t e]``, runs ``[b t]`` -> ``[b h t e]``, log-sum-exp f32."""
    scores = _scores(q, k, _visible(slice(0, q.shape[2]), q, runs))
    return _mixed(scores.softmax(-1), v), scores.logsumexp(-1).flatten(1, 2)


def _scores(q: Tensor, k: Tensor, visible: Tensor) -> Tensor:
    """q ``[b h c e]``, k ``[b k s e]``, visible bool ``[b 1 1 c s]`` -> f32 ``[b k g c s]``."""
    return _products(q, k).masked_fill(~visible, -math.inf)


def _products(q: Tensor, k: Tensor) -> Tensor:
    grouped = q.unflatten(1, (k.shape[1], -1)) * q.shape[-1] ** -0.5
    return _wide(grouped @ k[:, :, None].mT)


def _mixed(p: Tensor, v: Tensor) -> Tensor:
    """p ``[b k g c s]``, v ``[b k s e]`` -> ``[b h c e]`` in v's dtype."""
    return (p.to(v.dtype) @ v[:, :, None]).flatten(1, 2)


def _visible(some: slice, like: Tensor, runs: Tensor | None) -> Tensor:
    """Which tokens the tokens ``some`` see, of all up to the last of them: bool ``[1 1 1 c s]`` or ``[b 1 1 c s]``."""
    place = torch.arange(some.stop, device=like.device)
    causal = (place[some, None] >= place)[None, None, None]
    return causal if runs is None else causal & (runs[:, some, None] == runs[:, None, : some.stop])[:, None, None]


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
        return None, *Batched.apply(Pair(_backward, _dense_backward), g, *ctx.saved_tensors), *absent

    @staticmethod
    def jvp(ctx: Any, _: Any, *tangents: Any) -> Any:
        q, k, v, *runs = ctx.saved_tensors[-len(tangents) :]
        moving = (torch.zeros_like(t) if dt is None else dt for t, dt in zip((q, k, v), tangents, strict=False))
        return _dense_jvp(q, k, v, *moving, *runs)


def _dense_jvp(
    q: Tensor, k: Tensor, v: Tensor, dq: Tensor, dk: Tensor, dv: Tensor, runs: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The tangents of :func:`dense`, written out: torch.func.jvp does not work inside torch.autograd.forward_ad."""
    visible = _visible(slice(0, q.shape[2]), q, runs)
    p = _scores(q, k, visible).softmax(-1)
    ds = torch.where(visible, _products(dq, k) + _products(q, dk), 0.0)
    mean = (p * ds).sum(-1, keepdim=True)
    return _mixed(p * (ds - mean), v) + _mixed(p, dv), mean[..., 0].flatten(1, 2)


def _dense_backward(
    g: Tensor, y: Tensor, lse: Tensor, q: Tensor, k: Tensor, v: Tensor, runs: Tensor | None = None
) -> tuple[Tensor, ...]:
    """Of ``y`` and ``lse`` it is no function: they are functions of the others, through which derivatives go."""
    _, pull, *_ = torch.func.vjp(lambda q, k, v: dense(q, k, v, runs)[0], q, k, v)
    return pull(g)


def _forward(q: Tensor, k: Tensor, v: Tensor, runs: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """:func:`dense`, some queries at a time."""
    parts = [_some(q[:, :, at], k[:, :, : at.stop], v[:, :, : at.stop], seen) for at, seen in _chunks(q, runs)]
    y, lse = (part[0] if len(part) == 1 else torch.cat(part, 2) for part in zip(*parts, strict=True))
    return y, lse


def _backward(
    g: Tensor, y: Tensor, lse: Tensor, q: Tensor, k: Tensor, v: Tensor, runs: Tensor | None = None
) -> tuple[Tensor, ...]:
    """The gradients of q, k and v; those of keys and values are summed over chunks in float32 at least."""
    dq: list[Tensor] = []
    dk: Any = None
    dv: Any = None
    for at, seen in reversed(list(_chunks(q, runs))):  # the longest first, which is what shorter ones are added to
        rows = g[:, :, at], y[:, :, at], lse[:, :, at], q[:, :, at]
        one, more_k, more_v = _some_backward(*rows, k[:, :, : at.stop], v[:, :, : at.stop], seen)
        dq.insert(0, one)
        dk, dv = _added(dk, more_k), _added(dv, more_v)
    return dq[0] if len(dq) == 1 else torch.cat(dq, 2), dk.to(k.dtype), dv.to(v.dtype)


def _added(total: Tensor | None, part: Tensor) -> Tensor:
    """``total`` f32 ``[b k s e]`` and a part that begins with it; the first is its own total."""
    if total is None:
        return part
    return _wide(total) + F.pad(_wide(part), (0, 0, 0, total.shape[2] - part.shape[2]))


def _chunks(q: Tensor, runs: Tensor | None) -> Iterator[tuple[slice, Tensor | None]]:
    """Some queries of ``q [b h t e]`` at a time, and what they see, bool ``[b 1 1 c s]``.

    None is all up to themselves, and of all queries at once.
    """
    b, h, t, _ = q.shape
    fused = q.device.type in FUSED
    if fused and runs is None:
        yield slice(0, t), None
        return
    rows = max(1, CHUNK_BYTES // max(1, b * t * (q.itemsize if fused else 4 * h)))
    for first in range(0, max(t, 1), rows):
        at = slice(first, min(first + rows, t))
        yield at, _visible(at, q, runs)


def _some(q: Tensor, k: Tensor, v: Tensor, visible: Tensor | None) -> tuple[Tensor, Tensor]:
    """q ``[b h c e]``, k and v ``[b k s e]`` -> ``[b h c e]`` and f32 ``[b h c]``."""
    if q.device.type in FUSED:
        return _fused(q, k, v, 0.0, visible is None, attn_mask=_bias(visible, q))
    assert visible is not None
    scores = _scores(q, k, visible)
    lse = scores.logsumexp(-1, keepdim=True)
    return _mixed((scores - lse).exp(), v), lse[..., 0].flatten(1, 2)


def _some_backward(
    g: Tensor, y: Tensor, lse: Tensor, q: Tensor, k: Tensor, v: Tensor, visible: Tensor | None
) -> tuple[Tensor, ...]:
    """g, y and q ``[b h c e]``, lse f32 ``[b h c]``, k and v ``[b k s e]`` -> the gradients of q, k and v."""
    if q.device.type in FUSED:
        return _fused_backward(g, q, k, v, y, lse, 0.0, visible is None, attn_mask=_bias(visible, q))
    assert visible is not None
    slope = (_wide(g) * _wide(y)).sum(-1, keepdim=True)
    p = (_scores(q, k, visible) - lse.unflatten(1, (k.shape[1], -1))[..., None]).exp()  # [b k g c s]
    g, q, slope = (t.unflatten(1, (k.shape[1], -1)) for t in (g, q, slope))
    ds = (p * (_wide(g @ v[:, :, None].mT) - slope) * q.shape[-1] ** -0.5).to(q.dtype)
    return _mixed(ds, k), (ds.mT @ q).sum(2), (p.to(g.dtype).mT @ g).sum(2)


def _bias(visible: Tensor | None, like: Tensor) -> Tensor | None:
    """What the fused kernel adds to the scores, ``[b 1 c s]`` in the dtype of the queries ``like``."""
    if visible is None:
        return None
    bias = torch.where(visible[:, 0], 0.0, -math.inf).to(like.dtype)
    return bias.expand(like.shape[0], -1, -1, -1)


def _wide(x: Tensor) -> Tensor:
    """At least float32."""
    return x.to(torch.promote_types(x.dtype, torch.float32))
