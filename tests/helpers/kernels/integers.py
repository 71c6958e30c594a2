"""Weights, formats of activations and inputs of products of integers."""

from dataclasses import replace

import torch

from fquant import quantize
from fquant.format import (
    DYNAMIC8,
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
    NF4,
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
NAN = float("nan")
TABLES = [  # without names: NaN in front, levels beyond bytes or too far apart for them, and 8 bits to look up
    replace(TERNARY, name="nan_first", table=(NAN, -1.0, 0.0, 1.0)),
    replace(INT8_ROW, name="nan_first8", table=(NAN, *map(float, range(-127, 128)))),
    replace(INT4, name="high", table=tuple(map(float, range(200, 216)))),
    replace(NF4, name="far", table=(-2.0, *[n / 127 for n in range(14)], 2.0)),
    replace(DYNAMIC8, name="halves", flat=False, center=False, table=tuple(i // 2 / 127 for i in range(256))),
    replace(INT3_ZERO, name="int3_dq", scale=DYNAMIC8),
]
ACTS = [INT8_ROW, INT8_ROW_ZERO, INT8, replace(INT8_ROW, name="int8_row_all", unit=127.5)]


def inputs(format, m, out, width, dtype):
    """Return x [m width] in ``dtype`` with a row of zeros and an outlier, a weight [out width], and its spec."""
    x = (torch.randn(m, width, generator=rng(0)) + 0.3) * torch.randn(m, 1, generator=rng(1)).exp()
    x[m // 2] = 0.0
    x[0, 0] = -50.0
    w = quantize(torch.randn(out, width, generator=rng(2)), format)
    return x.to(dtype), w, Spec(format, w.shape, w.dtype)
