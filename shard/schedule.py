"""schedule: passes over a captured step that say when its gathers are issued, and a table of when they are.

    step = jit(step, passes=(schedule.keep(budget=64 << 20), schedule.prefetch(depth=1)))
    print(schedule.text(schedule.show(captured, mesh)))

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
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.fx import Graph, Node

from fquant import graph
from fquant.capture import Captured
from fquant.flops import flops

_COPIES = (torch.ops.aten.clone.default,)
_NAMESPACES = ("c10d", "c10d_functional", "_c10d_functional", "_c10d_functional_autograd", "symm_mem")
_KNOWN = ("all_gather", "all_reduce", "reduce_scatter", "all_to_all_single", "broadcast")


@dataclass(frozen=True)
class Prefetch:
    """The pass of :func:`prefetch`."""

    depth: int
    budget: int | None

    def __call__(self, g: Graph) -> None:
        """Move the gathers of ``g``."""
        _prefetch(g, self.depth, self.budget)


@dataclass(frozen=True)
class Keep:
    """The pass of :func:`keep`."""

    budget: int | None

    def __call__(self, g: Graph) -> None:
        """Take out gathers of ``g``."""
        _keep(g, self.budget)


@dataclass(frozen=True)
class Row:
    """One collective of a schedule; places count the calls of the graph from 0."""

    name: str  # all_gather, all_reduce, reduce_scatter ...
    axis: str  # of the mesh, or the name of the group where no mesh was given
    of: str  # the path of the argument that is sent, or its name in a graph without paths; "" for what is computed
    nbytes: int  # of the whole gathered or summed buffer
    issued: int
    waited: int
    ops: int  # between the two, without views and collectives
    flops: int  # of these


def prefetch(depth: int = 1, budget: int | None = None) -> Prefetch:
    """A pass that issues every gather ahead, up to ``depth`` of them being under way while a block computes.

    Gather k is issued before gather k - depth is waited for. Gathers keep their order. ``budget`` bounds the bytes
    that are held at any time because of it, and a gather that does not fit is issued as early as it does; None bounds
    nothing. Depth counts gathers, and not every block takes one: a final norm and a tied head take two.

    The pass raises ValueError for a collective that shard does not use and for a gather without a wait of its own.
    """
    if type(depth) is not int or depth < 1:
        raise ValueError(f"prefetch: depth is {depth!r}; wanted an integer of at least 1")
    return Prefetch(depth, _checked("prefetch", budget))


def keep(budget: int | None = None) -> Keep:
    """A pass that gathers a shard once where its next gather comes soon enough, and uses the first result again.

    The nearest pairs of gathers are joined first, as long as the bytes held between a first and its second are at no
    time more than ``budget``; None joins all of them, so that a step gathers every shard once.

    The pass raises what that of :func:`prefetch` raises.
    """
    return Keep(_checked("keep", budget))


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
    places = [(place, written) for place, node in enumerate(g.nodes) if (written := graph.written(node))]
    return lambda memory, low, high: any(low < place < high and memory & written for place, written in places)


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


def _keep(g: Graph, budget: int | None) -> None:
    found, written = gathers(g), writers(g)
    place = {node: i for i, node in enumerate(g.nodes)}
    kept = {storage for node in graph.outputs(g) for storage in graph.storages(node)}
    before: dict[object, int] = {}
    pairs = []
    for k, x in enumerate(found):
        if x.what in before:
            pairs.append((k - before[x.what], before[x.what], k))
        before[x.what] = k
    held = [0] * len(found)  # bytes that are kept from wait i to the next
    result = [x.wait for x in found]
    for _, i, k in sorted(pairs):
        one, two = found[i], found[k]
        memory = graph.storages(one.wait) | graph.storages(two.wait)
        if budget is not None and max(held[i:k]) + one.nbytes > budget:
            continue
        if written(one.reads, place[one.issue], place[two.wait]) or written(memory, 0, len(place)) or memory & kept:
            continue
        held[i:k] = [n + one.nbytes for n in held[i:k]]
        graph.substitute(two.wait, result[i])
        result = [result[i] if wait is two.wait else wait for wait in result]
        for node in (two.wait, two.issue, *reversed(two.chain)):
            if not node.users:
                g.erase_node(node)


def show(x: Captured | Graph, mesh: DeviceMesh | None = None) -> list[Row]:
    """The collectives of what was captured, in the order in which they are issued.

    Raises ValueError as the passes do.
    """
    g = x.module.graph if isinstance(x, Captured) else x
    arguments = [node for node in g.nodes if node.op == "placeholder"]
    names = x.paths if isinstance(x, Captured) else [node.name for node in arguments]
    path = dict(zip(arguments, names, strict=True))
    calls = [node for node in g.nodes if node.op == "call_function"]
    place = {node: i for i, node in enumerate(calls)}
    axes, rows = _axes(mesh), []
    for node in calls:
        name = _name(node)
        if name is None:
            continue
        wait, group = _wait(node), str(node.args[-1])
        between = [n for n in calls[place[node] + 1 : place[wait]] if not graph.is_view(n) and _name(n) is None]
        size = max(graph.nbytes(t) for near in (node, *node.all_input_nodes) for t in graph.tensors(near))
        of, work = path.get(_origin(node)[0], ""), sum(map(flops, between))
        rows.append(Row(name, axes.get(group, group), of, size, place[node], place[wait], len(between), work))
    return rows


def _axes(mesh: DeviceMesh | None) -> dict[str, str]:
    """The axis of each group, by its name; a group of all ranks is along all axes."""
    if mesh is None:
        return {}
    used = [name for i, name in enumerate(mesh.mesh_dim_names or ()) if mesh.size(i) > 1]
    world = dist.group.WORLD
    assert world is not None
    return {str(world.group_name): "*".join(used)} | {str(mesh.get_group(name).group_name): name for name in used}


def text(rows: list[Row]) -> str:
    """A schedule as a table of text, a line a collective."""
    head = ("collective", "axis", "of", "KiB", "issued", "waited", "ops between", "MFLOP between")
    lines = [head] + [
        (
            row.name, row.axis, row.of or "(computed)", f"{row.nbytes / 1024:.1f}", str(row.issued), str(row.waited),
            str(row.ops), f"{row.flops / 1e6:.2f}",
        )
        for row in rows
    ]  # fmt: skip
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    left = 3  # columns of words; the others are numbers
    return "\n".join(
        "  ".join(f"{cell:{'<' if i < left else '>'}{widths[i]}}" for i, cell in enumerate(line)).rstrip()
        for line in lines
    )
