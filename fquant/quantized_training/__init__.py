"""Quantised training: recipes of products, weights that stay quantised, and their updates."""

from .recipes import (
    BITNET,
    FP8_ROWWISE,
    FP8_ROWWISE_HP,
    FP8_TENSORWISE,
    INT8_MIXED,
    RECIPES,
    FakeQuantization,
    Products,
    Recipe,
    Trainable,
    attach,
)  # fmt: skip

__all__ = [
    "BITNET", "FP8_ROWWISE", "FP8_ROWWISE_HP", "FP8_TENSORWISE", "INT8_MIXED", "RECIPES", "FakeQuantization",
    "Products", "Recipe", "Trainable", "attach",
]  # fmt: skip
