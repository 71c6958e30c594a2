"""Round to nearest: the codes of tables whose unit is not the absmax, with their scales and zero points.

    rows f[rows width]  ->  codes u8[rows bytes], scale f32[rows blocks], zero f32[rows blocks] or None

The table of a format decides the recipe:

    integers in steps of one  scale = absmax / largest value; code of round(x / scale)                 INT4
      with zero points        lo, hi = min(0, x), max(0, x);  scale = (hi - lo) / steps;
                              zero = round(first value - lo / scale), which is a value of the table    INT4_ZERO
    E2M1                      scale = 2^(floor(log2(absmax)) - 2), and larger than 6 is 6              MXFP4
    E4M3                      scale = absmax / 448                                                     FP8

Halves go to even. So 0 is exact in every format. A block of zeros has scale 0, or 2^-126 if E2M1. Other scales are at
least 2^-126, the least normal float32.
Integers as in Jacob et al. 2018, section 3, and equal to torchao's ``choose_qparams_affine`` and ``quantize_affine``.
E2M1 as in OCP Microscaling Formats v1.0, section 6.3; its power of two is a float32 here. E4M3 saturates, as in
Micikevicius et al. 2022.

Formats in units of the absmax have kernels of their own (``kernels.packed_ops.encode``). All of this is torch.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from ..format import E2M1, E4M3, Format, num_blocks
from ..tree import expect

CHUNK = 1 << 20  # elements quantised at a time, which bounds the memory beside the weight
LEAST_POWER = -126
TINY = 2.0**LEAST_POWER  # the least normal float32; its reciprocal is finite
LARGEST_E4M3 = 448.0


def encode(rows: Tensor, format: Format) -> tuple[Tensor, Tensor, Tensor | None]:
    """Quantise ``rows`` f[rows width] to codes, scale and zero, which the module's docstring describes.

    A scale is NaN or infinite where ``rows`` are. Raises ValueError for a table without a recipe.
    """
    _check(format)
    parts = rows.split(max(1, CHUNK // max(rows.shape[1], 1)))
    codes, scale, zero = zip(*[_encode(part, format) for part in parts], strict=True)
    return torch.cat(codes), torch.cat(scale), torch.cat(zero) if format.zero else None


def _check(format: Format) -> None:
    table = format.table
    assert table is not None
    fault = f"quantize to {format.name} is not supported"
    if format.zero:
        expect(_is_integers(table), f"{fault}: a zero point is beside another table than integers in steps of one")
    signed = _is_integers(table) and table[0] < 0 < table[-1]
    known = format.zero or signed or table in (E2M1, E4M3)
    expect(known, f"{fault}: wanted a table whose largest value is 1, signed integers in steps of one, E2M1 or E4M3")


def _is_integers(table: tuple[float, ...]) -> bool:
    return all(value == i + table[0] for i, value in enumerate(table)) and table[0] == round(table[0])


def _encode(rows: Tensor, format: Format) -> tuple[Tensor, Tensor, Tensor]:
    """Quantise some rows; zero points are 0 for a format without them."""
    assert format.table is not None
    width, x = rows.shape[1], rows.float()
    blocks = num_blocks(format, width)
    block = format.block or width
    x = F.pad(x, (0, blocks * block - width)).unflatten(1, (blocks, block))  # [rows blocks block]
    first, last = format.table[0], format.table[-1]
    absmax, zero = x.abs().amax(-1), torch.zeros_like(x[..., 0])
    if format.zero:
        low, high = x.amin(-1).clamp(max=0.0), x.amax(-1).clamp(min=0.0)
        scale = _at_least_tiny((high - low) / (last - first))
        zero = (first - torch.round(low / scale.clamp(min=TINY))).clamp(first, last)
    elif format.table == E2M1:
        power = (torch.frexp(absmax).exponent - 3).clamp(min=LEAST_POWER)  # absmax is [1/2, 1) · 2^exponent
        scale = torch.ldexp(torch.ones_like(absmax), power.where(absmax > 0, LEAST_POWER))
        scale = scale.where(absmax.isfinite(), absmax)
    else:
        scale = _at_least_tiny(absmax / (LARGEST_E4M3 if format.table == E4M3 else last))
    y = x * (1.0 / scale.clamp(min=TINY))[..., None]
    if format.table == E2M1:
        index = _e2m1(y)
    elif format.table == E4M3:
        index = y.clamp(-LARGEST_E4M3, LARGEST_E4M3).to(torch.float8_e4m3fn).view(torch.uint8)
    else:
        index = ((torch.round(y) + zero[..., None]).clamp(first, last).nan_to_num() - first).to(torch.uint8)
    index = index.flatten(1)[:, :width]
    if format.bits == 4:
        index = F.pad(index, (0, width % 2))
        index = index[:, 0::2] << 4 | index[:, 1::2]
    return index, scale, zero


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
