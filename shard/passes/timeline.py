"""The time of copies between a device and the host beside the nodes of a graph.

Each direction is a stream of copies, which follow each other in the order of their issues, as in ``roofline.walk``. A
stash begins where it is issued, and is waited for where it will be complete. A fetch ends where it is waited for, and
is issued where it will arrive in time. Blocks of the base that are fetched keep their time, and others go between them.

Nodes take their seconds once elementwise chains are fused, and waits those that are left over before the pass.
"""

import bisect
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch.fx import Graph

from fquant.compile import graph, roofline

from .gathers import wait_of


@dataclass(frozen=True)
class RoundTrip:
    """A tensor that is held over a peak, to the host and back, by the indices of nodes."""

    storage: int
    nbytes: int
    last: int  # its last use before the peak, behind which the stash is issued
    first: int  # its first use behind the peak, before which the fetch is waited for
    low: int  # from this node to ``high`` it is to be on the host, even if the step waits for that
    high: int
    stashed: int = 0  # the stash is waited for before this node
    fetched: int = 0  # the fetch is issued before this node


class Timeline:
    """The nodes of a graph, the second in which each begins, and the copies that the graph has."""

    def __init__(self, g: Graph, device: roofline.Device) -> None:
        self.nodes, self.device = list(g.nodes), device
        self.begins = [0.0, *itertools.accumulate(roofline.seconds_if_fused(g, device))]
        at = {node: i for i, node in enumerate(self.nodes)}
        size = lambda node: sum(map(graph.nbytes, graph.tensors(node)))
        copies = {kind: [n for n in self.nodes if graph.transfer(n) == kind] for kind in ("stash", "fetch")}
        self.stashes = [(at[node], at[wait_of(node)], size(node)) for node in copies["stash"]]
        self.fetches, free = list[tuple[float, float, int]](), 0.0  # begin, end, and index of the issue
        for node in copies["fetch"]:
            begin = max(free, self.begins[at[node]])
            free = begin + self.copying(size(node))
            self.fetches.append((begin, free, at[node]))

    def copying(self, nbytes: int) -> float:
        """Return the seconds of a copy to the host or back."""
        return nbytes / (self.device.host * self.device.share.host) + self.device.latency

    def place(self, trips: Sequence[RoundTrip], waits: bool = False) -> list[RoundTrip] | None:
        """Return ``trips`` with the places of their copies; None if a stash is not complete where it must be.

        That is before the fetch of the same tensor, or before the wait that the graph has. With ``waits``
        each tensor is on the host from ``low`` to ``high``, though the step waits for the copies then.
        """
        stashed, fetched = self._stashed(trips), self._fetched(trips)
        if stashed is None:
            return None
        found = [replace(x, stashed=stashed[x.storage], fetched=fetched[x.storage]) for x in trips]
        if waits:
            found = [replace(x, stashed=min(x.stashed, x.low), fetched=max(x.fetched, x.high + 1)) for x in found]
        return found if all(x.stashed < x.fetched for x in found) else None

    def _stashed(self, trips: Sequence[RoundTrip]) -> dict[int, int] | None:
        """Return by storage the index of the node before which a stash is complete."""
        found, free = dict[int, int](), 0.0
        copies = [(i, n, wait, None) for i, wait, n in self.stashes] + [(x.last + 1, x.nbytes, 0, x) for x in trips]
        for issue, nbytes, wait, x in sorted(copies, key=lambda copy: copy[0]):
            free = max(free, self.begins[issue]) + self.copying(nbytes)
            if x is not None:
                found[x.storage] = bisect.bisect_left(self.begins, free)
            elif trips and free > self.begins[wait + 1]:
                return None
        return found

    def _fetched(self, trips: Sequence[RoundTrip]) -> dict[int, int]:
        """Return by storage the index of the node before which a fetch is issued, the last ones first."""
        found, free, before = dict[int, int](), math.inf, len(self.fetches)  # the graph's fetches that are left
        for x in sorted(trips, key=lambda x: -x.first):
            took = self.copying(x.nbytes)
            free = min(free, self.begins[x.first]) - took
            while before and self.fetches[before - 1][1] > free:  # it is under way then, or later
                before -= 1
                if (begin := self.fetches[before][0]) < free + took:
                    free = begin - took
            issue = bisect.bisect_right(self.begins, free) - 1
            found[x.storage] = max(issue, self.fetches[before - 1][2] + 1 if before else 0)
        return found
