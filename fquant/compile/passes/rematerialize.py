"""Rematerialisation: cheap tensors are computed again in the backward rather than held since the forward.

A step holds the most memory where its forward ends: everything that the backward will read. Results of matrix
products, collectives and attention are worth their bytes. Norms, activations, casts and sums are cheap: one pass over
their arguments computes them again. Of a gated MLP this keeps two products, where autograd holds two more tensors of
that size. The pass repeats the ops of such tensors before their first use behind the peak, so results keep every bit.
If no node waits for that use, e.g. for an adapter's gradient, it is delayed to the last use of the same sources. Then
one pass over memory computes both. Without it (``recompute=False``) everything is saved; with ``comm.wrap = remat``
only a block's inputs are.

The sources of a repeated tensor must be live: a norm, for instance, then holds its input instead. The pass compares the
bytes, down to results of ops that are not cheap. To keep or to recompute is a minimum cut of the graph (Chen et al.
2016, "Training deep nets with sublinear memory cost"; torch's partitioner). Here one graph has both forward and
backward, and its peak divides them.
"""

import math
import operator

import torch
from torch.fx import Graph, Node

from ...kernels.ops import norm
from .. import graph as graphs
from .. import liveness

MIN_BYTES = 2**16  # that justify another op
MIN_DISTANCE = 32  # nodes between two uses of a tensor, within which it is kept
MAX_DEPTH = 12  # ops in a row to compute one tensor again
MAX_ROUNDS = 8  # because the peak moves as it sinks

_aten = torch.ops.aten
_CHEAP = (_aten._to_copy.default, _aten.clone.default, _aten.mean.dim, norm.OP)


def rematerialize(graph: Graph) -> None:
    """Compute cheap tensors again rather than holding them over the peak of memory, as long as the peak sinks."""
    before = math.inf
    for _ in range(MAX_ROUNDS):
        peak = liveness.peak(graph)
        if peak.nbytes >= before or not _PeakReduction(graph, peak).apply():
            return
        before = peak.nbytes


