"""The codes of moments of optimisers: how a number in units of its block's scale becomes a code, as tables.

A code is the number of thresholds that are not above the number, in the order of the table's values. So every backend
gives the same code, by any computation. A *rounding* makes the thresholds of a format:

    nearest   the nearest value; of two at the same distance the upper, and E4M3's even one. Of the dynamic maps of 8
              bits thresholds are those of a formula, which differ from the middles between values by 1e-5 of their
              distance: a line in each decade. A mean of squares above zero never takes the code of zero, because a step
              would divide by eps: it takes at least the least value above zero.
    torchao   the same, but a mean of squares may become zero.
    grid      the value nearest to the nearest of 65536 points in [-1, 1], which is bitsandbytes' on the CPU. Numbers
              below 3e-5 share a point or two, and zeros become 1.5e-5. On CUDA bitsandbytes takes the nearest value.

The scale of a block is absmax / largest value of the table. torchao's absmax is at least 1e-12. The grid divides a
short last block by its scale; other blocks are multiplied by the reciprocal.
"""

from collections.abc import Callable
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from ..device import HOST
from ..format import E4M3, Format
from ..format.tables import dynamic_map
from . import reference
from .reference.codec import TINY

ROUNDINGS = ("nearest", "grid", "torchao")
LEAST = {"nearest": 0.0, "grid": 0.0, "torchao": 1e-12}  # of the absmax of a block
DECADES = 7
# (bits of a float32 >> 16, less ORIGIN if above it) * SLOPE >> 16 is the segment of a number or the one below.
ORIGIN, SLOPE = 13225, 166


class Codes(NamedTuple):
    """The codes in the order of their values, and from which number on each but the first is taken, f32[codes - 1]."""

    order: tuple[int, ...]
    thresholds: Tensor


class Segments(NamedTuple):
    """The formula of the magnitudes of a dynamic map: below edge 0, from edge 0 on, ... and from edge 7 on.

    Magnitude number trunc(min(x * slope + start, last)) belongs to x, where the first and the last segment share an
    entry. With signs, code 127 has magnitude 0.
    """

    edge: Tensor  # f32[8]
    slope: Tensor  # f32[8]
    start: Tensor  # f32[8]
    last: Tensor  # f32[8]
    signed: bool


class Cells(NamedTuple):
    """The codes of all numbers by their upper 16 bits: a code, another, and from which lower 16 bits on that is taken.

    Upper bits are limited to [low, high]; the cells of negative numbers follow those of the others.
    """

    cells: Tensor  # u32[1 or 2 times high - low + 1]: a code, the other << 8, lower bits << 16
    low: int
    high: int


def largest(format: Format) -> float:
    """Return the largest value of the table of ``format``, which is 1 in the scale's unit."""
    return max(x for x in format.table or (1.0,) if x == x)


def floor(format: Format, rounding: str) -> float:
    """Return the number, in units of the scale, to which smaller means of squares above zero are raised; 0.0: none."""
    order, thresholds = codes(format, rounding)
    assert format.table is not None
    below = sum(format.table[i] <= 0 for i in order)
    return thresholds[below - 1].item() if rounding == "nearest" and below else 0.0


@lru_cache(maxsize=64)
def codes(format: Format, rounding: str) -> Codes:
    """Return the codes and the thresholds of a format with a table."""
    assert format.table is not None
    table = torch.tensor(format.table, dtype=torch.float32, device=HOST)
    numbers = lambda x: torch.tensor(x, dtype=torch.int64, device=HOST)
    order = sorted((i for i, x in enumerate(format.table) if x == x), key=format.table.__getitem__)
    if rounding == "grid":
        place = torch.zeros(len(table), dtype=torch.int64, device=HOST)
        place[numbers(order)] = torch.arange(len(order), device=HOST)
        grid = place[reference.grid(format).long()]
        rank = lambda x: grid[((x.clamp(-1, 1) + 1.0) * 0.5 * 65535.0 + 0.5).int()]
    elif (parts := segments(format)) is not None:
        rank = lambda x: _by_segment(x, parts)
    elif format.table == E4M3:
        order = [i for i in order if i != 0x80]  # the zero with a sign is not made
        values = table[numbers(order)]
        rank = lambda x: torch.searchsorted(values, x.clamp(-448, 448).to(torch.float8_e4m3fn).float())
    else:
        values = table[numbers(order)].double()
        return Codes(tuple(order), ((values[:-1] + values[1:]) / 2).float())
    return Codes(tuple(order), _steps(rank, len(order) - 1))


