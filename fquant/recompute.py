"""recompute: what is cheap to make again is not kept from the forward to the backward.

A step holds the most where its forward ends: everything that the backward will read. Part of that is the result of a
matrix product, a collective or an attention, and worth its bytes. The rest are norms, activations, casts and sums,
which one pass over what they were made from makes again: a gated MLP keeps two products of its own and, because of
autograd, two more tensors of that size. This pass finds these in a captured graph, and puts their ops once more before
their first use behind the peak. The same ops of the same values: results stay what they were, to the bit.

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

from . import graph as graphs
from .kernels import norm

LEAST = 2**16  # bytes that are worth another op
NEAR = 32  # ops between two uses of a tensor, within which it is better kept
DEEP = 12  # ops in a row to make one tensor again
ROUNDS = 8  # the peak moves as it sinks

_aten = torch.ops.aten
_CHEAP = (_aten._to_copy.default, _aten.clone.default, _aten.mean.dim, norm.OP)


def recompute(graph: Graph) -> None:
    """Make cheap tensors again rather than holding them over the peak of memory, as long as the peak sinks."""
    before = None
    for _ in range(ROUNDS):
        peak = graphs.peak(graph)
        if (before is not None and peak.nbytes >= before) or not _Round(graph, peak).sink():
            return
        before = peak.nbytes


class _Round:
    """One peak: who reads behind it what was made before it, and what has been made again so far."""

    def __init__(self, graph: Graph, peak: graphs.Peak) -> None:
        self.graph, self.peak, self.nodes = graph, peak, list(graph.nodes)
        self.place = {node: i for i, node in enumerate(self.nodes)}
        self.held = set(peak.holding)
        self.fixed = set[int]().union(*map(graphs.storages, graphs.outputs(graph)))  # returned, or written in place
        self.before = dict[int, int]()  # the last use before the peak of every storage
        self.readers = dict[int, list[tuple[Node, Node]]]()  # and who reads it behind the peak, by which node
        self.later = dict[int, list[Node]]()  # what lies in it behind the peak
        self.copies = dict[Node, Node]()
        for i, node in enumerate(self.nodes):
            self.fixed |= graphs.written(node)
            if i > peak.place:
                for storage in graphs.storages(node):
                    self.later.setdefault(storage, []).append(node)
            for near in graphs.given(node):
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
        for storage in sorted(wanted, key=lambda storage: self.place[self.readers[storage][0][0]]):
            self._once_more(storage)
        return bool(wanted)

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
        if target is operator.getitem:
            return True
        if not isinstance(target, torch._ops.OpOverload):
            return False
        if torch.Tag.nondeterministic_seeded in target.tags:
            return False
        return target in _CHEAP or torch.Tag.pointwise in target.tags or graphs.is_view(node)

    def _once_more(self, storage: int) -> None:
        at = self.readers[storage][0][0]
        for reader, near in self.readers[storage]:
            reader.replace_input_with(near, self._copy(near, at))
        for node in self.later.get(storage, ()):  # views of it lie in the new memory now
            graphs.revalue(node)

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
            graphs.revalue(copy)
            self.copies[node] = copy
        return self.copies[node]


def _nbytes(node: Node) -> int:
    return sum(graphs.sizes(node).values())
