"""fuse: chains of elementwise nodes of a captured graph become one node each.

A product of matrices is a few nodes of a step, and what lies between them is hundreds: norms, activations, rotations,
casts, sums of gradients, the optimiser. Each reads its arguments from memory and writes its result to memory, though
most results are read once, by the next. Here such a chain becomes a program (fquant/kernels/ops/pointwise.py), which runs
through its arguments once and holds what is between in the nearest cache. Its bits are those of its nodes.

What only stands between such nodes is put aside before (fquant/compile/passes/canonicalize.py).

A group of nodes may run as one where its last member stands if nobody else has used a member before that. So nodes are
looked at in order: one joins the groups of its arguments if it has their shape, and a group that anybody else reads
takes no more. Neither does one whose arguments are about to be written over, nor one that would hold too much: run
later, it holds its arguments for longer, all the terms of a sum for instance, and the most that is held nearby is not
to rise. (So neither does the peak, and equal layers are fused alike, however far from it they are.) By the same rules a
group then runs with a later one that reads what it reads: the two gradients of a product, say.

A donated argument is written by the program that makes its new value, which is then nowhere else.

Only on CPUs, with the kernels of csrc/kernels.c; on other devices there is Inductor (``compile=True``).
"""

from __future__ import annotations

import operator
import os
import sys
from typing import Any

import torch
from torch.fx import Graph, Node

from ...kernels.dispatch import VARIABLE, backend
from ...kernels.ops.pointwise import OP
from ...kernels.ops.pointwise_program import Program, Step
from .. import graph as graphs
from .. import liveness
from .canonicalize import untangle
from .pointwise_lowering import COPY, SQUARE, constant, step_of

NEVER = sys.maxsize  # a place behind all others
SLACK = 2**16  # bytes that a group may hold in addition where the most is held
ABOUT = 256  # nodes before and behind a group, of which the most that is held is not to rise
READS, STEPS = 16, 48  # of one program at most: what it works on stays in the cache nearest to the core


def fuse_pointwise(graph: Graph) -> None:
    """Replace chains of elementwise nodes by one node each, where C computes them."""
    if not _in_c():
        return
    untangle(graph)
    groups = _Groups(graph)
    for place, node in enumerate(graph.nodes):
        groups.add(node, place)
    groups.pair()
    for group in groups.found:
        if len(group.members) > 1 and group.is_whole():
            _emit(graph, group)


def _in_c() -> bool:
    asked = os.environ.get(VARIABLE, "cpu").partition(":")[0]
    return asked == "cpu" and backend("cpu")[0] == "cpu"


class _Group:
    """Nodes of one shape that are to run as one."""

    def __init__(self, shape: torch.Size) -> None:
        self.shape, self.place = shape, 0  # the place is that of the last member
        self.members = dict[Node, Step | None]()  # None: a copy to what is donated
        self.over = set[int]()  # the memory that is written
        self.until = NEVER  # the place of the first node before which it has to run

    @property
    def is_open(self) -> bool:
        """Whether it takes more."""
        return self.until == NEVER

    def reads(self) -> list[Node]:
        """What members take that are none themselves, and no numbers."""
        near = [x for node in self.members for x in node.all_input_nodes]
        return [x for x in dict.fromkeys(near) if x not in self.members and constant(x) is None]

    def whole_reads(self) -> list[Node]:
        """Those that have its shape."""
        return [read for read in self.reads() if _shape(read) == self.shape]

    def is_whole(self) -> bool:
        """Whether the shape is that of what is read, and not of a constant."""
        reads = self.reads()
        return bool(reads) and torch.broadcast_shapes(*map(_shape, reads)) == self.shape

    def is_wanted(self, node: Node) -> bool:
        """Whether anybody else uses a member."""
        return not self.members.keys() >= node.users.keys()


