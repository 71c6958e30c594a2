"""Gathers: split from shard.schedule."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.fx import Graph, Node

from fquant.compile import graph

_COPIES = (torch.ops.aten.clone.default,)
_NAMESPACES = ("c10d", "c10d_functional", "_c10d_functional", "_c10d_functional_autograd", "symm_mem")
_KNOWN = ("all_gather", "all_reduce", "reduce_scatter", "all_to_all_single", "broadcast")


def _checked(name: str, budget: int | None) -> int | None:
    if budget is not None and (type(budget) is not int or budget < 0):
        raise ValueError(f"{name}: budget is {budget!r}; wanted bytes, or None for no bound")
    return budget


@dataclass(frozen=True)
class Gather:
    """A gather of an argument: the nodes that lead to it from there, the one that issues it, and its wait."""

    source: Node
    chain: tuple[Node, ...]
    issue: Node
    wait: Node

    @property
    def what(self) -> object:
        """Equal for gathers that give the same, unless something is written between."""
        form = lambda node: (node.target, str([x for x in node.args if not isinstance(x, Node)]), str(node.kwargs))
        return self.source, *map(form, (*self.chain, self.issue))

    @property
    def nbytes(self) -> int:
        """Bytes that issuing it takes: of its result, and of what is copied for it."""
        made = [node for node in (*self.chain, self.issue) if not graph.is_view(node)]
        return sum(graph.nbytes(t) for node in made for t in graph.tensors(node))

    @property
    def reads(self) -> set[int]:
        """The memory that must not be written while it is under way."""
        return {storage for node in (self.source, *self.chain) for storage in graph.storages(node)}


def gathers(g: Graph) -> list[Gather]:
    """The gathers of arguments, in the order in which they are waited for."""
    found = {}
    for node in g.nodes:
        if _name(node) != "all_gather":
            continue
        wait, (source, chain) = _wait(node), _origin(node)
        if source.op == "placeholder":
            found[wait] = Gather(source, chain, node, wait)
    return [found[node] for node in g.nodes if node in found]


def _name(node: Node) -> str | None:
    """What collective a node issues; ValueError for one that is not known here."""
    name = graph.collective(node)
    if getattr(node.target, "namespace", None) in _NAMESPACES and name not in _KNOWN and not graph.is_wait(node):
        raise ValueError(f"{node.name}: {node.target} cannot be scheduled; use the collectives of shard")
    return name


def _wait(issue: Node) -> Node:
    users = list(issue.users)
    if len(users) != 1 or not graph.is_wait(users[0]):
        names = ", ".join(str(user.target) for user in users) or "nothing"
        raise ValueError(f"{issue.name}: is used by {names}; wanted a wait_tensor of its own and nothing else")
    return users[0]


def _origin(issue: Node) -> tuple[Node, tuple[Node, ...]]:
    """Where what a collective sends comes from, and the views and copies that lead from there to it, in order."""
    (node,), chain = issue.all_input_nodes, []
    while len(node.all_input_nodes) == 1 and (graph.is_view(node) or node.target in _COPIES):
        chain.insert(0, node)
        (node,) = node.all_input_nodes
    return node, tuple(chain)


def writers(g: Graph) -> Callable[[set[int], int, int], bool]:
    """Whether some memory is written strictly between two places of the graph."""
    places = [(place, written) for place, node in enumerate(g.nodes) if (written := graph.written_storages(node))]
    return lambda memory, low, high: any(low < place < high and memory & written for place, written in places)
