"""Attention in plain torch: the formula, and the same in chunks of queries without a tensor of all scores.

A chunk of queries meets only the keys that it may see. Of its scores only the log-sum-exp is kept, and the backward
computes the scores again (Dao et al. 2022, "FlashAttention"). Products are in the dtype of ``q``, the softmax and the
sums in float32 at least.

``window``, ``scale``, ``cap`` and ``sinks`` are those of ``fquant.kernels.ops.attention``: the number of keys that a
query sees, itself included; the factor of its products, 1 / sqrt(e) by default; the limit of its scores; and the scores
of one more key for each head, whose value is 0.
"""

import math
from collections.abc import Iterator
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from ..arguments import widened

CHUNK_BYTES = 8 * 2**20  # of the scores of a chunk
Count: TypeAlias = int | None
Factor: TypeAlias = float | None


def dense(
    q: Tensor, k: Tensor, v: Tensor, runs: Tensor | None = None, window: Count = None, scale: Factor = None,
    cap: Factor = None, causal: bool = True, sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Compute the formula: q ``[b h t e]``, k and v ``[b k t e]``, runs ``[b t]`` -> ``[b h t e]``, log-sum-exp f32."""
    scores = masked_scores(q, k, visible(slice(0, q.shape[2]), q, runs, window, causal), scale, cap)
    scores = with_sinks(scores, sinks)
    return mixed(scores.softmax(-1)[..., : k.shape[2]], v), scores.logsumexp(-1).flatten(1, 2)


def attention(
    q: Tensor, k: Tensor, v: Tensor, runs: Tensor | None = None, window: Count = None, scale: Factor = None,
    cap: Factor = None, causal: bool = True, sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Compute :func:`dense` in chunks of queries."""
    parts = []
    for at in _chunks(q):
        end = at.stop if causal else q.shape[2]
        scores = masked_scores(q[:, :, at], k[:, :, :end], visible(at, q, runs, window, causal), scale, cap)
        lse = with_sinks(scores, sinks).logsumexp(-1, keepdim=True)
        parts.append((mixed((scores - lse).exp(), v[:, :, :end]), lse[..., 0].flatten(1, 2)))
    y, lse = (part[0] if len(part) == 1 else torch.cat(part, 2) for part in zip(*parts, strict=True))
    return by_tokens(y), lse


def attention_backward(
    g: Tensor, y: Tensor, lse: Tensor, q: Tensor, k: Tensor, v: Tensor, runs: Tensor | None = None,
    window: Count = None, scale: Factor = None, cap: Factor = None, causal: bool = True,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Return the gradients of q, k and v; those of k and v are summed over chunks in float32 at least."""
    dq: list[Tensor] = []
    dk: Any = None
    dv: Any = None
    for at in reversed(list(_chunks(q))):  # the longest first; shorter ones are added to it
        rows = g[:, :, at], y[:, :, at], lse[:, :, at], q[:, :, at]
        seen, end = visible(at, q, runs, window, causal), at.stop if causal else q.shape[2]
        part_q, part_k, part_v = _chunk_backward(*rows, k[:, :, :end], v[:, :, :end], seen, scale, cap)
        dq.insert(0, part_q)
        dk, dv = _added(dk, part_k), _added(dv, part_v)
    return by_tokens(torch.cat(dq, 2)), by_tokens(dk.to(k.dtype)), by_tokens(dv.to(v.dtype))


def by_tokens(x: Tensor) -> Tensor:
    """Return ``x`` ``[b h t e]`` with the memory layout [b t h e]."""
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def masked_scores(q: Tensor, k: Tensor, visible: Tensor, scale: Factor = None, cap: Factor = None) -> Tensor:
    """Return :func:`scores`, capped, with -inf outside of ``visible`` bool ``[b 1 1 c s]``: f32 ``[b k g c s]``."""
    return capped(scores(q, k, scale), cap).masked_fill(~visible, -math.inf)


def scores(q: Tensor, k: Tensor, scale: Factor = None) -> Tensor:
    """Return scaled products q·kᵀ: q ``[b h c e]``, k ``[b k s e]`` -> f32 ``[b k g c s]``."""
    grouped = q.unflatten(1, (k.shape[1], -1)) * (q.shape[-1] ** -0.5 if scale is None else scale)
    return widened(grouped @ k[:, :, None].mT)


def capped(scores: Tensor, cap: Factor) -> Tensor:
    """Return ``cap * tanh(scores / cap)``, or the scores without a cap (Gemma Team 2024, "Gemma 2", section 2)."""
    return scores if cap is None else (scores / cap).tanh() * cap


def mixed(p: Tensor, v: Tensor) -> Tensor:
    """Return p · v: p ``[b k g c s]``, v ``[b k s e]`` -> ``[b h c e]`` in v's dtype."""
    return (p.to(v.dtype) @ v[:, :, None]).flatten(1, 2)


def with_sinks(scores: Tensor, sinks: Tensor | None) -> Tensor:
    """Append the scores of the sinks ``[b h]``, if any, to scores ``[b k g c s]``: ``[b k g c s + 1]``."""
    if sinks is None:
        return scores
    column = sinks.unflatten(1, scores.shape[1:3])[..., None, None].to(scores.dtype)
    return torch.cat([scores, column.expand(*scores.shape[:-1], 1)], -1)


def visible(chunk: slice, like: Tensor, runs: Tensor | None, window: Count = None, causal: bool = True) -> Tensor:
    """Return the mask of a chunk of the queries ``like`` over keys: bool ``[1 1 1 c s]`` or ``[b 1 1 c s]``.

    Causal keys are those up to the chunk's end, others are all.
    """
    end = chunk.stop if causal else like.shape[2]
    place = torch.arange(end, device=like.device)
    seen = (place[chunk, None] >= (place if causal else 0 * place))[None, None, None]
    if window is not None:
        seen = seen & (place[chunk, None] < place + window)
    return seen if runs is None else seen & (runs[:, chunk, None] == runs[:, None, :end])[:, None, None]


def _chunk_backward(
    g: Tensor, y: Tensor, lse: Tensor, q: Tensor, k: Tensor, v: Tensor, visible: Tensor, scale: Factor, cap: Factor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q, k and v: g, y and q ``[b h c e]``, lse f32 ``[b h c]``, k and v ``[b k s e]``."""
    slope = (widened(g) * widened(y)).sum(-1, keepdim=True)
    limited = capped(scores(q, k, scale), cap)  # [b k g c s]
    p = (limited.masked_fill(~visible, -math.inf) - lse.unflatten(1, (k.shape[1], -1))[..., None]).exp()
    g, q, slope = (t.unflatten(1, (k.shape[1], -1)) for t in (g, q, slope))
    ds = p * (widened(g @ v[:, :, None].mT) - slope) * (q.shape[-1] ** -0.5 if scale is None else scale)
    ds = (ds if cap is None else ds * (1 - (limited / cap) ** 2)).to(q.dtype)
    return mixed(ds, k), (ds.mT @ q).sum(2), (p.to(g.dtype).mT @ g).sum(2)


def _added(total: Tensor | None, part: Tensor) -> Tensor:
    """Add a part to ``total`` f32 ``[b k s e]``, which is at least as long; without a total, return the part."""
    if total is None:
        return part
    return widened(total) + F.pad(widened(part), (0, 0, 0, total.shape[2] - part.shape[2]))


def _chunks(q: Tensor) -> Iterator[slice]:
    """Yield chunks of the queries of ``q [b h t e]``."""
    b, h, t, _ = q.shape
    rows = max(1, CHUNK_BYTES // max(1, 4 * b * h * t))
    for first in range(0, max(t, 1), rows):
        yield slice(first, min(first + rows, t))
