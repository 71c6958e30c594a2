"""Pointwise fusion: chains of elementwise nodes of a captured graph become one node each, with the same bits.

A step has few matrix products and hundreds of elementwise nodes. Each reads and writes memory, though most results are
read once, by the next node. A fused chain is a program (``fquant/kernels/ops/pointwise.py``), which traverses memory
once and keeps intermediate values in the nearest cache. ``canonicalize.py`` first removes what is between such nodes.

A group of nodes may run as one, at the place of its last member, if no other node uses a member before. So nodes are
visited in order: each joins the groups of its arguments if it has their shape, and a group that another node reads is
closed. Run later, a node holds its arguments longer, e.g. all the terms of a sum; the most that is held nearby must not
rise. Because the rest of the graph does not count, equal layers fuse alike. By the same rules a group then joins a
later one that reads the same tensors. The program that makes the new value of a donated argument also writes it.

The pass applies to nodes on devices whose backend has programs (``dispatch.runs_programs``). All nodes of a group are
on one device.
"""

import operator
import sys
from typing import Any, NamedTuple

import torch
from torch.fx import Graph, Node

from ...device import HOST
from ...kernels.dispatch import runs_programs
from ...kernels.ops.pointwise import OP
from ...kernels.ops.pointwise_program import Program, Step
from .. import graph as graphs
from .. import liveness
from .canonicalize import canonicalize, erase_unused
from .pointwise_lowering import COPY, constant_value, step_of, with_arguments

NO_DEADLINE = sys.maxsize  # an index behind all nodes
MEMORY_SLACK = 2**16  # bytes that a group may add to the most that is held nearby
PEAK_WINDOW = 256  # nodes before and behind a group that count as nearby
MAX_READS, MAX_STEPS = 16, 48  # of one program, so that its working set stays in the nearest cache


def fuse_pointwise(graph: Graph) -> None:
    """Replace chains of elementwise nodes by one node each, on devices that run programs."""
    if not any(map(runs_programs, {t.device.type for node in graph.nodes for t in graphs.tensors(node)})):
        return
    canonicalize(graph)
    grouping = _Grouping(graph)
    for place, node in enumerate(graph.nodes):
        grouping.add(node, place)
    for group in grouping.pair():
        reads = group.reads()
        if len(group.members) > 1 and reads and torch.broadcast_shapes(*map(graphs.shape, reads)) == group.kind.shape:
            _replace_with_program(graph, group.members, reads)


class _Kind(NamedTuple):
    """The shape and the device of the members of a group."""

    shape: torch.Size
    device: torch.device


def _kind_of(node: Node) -> _Kind:
    t = graphs.tensors(node)[0]
    return _Kind(t.shape, t.device)


class _Group:
    """Nodes of one shape and device that are to run as one program."""

    def __init__(self, kind: _Kind) -> None:
        self.kind, self.place = kind, 0  # the place is that of the last member
        self.members = dict[Node, Step | None]()  # None: a copy into a donated argument
        self.written = set[int]()  # storages that such copies write
        self.deadline = NO_DEADLINE  # the place of the first node that needs the group to have run

    def reads(self) -> list[Node]:
        """Return the arguments of members that are neither members nor constants."""
        arguments = dict.fromkeys(x for node in self.members for x in node.all_input_nodes)
        return [x for x in arguments if x not in self.members and constant_value(x) is None]


