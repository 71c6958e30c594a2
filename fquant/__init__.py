"""Quantised models as plain pytrees, and pure functions over them."""

from . import calibration, func, lora, optim, quantized_training, random, tree, vq
from .activation_checkpoint import remat
from .communication import LOCAL, Comm
from .compile.cost import cost
from .compile.dynamic_sizes import DynamicSize, Padded
from .compile.jit import bind, jit
from .dynamic_quantization import Outliers, fake_quantize
from .format import (
    AF4,
    AQ_2X8,
    AQ_3X8,
    FP4,
    FP8,
    FP8_E4M3,
    FP8_E5M2,
    FP8_TENSOR,
    INT2,
    INT2_ZERO,
    INT3,
    INT3_ZERO,
    INT4,
    INT4_ZERO,
    INT8,
    INT8_GROUP,
    INT8_ROW,
    INT8_ROW_ZERO,
    INT8_TENSOR,
    MXFP4,
    MXFP8,
    NF4,
    NF4_DQ,
    NF4_INT8,
    NVFP4,
    TERNARY,
    Format,
)  # fmt: skip
from .grouped_products import grouped_linear
from .kernels.batch_invariant import batch_invariant
from .packed import Packed, dequantize, quantize
from .packed_linear import embedding, linear
from .profiling import profile
from .scan_layers import scan, stack_layers, unstack_layers

__all__ = [
    "AF4", "AQ_2X8", "AQ_3X8", "FP4", "FP8", "FP8_E4M3", "FP8_E5M2", "FP8_TENSOR", "INT2", "INT2_ZERO", "INT3",
    "INT3_ZERO", "INT4", "INT4_ZERO", "INT8", "INT8_GROUP", "INT8_ROW", "INT8_ROW_ZERO", "INT8_TENSOR", "LOCAL",
    "MXFP4", "MXFP8", "NF4", "NF4_DQ", "NF4_INT8", "NVFP4", "TERNARY", "Comm", "DynamicSize", "Format", "Outliers",
    "Packed", "Padded", "batch_invariant", "bind", "calibration", "cost", "dequantize", "embedding", "fake_quantize",
    "func", "grouped_linear", "jit", "linear", "lora", "optim", "profile", "quantize", "quantized_training", "random",
    "remat", "scan", "stack_layers", "tree", "unstack_layers", "vq",
]  # fmt: skip
