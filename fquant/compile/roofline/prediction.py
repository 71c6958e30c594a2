"""Predict the seconds of a captured graph on a device, by kind of work, and the share of the limit that they leave.

    found = predict(captured.module.graph, DEVICES["h100"])
    found.seconds, found.share, found.by_kind

Each node takes the longest of arithmetic and memory (nodes.py), and nodes run one after another. A collective or a copy
runs beside them from its issue to its wait, on a stream of its own for each of three: collectives, copies to the
device, and copies to the host. The wait takes what is left then, which is *exposed*. ``serial`` is the time without
such overlap.

The *limit* is the time of the products of this graph and of its attention, at the FLOP/s that devices.py states: the
peak, times the share of it that such kernels reach. Thin products with adapters count, and so do those of blocks that
are computed again. Nothing else does: no memory, no launch, no decoding, no communication. The *share of the limit* is
this time over the seconds of a replay. What it lacks of 1 is the most that a schedule, a fusion or a kernel could gain.
``examples.plan`` prints the share of the predicted seconds. The progress of ``examples.qlora`` prints that of the
measured ones, and ``tests.bench.gpu`` both.

Not counted: waves of thread blocks that leave multiprocessors idle, contention for memory between streams, and clocks
that sink under load.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from torch.fx import Graph, Node

from .. import graph as graphs
from .devices import Device
from .nodes import ATTENTION, COLLECTIVE, COPY, LAUNCH, PRODUCT, THIN_PRODUCT, Work, work

COMPUTED = (PRODUCT, THIN_PRODUCT, ATTENTION)  # of which the limit is the sum


@dataclass(frozen=True)
class Prediction:
    """Seconds of a graph: by kind, collectives and copies as far as they are exposed; serial; and at the limit.

    ``copying`` are the seconds of copies to the host and back, exposed or not.
    """

    by_kind: Mapping[str, float]
    serial: float
    limit: float
    copying: float = 0.0

    @property
    def seconds(self) -> float:
        """Return the seconds of a replay."""
        return sum(self.by_kind.values())

    @property
    def share(self) -> float:
        """Return the limit over the seconds of a replay."""
        return self.limit / self.seconds if self.limit else 0.0

    @property
    def overlapped(self) -> float:
        """Return the share of the seconds of copies that other work hides; 1 without copies."""
        return 1 - self.by_kind.get(COPY, 0.0) / self.copying if self.copying else 1.0


class Spent(NamedTuple):
    """A part of the time of a replay, and the part of the limit in it."""

    node: Node
    kind: str
    seconds: float
    limit: float = 0.0
    serial: float = 0.0  # without overlap


def predict(graph: Graph, device: Device, kind: Callable[[Node, str], str] = lambda node, kind: kind) -> Prediction:
    """Return the prediction for a graph on ``device``; ``kind`` may rename the kind of a node's work."""
    by_kind, serial, limit, copying = dict[str, float](), 0.0, 0.0, 0.0
    for spent in walk(graph, device):
        name = kind(spent.node, spent.kind)
        by_kind[name] = by_kind.get(name, 0.0) + spent.seconds
        serial += spent.serial
        limit += spent.limit
        copying += spent.serial if spent.kind == COPY else 0.0
    return Prediction(by_kind, serial, limit, copying)


def limit(graph: Graph, device: Device) -> float:
    """Return the seconds of a graph at the limit; see the module."""
    return sum(part.computing(device) for node in graph.nodes for part in work(node, device) if part.kind in COMPUTED)


def walk(graph: Graph, device: Device) -> Iterator[Spent]:
    """Yield the time of each node in order, that of a collective or copy at its wait."""
    now, free, done = 0.0, dict[str, float](), dict[Node, tuple[str, float]]()
    for node in graph.nodes:
        if graphs.is_wait(node):
            kind, end = done.pop(graphs.issue_of(node), (COLLECTIVE, now))
            exposed, now = max(0.0, end - now), max(now, end)
            yield Spent(node, kind, exposed)
            continue
        for part in work(node, device):
            seconds = part.seconds(device)
            if part.kind in (COLLECTIVE, COPY):
                stream = graphs.transfer(node) or part.kind
                free[stream] = max(now, free.get(stream, 0.0)) + seconds
                done[node] = part.kind, free[stream]
                yield Spent(node, part.kind, 0.0, serial=seconds)
            else:
                yield Spent(node, part.kind, seconds, _limit(part, device), seconds)
                launches = part.launches * device.launch
                yield Spent(node, LAUNCH, launches, serial=launches)
                now += seconds + launches
    for node, (kind, end) in done.items():  # a stash that nothing waits for
        yield Spent(node, kind, max(0.0, end - now))
        now = max(now, end)


def _limit(part: Work, device: Device) -> float:
    return part.computing(device) if part.kind in COMPUTED else 0.0
