"""The choice of how to compute a product with a packed weight on CUDA, by estimates.

    Few      triton/few_rows.py     one pass over the packed bytes, decoded in the operand's registers; x · Wᵀ
    Fused    triton/mixed_gemm.py   decoded beside the tensor cores, once for each tile of rows
    Tiled    triton/gemm.py         a slab of the weight is decoded, multiplied by torch, and overwritten

:func:`estimate` gives the seconds of a plan, and :func:`plan_for` takes the candidate with the fewest. Predictions of
graphs (``compile.roofline``) ask both, on machines without a card or Triton too. Nothing of it has been measured:
``python -m tests.bench.gpu sweep`` measures all candidates. The figures are

    instructions    to decode an element: COUNTED in the machine code's longest loop, the greater of both orientations
                    and of Triton 3.6 and 3.9, with packed scales and whole reductions; 10 for a slab. Divided
                    reductions have up to 40 % more on sm_100, which the estimates leave out
    issue           128 instructions of threads a clock and multiprocessor; ISSUED of it is assumed, WARP for one warp
    tensor cores    2048 (sm_80), 4096 (sm_90), 8192 (sm_100) operations a clock and multiprocessor; REACHED is assumed
    memory          bytes of packed weight, x and y, at the bandwidth of a copy
    slabs           the decoding, then torch's product at PRODUCTS of the peak, and two launches a slab

An element is decoded once for each tile of rows. On an H100 seven instructions take 0.3e-12 s, and a product 2.9e-15 s
a row. A slab decodes an element once, in ten. So from two tiles of 128 rows on, a fused product decodes for longer than
a slab does. But its decoding overlaps with the tensor cores of another program on the multiprocessor, if there is room
for one. It is assumed that OVERLAP of the shorter time is hidden. By this, for a weight of 4096 x 14336 in NF4_DQ on an
H100, the time over that of torch's bf16 product is

    rows     1      16     64     128    256    512    1024   2048   4096
    plan     few    few    fused  fused  fused  fused  slabs  slabs  slabs
    ratio    0.42   0.45   0.86   1.09   1.39   1.40   1.22   1.11   1.05
"""

from functools import lru_cache
from math import ceil, prod
from typing import NamedTuple

import torch

from ..format import num_bytes
from .spec import FLOATS, Spec

TENSOR_CORES = (torch.bfloat16, torch.float16)  # dtypes of x
ISSUED, REACHED, PRODUCTS, OVERLAP = 0.8, 0.8, 0.72, 0.7
WARP = 0.35  # of the instructions of a scheduler that one warp issues
SLAB_INSTRUCTIONS = 10
COUNTED_FEW = {8: 6.2, 16: 6.6, 32: 7.3}  # by rows of x
COUNTED = {  # by generation, then rows of x and warps
    80: {(16, 4): 6.9, (32, 4): 8.5, (64, 8): 8.8, (128, 8): 10.2},
    90: {(16, 4): 6.9, (32, 4): 8.2, (64, 4): 6.9, (64, 8): 13.4, (128, 4): 7.2, (128, 8): 8.5, (256, 8): 8.8},
    100: {(16, 4): 6.9, (32, 4): 8.2, (64, 4): 7.3, (64, 8): 9.2, (128, 4): 8.2, (128, 8): 10.8, (256, 8): 16.1},
}
LAUNCH = 2e-6
FEW = 64  # rows of x up to which Few is tried
FEW_F32 = 16  # the same without tensor cores


class Few(NamedTuple):
    """One pass over the weight for each ``rows`` rows of x."""

    rows: int  # of x at a time
    parts: int  # warps that share 16 rows of the weight
    stages: int  # of the pipeline


class Fused(NamedTuple):
    """One pass over the weight for each ``rows`` rows of x."""

    rows: int  # of x a program, BM
    columns: int  # of the result a program, BN
    depth: int  # of the reduction a step, BK
    warps: int
    stages: int  # of the pipeline
    splits: int = 1  # programs that share a reduction


class Tiled(NamedTuple):
    """torch's product with slabs of ``size`` bytes: what 50 MB of cache hold beside x and y."""

    size: int = 32 << 20


Plan = Few | Fused | Tiled


class Card(NamedTuple):
    """The figures of a device, or of the usual one of a generation."""

    processors: int
    clock: float
    operations: float  # of a multiprocessor's tensor cores a clock, in bf16
    bandwidth: float  # of a copy


CARDS = {80: Card(108, 1.41e9, 2048, 1.8e12), 90: Card(132, 1.755e9, 4096, 3.0e12), 100: Card(148, 1.9e9, 8192, 7e12)}
FEW_PLANS = tuple(Few(rows, parts, 3) for rows, parts in ((8, 8), (16, 4), (32, 4)))
SMALL = tuple(
    Fused(*tile, splits)
    for tile in ((16, 64, 128, 4, 3), (32, 64, 64, 4, 3), (64, 128, 64, 4, 3), (64, 128, 64, 8, 3))
    for splits in (1, 2, 4, 8, 16)
)
LARGE = tuple(
    Fused(*tile, splits) for tile in ((128, 128, 64, 8, 3), (128, 128, 64, 4, 3), (256, 128, 64, 8, 3))
    for splits in (1, 2, 4)
)  # fmt: skip
WIDE = {(64, 128, 64, 4, 3), (128, 128, 64, 4, 3), (256, 128, 64, 8, 3)}  # sm_80 has operands in registers too
FEW_SWEPT = tuple(Few(rows, parts, stages) for rows in (8, 16, 32) for parts in (4, 8) for stages in (2, 3, 4))
SLABS = tuple(Tiled(mib << 20) for mib in (16, 32, 64, 128))
CANDIDATES: tuple[Plan, ...] = (*FEW_SWEPT, *SMALL, *LARGE, *SLABS)


