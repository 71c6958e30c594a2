"""Round to nearest: scales and zero points of blocks, and the codes of tables in units of a scale.

    rows f[rows width]                          ->  scale f32[rows blocks], zero f32[rows blocks] or None
    rows, scale and zero, as they are decoded   ->  codes u8[rows bytes]

The fields of a format decide the scale:

    usual                  absmax / unit, by default the largest value that the table has with both signs
    powers of two          2^(floor(log2(absmax)) - e), where 2^e is the power of two of the largest value
    zero points            lo, hi = min(0, x), max(0, x);  scale = (hi - lo) / steps;
                           zero = round(first value - lo / scale), which is a value of the table
    mean                   the mean of |x|, at least 1e-5
    shared                 the largest of these, or the mean of all

and its table decides the code of y = x / scale:

    integers in steps of one   round(y + zero)
    E4M3, E5M2, E2M1           the nearest, halves to the even code; larger than the largest is the largest
    others                     the nearest, halves to the smaller value

Stochastic rounding is unbiased only between two values of the table. So its scales *cover* a block, the extremes
included. The unit is at most the largest value with both signs. A power of two is doubled if the absmax is beyond the
table. A zero point has n values below it, where n gives the least scale = max(-lo / n, hi / (steps - n)). If a scale
covers a block, the covering scale is not larger. So rounding again does not make scales grow.

0 is exact in every table that has it. A block of zeros has scale 0, or 2^-126 if scales are powers of two. Other
scales are at least 2^-126, the least normal float32.
Integers as in Jacob et al. 2018, section 3, and equal to torchao's ``choose_qparams_affine`` and ``quantize_affine``.
Powers of two as in OCP Microscaling Formats v1.0, section 6.3. E4M3 and E5M2 saturate, as in Micikevicius et al. 2022.
The mean is that of BitNet b1.58, Ma et al. 2024. The codes of NVFP4 are found with scales as they are decoded, as in
NVIDIA's recipe; those of other nested scales with the exact ones.

Formats in units of the absmax have kernels of their own (``kernels.packed_ops.encode``). All of this is torch.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from ..format import E2M1, E4M3, E5M2, E8M0, Format, bits, num_blocks
from ..kernels.reference import midpoints
from ..tree import expect

CHUNK = 1 << 20  # elements quantised at a time, which bounds the memory beside the weight
LEAST_POWER = -126
TINY = 2.0**LEAST_POWER  # the least normal float32; its reciprocal is finite
LEAST_MEAN = 1e-5
FLOAT8 = {E4M3: torch.float8_e4m3fn, E5M2: torch.float8_e5m2}


def scales(rows: Tensor, format: Format, covers: bool = False) -> tuple[Tensor, Tensor | None]:
    """Return the scales and zero points of ``rows`` f[rows width]; if ``covers``, no value is beyond the table.

    A scale is NaN or infinite where ``rows`` are. Raises ValueError for a table without a recipe.
    """
    _check(format)
    if format.mean and format.shared:
        mean = rows.float().abs().mean().clamp(min=LEAST_MEAN)
        return mean.repeat(rows.shape[0], num_blocks(format, rows.shape[1])), None
    parts = [_scales(part, format, covers) for part in _chunks(rows)]
    scale = torch.cat([scale for scale, _ in parts])
    if format.shared and scale.numel():
        scale = scale.amax().repeat(scale.shape)  # a copy: one element of stride 0 is contiguous to torch
    return scale, torch.cat([zero for _, zero in parts]) if format.zero else None


def codes(rows: Tensor, scale: Tensor, zero: Tensor | None, format: Format, draws: Tensor | None = None) -> Tensor:
    """Return the codes of ``rows`` f[rows width], given the scales and zero points f32[rows blocks] of their blocks.

    With ``draws`` f32[rows width] in [0, 1) an integer is floor(y + draw) + zero, computed exactly.
    """
    zeros = torch.zeros_like(scale) if zero is None else zero
    sizes = [len(part) for part in _chunks(rows)]
    drawn = [None] * len(sizes) if draws is None else draws.reshape(rows.shape).split(sizes)
    parts = zip(_chunks(rows), scale.split(sizes), zeros.split(sizes), drawn, strict=True)
    return torch.cat([bits.pack(index(*part, format), format.bits) for part in parts])


def _chunks(rows: Tensor) -> tuple[Tensor, ...]:
    return rows.split(max(1, CHUNK // max(rows.shape[1], 1)))


def _check(format: Format) -> None:
    assert format.table is not None
    fault = f"quantize to {format.name} is not supported"
    if format.zero:
        expect(format.integers, f"{fault}: a zero point is beside another table than integers in steps of one")
    elif format.table != E8M0:
        values = _finite(format)
        expect(max(values) > 0, f"{fault}: the table has no value above 0")
        fix = "wanted values of both signs, or of one sign and a zero point"
        expect(min(values) < 0 or format.flat, f"{fault}: the table has no value below 0; {fix}")


def _finite(format: Format) -> list[float]:
    return sorted(x for x in format.table or () if math.isfinite(x))


def _blocks(rows: Tensor, format: Format) -> Tensor:
    """Return ``rows`` in float32 by blocks, f32[rows blocks block], padded with zeros."""
    width = rows.shape[1]
    count, block = num_blocks(format, width), format.block or width
    return F.pad(rows.float(), (0, count * block - width)).unflatten(1, (count, block))


def _scales(rows: Tensor, format: Format, covers: bool) -> tuple[Tensor, Tensor]:
    """Return the scales of some rows, and their zero points, which are 0 for a format without them."""
    x, values = _blocks(rows, format), _finite(format)
    absmax = x.abs().amax(-1)
    zero = torch.zeros_like(absmax)
    if format.table == E8M0:  # a power of two is exact in units of one
        return torch.ones_like(absmax).where(absmax.isfinite(), absmax), zero
    if format.zero:
        first, last = values[0], values[-1]
        low, high = x.amin(-1).clamp(max=0.0), x.amax(-1).clamp(min=0.0)
        if covers:
            return _covering(low, high, first, last)
        scale = _at_least_tiny(_over(high - low, last - first))
        return scale, (first - torch.round(low / scale.clamp(min=TINY))).clamp(first, last)
    if format.mean:
        block, width = x.shape[-1], rows.shape[1]
        count = torch.full((x.shape[1],), block, dtype=torch.float32, device=x.device)
        count[-1] = width - (x.shape[1] - 1) * block
        return (x.abs().sum(-1) / count).clamp(min=LEAST_MEAN), zero
    largest = min(values[-1], -values[0]) if values[0] < 0 else values[-1]
    if format.power:
        down = math.frexp(largest)[1]  # absmax is [1/2, 1) · 2^exponent, and the largest [1/2, 1) · 2^down
        power = (torch.frexp(absmax).exponent - down).clamp(min=LEAST_POWER)
        scale = torch.ldexp(torch.ones_like(absmax), power.where(absmax > 0, LEAST_POWER))
        scale = torch.where(absmax > largest * scale, 2 * scale, scale) if covers else scale
        return scale.where(absmax.isfinite(), absmax), zero
    unit = format.unit or largest
    return _at_least_tiny(_over(absmax, min(unit, largest) if covers else unit)), zero


def _covering(low: Tensor, high: Tensor, first: float, last: float) -> tuple[Tensor, Tensor]:
    """Return the least scales with a zero point, a value of the table, such that low <= 0 <= high are within the table.

    Either low or high is a value of the table then.
    """
    most = last - first
    below = torch.floor(-low / _over(high - low, most).clamp(min=TINY))
    part = lambda x, n: torch.where(x == 0, 0.0, x / n.clamp(min=0.0))  # infinite if there are no values for x
    counts = below.clamp(max=most), (below + 1).clamp(max=most)
    each = [(torch.maximum(part(-low, n), part(high, most - n)), n) for n in counts]
    (scale, n), (other, more) = each
    scale, n = torch.minimum(scale, other), torch.where(other < scale, more, n)
    return _at_least_tiny(scale), (first + n).clamp(first, last)


def _over(x: Tensor, number: float) -> Tensor:
    """Return ``x`` over a number; on CUDA torch multiplies by the reciprocal of one that is not a tensor there."""
    return x / torch.full((), number, dtype=x.dtype, device=x.device)


def index(rows: Tensor, scale: Tensor, zero: Tensor, draws: Tensor | None, format: Format) -> Tensor:
    """Return the codes u8[rows width], one a byte."""
    table, x, width = format.table, _blocks(rows, format), rows.shape[1]
    if format.mean:
        y = x / scale[..., None]
    else:
        y = x * (1.0 / scale.clamp(min=TINY))[..., None]
    if format.integers is not None:
        first, last = format.integers
        y = torch.round(y) if draws is None else _drawn(y, _blocks(draws, format))
        code = format.table.index(first) if format.table else 0  # of the first: NaN may be before it
        index = ((y + zero[..., None]).clamp(first, last).nan_to_num() - (first - code)).to(torch.uint8)
    elif table in FLOAT8:
        largest = max(_finite(format))
        index = y.clamp(-largest, largest).to(FLOAT8[table]).view(torch.uint8)
    elif table == E2M1:
        index = _e2m1(y)
    elif table == E8M0:
        power = (torch.frexp(y).exponent + 126).clamp(0, 254)
        index = power.where(y > 0, 0).to(torch.uint8)  # the exponent of zero is that of one half
    else:
        order, middles = midpoints(format)
        at = torch.bucketize(y.contiguous(), middles.to(y.device), out_int32=True)
        index = torch.tensor(order, dtype=torch.uint8, device=y.device)[at]
    return index.flatten(1)[:, :width]


def _drawn(y: Tensor, draws: Tensor) -> Tensor:
    below = torch.floor(y)
    return below + (draws >= 1 - (y - below))  # y - below is exact, and y + draws would not be


def _at_least_tiny(scale: Tensor) -> Tensor:
    """Raise scales that are above zero to TINY: the reciprocal of a smaller one may be infinite."""
    return scale.where(~((scale > 0) & (scale < TINY)), TINY)


def _e2m1(y: Tensor) -> Tensor:
    """Return the u8 codes of the E2M1 values nearest to ``y`` f32, halves to the even code; larger than 6 is 6."""
    middles = [(a + b) / 2 for a, b in zip(E2M1[:7], E2M1[1:8], strict=True)]
    middles = torch.tensor(middles, dtype=torch.float32, device=y.device)
    size = y.abs().contiguous()
    low, high = (torch.bucketize(size, middles, right=right, out_int32=True) for right in (False, True))
    return (torch.where(low % 2 == 0, low, high) + 8 * torch.signbit(y)).to(torch.uint8)
