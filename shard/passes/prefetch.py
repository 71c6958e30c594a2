"""schedule: passes over a captured step that say when its gathers are issued, and a table of when they are.

    step = jit(step, passes=(schedule.keep(budget=64 << 20), schedule.prefetch(depth=1)))
    print(schedule_text(schedule.show(captured, mesh)))

As traced, a block is gathered where it begins and waited for at once, so nothing else is done meanwhile. ``prefetch``
issues a gather before an earlier one is waited for: it travels while the blocks before its own compute, in the forward
and, as the recomputation gathers too, in the backward. ``keep`` gathers once what would be gathered again soon after,
as the last block is by its backward. Both trade memory, and ``budget`` bounds by how much.

Ranks that issue collectives in different orders wait for each other forever, and their graphs need not be the same:
shares of a batch differ in size. So everything here is decided by what is the same on every rank, the sequence of
gathers with their sizes; what is computed between them is not looked at. Time is counted in waits: a gather issued
before wait i is held while blocks i, i+1 ... compute, and which these are does not depend on how much they compute.

Only gathers of arguments move, with the views and copies that lead from the argument to them, and none moves past a
node that writes what it reads. Gathers of what is computed, sums and scatters stay where they are, waits as well. What
is moved changes no value: results are those of the step as it was, to the bit.
"""

from __future__ import annotations

import bisect
from dataclasses import dataclass

from torch.fx import Graph

from .gathers import _checked, gathers, writers


@dataclass(frozen=True)
class Prefetch:
    """The pass of :func:`prefetch`."""

    depth: int
    budget: int | None

    def __call__(self, g: Graph) -> None:
        """Move the gathers of ``g``."""
        _prefetch(g, self.depth, self.budget)


def prefetch_gathers(depth: int = 1, budget: int | None = None) -> Prefetch:
    """A pass that issues every gather ahead, up to ``depth`` of them being under way while a block computes.

    Gather k is issued before gather k - depth is waited for. Gathers keep their order. ``budget`` bounds the bytes
    that are held at any time because of it, and a gather that does not fit is issued as early as it does; None bounds
    nothing. Depth counts gathers, and not every block takes one: a final norm and a tied head take two.

    The pass raises ValueError for a collective that shard does not use and for a gather without a wait of its own.
    """
    if type(depth) is not int or depth < 1:
        raise ValueError(f"prefetch: depth is {depth!r}; wanted an integer of at least 1")
    return Prefetch(depth, _checked("prefetch", budget))


def _prefetch(g: Graph, depth: int, budget: int | None) -> None:
    found, written = gathers(g), writers(g)
    place = {node: i for i, node in enumerate(g.nodes)}
    waits = [place[x.wait] for x in found]
    early = [0] * len(found)  # bytes that are held because of early issue from wait i to the next
    first = 0  # the wait before which the one before is issued
    for k, x in enumerate(found):
        issued = place[x.issue]
        own = bisect.bisect(waits, issued)  # the first wait after its issue: its own, as traced
        for at in range(max(first, k - depth), own):
            full = budget is not None and max(early[at:own]) + x.nbytes > budget
            if not full and not written(x.reads, waits[at], issued):
                break
        else:
            at = own
        for node in (*x.chain, x.issue) if at < own else ():
            if place[node] > waits[at]:
                found[at].wait.prepend(node)
                place[node] = waits[at]
        early[at:own] = [held + x.nbytes for held in early[at:own]]
        first = at