def _steps(rank: Callable[[Tensor], Tensor], count: int) -> Tensor:
    """Return the least float32 at which the function ``rank``, which rises, is at least 1, 2, ... count."""
    wanted = torch.arange(1, count + 1, device=HOST)
    low, high = (torch.full((count,), x, dtype=torch.int64, device=HOST) for x in (-0x44000000, 0x44000000))
    while bool((high - low > 1).any()):  # of floats, numbered from -512 to 512
        middle = (low + high) // 2
        reached = rank(_float(middle)) >= wanted
        low, high = torch.where(reached, low, middle), torch.where(reached, middle, high)
    return _float(high)


def _float(number: Tensor) -> Tensor:
    """Return the float32 of a number that counts from 0.0 up or down."""
    size = number.abs().int().view(torch.float32)
    return torch.where(number < 0, -size, size)


@lru_cache(maxsize=64)
def segments(format: Format) -> Segments | None:
    """Return the formula of a format whose table is the dynamic map of 8 bits; None for another."""
    signed = format.table == dynamic_map()
    if not signed and format.table != dynamic_map(signed=False):
        return None
    sizes = [x for x in format.table or () if x >= 0]
    middle = lambda i: (sizes[i - 1] + sizes[i]) / 2
    top = len(sizes) - 1
    edge, rows, first = [middle(1)], [(float(top), 0.5, top + 0.5)], 1
    for i in range(DECADES):
        count, unit = 2 ** (i if signed else i + 1), 10.0 ** (i + 1 - DECADES)
        rows.append((count / (0.9 * unit), first - count / 9, first + count - 0.5))
        first += count
        edge.append(middle(first))
    wide = lambda numbers: torch.tensor(numbers, dtype=torch.float32, device=HOST)
    slope, start, last = map(wide, zip(*rows, strict=True))
    return Segments(wide(edge), slope, start, last, signed)


def _by_segment(x: Tensor, parts: Segments) -> Tensor:
    """Return the codes of x f32 by the formula, in the order of its operations."""
    size = x.abs()
    segment = torch.bucketize(size, parts.edge, right=True) % 8
    k = torch.minimum(size * parts.slope[segment] + parts.start[segment], parts.last[segment]).to(torch.int64)
    return torch.where(x < 0, 127 - k, 127 + k).clamp(min=0) if parts.signed else k


@lru_cache(maxsize=64)
def cells(format: Format, rounding: str) -> Cells | None:
    """Return the codes by upper bits; None if two thresholds have the same."""
    order, thresholds = codes(format, rounding)
    bits = thresholds.view(torch.int32).long() & 0x7FFFFFFF
    low, high = int(bits[bits > 0].min() >> 16) - 1, int(bits.max() >> 16) + 1
    key = torch.arange(low, high + 1, dtype=torch.int64, device=HOST) << 16
    found = []
    for negative in (False, True) if bool((thresholds < 0).any()) else (False,):
        value = lambda bits, sign=negative: bits.int().view(torch.float32) * (-1.0 if sign else 1.0)
        begin, end = (torch.bucketize(value(key | rest), thresholds, right=True) for rest in (0, 0xFFFF))
        upper = torch.maximum(begin, end)
        within = thresholds[(upper - 1).clamp(min=0)]  # the only one in a cell whose ends differ
        at = (within.view(torch.int32).long() & 0xFFFF) + negative
        least = torch.minimum(begin, end)
        inside = (begin != end) & (least > 0) & (upper - least > 1)
        if bool((thresholds[least[inside]] != within[inside]).any()):
            return None
        end = torch.where(at > 0xFFFF, begin, end)
        names = torch.tensor(order, dtype=torch.int64, device=HOST)
        at = torch.where((begin == end) | (at > 0xFFFF), 0, at)
        begin = torch.where(at == 0, end, begin)
        found.append(names[begin] | names[end] << 8 | at << 16)
    return Cells(torch.cat(found).to(torch.uint32), low, high)


def scaled(
    x: Tensor, absmax: Tensor, format: Format, rounding: str, short: bool, square: bool
) -> tuple[Tensor, Tensor]:
    """Return blocks x f32[blocks block] in units of their scale, and the scale f32[blocks].

    ``square`` says that x are means of squares.
    """
    scale = absmax.clamp(min=LEAST[rounding]) / largest(format)
    divisor = scale.clamp(min=TINY)[:, None]
    y = x / divisor if short and rounding == "grid" else x * (1.0 / divisor)
    return torch.where(x > 0, y.clamp(min=floor(format, rounding)), y) if square else y, scale
