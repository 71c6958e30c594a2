"""The choice of a tile for products of integers on CUDA (``triton/integers``), by estimates.

:func:`estimate` gives the seconds of a plan, and :func:`plan_for` takes the candidate with the fewest. On an H200
(``python -m tests.bench.gpu sweep``) weights of one block took 1.1 times their estimate. Codes of 4 and 2 bits took 1.5
times theirs, and those of 3 bits 5 times. The figures are those of ``cuda_plans.py``, but for

    shares          ISSUED, REACHED and OVERLAP, which are assumed
    instructions    of a step, COUNTED in the machine code's longest loop (Triton 3.9), whole steps, rows of x without
                    zero points. A step is ``depth`` columns: of a dense operand, of 8 bits in one block, of 4 bits with
                    zero points in blocks of 128, and of 64. Each further block costs what that of 64 does; blocks
                    of 16 a fifth more
    tensor cores    twice the operations of bf16

A block is scaled in float32 when its sum is complete, for each element of the tile. So small blocks make a product of
many rows take several times as long as rows that are one block.
"""

from functools import lru_cache
from math import ceil
from typing import NamedTuple

from .cuda_plans import CARDS, LAUNCH, WARP, Card

ISSUED, REACHED, OVERLAP = 0.8, 0.8, 0.7
QUANTIZING = 30  # instructions to round an element of x, in two passes


class Integral(NamedTuple):
    """A tile of the result, and how a program computes it."""

    rows: int  # of x
    columns: int  # of the result
    depth: int  # of the reduction a step
    warps: int
    stages: int  # of the pipeline


FEW, FEW_WIDE = Integral(16, 32, 256, 4, 4), Integral(16, 64, 128, 4, 5)
SOME, HALF = Integral(32, 64, 128, 4, 4), Integral(64, 64, 128, 8, 3)
TALL, LARGE, WIDE = Integral(128, 64, 128, 8, 3), Integral(128, 128, 128, 8, 3), Integral(128, 256, 128, 8, 3)
CANDIDATES = (FEW, FEW_WIDE, SOME, HALF, TALL, LARGE, WIDE)
COUNTED = {  # by generation: of a step of a dense operand, by rows, by blocks of 128, and of 64
    80: {
        FEW: (80, 321, 377, 470), FEW_WIDE: (67, 313, 331, 412), SOME: (79, 319, 406, 513),
        HALF: (71, 312, 389, 1424), TALL: (98, 579, 734, 1431), LARGE: (143, 634), WIDE: (238,),
    },
    90: {
        FEW: (76, 89, 281, 393), FEW_WIDE: (64, 80, 268, 332), SOME: (80, 96, 332, 441), HALF: (73, 98, 276, 422),
        TALL: (81, 97, 400, 687), LARGE: (85, 117), WIDE: (110,),
    },
    100: {
        FEW: (75, 88, 279, 380), FEW_WIDE: (61, 78, 252, 306), SOME: (76, 92, 299, 381), HALF: (86, 97, 289, 469),
        TALL: (94, 100),
    },
}  # fmt: skip


def plan_for(
    rows: int, depth: int, width: int, bits: int, block: int | None, generation: int, dense: bool = False
) -> Integral:
    """Return the candidate with the shortest estimate for ``rows`` of x and a weight [width depth] of ``bits``.

    ``dense`` says that the weight is a dense operand, which is quantised by rows too.
    """
    return _best(rows, depth, width, bits, block, generation, dense)


def candidates(block: int | None, generation: int, dense: bool = False) -> list[Integral]:
    """Return the plans for which the generation has registers: with blocks, a program has two sums an element.

    For blocks of 16, two of which are multiplied at a time, that is one plan.
    """
    if block is not None and block < 32:
        return [FEW_WIDE]
    kind = 0 if dense else 1 if block is None else 2
    return [plan for plan, counted in COUNTED[generation].items() if len(counted) > kind]


@lru_cache(maxsize=4096)
def _best(
    rows: int, depth: int, width: int, bits: int, block: int | None, generation: int, dense: bool
) -> Integral:  # fmt: skip
    seconds = lambda plan: estimate(plan, rows, depth, width, bits, block, generation, dense)
    return min(candidates(block, generation, dense), key=seconds)


def instructions(plan: Integral, block: int | None, generation: int, dense: bool = False) -> float:
    """Return the instructions of a thread in a step of the plan."""
    counted = COUNTED[generation][plan]
    if dense or block is None:
        return counted[0 if dense else 1]
    _, by_row, of_128, of_64 = counted
    return max(by_row, of_128 + (of_64 - of_128) * (128 / block - 1))


def estimate(
    plan: Integral, rows: int, depth: int, width: int, bits: int, block: int | None, generation: int,
    dense: bool = False, card: Card | None = None,
) -> float:  # fmt: skip
    """Return the seconds of a product of x [rows depth] with a weight of depth · width codes to y [rows width].

    ``card`` is the device's; the default is the usual one of the generation.
    """
    card = card or CARDS[generation]
    quantizing = LAUNCH + max(
        3 * rows * depth / card.bandwidth,
        rows * depth * QUANTIZING / (128 * ISSUED * min(card.processors, rows) * card.clock),
    )
    moved = (depth * width * bits / 8 + rows * (depth + 2 * width)) / card.bandwidth
    tiles = ceil(rows / plan.rows) * ceil(width / plan.columns)
    programs = ceil(tiles / card.processors)  # of the busiest multiprocessor
    room = min(programs, 16 // plan.warps if plan.rows <= 64 else 8 // plan.warps)  # at a time
    steps = programs * ceil(depth / plan.depth)
    issued = 128 * min(ISSUED, WARP * room * plan.warps / 4)
    computing = steps * instructions(plan, block, generation, dense) * 32 * plan.warps / issued
    multiplying = steps * plan.rows * plan.columns * plan.depth / (REACHED * card.operations)
    both = computing + multiplying - (OVERLAP * min(computing, multiplying) if room > 1 else 0)
    return quantizing + LAUNCH + max(moved, both / card.clock)
