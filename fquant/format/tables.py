"""The values of codes: the tables of formats.

Sources: NF4, Dettmers et al. 2023 (QLoRA); the dynamic maps of 8 bits, Dettmers et al. 2022 (8-bit optimizers via
block-wise quantization); those of 4 bits, Li et al. 2023 (memory efficient optimizers with 4-bit states); E2M1 and
E8M0, OCP Microscaling Formats v1.0, 2023; E4M3 and E5M2, Micikevicius et al. 2022; AF4, Yoshida 2023 (NF4 isn't
information theoretically optimal). NF4, FP4 and the dynamic maps of 8 bits equal those of bitsandbytes bit for bit.
"""

import math

import torch

from ..device import HOST
from .definition import with_one_nan


def dynamic_map(decades: int = 7, signed: bool = True) -> tuple[float, ...]:
    """Return the dynamic map of ``decades`` up to 1: each has twice as many values as the one before, and 0 and 1.

    A signed map has the negatives of all values but 1. One without signs has two values for each of theirs.
    """
    values = [0.0, 1.0]
    for i in range(decades):
        edges = torch.linspace(0.1, 1, 2 ** (i if signed else i + 1) + 1, dtype=torch.float32, device=HOST)
        middles = 10.0 ** (i + 1 - decades) * ((edges[:-1] + edges[1:]) / 2.0)
        values += middles.tolist() + ((-middles).tolist() if signed else [])
    return tuple(sorted(values))


# The quantiles of a normal distribution, scaled to [-1, 1]; literals, because recomputing changes the last digits.
NORMAL4 = (-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
        -0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725,
        0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941, 0.7229568362236023,
        1.0)  # fmt: skip

# Sign, two exponent bits, one mantissa bit, in the order of the bit pattern and so not sorted. Both zeros are +0.
_FP4_MAGNITUDE = tuple(x / 12 for x in (0, 0.0625, 8, 12, 4, 6, 2, 3))
FP4_VALUES = _FP4_MAGNITUDE + tuple(0.0 - x for x in _FP4_MAGNITUDE)

# Sixteenths without a zero, for the second moments of optimisers, which would divide by it.
SIXTEENTHS = tuple(i / 16 for i in range(1, 17))

# Sign, two exponent bits with bias 1, one mantissa bit: the values of four bits in MXFP4 and NVFP4, in their order.
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)


# The quantiles that minimise the mean absolute error of normal values, divided by the absmax of blocks of 64.
ABNORMAL4 = (-1.0, -0.69441008, -0.51243739, -0.3736951, -0.25607552, -0.14982478, -0.04934812, 0.0, 0.04273164,
             0.12934483, 0.21961274, 0.31675666, 0.42563882, 0.55496234, 0.72424863, 1.0)  # fmt: skip


def integers(first: int, last: int) -> tuple[float, ...]:
    """Return the integers from ``first`` to ``last``."""
    return tuple(map(float, range(first, last + 1)))


def _bytes_as(dtype: torch.dtype) -> tuple[float, ...]:
    """Return the value of each byte of an 8-bit float; what is no number is NaN."""
    return with_one_nan(torch.arange(256, dtype=torch.uint8, device=HOST).view(dtype).double().tolist())


E4M3 = _bytes_as(torch.float8_e4m3fn)  # up to 448; 0x7f and 0xff are NaN
E5M2 = with_one_nan(x if abs(x) < math.inf else math.nan for x in _bytes_as(torch.float8_e5m2))  # up to 57344
E8M0 = _bytes_as(torch.float8_e8m0fnu)  # powers of two, 2^-127 to 2^127
