"""The gathers of a graph, as its passes see them.

A gather brings an argument. It is a chain of nodes: the argument (``source``), views and copies of it (``chain``), the
node that issues the collective (``issue``), and the node that waits for it (``wait``). A copy may be a cast, or a
quantised message, which is decoded behind the wait; its scales are computed before (``sides``), and do not move.

An argument on the host is brought to the device by a fetch, which is a gather too. If ranks have parts of it, the fetch
and an all-gather follow each other: two *stages* of one gather.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.fx import Graph, Node

from fquant.compile import graph

COPIES = (torch.ops.aten.clone.default, torch.ops.aten._to_copy.default)
_ENCODE, _DECODE = "fquant.encode_message.default", "fquant.decode_messages.default"  # of shard.transport.wire
_NAMESPACES = ("c10d", "c10d_functional", "_c10d_functional", "_c10d_functional_autograd", "symm_mem")
_KNOWN = ("all_gather", "all_reduce", "reduce_scatter", "all_to_all", "all_to_all_single", "broadcast")


@dataclass(frozen=True)
class Stage:
    """One issue and its wait, and the views and copies that lead to it."""

    chain: tuple[Node, ...]
    issue: Node
    wait: Node

    @property
    def nbytes(self) -> int:
        """Bytes that issuing it takes: of its result and of copies in the chain."""
        new = [node for node in (*self.chain, self.issue) if not graph.is_view(node)]
        return sum(graph.nbytes(t) for node in new for t in graph.tensors(node))


@dataclass(frozen=True)
class Gather:
    """A gather of an argument; see the module's docstring."""

    source: Node
    stages: tuple[Stage, ...]

    @property
    def nodes(self) -> tuple[Node, ...]:
        """The nodes of all stages, in order."""
        return tuple(node for stage in self.stages for node in (*stage.chain, stage.issue, stage.wait))

    @property
    def issue(self) -> Node:
        """The issue of the first stage."""
        return self.stages[0].issue

    @property
    def wait(self) -> Node:
        """The wait of the last stage, which has the result."""
        return self.stages[-1].wait

    @property
    def result(self) -> Node:
        """The node with what was gathered: the wait, or the node that decodes it."""
        users = list(self.wait.users)
        return users[0] if len(users) == 1 and str(users[0].target) == _DECODE else self.wait

    @property
    def sides(self) -> tuple[Node, ...]:
        """Nodes that it reads beside its source: the scales of a message."""
        return tuple(near for node in self.nodes for near in node.all_input_nodes[1:])

    @property
    def key(self) -> object:
        """Equal for gathers with equal results, unless their source is written between."""
        form = lambda node: (node.target, str([x for x in node.args if not isinstance(x, Node)]), str(node.kwargs))
        return self.source, self.sides, *map(form, self.nodes)

    @property
    def nbytes(self) -> int:
        """Bytes that issuing all stages takes."""
        return sum(stage.nbytes for stage in self.stages)

    @property
    def reads(self) -> set[int]:
        """The memory that must not be written between issue and wait."""
        return graph.all_storages((self.source, *self.sides, *self.nodes[:-2]))


def gathers(g: Graph) -> list[Gather]:
    """Return the gathers and fetches of arguments, in the order of their waits.

    Raises ValueError for a collective that shard does not use, and for a gather without a wait of its own.
    """
    found = dict[Node, Gather]()
    for node in g.nodes:
        if collective_name(node) != "all_gather" and graph.transfer(node) != "fetch":
            continue
        wait, (source, chain) = wait_of(node), origin(node)
        if source.op == "placeholder":
            found[wait] = Gather(source, (Stage(chain, node, wait),))
        elif chain and chain[0] in found and graph.transfer(source) == "fetch" and _is_alone(chain):
            first = found.pop(chain[0])
            found[wait] = Gather(first.source, (*first.stages, Stage(chain[1:], node, wait)))
    return [found[node] for node in g.nodes if node in found]


def _is_alone(chain: tuple[Node, ...]) -> bool:
    """Return True if every node of a chain is used once."""
    return all(len(node.users) == 1 for node in chain)


def collective_name(node: Node) -> str | None:
    """Return the name of the collective that ``node`` issues, or None; raise ValueError for an unknown one."""
    name = graph.collective(node)
    if getattr(node.target, "namespace", None) in _NAMESPACES and name not in _KNOWN and not graph.is_wait(node):
        raise ValueError(f"{node.name}: {node.target} cannot be scheduled; use the collectives of shard")
    return name


def wait_of(issue: Node) -> Node:
    """Return the wait for a collective or a transfer; raise ValueError if it has another user."""
    users = list(issue.users)
    if len(users) != 1 or not graph.is_wait(users[0]):
        names = ", ".join(str(user.target) for user in users) or "nothing"
        raise ValueError(f"{issue.name}: is used by {names}; wanted a {_wait_name(issue)} of its own and nothing else")
    return users[0]


def _wait_name(issue: Node) -> str:
    return "wait_tensor" if graph.transfer(issue) is None else "wait (arrived)"


def origin(issue: Node) -> tuple[Node, tuple[Node, ...]]:
    """Return the origin of the input of a collective, and the views, waits and copies from there to it, in order."""
    (node, *_), chain = issue.all_input_nodes, []  # a store has what it replaces, and the tensor
    while str(node.target) == _ENCODE or (len(node.all_input_nodes) == 1 and _is_copy(node)):
        chain.insert(0, node)
        node = node.all_input_nodes[0]
    return node, tuple(chain)


def _is_copy(node: Node) -> bool:
    return graph.is_view(node) or node.target in COPIES


def positions(g: Graph) -> tuple[dict[Node, int], Callable[[set[int], int, int], bool]]:
    """Return the position of every node, and a predicate (memory, low, high).

    It is True if a node strictly between the two positions writes the memory.
    """
    at = {node: i for i, node in enumerate(g.nodes)}
    writers = [(at[node], written) for node in g.nodes if (written := graph.written_storages(node))]
    return at, lambda memory, low, high: any(low < i < high and memory & written for i, written in writers)


def check_budget(name: str, budget: int | None, option: str = "budget") -> None:
    """Raise ValueError unless ``budget`` is a number of bytes or None."""
    if budget is not None and (type(budget) is not int or budget < 0):
        raise ValueError(f"{name}: {option} is {budget!r}; wanted bytes, or None for no bound")
