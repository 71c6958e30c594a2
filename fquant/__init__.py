"""Quantised models as plain pytrees, and pure functions over them."""

from . import func, lora, optim, random, tree, vq
from .activation_checkpoint import remat
from .communication import LOCAL, Comm
from .compile.cost import cost
from .compile.jit import bind, jit
from .format import AQ_2X8, AQ_3X8, FP4, FP8, INT4, INT4_ZERO, INT8, MXFP4, NF4, NF4_DQ, Format
from .grouped_products import grouped_linear
from .packed import Packed, dequantize, quantize
from .packed_linear import embedding, linear

__all__ = [
    "AQ_2X8", "AQ_3X8", "FP4", "FP8", "INT4", "INT4_ZERO", "INT8", "LOCAL", "MXFP4", "NF4", "NF4_DQ", "Comm", "Format",
    "Packed", "cost", "dequantize", "embedding", "func", "grouped_linear", "bind", "jit", "linear", "lora", "optim",
    "quantize", "random", "remat", "tree", "vq",
]  # fmt: skip
