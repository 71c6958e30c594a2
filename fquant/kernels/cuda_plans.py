"""The choice of how to compute a product with a packed weight on CUDA, by estimates.

    Few      triton/few_rows.py     one pass over the packed bytes, decoded in the operand's registers; x · Wᵀ
    Fused    triton/mixed_gemm.py   decoded beside the tensor cores, once for each tile of rows
    Tiled    triton/gemm.py         a slab of the weight is decoded, multiplied by torch, and overwritten

:func:`estimate` gives the seconds of a plan, and :func:`plan_for` takes the candidate with the fewest. Predictions of
graphs (``compile.roofline``) ask both, on machines without a card or Triton too. The figures fit what an H200 took
(``python -m tests.bench.gpu sweep``, tests/bench/RESULTS.md); other generations are assumed to be alike. They are

    instructions    to decode an element: COUNTED in the machine code's longest loop, the greater of both orientations
                    and of Triton 3.6 and 3.9, with packed scales and whole reductions; 10 for a slab. Divided
                    reductions have up to 40 % more on sm_100, which the estimates leave out
    issue           128 instructions of threads a clock and multiprocessor, of which ISSUED get through (permutes have
                    half of the rate), and WARP from one warp. In ``g · W`` decoding takes ACROSS times that
    few rows        FEW_TAKE, the instructions that would take what was measured, at ISSUED_SLAB
    tensor cores    2048 (sm_80), 4096 (sm_90), 8192 (sm_100) operations a clock and multiprocessor; REACHED of it
    memory          bytes of packed weight, x and y, at the bandwidth of a copy
    slabs           the decoding, then torch's product at PRODUCTS of the peak; two launches a slab, and RAMP for every
                    slab but the first, because a product of a part does not fill the device

An element is decoded once for each tile of rows, but once in all for a slab. A slab is larger for fewer rows, and for a
long reduction, because its product is wider then. For a weight of 8192 x 8192 in NF4_DQ on an H200, the time over that
of torch's bf16 product is, as measured

    rows     1      16     32     64     128    256    512    1024   2048   4096
    plan     few    few    fused  fused  fused  slabs  slabs  slabs  slabs  slabs
    ratio    0.85   1.10   1.3    1.24   1.9    1.8    1.46   1.2    1.10   1.03
"""

from functools import lru_cache
from math import ceil, prod
from typing import NamedTuple

import torch

from ..format import num_bytes
from .spec import FLOATS, Spec

TENSOR_CORES = (torch.bfloat16, torch.float16)  # dtypes of x
ISSUED, REACHED, PRODUCTS, OVERLAP, ACROSS, ISSUED_SLAB = 0.5, 0.6, 0.78, 0.3, 1.1, 0.8
WARP = 0.35  # of the instructions of a scheduler that one warp issues
SLAB_INSTRUCTIONS = 10
FEW_TAKE = {8: 9.9, 16: 12.8, 32: 25.8}  # instead of 5.8, 6.7 and 8.0 instructions in the machine code, by rows of x
COUNTED = {  # by generation, then rows of x and warps
    80: {(16, 4): 6.9, (32, 4): 8.5, (64, 8): 8.8, (128, 8): 10.2},
    90: {(16, 4): 7.2, (32, 4): 10.0, (64, 4): 6.0, (64, 8): 7.4, (128, 4): 6.1, (128, 8): 7.7, (256, 8): 7.8},
    100: {(16, 4): 7.2, (32, 4): 10.2, (64, 4): 6.2, (64, 8): 8.2, (128, 4): 8.4, (128, 8): 10.3, (256, 8): 15.4},
}
LAUNCH, RAMP = 2e-6, 6e-6
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
    """torch's product with slabs of ``size`` bytes of the weight."""

    size: int = 64 << 20


Plan = Few | Fused | Tiled


class Card(NamedTuple):
    """The figures of a device, or of the usual one of a generation."""

    processors: int
    clock: float
    operations: float  # of a multiprocessor's tensor cores a clock, in bf16
    bandwidth: float  # of a copy


