"""Quantised models as plain pytrees, and pure functions over them."""

from . import func, lora, optim, random, tree
from .comm import LOCAL, Comm
from .format import FP4, INT8, NF4, NF4_DQ, Format
from .linear import embedding, linear
from .packed import Packed, dequantize, quantize
from .remat import remat

__all__ = [
    "FP4", "INT8", "LOCAL", "NF4", "NF4_DQ", "Comm", "Format", "Packed", "dequantize", "embedding", "func", "linear",
    "lora", "optim", "quantize", "random", "remat", "tree",
]  # fmt: skip
