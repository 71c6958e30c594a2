"""recompute: what is cheap to make again is not kept from the forward to the backward.

A step holds the most where its forward ends: everything that the backward will read. Part of that is the result of a
matrix product, a collective or an attention, and worth its bytes. The rest are norms, activations, casts and sums,
which one pass over what they were made from makes again: a gated MLP keeps two products of its own and, because of
autograd, two more tensors of that size. This pass finds these in a captured graph, and puts their ops once more before
their first use behind the peak. The same ops of the same values: results stay what they were, to the bit. If nobody
waits for that use, a gradient of an adapter for instance, it is put off until what they are made from is read for
another purpose, and last: then one pass over that does both.

So of three choices that a block has, one is made here, for any model and without a word in it:

    save everything      jit(step, recompute=False)
    save selected        jit(step)
    save inputs          comm.wrap = remat, which computes matrix products again as well

What a tensor is made again from has to be there, and may not have been: a norm is made from its input, which is then
held in its place. :func:`_least` weighs the one against the other, down to what is no cheap op's result. (Kept or made
again is a minimum cut of the graph; Chen et al. 2016, "Training deep nets with sublinear memory cost", and torch's
partitioner do it for a forward and a backward that were traced apart. Here they are one list, and the peak divides it.)
"""

from __future__ import annotations

import operator

import torch
from torch.fx import Graph, Node

from ...kernels.ops import norm
from .. import graph as graphs
from .. import liveness

LEAST = 2**16  # bytes that are worth another op
NEAR = 32  # ops between two uses of a tensor, within which it is better kept
DEEP = 12  # ops in a row to make one tensor again
ROUNDS = 8  # the peak moves as it sinks

_aten = torch.ops.aten
_CHEAP = (_aten._to_copy.default, _aten.clone.default, _aten.mean.dim, norm.OP)


def rematerialize(graph: Graph) -> None:
    """Make cheap tensors again rather than holding them over the peak of memory, as long as the peak sinks."""
    before = None
    for _ in range(ROUNDS):
        peak = liveness.peak(graph)
        if (before is not None and peak.nbytes >= before) or not _Round(graph, peak).sink():
            return
        before = peak.nbytes


