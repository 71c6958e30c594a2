"""Nodes of low-rank adaptation: an adapter, and a weight with one attached (see fquant.lora)."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from .tree import node, static


@node
class Lora:
    """A low-rank update ``s · b · a`` of a weight [out in]; ``s`` is alpha / rank, or alpha / sqrt(rank).

    With a ``magnitude`` it is DoRA's: the rows of the adapted weight are scaled to these norms. ``dropout`` acts on the
    input of ``a`` if a key is attached; the input of an embedding is a token, which is never dropped.
    """

    a: Tensor  # f[rank, in]
    b: Tensor  # f[out, rank]
    magnitude: Tensor | None = None  # f[out]
    alpha: float = static(default=16.0)
    rank_stabilised: bool = static(default=False)  # s is alpha / sqrt(rank)
    dropout: float = static(default=0.0)


@node
class Adapted:
    """A weight and the adapter attached to it; ``key`` i64[...] is present if dropout is on."""

    base: Any  # Tensor | Packed | Adapted
    lora: Lora
    key: Tensor | None = None