class _Grouping:
    """The groups of a graph, formed while its nodes are visited in order."""

    def __init__(self, graph: Graph) -> None:
        self.group_of = dict[Node, _Group]()
        self.users = dict[int, list[_Group]]()  # groups that read or write a storage
        self.writers = dict[int, _Group]()
        self.last = liveness.last_uses(graph)
        live = [nbytes for _, nbytes, _ in liveness.walk_memory(graph)]  # while each node runs
        self.live = torch.tensor(live, dtype=torch.int64, device=HOST)

    def add(self, node: Node, place: int) -> None:
        """Join a node to the groups of its arguments or to a new one, and close the groups that must run before it."""
        step, arguments = step_of(node), graphs.read_nodes(node)
        near = list(dict.fromkeys(self.group_of[x] for x in arguments if x in self.group_of))
        joined = [g for g in near if g.deadline == NO_DEADLINE and step and g.kind == _kind_of(node)]
        joined = [g for g in joined if self._may_defer(g, place)] if _may_join(node, joined) else []
        written = graphs.written_storages(node) if node.op == "call_function" else set()
        read = graphs.all_storages(arguments)
        overwritten = [group for storage in written for group in self.users.get(storage, ())]
        overwriting = [self.writers[storage] for storage in read & self.writers.keys()]
        for group in (*near, *overwritten, *overwriting):
            if group not in joined:
                group.deadline = min(group.deadline, place)
        if step is None:
            return
        group = self._merge(joined) if joined else _Group(_kind_of(node))
        group.members[node] = step if isinstance(step, Step) else None
        group.written |= written
        group.place = place
        self.group_of[node] = group
        self.writers |= dict.fromkeys(written, group)
        for storage in read | written:
            self.users.setdefault(storage, []).append(group)

    def pair(self) -> list[_Group]:
        """Merge a group into a later one that reads the same tensors, which are then read once; return all in order."""
        readers = dict[Node, list[_Group]]()
        full_reads = lambda group: [read for read in group.reads() if graphs.shape(read) == group.kind.shape]
        groups = sorted(set(self.group_of.values()), key=lambda group: group.place)
        for group in groups:
            if group.written:
                continue
            for other in [other for read in full_reads(group) for other in readers.get(read, ())]:
                members = other.members | group.members
                if not other.members or other is group or other.deadline <= group.place or len(members) > MAX_STEPS:
                    continue
                if len({*other.reads(), *group.reads()}) <= MAX_READS and self._may_defer(other, group.place):
                    group.members, other.members = members, {}
                    group.deadline = min(group.deadline, other.deadline)
            for read in full_reads(group):
                readers.setdefault(read, []).append(group)
        return groups

    def _may_defer(self, group: _Group, place: int) -> bool:
        """Return True, and account for it, if there is memory to hold a group's reads until ``place``."""
        reads = [read for read in group.reads() if read.op != "placeholder"]  # which are held in any case
        held = {s: size for read in reads for s, size in graphs.sizes(read).items() if self.last[s] < place}
        results = [graphs.sizes(member) for member, step in group.members.items() if step is not None]
        added = sum(held.values()) - sum(n for sizes in results for s, n in sizes.items() if self.last[s] >= place)
        between = self.live[group.place + 1 : place]
        nearby = self.live[max(0, group.place - PEAK_WINDOW) : place + PEAK_WINDOW]
        if len(between) and added > MEMORY_SLACK and int(between.max()) + added > int(nearby.max()):
            return False
        between += max(added, 0)
        self.last |= dict.fromkeys(held, place)
        return True

    def _merge(self, groups: list[_Group]) -> _Group:
        first, *rest = groups
        for group in rest:
            first.members |= group.members
            first.written |= group.written
            self.group_of |= dict.fromkeys(group.members, first)
            self.writers |= dict.fromkeys(group.written, first)
            for storage in graphs.all_storages((*group.reads(), *group.members)):
                self.users.setdefault(storage, []).append(first)
            group.members = {}
        return first


def _may_join(node: Node, groups: list[_Group]) -> bool:
    """Return True if a program of ``groups`` and ``node`` is small enough and reads nothing that it overwrites.

    A copy may overwrite what others read if they read its target itself, and not another view of it.
    """
    reads = {read for group in groups for read in group.reads()} | set(node.all_input_nodes)
    if len(reads) > MAX_READS or sum(len(group.members) for group in groups) >= MAX_STEPS:
        return False
    members = {member for group in groups for member in group.members}
    overwritten = {storage for group in groups for storage in group.written}
    if overwritten & graphs.all_storages(x for x in node.all_input_nodes if x not in members):
        return False
    target, written = node.args[0] if node.target is COPY else None, graphs.written_storages(node)
    return all(read is target for read in reads if graphs.storages(read) & written)


def _replace_with_program(graph: Graph, members: dict[Node, Step | None], reads: list[Node]) -> None:
    """Replace the members of a group by one program at the place of the last."""
    number = {node: i for i, node in enumerate(reads)}  # of the program's values
    steps, over, written, known = list[Step](), list[int](), list[Any](), dict[str, int]()
    for node, step in members.items():
        if step is None:
            number[node] = number[node.args[1]]  # type: ignore[index]
            over.append(number[node])
            written.append(node.args[0])
            continue
        step = with_arguments(node, step, number)
        next_number = len(reads) + len(steps)
        number[node] = known.setdefault(repr(step), next_number)  # by text: value 1 equals constant 1.0
        if number[node] == next_number:
            steps.append(step)
    results = [node for node, step in members.items() if step is not None and not members.keys() >= node.users.keys()]
    program = Program(tuple(steps), tuple(number[node] for node in results), tuple(over))
    behind = list(members)[-1].next
    values = [node.meta["val"] for node in results]
    call = graphs.insert_before(behind, OP, (reads, written, program.text), values)
    for i, (node, value) in enumerate(zip(results, values, strict=True)):
        node.replace_all_uses_with(graphs.insert_before(behind, operator.getitem, (call, i), value))
    for node in members:
        if node.target is COPY:
            node.replace_all_uses_with(node.args[0])  # type: ignore[arg-type]
    erase_unused(graph, members)
