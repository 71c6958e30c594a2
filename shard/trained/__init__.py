"""Blocks that are trained: bundles of floats, whose gradients are scattered sums, and trees of them made whole."""

from .float_bundle import FloatBundle, Precision
from .reshard import part, whole, whole_like
from .scales import Scaled, scaled, wire_scales

__all__ = ["FloatBundle", "Precision", "Scaled", "part", "scaled", "whole", "whole_like", "wire_scales"]