CARDS = {80: Card(108, 1.41e9, 2048, 1.8e12), 90: Card(132, 1.755e9, 4096, 3.0e12), 100: Card(148, 1.9e9, 8192, 7e12)}
FEW_PLANS = tuple(Few(rows, 4, 3) for rows in (8, 16, 32))
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
FEW_SWEPT = tuple(Few(rows, parts, stages) for rows in (8, 16, 32) for parts in (4, 8) for stages in (1, 2, 3, 4))
SLABS = tuple(Tiled(mib << 20) for mib in (16, 32, 64, 128))
CANDIDATES: tuple[Plan, ...] = (*FEW_SWEPT, *SMALL, *LARGE, *SLABS)


def plan_for(rows: int, spec: Spec, dtype: torch.dtype, across: bool, in_words: bool, generation: int) -> Plan:
    """Return the candidate with the shortest estimate for ``rows`` of x in ``dtype`` on sm_80, 90 or 100.

    ``in_words`` says that rows of the weight are whole 32-bit words; only slabs do without.
    """
    depth, width = spec.shape if across else spec.shape[::-1]
    if not in_words or dtype not in FLOATS:
        return slabs(rows, depth)
    if dtype not in TENSOR_CORES:
        return Few(8, 4, 3) if rows <= FEW_F32 and not across else slabs(rows, depth)
    return _best(rows, depth, width, spec.format.bits, across, generation)


def slabs(rows: int, depth: int) -> Tiled:
    """Return the slabs for ``rows`` of x and sums of ``depth`` elements; they are columns, if they are rows of W."""
    return Tiled(128 << 20) if rows <= 1024 or depth > 16384 else Tiled()


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
    plans = [slabs(rows, depth), *candidates(generation, even=depth % 128 == width % 128 == 0)]
    if rows <= FEW and not across:
        plans = [*FEW_PLANS, *plans]
    return min(plans, key=lambda plan: estimate(plan, rows, depth, width, bits, generation, across=across))


def estimate(
    plan: Plan, rows: int, depth: int, width: int, bits: int, generation: int, card: Card | None = None,
    across: bool = False,
) -> float:  # fmt: skip
    """Return the seconds of a product of x [rows depth] with a weight of depth · width codes to y [rows width].

    ``card`` is the device's; the default is the usual one of the generation. ``across`` says that sums go across the
    rows of the weight.
    """
    card, elements = card or CARDS[generation], depth * width
    per_second = card.processors * card.clock
    moved = (elements * bits / 8 + 2 * rows * (depth + width)) / card.bandwidth
    if isinstance(plan, Tiled):
        decoding = max(
            elements * SLAB_INSTRUCTIONS / (128 * ISSUED_SLAB * per_second), elements * (bits / 8 + 2) / card.bandwidth
        )
        multiplying = max(
            2 * rows * elements / (PRODUCTS * card.operations * per_second), 2 * elements / card.bandwidth
        )
        number = ceil(2 * elements / plan.size)
        return decoding + multiplying + 2 * LAUNCH * number + RAMP * (number - 1)
    if isinstance(plan, Few):
        passes = ceil(rows / plan.rows)
        computing = passes * elements * FEW_TAKE[plan.rows] / (128 * ISSUED_SLAB * per_second)
        return LAUNCH + max(moved, computing)
    tiles = ceil(rows / plan.rows) * ceil(width / plan.columns)
    steps = ceil(ceil(depth / plan.depth) / plan.splits)
    splits = ceil(ceil(depth / plan.depth) / steps)
    programs = ceil(tiles * splits / card.processors)  # of the busiest multiprocessor
    room = min(programs, 16 // plan.warps if plan.rows <= 64 else 8 // plan.warps)  # at a time
    issued = 128 * min(ISSUED, WARP * room * plan.warps / 4)
    decoding = programs * steps * plan.columns * plan.depth * COUNTED[generation][plan.rows, plan.warps] / issued
    decoding *= ACROSS if across else 1
    multiplying = programs * steps * 2 * plan.rows * plan.columns * plan.depth / (REACHED * card.operations)
    both = decoding + multiplying - (OVERLAP * min(decoding, multiplying) if room > 1 else 0)
    adding = LAUNCH + 8 * splits * rows * width / card.bandwidth if splits > 1 else 0
    return LAUNCH + max(moved, both / card.clock) + adding
