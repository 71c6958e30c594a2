"""Decoding a token at a time in plain torch: attention to the slots of a cache, and products of few rows."""

import torch
from torch import Tensor

from .causal_attention import masked_scores, mixed, with_sinks


def cached_attention(
    q: Tensor, k: Tensor, v: Tensor, position: Tensor, scale: float | None = None, cap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:  # fmt: skip
    keys, values = k.transpose(1, 2), v.transpose(1, 2)  # [b k s e]
    seen = torch.arange(k.shape[1], device=k.device) <= position[:, None]  # [b s]
    scores = masked_scores(q[:, :, None], keys, seen[:, None, None, None], scale, cap)  # [b k g 1 s]
    p = with_sinks(scores, sinks).softmax(-1)
    return mixed(p[..., : k.shape[1]], values)[:, :, 0]


def dense_matmul(x: Tensor, w: Tensor) -> Tensor:
    return x @ w.mT
