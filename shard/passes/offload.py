"""Offload activations: stash on the host what the backward reads late, and fetch it shortly before.

A step holds the most memory where its forward ends. Every activation that the backward will read is held over this
peak, the first layer's for the longest. The link to the host is idle meanwhile, but for blocks that are fetched. So the
pass stashes such tensors after the last use in the forward, and fetches them ahead of the first use in the backward. A
copy has the bits of the tensor, and so has the step. (Rhu et al. 2016, "vDNN"; Beaumont et al. 2020 for the choice.)

The link's time decides how much. A stash is waited for where the copy will be complete. A fetch is issued where it will
arrive in time, by the seconds of the nodes between. Copies of one direction follow each other. Those that would not be
complete before the peak, or could only begin before it, are left out: they would make the step wait. Tensors are chosen
by bytes times the seconds between their uses, as long as the link has time and the peak is above the goal. As the peak
sinks it moves, and the pass looks again.

Run the pass behind those that move gathers, and behind ``rematerialize``: to compute a cheap tensor again is cheaper.

    passes = (regather_blocks(), prefetch_gathers(), rematerialize, offload_activations())
"""

import bisect
import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch.fx import Graph, Node

from fquant.compile import graph, liveness, roofline

from ..transport.host import arrived, fetch, stash
from .gathers import check_budget, wait_of

MAX_ROUNDS = 8  # because the peak moves as it sinks


@dataclass(frozen=True)
class OffloadActivations:
    """Stash activations of ``min_bytes`` or more until the peak has sunk by ``reduce`` bytes, or the link is busy.

    The seconds are those of ``device``. ``reduce`` None is no bound. Raises ValueError for bad numbers.
    """

    min_bytes: int = 1 << 20
    reduce: int | None = None
    device: roofline.Device = roofline.DEVICES["h100"]

    def __post_init__(self) -> None:
        check_budget("offload_activations", self.reduce, "reduce")
        check_budget("offload_activations", self.min_bytes, "min_bytes")

    def __call__(self, g: Graph) -> None:
        goal, before = None, math.inf
        for _ in range(MAX_ROUNDS):
            peak = liveness.peak(g, graph.storages_on_device(g) - graph.storages_offloaded(g))
            if goal is None:
                goal = -math.inf if self.reduce is None else peak.nbytes - self.reduce
            if peak.nbytes <= goal or peak.nbytes >= before:
                return
            line = _Timeline(g, peak, self)
            chosen = line.choose(peak.nbytes - goal)
            for x in chosen:
                _move(x, line.nodes)
            if not chosen:
                return
            before = peak.nbytes


offload_activations = OffloadActivations


@dataclass(frozen=True)
class _Held:
    """A tensor that is held over the peak: its node, the last use before, the first behind; see :class:`_Timeline`."""

    base: Node
    storage: int
    nbytes: int
    last: int
    first: int
    stashed: int = 0  # the index of the node before which the stash is waited for
    fetched: int = 0  # and of that before which the fetch is issued


