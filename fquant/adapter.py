"""A low-rank adapter and a weight with one attached; see fquant.lora for what is done with them."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from .tree import node, static


@node
class Lora:
    """A low-rank update ``s · b · a`` of a weight [out in].

    ``s`` is alpha / rank, or alpha / sqrt(rank) if rank-stabilised.

    With a ``magnitude`` it is DoRA's: the adapted weight's rows are then scaled to have these norms.
    ``dropout`` acts on the input of ``a`` where a key is attached; an embedding's input is a token, never dropped.
    """

    a: Tensor  # f[rank, in]
    b: Tensor  # f[out, rank]
    magnitude: Tensor | None = None  # f[out]
    alpha: float = static(default=16.0)
    rank_stabilised: bool = static(default=False)
    dropout: float = static(default=0.0)


@node
class Adapted:
    """A weight and the adapter attached to it; ``key`` i64[...] is there while dropout is on."""

    base: Any  # Tensor | Packed | Adapted
    lora: Lora
    key: Tensor | None = None