class _Round:
    """One peak: who reads behind it what was made before it, and what has been made again so far."""

    def __init__(self, graph: Graph, peak: liveness.Peak) -> None:
        self.graph, self.peak, self.nodes = graph, peak, list(graph.nodes)
        self.place: dict[Node, float] = {node: i for i, node in enumerate(self.nodes)}
        self.held = set(peak.holding)
        self.last = liveness.last_uses(graph)
        # Returned, or written in place: it is not made again, nor is anything that was made from what is written.
        self.written = set[int]().union(*map(graphs.written_storages, self.nodes))
        self.fixed = self.written.union(*map(graphs.storages, graphs.outputs(graph)))
        self.before = dict[int, int]()  # the last use before the peak of every storage
        self.readers = dict[int, list[tuple[Node, Node]]]()  # and who reads it behind the peak, by which node
        self.later = dict[int, list[Node]]()  # what lies in it behind the peak
        self.copies = dict[Node, Node]()
        for i, node in enumerate(self.nodes):
            if i > peak.place:
                for storage in graphs.storages(node):
                    self.later.setdefault(storage, []).append(node)
            for near in graphs.read_nodes(node):
                for storage in graphs.storages(near):
                    if i <= peak.place:
                        self.before[storage] = i
                    elif self.place[near] <= peak.place:
                        self.readers.setdefault(storage, []).append((node, near))

    def sink(self) -> bool:
        """Make again what can be; whether anything was."""
        made = {storage: self.place[maker] for storage, maker in self.peak.holding.items()}
        # What is decided of a tensor holds for what is made from it; what is used first is made again first.
        wanted = [storage for storage in sorted(made, key=made.__getitem__) if self._is_wanted(storage)]
        for storage in wanted:
            self._put_off(storage)
        for storage in sorted(wanted, key=self._first):
            self._once_more(storage)
        return bool(wanted)

    def _put_off(self, storage: int) -> None:
        """Move those who read it, if nobody waits for them, to where what it is made from is read last."""
        sources = {source: None for _, near in self.readers[storage] for source in self._sources(near)}
        places = [self.last[s] for source in sources for s in graphs.storages(source)]
        behind = max(places, default=0) + 1
        if behind == len(self.nodes):
            return  # one of them is returned
        while self._is_cheap(self.nodes[behind]) and not graphs.is_view(self.nodes[behind]):
            behind += 1  # the passes that begin there stay together, and run as one (fuse.py)
        early = [reader for reader, _ in self.readers[storage] if self.place[reader] < behind]
        if all(self._may_move(reader, storage, behind) for reader in early):
            for reader in early:
                self.nodes[behind].prepend(reader)
                self.place[reader] = behind - 0.5

    def _is_wanted(self, storage: int) -> bool:
        """Whether less is held if it is made again; then it counts as not held, and what it is made from as held."""
        if not self._is_candidate(storage):
            return False
        self.held.remove(storage)
        cost, kept = 0, set[Node]()
        for near in {near: None for _, near in self.readers[storage]}:
            more, nodes = self._least(near, DEEP)
            cost, kept = cost + (more if nodes - kept else 0), kept | nodes
        if self._nbytes(storage) - cost < LEAST:
            self.held.add(storage)
            return False
        for node in kept:
            self.held |= graphs.storages(node)
        return True

    def _is_candidate(self, storage: int) -> bool:
        if storage not in self.readers or self._nbytes(storage) < LEAST:
            return False
        made = self.place[self.peak.holding[storage]]
        return self.place[self.readers[storage][0][0]] - self.before.get(storage, made) > NEAR

    def _nbytes(self, storage: int) -> int:
        return graphs.sizes(self.peak.holding[storage])[storage]

    def _is_cheap(self, node: Node) -> bool:
        """Whether ``node`` is one pass over its arguments, one of the results of such a node, or a view."""
        target = node.target
        if node.op != "call_function" or graphs.storages(node) & self.fixed:
            return False
        if any(graphs.storages(near) & self.written for near in node.all_input_nodes):
            return False  # it may read something else by then
        if target is operator.getitem:
            return True
        if not isinstance(target, torch._ops.OpOverload):
            return False
        if torch.Tag.nondeterministic_seeded in target.tags:
            return False
        return target in _CHEAP or torch.Tag.pointwise in target.tags or graphs.is_view(node)

    def _sources(self, node: Node) -> dict[Node, None]:
        """What ``node`` is made from again."""
        if node.op == "placeholder":
            return {}
        if graphs.storages(node) <= self.held:
            return {node: None}
        return {source: None for near in node.all_input_nodes for source in self._sources(near)}

    def _may_move(self, reader: Node, storage: int, behind: int) -> bool:
        """Whether a node may run later, holding less for that than ``storage``."""
        if not isinstance(reader.target, torch._ops.OpOverload) or graphs.collective(reader) or graphs.is_wait(reader):
            return False
        memory = set().union(*map(graphs.storages, (reader, *reader.all_input_nodes)))
        if memory & self.written or any(self.place[user] < behind for user in reader.users):
            return False
        ending = [near for near in reader.all_input_nodes if near.op != "placeholder"]
        sizes = {s: n for near in ending for s, n in graphs.sizes(near).items() if self.last[s] < behind}
        return sum(n for s, n in sizes.items() if s != storage) < self._nbytes(storage)

    def _first(self, storage: int) -> float:
        return min(self.place[reader] for reader, _ in self.readers[storage])

    def _once_more(self, storage: int) -> None:
        at = min((reader for reader, _ in self.readers[storage]), key=self.place.__getitem__)
        for reader, near in self.readers[storage]:
            reader.replace_input_with(near, self._copy(near, at))
        for node in self.later.get(storage, ()):  # views of it lie in the new memory now
            graphs.refresh_value(node)

    def _least(self, node: Node, deep: int) -> tuple[int, set[Node]]:
        """The fewest bytes to hold in addition, to have ``node`` behind the peak, and what is held for that."""
        if node.op == "placeholder" or graphs.storages(node) <= self.held:
            return 0, set()
        keep = _nbytes(node)
        if deep == 0 or not self._is_cheap(node):
            return keep, {node}
        cost, kept = 0, set[Node]()
        for near in node.all_input_nodes:
            more, nodes = self._least(near, deep - 1)
            cost, kept = cost + more, kept | nodes
            if cost >= keep:
                return keep, {node}
        return cost, kept

    def _copy(self, node: Node, at: Node) -> Node:
        """``node`` made again before ``at``, unless it is there."""
        if node.op == "placeholder" or graphs.storages(node) <= self.held:
            return node
        if node not in self.copies:
            args = {near: self._copy(near, at) for near in node.all_input_nodes}
            with self.graph.inserting_before(at):
                copy = self.graph.node_copy(node, lambda near: args[near])
            graphs.refresh_value(copy)
            self.copies[node] = copy
        return self.copies[node]


def _nbytes(node: Node) -> int:
    return sum(graphs.sizes(node).values())