def plan_for(rows: int, spec: Spec, dtype: torch.dtype, across: bool, in_words: bool, generation: int) -> Plan:
    """Return the candidate with the shortest estimate for ``rows`` of x in ``dtype`` on sm_80, 90 or 100.

    ``in_words`` says that rows of the weight are whole 32-bit words; only slabs do without.
    """
    if not in_words or dtype not in FLOATS:
        return Tiled()
    if dtype not in TENSOR_CORES:
        return Few(8, 4, 3) if rows <= FEW_F32 and not across else Tiled()
    out, width = spec.shape
    bits = spec.format.bits
    return _best(rows, *((out, width) if across else (width, out)), bits, across, generation)


def in_words(spec: Spec) -> bool:
    """Return True if packed rows are whole 32-bit words, and blocks do not straddle rows."""
    format, width = spec.format, spec.shape[-1]
    return num_bytes(format, width) % 4 == 0 and not straddles(spec)


def straddles(spec: Spec) -> bool:
    """Return True if the blocks of a flat format straddle rows."""
    return spec.format.flat and spec.shape[-1] % (spec.format.block or prod(spec.shape)) != 0


def grouped_plan(rows: int, generation: int) -> Fused:
    """Return the tile for groups of about ``rows`` rows."""
    if rows <= 16:
        return Fused(16, 64, 128, 4, 3)
    if rows <= 32:
        return Fused(32, 64, 64, 4, 3)
    warps = 8 if generation == 80 else 4
    return Fused(64 if rows <= 64 else 128, 128, 64, warps, 3)


def candidates(generation: int, even: bool = True) -> list[Fused]:
    """Return the fused plans whose registers the generation has; fewer for weights that are not whole tiles."""
    if even:
        return [plan for plan in (*SMALL, *LARGE) if generation > 80 or plan[:5] not in WIDE]
    return [plan for plan in (*SMALL, *LARGE) if (generation > 80 or plan.rows <= 64) and plan[:5] not in WIDE]


@lru_cache(maxsize=4096)
def _best(rows: int, depth: int, width: int, bits: int, across: bool, generation: int) -> Plan:
    plans = [Tiled(), *candidates(generation, even=depth % 128 == width % 128 == 0)]
    if rows <= FEW and not across:
        plans = [*FEW_PLANS, *plans]
    return min(plans, key=lambda plan: estimate(plan, rows, depth, width, bits, generation))


def estimate(
    plan: Plan, rows: int, depth: int, width: int, bits: int, generation: int, card: Card | None = None
) -> float:
    """Return the seconds of a product of x [rows depth] with a weight of depth · width codes to y [rows width].

    ``card`` is the device's; the default is the usual one of the generation.
    """
    card, elements = card or CARDS[generation], depth * width
    per_second = card.processors * card.clock
    moved = (elements * bits / 8 + 2 * rows * (depth + width)) / card.bandwidth
    if isinstance(plan, Tiled):
        decoding = elements * SLAB_INSTRUCTIONS / (128 * ISSUED * per_second)
        multiplying = max(
            2 * rows * elements / (PRODUCTS * card.operations * per_second), 2 * elements / card.bandwidth
        )
        return decoding + multiplying + 2 * LAUNCH * ceil(2 * elements / plan.size)
    if isinstance(plan, Few):
        passes = ceil(rows / plan.rows)
        computing = passes * elements * COUNTED_FEW[plan.rows] / (128 * ISSUED * per_second)
        return LAUNCH + max(moved, computing)
    tiles = ceil(rows / plan.rows) * ceil(width / plan.columns)
    steps = ceil(ceil(depth / plan.depth) / plan.splits)
    splits = ceil(ceil(depth / plan.depth) / steps)
    programs = ceil(tiles * splits / card.processors)  # of the busiest multiprocessor
    room = min(programs, 16 // plan.warps if plan.rows <= 64 else 8 // plan.warps)  # at a time
    issued = 128 * min(ISSUED, WARP * room * plan.warps / 4)
    decoding = programs * steps * plan.columns * plan.depth * COUNTED[generation][plan.rows, plan.warps] / issued
    multiplying = programs * steps * 2 * plan.rows * plan.columns * plan.depth / (REACHED * card.operations)
    both = decoding + multiplying - (OVERLAP * min(decoding, multiplying) if room > 1 else 0)
    adding = LAUNCH + 8 * splits * rows * width / card.bandwidth if splits > 1 else 0
    return LAUNCH + max(moved, both / card.clock) + adding
