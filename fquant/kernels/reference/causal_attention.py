"""Attention in plain torch: the formula, and the same some queries at a time, without a tensor of all scores.

Scores are made of some queries and of the keys that these may see; of all of them only the log-sum-exp is kept, from
which the slope makes them again (Dao et al. 2022, "FlashAttention"). Products are in the dtype of ``q``, the softmax
and the sums in float32 at least.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

CHUNK_BYTES = 8 * 2**20  # of the scores made at a time


def dense(q: Tensor, k: Tensor, v: Tensor, runs: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The formula: q ``[b h t e]``, k and v ``[b k t e]``, runs ``[b t]`` -> ``[b h t e]``, log-sum-exp f32."""
    scores = masked_scores(q, k, visible(slice(0, q.shape[2]), q, runs))
    return mixed(scores.softmax(-1), v), scores.logsumexp(-1).flatten(1, 2)


def attention(q: Tensor, k: Tensor, v: Tensor, runs: Tensor | None) -> tuple[Tensor, Tensor]:
    """:func:`dense`, some queries at a time."""
    parts = []
    for at in _chunks(q):
        scores = masked_scores(q[:, :, at], k[:, :, : at.stop], visible(at, q, runs))
        lse = scores.logsumexp(-1, keepdim=True)
        parts.append((mixed((scores - lse).exp(), v[:, :, : at.stop]), lse[..., 0].flatten(1, 2)))
    y, lse = (part[0] if len(part) == 1 else torch.cat(part, 2) for part in zip(*parts, strict=True))
    return by_tokens(y), lse


def attention_backward(
    g: Tensor, y: Tensor, lse: Tensor, q: Tensor, k: Tensor, v: Tensor, runs: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of q, k and v; those of keys and values are summed over chunks in float32 at least."""
    dq: list[Tensor] = []
    dk: Any = None
    dv: Any = None
    for at in reversed(list(_chunks(q))):  # the longest first, which is what shorter ones are added to
        rows = g[:, :, at], y[:, :, at], lse[:, :, at], q[:, :, at]
        one, more_k, more_v = _some_backward(*rows, k[:, :, : at.stop], v[:, :, : at.stop], visible(at, q, runs))
        dq.insert(0, one)
        dk, dv = _added(dk, more_k), _added(dv, more_v)
    return by_tokens(torch.cat(dq, 2)), by_tokens(dk.to(k.dtype)), by_tokens(dv.to(v.dtype))


def by_tokens(x: Tensor) -> Tensor:
    """``x`` ``[b h t e]``, a head of a token beside the next in memory."""
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def masked_scores(q: Tensor, k: Tensor, visible: Tensor) -> Tensor:
    """q ``[b h c e]``, k ``[b k s e]``, visible bool ``[b 1 1 c s]`` -> f32 ``[b k g c s]``."""
    return scores(q, k).masked_fill(~visible, -math.inf)


def scores(q: Tensor, k: Tensor) -> Tensor:
    """q ``[b h c e]``, k ``[b k s e]`` -> f32 ``[b k g c s]``, over sqrt(e)."""
    grouped = q.unflatten(1, (k.shape[1], -1)) * q.shape[-1] ** -0.5
    return _wide(grouped @ k[:, :, None].mT)


def mixed(p: Tensor, v: Tensor) -> Tensor:
    """p ``[b k g c s]``, v ``[b k s e]`` -> ``[b h c e]`` in v's dtype."""
    return (p.to(v.dtype) @ v[:, :, None]).flatten(1, 2)


def visible(some: slice, like: Tensor, runs: Tensor | None) -> Tensor:
    """Which tokens the tokens ``some`` see, of all up to the last of them: bool ``[1 1 1 c s]`` or ``[b 1 1 c s]``."""
    place = torch.arange(some.stop, device=like.device)
    causal = (place[some, None] >= place)[None, None, None]
    return causal if runs is None else causal & (runs[:, some, None] == runs[:, None, : some.stop])[:, None, None]


def _some_backward(
    g: Tensor, y: Tensor, lse: Tensor, q: Tensor, k: Tensor, v: Tensor, visible: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """g, y and q ``[b h c e]``, lse f32 ``[b h c]``, k and v ``[b k s e]`` -> the gradients of q, k and v."""
    slope = (_wide(g) * _wide(y)).sum(-1, keepdim=True)
    p = (masked_scores(q, k, visible) - lse.unflatten(1, (k.shape[1], -1))[..., None]).exp()  # [b k g c s]
    g, q, slope = (t.unflatten(1, (k.shape[1], -1)) for t in (g, q, slope))
    ds = (p * (_wide(g @ v[:, :, None].mT) - slope) * q.shape[-1] ** -0.5).to(q.dtype)
    return mixed(ds, k), (ds.mT @ q).sum(2), (p.to(g.dtype).mT @ g).sum(2)


def _added(total: Tensor | None, part: Tensor) -> Tensor:
    """``total`` f32 ``[b k s e]`` and a part that begins with it; the first is its own total."""
    if total is None:
        return part
    return _wide(total) + F.pad(_wide(part), (0, 0, 0, total.shape[2] - part.shape[2]))


def _chunks(q: Tensor) -> Iterator[slice]:
    """Some queries of ``q [b h t e]`` at a time."""
    b, h, t, _ = q.shape
    rows = max(1, CHUNK_BYTES // max(1, 4 * b * h * t))
    for first in range(0, max(t, 1), rows):
        yield slice(first, min(first + rows, t))


def _wide(x: Tensor) -> Tensor:
    """At least float32."""
    return x.to(torch.promote_types(x.dtype, torch.float32))
