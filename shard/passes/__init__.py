"""Passes over a captured step that schedule its gathers, and a table of the schedule.

    step = jit(step, passes=(regather_blocks(), deduplicate_gathers(budget=64 << 20), prefetch_gathers(depth=1)))
    print(schedule_text(schedule(captured, mesh)))

A pass moves, copies or removes gathers of arguments, with the views and copies that lead from the argument to them. A
fetch from the host is such a gather, or the first half of one. Other collectives stay; ``overlap_reductions`` moves
waits for scattered sums. No gather passes a node that
writes what it reads. Results stay the same, bit for bit. Ranks whose collectives differ in order would wait for each
other forever, and graphs may differ, as shares of a batch do. So passes decide only by what is the same on every rank:
the order, sizes and uses of gathers. Time is counted in waits. ``offload_activations`` moves no collective, and may
count seconds.
"""

from .deduplicate import deduplicate_gathers
from .offload import offload_activations
from .prefetch import prefetch_gathers
from .reductions import overlap_reductions
from .regather import regather_blocks
from .report import Row, schedule, schedule_text

__all__ = [
    "Row", "deduplicate_gathers", "offload_activations", "overlap_reductions", "prefetch_gathers", "regather_blocks",
    "schedule", "schedule_text",
]  # fmt: skip
