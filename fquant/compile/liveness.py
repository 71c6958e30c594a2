"""Liveness of a captured graph: for how long each storage is held, and where the most memory is held at once.

A storage is live from the node that makes it to the last node that reads, views or returns it. Inputs of the graph are
live throughout, because the caller holds them. A collective reads its inputs until it is waited for (``graph.py``).
Storages on the graph's device count; those that the host has beside it are another memory.
"""

import dataclasses
from collections.abc import Callable, Collection, Iterator, Mapping

from torch.fx import Graph, Node

from .graph import all_storages, read_nodes, sizes, storages_offloaded, storages_on_device


def last_uses(graph: Graph) -> dict[int, int]:
    """Return for each storage the index of the last node that makes, views, reads or returns it."""
    last: dict[int, int] = {}
    for place, node in enumerate(graph.nodes):
        last |= dict.fromkeys(all_storages((node, *read_nodes(node))), place)
    return last


def walk_memory(graph: Graph, among: Collection[int] | None = None) -> Iterator[tuple[Node, int, Mapping[int, Node]]]:
    """Yield each node in order, the bytes live while it runs, and their makers by storage, which the walk changes.

    The storages ``among`` count, by default those on the graph's device.
    """
    among = storages_on_device(graph) if among is None else among
    last, live, size, total = last_uses(graph), dict[int, Node](), dict[int, int](), 0
    for place, node in enumerate(graph.nodes):
        for storage, nbytes in sizes(node).items():
            if storage in among and storage not in live:
                live[storage], size[storage] = node, nbytes
                total += nbytes
        yield node, total, live
        for storage in all_storages((node, *read_nodes(node))) & live.keys():
            if last[storage] == place and node.op != "output" and live[storage].op != "placeholder":
                total -= size[storage]
                del live[storage]


@dataclasses.dataclass(frozen=True)
class Peak:
    """The peak of live memory: the index of its node, the bytes, and the nodes that made them by storage."""

    place: int
    nbytes: int
    holding: dict[int, Node]


def peak(graph: Graph, among: Collection[int] | None = None, scratch: Callable[[Node], int] = lambda node: 0) -> Peak:
    """Return the first point of :func:`walk_memory` at which the most bytes are live, those of ``scratch`` included.

    That is the bytes which a node takes while it runs, beside its arguments and results.
    """
    found = Peak(0, 0, {})
    for place, (node, total, live) in enumerate(walk_memory(graph, among)):
        total += scratch(node)
        if total > found.nbytes:
            found = Peak(place, total, dict(live))
    return found


def peak_on_host(graph: Graph) -> int:
    """Return the most bytes of the host that are live at once in what is fetched and stashed."""
    return max((total for _, total, _ in walk_memory(graph, storages_offloaded(graph))), default=0)
