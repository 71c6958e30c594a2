"""Offload activations: stash on the host what the backward reads late, and fetch it shortly before.

A step holds the most memory where its forward ends. Every activation that the backward will read is held over this
peak, the first layer's for the longest. The link to the host is idle meanwhile, but for blocks that are fetched. So the
pass stashes such tensors after the last use in the forward, and fetches them ahead of the first use in the backward. A
copy has the bits of the tensor, and so has the step. (Rhu et al. 2016, "vDNN"; Beaumont et al. 2020 for the choice.)

A tensor is left out if its copies, or those chosen before it, would be too late for the peak (timeline.py).

*The choice.* Tensors that are held over the peak are tried by bytes times the seconds between their uses. Each one that
is chosen may move the peak, and those over the next are tried. With ``room``, copies for which the step waits are added
as long as the peak is above: a tensor is then on the host for as long as memory is short.

    step                                     seconds    peak, GiB    stashed, GiB
    Llama-3-8B, 4 x 2048, selective, H100     0.520         29.6
    with this pass                            0.525         18.3            11.3

Run the pass behind those that move gathers, and behind ``rematerialize``: to compute a cheap tensor again is cheaper.

    passes = (regather_blocks(), prefetch_gathers(), rematerialize, offload_activations())
"""

import bisect
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch.fx import Graph, Node

from fquant.compile import graph, liveness, roofline
from fquant.device import HOST

from ..transport.host import arrived, fetch, stash
from .gathers import check_budget
from .timeline import RoundTrip, Timeline


@dataclass(frozen=True)
class OffloadActivations:
    """Stash activations of ``min_bytes`` or more until the peak has sunk by ``reduce`` bytes, or the link is busy.

    If the peak is above ``room`` bytes then, more are stashed, for which the step waits. The seconds are those of
    ``device``. ``reduce`` None is no bound, ``room`` None asks for nothing. Raises ValueError for bad numbers.
    """

    min_bytes: int = 1 << 20
    reduce: int | None = None
    device: roofline.Device = roofline.DEVICES["h100"]
    room: int | None = None

    def __post_init__(self) -> None:
        for option in ("reduce", "min_bytes", "room"):
            check_budget("offload_activations", getattr(self, option), option)

    def __call__(self, g: Graph) -> None:
        by = _Choice(g, self)
        goal = -math.inf if self.reduce is None else int(by.live.max()) - self.reduce
        chosen = by.choose(goal, [])
        if self.room is not None:
            chosen = by.choose(self.room, chosen, waits=True)
        _move(chosen, by)


offload_activations = OffloadActivations


