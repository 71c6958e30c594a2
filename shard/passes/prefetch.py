"""Prefetch: issue each gather before an earlier one is waited for, so that it travels while earlier blocks compute.

As traced, a block is gathered where it begins and waited for at once, so nothing overlaps with it. This pass costs the
memory of the gathers under way: one issued before wait i holds its memory while blocks i, i+1 ... compute.
"""

import bisect
from dataclasses import dataclass

from torch.fx import Graph

from .gathers import check_budget, gathers, positions


@dataclass(frozen=True)
class PrefetchGathers:
    """Issue gathers ahead, so that up to ``depth`` are under way while a block computes.

    Gather k is issued before the wait for gather k - depth. Gathers keep their order. ``budget`` bounds the bytes that
    prefetching holds at any time; None is no bound. A gather that does not fit is issued as early as it fits. Depth
    counts gathers, and some blocks have two, such as a final norm with a tied head.

    Raises ValueError for a bad ``depth`` or ``budget``. The pass raises the errors of :func:`gathers`.
    """

    depth: int = 1
    budget: int | None = None

    def __post_init__(self) -> None:
        if type(self.depth) is not int or self.depth < 1:
            raise ValueError(f"prefetch_gathers: depth is {self.depth!r}; wanted an integer of at least 1")
        check_budget("prefetch_gathers", self.budget)

    def __call__(self, g: Graph) -> None:
        found, (at, written) = gathers(g), positions(g)
        waits = [at[x.wait] for x in found]
        early = [0] * len(found)  # bytes held by early issue, from wait i to the next
        previous = 0  # the wait before which the previous gather is issued
        for k, x in enumerate(found):
            issued = at[x.issue]
            traced = bisect.bisect(waits, issued)  # the first wait after its issue, which is its own as traced
            for target in range(max(previous, k - self.depth), traced):
                fits = self.budget is None or max(early[target:traced]) + x.nbytes <= self.budget
                if fits and not written(x.reads, waits[target], issued):
                    break
            else:
                target = traced
            for node in (*x.chain, x.issue) if target < traced else ():
                if at[node] > waits[target]:
                    found[target].wait.prepend(node)
                    at[node] = waits[target]
            early[target:traced] = [held + x.nbytes for held in early[target:traced]]
            previous = target


prefetch_gathers = PrefetchGathers
