"""Adapters and the weights that they are attached to, as nodes.

    Lora in an Adapted     x · (w + s · b · a)ᵀ          low-rank; with a magnitude, DoRA
    LoraSlots in AdaptedSlots  x[i] · (w + s[i] · b[i] · a[i])ᵀ    an update for each slot i of the inputs
    Ia3 in a Scaled        outputs ∘ ((x ∘ inputs) · wᵀ + bias)     multiplicative, (IA)³

Sources: LoRA, Hu et al. 2021; DoRA, Liu et al. 2024; (IA)³, Liu et al. 2022 (T-Few).
"""

from typing import Any

from torch import Tensor

from ..tree import add_later_fields, node, static


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
class LoraSlots:
    """Low-rank updates of a weight [out in] for inputs whose dim 0 is the slot; ranks differ between stacks.

    Slots are those of the first stack, then of the second, and so on. Alpha and dropout are those of each slot, and
    the static ones of the stacks are not read.
    """

    stacks: list[Lora]  # a f[n rank in], b f[n out rank]
    alpha: Tensor  # f64[slots]
    dropout: Tensor | None = None  # f64[slots], probabilities


@node
class Adapted:
    """A weight and the adapter attached to it; ``key`` i64[...] is present if dropout is on."""

    base: Any  # Tensor | Packed | Adapted
    lora: Lora
    key: Tensor | None = None
    merge_aware: bool = static(default=False)  # products are those of the merged weight (see merge_aware)


add_later_fields(Adapted, "merge_aware")


@node
class AdaptedSlots:
    """A weight and the adapters of slots attached to it; ``key`` i64[slots] is present if dropout is on."""

    base: Any  # any weight that linear takes
    slots: LoraSlots
    key: Tensor | None = None


@node
class Ia3:
    """Factors of the inputs or of the outputs of a weight [out in], one a column or a row; outputs include the bias."""

    inputs: Tensor | None = None  # f[in]
    outputs: Tensor | None = None  # f[out]


@node
class Scaled:
    """A weight and the multiplicative adapter attached to it."""

    base: Any  # any weight that linear takes
    ia3: Ia3


def scaling(lora: Lora) -> float:
    """Return the factor of ``b · a``: alpha / rank, or alpha / sqrt(rank) if rank-stabilised."""
    return lora.alpha / divisor(lora)


def divisor(lora: Lora) -> float:
    """Return what alpha is divided by: the rank, or its root if rank-stabilised."""
    rank = lora.a.shape[-2]
    return rank**0.5 if lora.rank_stabilised else rank