class _Groups:
    """All groups of a graph, as its nodes are looked at in order."""

    def __init__(self, graph: Graph) -> None:
        self.found = list[_Group]()
        self.of = dict[Node, _Group]()
        self.using = dict[int, list[_Group]]()  # who reads or writes a storage
        self.writing = dict[int, _Group]()
        self.last = liveness.last_uses(graph)
        now = [now for _, now, _ in liveness.walk_memory(graph)]  # bytes while each node runs
        self.now = torch.tensor(now, dtype=torch.int64, device="cpu")

    def add(self, node: Node, place: int) -> None:
        """Let a node join groups, or begin one, and close those that it comes in the way of."""
        step, given = step_of(node), graphs.read_nodes(node)
        near = {id(self.of[x]): self.of[x] for x in given if x in self.of}
        joined = [group for group in near.values() if group.is_open and step and group.shape == _shape(node)]
        joined = [group for group in joined if self._may_wait(group, place)] if _may_join(node, joined) else []
        written = graphs.written_storages(node) if node.op == "call_function" else set()
        memory = {storage for x in given for storage in graphs.storages(x)}
        overwritten = [group for storage in written for group in self.using.get(storage, ())]
        overwriting = [self.writing[storage] for storage in memory & self.writing.keys()]
        for group in (*near.values(), *overwritten, *overwriting):
            group.until = group.until if group in joined else min(group.until, place)
        if step is None:
            return
        group = self._merged(joined) if joined else _Group(_shape(node))
        if not joined:
            self.found.append(group)
        group.members[node] = step if isinstance(step, Step) else None
        group.over |= written
        group.place = place
        self.of[node] = group
        self.writing |= dict.fromkeys(written, group)
        for storage in memory | written:
            self.using.setdefault(storage, []).append(group)

    def pair(self) -> None:
        """Let a group that may wait for another, and reads what that reads, run with it: so it is read once."""
        reading = dict[Node, list[_Group]]()
        for group in sorted(self.found, key=lambda group: group.place):
            if not group.members or group.over:
                continue
            for other in [other for read in group.whole_reads() for other in reading.get(read, ())]:
                members = other.members | group.members
                if not other.members or other is group or other.until <= group.place or len(members) > STEPS:
                    continue
                if len({*other.reads(), *group.reads()}) <= READS and self._may_wait(other, group.place):
                    group.members, group.until, other.members = members, min(group.until, other.until), {}
            for read in group.whole_reads():
                reading.setdefault(read, []).append(group)

    def _may_wait(self, group: _Group, place: int) -> bool:
        """Whether there is memory for a group to run at ``place``: it then holds what it reads until there."""
        reads = {storage: size for read in group.reads() for storage, size in _made(read).items()}
        held = {storage: size for storage, size in reads.items() if self.last[storage] < place}
        made = [_made(member) for member, step in group.members.items() if step is not None]
        more = sum(held.values()) - sum(n for sizes in made for s, n in sizes.items() if self.last[s] >= place)
        between, about = self.now[group.place + 1 : place], self.now[max(0, group.place - ABOUT) : place + ABOUT]
        if len(between) and more > SLACK and int(between.max()) + more > int(about.max()):
            return False
        between += max(more, 0)
        self.last |= dict.fromkeys(held, place)
        return True

    def _merged(self, groups: list[_Group]) -> _Group:
        first, *rest = groups
        for group in rest:
            first.members |= group.members
            first.over |= group.over
            self.of |= dict.fromkeys(group.members, first)
            self.writing |= dict.fromkeys(group.over, first)
            for storage in {storage for x in (*group.reads(), *group.members) for storage in graphs.storages(x)}:
                self.using.setdefault(storage, []).append(first)
            group.members = {}
        return first


def _may_join(node: Node, groups: list[_Group]) -> bool:
    """Whether all are small enough together; and what one writes the others may read only as it is, and before."""
    reads = {read for group in groups for read in group.reads()} | set(node.all_input_nodes)
    if len(reads) > READS or sum(len(group.members) for group in groups) >= STEPS:
        return False
    members = {member for group in groups for member in group.members}
    over = {storage for group in groups for storage in group.over}
    if any(graphs.storages(x) & over for x in node.all_input_nodes if x not in members):
        return False
    into, written = node.args[0] if node.target is COPY else None, graphs.written_storages(node)
    return all(read is into for read in reads if graphs.storages(read) & written)


def _shape(node: Node) -> torch.Size:
    return graphs.tensors(node)[0].shape


def _made(node: Node) -> dict[int, int]:
    """Bytes of each storage of a node that is no argument."""
    return {} if node.op == "placeholder" else graphs.sizes(node)


def _emit(graph: Graph, group: _Group) -> None:
    """Put the program of a group where its last member stands."""
    reads = group.reads()
    number = {node: i for i, node in enumerate(reads)}
    steps, over, written, known = list[Step](), list[int](), list[Any](), dict[str, int]()
    for node, step in group.members.items():
        if step is None:
            number[node] = number[node.args[1]]  # type: ignore[index]
            over.append(number[node])
            written.append(node.args[0])
            continue
        args = node.args if node.target is not SQUARE else (node.args[0],) * 2
        told = (constant(a) if constant(a) is not None else number[a] for a in args)  # type: ignore[index]
        step = step._replace(args=tuple(told))  # type: ignore[arg-type]
        number[node] = known.setdefault(repr(step), len(reads) + len(steps))
        if number[node] == len(reads) + len(steps):
            steps.append(step)
    wanted = [node for node, step in group.members.items() if step is not None and group.is_wanted(node)]
    program = Program(tuple(steps), tuple(number[node] for node in wanted), tuple(over))
    last = list(group.members)[-1]
    with graph.inserting_after(last):
        call = graph.call_function(OP, (reads, written, program.text))
    call.meta["val"] = [node.meta["val"] for node in wanted]
    with graph.inserting_after(call):
        for i, node in reversed(list(enumerate(wanted))):
            one = graph.call_function(operator.getitem, (call, i))
            one.meta["val"] = node.meta["val"]
            node.replace_all_uses_with(one)
    for node in reversed(group.members):
        if node.target is COPY:
            node.replace_all_uses_with(node.args[0])  # type: ignore[arg-type]
        near = node.all_input_nodes
        graph.erase_node(node)
        for number in near:
            if not number.users and constant(number) is not None:
                graph.erase_node(number)
