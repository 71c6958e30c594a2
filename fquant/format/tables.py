"""The values of codes: the tables of formats.

Sources: NF4, Dettmers et al. 2023 (QLoRA); the dynamic maps of 8 bits, Dettmers et al. 2022 (8-bit optimizers via
block-wise quantization); those of 4 bits, Li et al. 2023 (memory efficient optimizers with 4-bit states); E2M1, OCP
Microscaling Formats v1.0, 2023; E4M3, Micikevicius et al. 2022. NF4, FP4 and the dynamic maps of 8 bits equal those of
bitsandbytes bit for bit.
"""

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


def _e4m3() -> tuple[float, ...]:
    """Return the value of each byte of torch.float8_e4m3fn; 0x7f and 0xff are NaN."""
    codes = torch.arange(256, dtype=torch.uint8, device=HOST)
    return with_one_nan(codes.view(torch.float8_e4m3fn).double().tolist())


E4M3 = _e4m3()
