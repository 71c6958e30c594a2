"""The gathers of a graph, and passes that issue them ahead and join them.

A gather of an argument is a chain of nodes: the argument (``source``), views and copies of it (``chain``), the node
that issues the collective (``issue``), and the node that waits for it (``wait``).

*Prefetch* issues each gather before an earlier one is waited for, so that it travels while earlier blocks compute. As
traced, a block is gathered where it begins and waited for at once. A gather issued before wait i holds its memory while
blocks i, i+1 ... compute.

*Deduplicate* gathers once what would be gathered again soon, and uses the first result again. The last block of a
forward, for example, is gathered again by the backward at once. It costs the memory between the two uses.
"""

import bisect
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.fx import Graph, Node

from fquant.compile import graph

_COPIES = (torch.ops.aten.clone.default,)
_NAMESPACES = ("c10d", "c10d_functional", "_c10d_functional", "_c10d_functional_autograd", "symm_mem")
_KNOWN = ("all_gather", "all_reduce", "reduce_scatter", "all_to_all_single", "broadcast")


@dataclass(frozen=True)
class Gather:
    """A gather of an argument; see the module's docstring."""

    source: Node
    chain: tuple[Node, ...]
    issue: Node
    wait: Node

    @property
    def key(self) -> object:
        """Equal for gathers with equal results, unless their source is written between."""
        form = lambda node: (node.target, str([x for x in node.args if not isinstance(x, Node)]), str(node.kwargs))
        return self.source, *map(form, (*self.chain, self.issue))

    @property
    def nbytes(self) -> int:
        """Bytes that issuing it takes: of its result and of copies in the chain."""
        new = [node for node in (*self.chain, self.issue) if not graph.is_view(node)]
        return sum(graph.nbytes(t) for node in new for t in graph.tensors(node))

    @property
    def reads(self) -> set[int]:
        """The memory that must not be written between issue and wait."""
        return graph.all_storages((self.source, *self.chain))


def gathers(g: Graph) -> list[Gather]:
    """Return the gathers of arguments, in the order of their waits.

    Raises ValueError for a collective that shard does not use, and for a gather without a wait of its own.
    """
    found = {}
    for node in g.nodes:
        if collective_name(node) == "all_gather":
            wait, (source, chain) = wait_of(node), origin(node)
            if source.op == "placeholder":
                found[wait] = Gather(source, chain, node, wait)
    return [found[node] for node in g.nodes if node in found]


def collective_name(node: Node) -> str | None:
    """Return the name of the collective that ``node`` issues, or None; raise ValueError for an unknown one."""
    name = graph.collective(node)
    if getattr(node.target, "namespace", None) in _NAMESPACES and name not in _KNOWN and not graph.is_wait(node):
        raise ValueError(f"{node.name}: {node.target} cannot be scheduled; use the collectives of shard")
    return name


def wait_of(issue: Node) -> Node:
    """Return the wait for a collective; raise ValueError if it has another user."""
    users = list(issue.users)
    if len(users) != 1 or not graph.is_wait(users[0]):
        names = ", ".join(str(user.target) for user in users) or "nothing"
        raise ValueError(f"{issue.name}: is used by {names}; wanted a wait_tensor of its own and nothing else")
    return users[0]


def origin(issue: Node) -> tuple[Node, tuple[Node, ...]]:
    """Return the origin of the input of a collective, and the views and copies from there to it, in order."""
    (node,), chain = issue.all_input_nodes, []
    while len(node.all_input_nodes) == 1 and (graph.is_view(node) or node.target in _COPIES):
        chain.insert(0, node)
        (node,) = node.all_input_nodes
    return node, tuple(chain)


def positions(g: Graph) -> tuple[dict[Node, int], Callable[[set[int], int, int], bool]]:
    """Return the position of every node, and a predicate (memory, low, high).

    It is True if a node strictly between the two positions writes the memory.
    """
    at = {node: i for i, node in enumerate(g.nodes)}
    writers = [(at[node], written) for node in g.nodes if (written := graph.written_storages(node))]
    return at, lambda memory, low, high: any(low < i < high and memory & written for i, written in writers)


def _check_budget(name: str, budget: int | None) -> None:
    if budget is not None and (type(budget) is not int or budget < 0):
        raise ValueError(f"{name}: budget is {budget!r}; wanted bytes, or None for no bound")


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
        _check_budget("prefetch_gathers", self.budget)

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


@dataclass(frozen=True)
class DeduplicateGathers:
    """Gather a shard once if its next gather comes soon, and use the first result again.

    The nearest pairs of gathers are joined first. The bytes held between a first gather and its second are at no time
    more than ``budget``. None joins all pairs, so that a step gathers every shard once.

    Raises ValueError for a bad ``budget``. The pass raises the errors of :func:`gathers`.
    """

    budget: int | None = None

    def __post_init__(self) -> None:
        _check_budget("deduplicate_gathers", self.budget)

    def __call__(self, g: Graph) -> None:
        found, (at, written), returned = gathers(g), positions(g), graph.all_storages(graph.outputs(g))
        latest: dict[object, int] = {}
        pairs = []  # (distance, first, second) of gathers with equal results
        for k, x in enumerate(found):
            if x.key in latest:
                pairs.append((k - latest[x.key], latest[x.key], k))
            latest[x.key] = k
        held = [0] * len(found)  # bytes that are kept from wait i to the next
        result = [x.wait for x in found]
        for _, i, k in sorted(pairs):
            first, second = found[i], found[k]
            memory = graph.storages(first.wait) | graph.storages(second.wait)
            if self.budget is not None and max(held[i:k]) + first.nbytes > self.budget:
                continue
            changed = written(first.reads, at[first.issue], at[second.wait]) or written(memory, 0, len(at))
            if changed or memory & returned:
                continue
            held[i:k] = [n + first.nbytes for n in held[i:k]]
            graph.replace_uses(second.wait, result[i])
            result = [result[i] if wait is second.wait else wait for wait in result]
            for node in (second.wait, second.issue, *reversed(second.chain)):
                if not node.users:
                    g.erase_node(node)


deduplicate_gathers, prefetch_gathers = DeduplicateGathers, PrefetchGathers
