"""Prefetch: issue each gather before an earlier one is waited for, so that it travels while earlier blocks compute.

As traced, a block is gathered where it begins and waited for at once, so nothing overlaps with it. This pass costs the
memory of the gathers under way: one issued before wait i holds its memory while blocks i, i+1 ... compute.

A block that is fetched from the host and then gathered from all ranks has two stages. While a block computes, the next
is gathered, and the one after that is fetched.
"""

import bisect
from collections.abc import Iterator
from dataclasses import dataclass

from torch.fx import Graph, Node

from .gathers import Gather, check_budget, gathers, positions


@dataclass(frozen=True)
class PrefetchGathers:
    """Issue gathers ahead, so that up to ``depth`` are under way while a block computes.

    Gather k is issued before the wait for gather k - depth, and a fetch that it needs before k - 2·depth. Gathers keep
    their order. ``budget`` bounds the bytes that
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
        previous = dict[int, int]()  # by stages to come: the wait before which the previous gather's is issued
        for k, x in enumerate(found):
            issued, size, targets = at[x.issue], x.nbytes, list[int]()
            ready = max((at[node] for node in x.sides), default=-1)
            end = bisect.bisect(waits, issued)  # the first wait after its issue, which is its own as traced
            traced = end
            for ahead, stage in enumerate(reversed(x.stages), 1):
                for target in range(max(previous.get(ahead, 0), k - self.depth * ahead), end):
                    fits = self.budget is None or max(early[target:end]) + size <= self.budget
                    if fits and ready < waits[target] and not written(x.reads, waits[target], issued):
                        break
                else:
                    target = end
                early[target:end] = [held + size for held in early[target:end]]
                previous[ahead] = end = target
                size -= stage.nbytes  # the stages before it may be issued earlier still
                targets.insert(0, target)
            for node, target in _with_targets(x, targets):
                if target < traced and at[node] > waits[target]:
                    found[target].wait.prepend(node)
                    at[node] = waits[target]


def _with_targets(x: Gather, targets: list[int]) -> Iterator[tuple[Node, int]]:
    """Yield the nodes of a gather but its last wait, each with the target of its stage; a wait is of the next stage."""
    for i, (stage, target) in enumerate(zip(x.stages, targets, strict=True)):
        for node in (*(before.wait for before in x.stages[i - 1 : i]), *stage.chain, stage.issue):
            yield node, target


prefetch_gathers = PrefetchGathers
