"""Blocks that are trained: bundles of floats or of packed rows, whose gradients are scattered sums, and whole trees."""

from .float_bundle import FloatBundle, Precision
from .reshard import part, whole, whole_like
from .row_bundle import RowBundle
from .scales import Scaled, scaled, wire_scales
from .whole_tensors import on_whole

__all__ = [
    "FloatBundle", "Precision", "RowBundle", "Scaled", "on_whole", "part", "scaled", "whole", "whole_like",
    "wire_scales",
]  # fmt: skip