class _PeakReduction:
    """The liveness of a graph around one peak, and the tensors that have been computed again so far."""

    def __init__(self, graph: Graph, peak: liveness.Peak) -> None:
        self.graph, self.makers, self.nodes = graph, peak.holding, list(graph.nodes)
        self.place: dict[Node, float] = {node: i for i, node in enumerate(self.nodes)}
        self.held = set(peak.holding)
        self.size = {storage: graphs.sizes(maker)[storage] for storage, maker in self.makers.items()}
        self.last = liveness.last_uses(graph)
        self.written = graphs.all_written_storages(graph)
        self.fixed = self.written | graphs.all_storages(graphs.outputs(graph))  # never computed again
        self.last_before = dict[int, int]()  # by storage, its last use before the peak
        self.readers = dict[int, list[tuple[Node, Node]]]()  # its readers behind the peak, and the nodes they read
        self.later = dict[int, list[Node]]()  # its views behind the peak
        self.copies = dict[Node, Node]()
        for i, node in enumerate(self.nodes):
            if i > peak.place:
                for storage in graphs.storages(node):
                    self.later.setdefault(storage, []).append(node)
            for argument in graphs.read_nodes(node):
                for storage in graphs.storages(argument):
                    if i <= peak.place:
                        self.last_before[storage] = i
                    elif self.place[argument] <= peak.place:
                        self.readers.setdefault(storage, []).append((node, argument))

    def apply(self) -> bool:
        """Compute again every tensor for which less is held then; return True if there is any."""
        # In the order in which they were made, because a choice holds for the tensors made from it.
        in_order = sorted(self.makers, key=lambda storage: self.place[self.makers[storage]])
        chosen = [storage for storage in in_order if self._choose(storage)]
        for storage in chosen:
            self._delay_readers(storage)
        first = {s: min((reader for reader, _ in self.readers[s]), key=self.place.__getitem__) for s in chosen}
        for storage, at in sorted(first.items(), key=lambda item: self.place[item[1]]):
            for reader, argument in self.readers[storage]:
                reader.replace_input_with(argument, self._recompute(argument, at))
            for node in self.later.get(storage, ()):  # its views have the new storage
                graphs.refresh_value(node)
        return bool(chosen)

    def _choose(self, storage: int) -> bool:
        """Return True if recomputation holds less; from then on the sources count as held, and the storage not."""
        if storage not in self.readers or self.size[storage] < MIN_BYTES:
            return False
        last_before = self.last_before.get(storage, self.place[self.makers[storage]])
        if self.place[self.readers[storage][0][0]] - last_before <= MIN_DISTANCE:
            return False
        self.held.remove(storage)
        cost, kept = 0, set[Node]()
        for argument in dict.fromkeys(argument for _, argument in self.readers[storage]):
            added, nodes = self._recompute_cost(argument, MAX_DEPTH)
            cost, kept = cost + (added if nodes - kept else 0), kept | nodes
        if self.size[storage] - cost < MIN_BYTES:
            self.held.add(storage)
            return False
        self.held |= graphs.all_storages(kept)
        return True

    def _recompute_cost(self, node: Node, depth: int) -> tuple[int, set[Node]]:
        """Return the fewest bytes to hold in addition for ``node`` behind the peak, and the nodes to hold."""
        if self._is_held(node):
            return 0, set()
        own = sum(graphs.sizes(node).values())
        if depth == 0 or not self._is_cheap(node):
            return own, {node}
        cost, kept = 0, set[Node]()
        for argument in node.all_input_nodes:
            added, nodes = self._recompute_cost(argument, depth - 1)
            cost, kept = cost + added, kept | nodes
            if cost >= own:
                return own, {node}
        return cost, kept

    def _is_held(self, node: Node) -> bool:
        return node.op == "placeholder" or graphs.storages(node) <= self.held

    def _is_cheap(self, node: Node) -> bool:
        """Return True if ``node`` is one pass over its arguments, one of the results of such a node, or a view."""
        target, written = node.target, self.written & graphs.all_storages(node.all_input_nodes)  # before it runs again
        if node.op != "call_function" or written or graphs.storages(node) & self.fixed:
            return False
        if target is operator.getitem:
            return True
        if not isinstance(target, torch._ops.OpOverload) or torch.Tag.nondeterministic_seeded in target.tags:
            return False
        return target in _CHEAP or torch.Tag.pointwise in target.tags or graphs.is_view(node)

    def _delay_readers(self, storage: int) -> None:
        """Move the readers of a storage, if no node waits for them, to where its sources are read last."""
        sources = {source: None for _, argument in self.readers[storage] for source in self._sources(argument)}
        behind = max((self.last[s] for s in graphs.all_storages(sources)), default=0) + 1
        if behind == len(self.nodes):
            return  # a source is returned
        while self._is_cheap(self.nodes[behind]) and not graphs.is_view(self.nodes[behind]):
            behind += 1  # the elementwise nodes that begin there stay together to fuse
        early = [reader for reader, _ in self.readers[storage] if self.place[reader] < behind]
        if all(self._may_delay(reader, storage, behind) for reader in early):
            for reader in early:
                self.nodes[behind].prepend(reader)
                self.place[reader] = behind - 0.5

    def _sources(self, node: Node) -> dict[Node, None]:
        """Return the held nodes from which ``node`` is computed again, without inputs of the graph."""
        if self._is_held(node):
            return {} if node.op == "placeholder" else {node: None}
        return {source: None for argument in node.all_input_nodes for source in self._sources(argument)}

    def _may_delay(self, reader: Node, storage: int, behind: int) -> bool:
        """Return True if a node may run later without holding more for that than the bytes of ``storage``."""
        if not isinstance(reader.target, torch._ops.OpOverload) or graphs.is_issue(reader) or graphs.is_wait(reader):
            return False
        memory = graphs.all_storages((reader, *reader.all_input_nodes))
        if memory & self.written or any(self.place[user] < behind for user in reader.users):
            return False
        sizes = {s: n for x in reader.all_input_nodes if x.op != "placeholder" for s, n in graphs.sizes(x).items()}
        return sum(n for s, n in sizes.items() if self.last[s] < behind and s != storage) < self.size[storage]

    def _recompute(self, node: Node, at: Node) -> Node:
        """Return a copy of ``node``, computed again before ``at`` unless there is one; held nodes are returned."""
        if self._is_held(node):
            return node
        if node not in self.copies:
            args = {argument: self._recompute(argument, at) for argument in node.all_input_nodes}
            with self.graph.inserting_before(at):
                copy = self.graph.node_copy(node, args.__getitem__)
            graphs.refresh_value(copy)
            self.copies[node] = copy
        return self.copies[node]
