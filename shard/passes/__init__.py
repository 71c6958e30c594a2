"""Passes over a captured step that schedule its gathers, and a table of the schedule.

    step = jit(step, passes=(regather_blocks(), deduplicate_gathers(budget=64 << 20), prefetch_gathers(depth=1)))
    print(schedule_text(schedule(captured, mesh)))

Ranks that issue collectives in different orders wait for each other forever. Shares of a batch differ in size, and so
may graphs. So the passes decide only by what is the same on every rank: the order of the gathers of arguments, their
sizes and their uses. Time is counted in waits.

A pass moves, copies or removes gathers of arguments, with the views and copies that lead from the argument to them.
Other collectives stay. No gather passes a node that writes what it reads. Results stay the same, bit for bit.
"""

from .gathers import deduplicate_gathers, prefetch_gathers
from .regather import regather_blocks
from .report import Row, schedule, schedule_text

__all__ = ["Row", "deduplicate_gathers", "prefetch_gathers", "regather_blocks", "schedule", "schedule_text"]
