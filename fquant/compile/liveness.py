"""Liveness: split from fquant.compile.graph."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping

from torch.fx import Graph, Node

from .graph import read_nodes, sizes, storages


def last_uses(graph: Graph) -> dict[int, int]:
    """For every storage the place in the graph of the last node that makes, views, reads or returns it."""
    last: dict[int, int] = {}
    for place, node in enumerate(graph.nodes):
        for near in (node, *read_nodes(node)):
            for storage in storages(near):
                last[storage] = place
    return last


def walk_memory(graph: Graph) -> Iterator[tuple[Node, int, Mapping[int, Node]]]:
    """Every node in the order in which they run, the bytes that are there while it does, and who made them.

    Arguments are there from the beginning to the end, what a node makes until its last use or that of a view. The
    mapping is by storage, and is the walk's own: it changes as the walk goes on.
    """
    last, alive, size, now = last_uses(graph), dict[int, Node](), dict[int, int](), 0
    for place, node in enumerate(graph.nodes):
        for storage, nbytes in sizes(node).items():
            if storage not in alive:
                alive[storage], size[storage] = node, nbytes
                now += nbytes
        yield node, now, alive
        for near in (node, *read_nodes(node)):
            for storage in storages(near) & alive.keys():
                if last[storage] == place and node.op != "output" and alive[storage].op != "placeholder":
                    now -= size[storage]
                    del alive[storage]


@dataclasses.dataclass(frozen=True)
class Peak:
    """Where in a graph the most memory is held: after the node at ``place``, by the nodes that made ``holding``."""

    place: int
    nbytes: int
    holding: dict[int, Node]  # by storage


def peak(graph: Graph) -> Peak:
    """The peak of :func:`memory`, the first where there are several."""
    found = Peak(0, 0, {})
    for place, (_, now, alive) in enumerate(walk_memory(graph)):
        if now > found.nbytes:
            found = Peak(place, now, dict(alive))
    return found