class _Choice:
    """The bytes that each node needs, the uses of tensors that may be copied, and the time of their copies."""

    def __init__(self, g: Graph, options: OffloadActivations) -> None:
        self.options, self.time = options, Timeline(g, options.device)
        self.nodes, self.begins = self.time.nodes, self.time.begins
        near = graph.storages_on_device(g) - graph.storages_offloaded(g)
        live = [n + roofline.scratch(node, options.device) for node, n, _ in liveness.walk_memory(g, near)]
        self.live = torch.tensor(live, dtype=torch.int64, device=HOST)
        self._read_uses(g, near)

    def _read_uses(self, g: Graph, near: set[int]) -> None:
        """Find the indices of the uses of every tensor that may be copied, in order, and the node that fills it."""
        fixed = graph.all_storages((*graph.outputs(g), *g.find_nodes(op="placeholder")))
        fixed |= graph.all_written_storages(g)
        self.sizes, self.bases = dict[int, int](), dict[int, Node]()
        self.uses, self.ends = dict[int, list[int]](), dict[int, int]()  # of collectives that read it
        for i, node in enumerate(self.nodes):
            if graph.is_issue(node):
                fixed |= graph.storages(node)
            for storage, nbytes in graph.sizes(node).items():
                if storage in near and storage not in fixed and nbytes >= self.options.min_bytes:
                    self.sizes[storage] = nbytes
            own = graph.all_storages((node, *node.all_input_nodes))
            for storage in (own | graph.all_storages(graph.read_nodes(node))) & self.sizes.keys():
                self.uses.setdefault(storage, []).append(i)
                if storage not in own:
                    self.ends[storage] = i
                if storage not in self.bases and _fills(node, storage):
                    self.bases[storage] = node

    def choose(self, goal: float, chosen: list[RoundTrip], waits: bool = False) -> list[RoundTrip]:
        """Return more tensors than ``chosen``, with the places of their copies, until the peak is at the goal.

        Without ``waits`` all copies are in time. With it a tensor is on the host wherever the memory is above the goal.
        """
        live, bounds = self._live(chosen), dict[tuple[int, int], RoundTrip | None]()
        while (top := int(live.max())) > goal:
            peak = int((live == top).nonzero()[0])
            for x in self._held(peak, {each.storage for each in chosen}):
                known = bounds.get((x.storage, x.last), x)
                if known is None or (known.fetched and not known.stashed <= peak < known.fetched):
                    continue
                if waits:
                    above = x.last + 1 + (live[x.last + 1 : x.first] > goal).nonzero()
                    x = replace(x, low=int(above[0]), high=int(above[-1]))
                if (placed := self.time.place([*chosen, x], waits)) is None:
                    bounds[x.storage, x.last] = None
                    continue
                later = self._live(placed)
                if int(later[peak]) < top and int(later.max()) <= top:
                    chosen, live = placed, later
                    break
                # As more are chosen, a stash ends later and a fetch begins earlier.
                is_over = placed[-1].stashed <= peak < placed[-1].fetched
                bounds[x.storage, x.last] = None if is_over else placed[-1]
            else:
                break
        return chosen

    def _live(self, chosen: Sequence[RoundTrip]) -> torch.Tensor:
        """Return the bytes that are live at each node once ``chosen`` are on the host between their copies."""
        live = self.live.clone()
        for x in chosen:
            live[x.stashed : max(x.stashed, x.fetched)] -= x.nbytes
        return live

    def _held(self, peak: int, chosen: set[int]) -> Iterator[RoundTrip]:
        """Return the tensors that are held over a peak and may be copied, those of the longest use of memory first."""
        found = list[RoundTrip]()
        for storage, uses in self.uses.items():
            behind = bisect.bisect_right(uses, peak)
            is_free = storage in self.bases and storage not in chosen and self.ends.get(storage, 0) <= peak
            if is_free and 0 < behind < len(uses) and uses[behind - 1] < peak:
                size = self.sizes[storage]
                found.append(RoundTrip(storage, size, uses[behind - 1], uses[behind], peak, peak))
        worth = lambda x: x.nbytes * (self.begins[x.first] - self.begins[x.last])
        return filter(self._is_whole, sorted(found, key=worth, reverse=True))

    def _is_whole(self, x: RoundTrip) -> bool:
        """Return True if all uses behind the peak can be made of a copy of the tensor."""
        late = {n for i in self.uses[x.storage] if i >= x.first for n in self.nodes[i].all_input_nodes}
        return all(_is_view_of(n, self.bases[x.storage], x.storage) for n in late if x.storage in graph.storages(n))


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


def _move(chosen: Sequence[RoundTrip], by: _Choice) -> None:
    """Copy tensors to the host and back, in the order of the timeline, and let the nodes behind use the copies."""
    far, nodes = dict[int, Node](), by.nodes
    for x in sorted(chosen, key=lambda x: x.last):
        far[x.storage] = graph.insert_before(nodes[x.last + 1], stash, (by.bases[x.storage],))
    for x in chosen:
        far[x.storage] = graph.insert_before(nodes[x.stashed], arrived, (far[x.storage],))
    for x in reversed(sorted(chosen, key=lambda x: -x.first)):
        (t,) = graph.tensors(base := by.bases[x.storage])
        near = graph.insert_before(nodes[x.fetched], fetch, (far[x.storage], t.device))
        near = graph.insert_before(nodes[x.first], arrived, (near,))
        _replace(base, near, [nodes[i] for i in by.uses[x.storage] if i >= x.first])


def _replace(base: Node, near: Node, users: Sequence[Node]) -> None:
    """Let ``users`` use ``near``, and views of it, in place of ``base`` and its views."""
    copies, first, (storage,) = {base: near}, users[0], graph.storages(base)

    def copy(node: Node) -> Node:
        if node not in copies:
            args = {near: copy(near) for near in node.all_input_nodes}
            with node.graph.inserting_before(first):
                new = node.graph.node_copy(node, args.__getitem__)
            graph.refresh_value(new)
            copies[node] = new
        return copies[node]

    for node in users:
        for given in node.all_input_nodes:
            if storage in graph.storages(given):
                node.replace_input_with(given, copy(given))
        if storage in graph.storages(node):  # a view, whose storage is now that of the copy
            graph.refresh_value(node)
