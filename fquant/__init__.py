"""Quantised models as plain pytrees, and pure functions over them."""

from . import func, lora, optim, random, tree, vq
from .capture import jit
from .comm import LOCAL, Comm
from .cost import cost
from .format import FP4, INT8, NF4, NF4_DQ, VQ2, VQ3, Format
from .linear import embedding, linear
from .packed import Packed, dequantize, quantize
from .remat import remat

__all__ = [
    "FP4", "INT8", "LOCAL", "NF4", "NF4_DQ", "VQ2", "VQ3", "Comm", "Format", "Packed", "cost", "dequantize",
    "embedding", "func", "jit", "linear", "lora", "optim", "quantize", "random", "remat", "tree", "vq",
]  # fmt: skip