class _Timeline:
    """The nodes of a graph by the second in which they begin, the tensors held over its peak, and copies under way."""

    def __init__(self, g: Graph, peak: liveness.Peak, options: OffloadActivations) -> None:
        self.nodes, self.peak, self.options = list(g.nodes), peak, options
        self.begins = [0.0, *itertools.accumulate(map(self._seconds, self.nodes))]
        at = {node: i for i, node in enumerate(self.nodes)}
        size = lambda node: sum(map(graph.nbytes, graph.tensors(node)))
        issues = {kind: [n for n in self.nodes if graph.transfer(n) == kind] for kind in ("stash", "fetch")}
        self.stashes = [(at[node], size(node)) for node in issues["stash"]]  # indices of issue, and of wait
        self.fetches = [(at[wait_of(node)], size(node)) for node in issues["fetch"]]
        self.fixed = graph.all_storages((*graph.outputs(g), *g.find_nodes(op="placeholder")))
        self.fixed |= graph.all_written_storages(g)

    def _seconds(self, node: Node) -> float:
        """Return the seconds of a node; collectives and transfers run beside others."""
        return 0.0 if graph.is_issue(node) else roofline.seconds(node, self.options.device)

    def _copying(self, nbytes: int) -> float:
        """Return the seconds of a copy to the host or back."""
        device = self.options.device
        return nbytes / (device.host * device.share.host) + device.latency

    def choose(self, wanted: float) -> list[_Held]:
        """Return tensors of ``wanted`` bytes, or fewer if the link has no time, with the places of their copies."""
        worth = lambda x: x.nbytes * (self.begins[x.first] - self.begins[x.last])
        chosen, placed = list[_Held](), list[_Held]()
        for x in sorted(self._held(), key=worth, reverse=True):
            if sum(each.nbytes for each in chosen) >= wanted:
                break
            if (found := self._place([*chosen, x])) is not None:
                chosen, placed = [*chosen, x], found
        return placed

    def _held(self) -> Iterator[_Held]:
        """Yield the tensors that are held over the peak and may be copied."""
        chosen = {
            storage: graph.sizes(maker)[storage]
            for storage, maker in self.peak.holding.items()
            if storage not in self.fixed and not graph.is_issue(maker)
            if graph.sizes(maker)[storage] >= self.options.min_bytes
        }
        bases, used, in_flight = dict[int, Node](), dict[int, list[int]](), set[int]()
        for i, node in enumerate(self.nodes):
            near = graph.all_storages((node, *node.all_input_nodes))
            for storage in (near | graph.all_storages(graph.read_nodes(node))) & chosen.keys():
                used.setdefault(storage, []).append(i)
                if storage not in near and i > self.peak.place:
                    in_flight.add(storage)  # of a collective, which reads it until this wait
                if storage not in bases and _fills(node, storage):
                    bases[storage] = node
        for storage, nbytes in chosen.items():
            last = max(i for i in used[storage] if i <= self.peak.place)
            later = [i for i in used[storage] if i > self.peak.place]
            base = bases.get(storage)
            if base is None or not later or storage in in_flight:
                continue
            late = {n for i in later for n in self.nodes[i].all_input_nodes if storage in graph.storages(n)}
            if all(_is_view_of(n, base, storage) for n in late):
                yield _Held(base, storage, nbytes, last, later[0])

    def _place(self, chosen: list[_Held]) -> list[_Held] | None:
        """Return the tensors with the places of their copies; None if one cannot be copied in time."""
        stashed, fetched = dict[int, int](), dict[int, int]()
        copies = [(i, n, None) for i, n in self.stashes] + [(x.last + 1, x.nbytes, x) for x in chosen]
        free = 0.0
        for issue, nbytes, x in sorted(copies, key=lambda copy: copy[0]):
            free = max(free, self.begins[issue]) + self._copying(nbytes)
            if x is not None:
                stashed[x.storage] = bisect.bisect_left(self.begins, free)
        copies = [(i, n, None) for i, n in self.fetches] + [(x.first, x.nbytes, x) for x in chosen]
        free = math.inf
        for wait, nbytes, x in sorted(copies, key=lambda copy: -copy[0]):
            free = min(free, self.begins[wait]) - self._copying(nbytes)
            if x is not None:
                fetched[x.storage] = bisect.bisect_right(self.begins, free) - 1
        if max(stashed.values()) > self.peak.place or min(fetched.values()) <= self.peak.place:
            return None
        return [replace(x, stashed=stashed[x.storage], fetched=fetched[x.storage]) for x in chosen]


def _fills(node: Node, storage: int) -> bool:
    """Return True if a node returns one tensor, which is dense and has all of the storage."""
    t = node.meta.get("val")
    if not isinstance(t, torch.Tensor) or graph.sizes(node) != {storage: graph.nbytes(t)}:
        return False
    return bool(torch.ops.aten.is_non_overlapping_and_dense(t))


def _is_view_of(node: Node, base: Node, storage: int) -> bool:
    """Return True for ``base`` and its views, which can be made of a copy of ``base`` too."""
    inputs = node.all_input_nodes
    return node is base or (
        graph.is_view(node)
        and not graph.is_wait(node)
        and all(storage in graph.storages(x) and _is_view_of(x, base, storage) for x in inputs)
    )


def _move(x: _Held, nodes: list[Node]) -> None:
    """Copy a tensor to the host and back, and let the nodes behind the peak use the copy, or views of it."""
    (t,) = graph.tensors(x.base)
    far = graph.insert_before(nodes[x.last + 1], stash, (x.base,))
    far = graph.insert_before(nodes[x.stashed], arrived, (far,))
    near = graph.insert_before(nodes[x.fetched], fetch, (far, t.device))
    copies = {x.base: graph.insert_before(nodes[x.first], arrived, (near,))}

    def copy(node: Node) -> Node:
        if node not in copies:
            args = {near: copy(near) for near in node.all_input_nodes}
            with node.graph.inserting_before(nodes[x.first]):
                new = node.graph.node_copy(node, args.__getitem__)
            graph.refresh_value(new)
            copies[node] = new
        return copies[node]

    for node in nodes[x.first :]:
        for near in node.all_input_nodes:
            if x.storage in graph.storages(near):
                node.replace_input_with(near, copy(near))
        if x.storage in graph.storages(node):  # a view, whose storage is now that of the copy
            graph.refresh_value(node)
