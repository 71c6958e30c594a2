"""Weights, formats of activations and inputs of products of integers."""

from dataclasses import replace

import torch

from fquant import quantize
from fquant.format import (
    DYNAMIC8,
    INT2_ZERO,
    INT3,
    INT4,
    INT4_ZERO,
    INT8,
    INT8_GROUP,
    INT8_ROW,
    INT8_ROW_ZERO,
    INT8_TENSOR,
    NF4_INT8,
    TERNARY,
)
from fquant.kernels.spec import Spec
from tests.helpers.arrays import rng

WEIGHTS = [
    INT8, INT8_ROW, INT8_GROUP, INT8_TENSOR, INT4, INT4_ZERO, INT3, INT2_ZERO, TERNARY, NF4_INT8,
    replace(INT4_ZERO, name="int4_zero_16", block=16), replace(INT4_ZERO, name="int4_zero_row", block=None),
    replace(INT4, name="int4_dq", block=32, scale=DYNAMIC8), replace(INT8_GROUP, name="int8_2048", block=2048),
    INT8_ROW_ZERO, replace(INT8_ROW, name="int8_all", unit=127.5),  # whose integers, as bytes, begin at -128
]  # fmt: skip
ACTS = [INT8_ROW, INT8_ROW_ZERO, INT8, replace(INT8_ROW, name="int8_row_all", unit=127.5)]


def inputs(format, m, out, width, dtype):
    """Return x [m width] in ``dtype`` with a row of zeros and an outlier, a weight [out width], and its spec."""
    x = (torch.randn(m, width, generator=rng(0)) + 0.3) * torch.randn(m, 1, generator=rng(1)).exp()
    x[m // 2] = 0.0
    x[0, 0] = -50.0
    w = quantize(torch.randn(out, width, generator=rng(2)), format)
    return x.to(dtype), w, Spec(format, w.shape, w.dtype)
