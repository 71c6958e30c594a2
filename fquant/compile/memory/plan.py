"""arena: where the results of a captured graph lie is decided before it runs.

A graph says when every result is made and when it is read last. So memory can be laid out once, as a compiler lays out
registers: two results that are never there together may have the same place, and a replay asks nobody for memory.
Asked for one by one, as tensors are, the results of a step come to lie in a heap that falls to pieces, a quarter larger
than what it holds; laid out in advance, by size, they need a few hundredths more than the most that is there at once
(Pisarchyk & Lee 2020, "Efficient memory management for deep neural net inference", greedy by size).

    placed = place(graph)        # a graph that computes the same into places of one piece of memory
    outs   = run(placed, plain, tensors)

An op is placed by its variant that writes into tensors it is given, whose bits are the same: those of torch's ops
that compute so, our own (``kernels.into``), programs (``fquant/compile/passes/fuse_pointwise.py``), and casts, which are copies. A view of what
is placed is then always the same tensor, and is made once. Not placed, and allocated as ever, are results of other ops,
what the graph returns, which is the caller's, and what a collective sends or receives, which may be under way when an
error ends a replay. A collective that can lend its result, rather than make it, is called so where nobody could tell.

All captured functions of a process share the memory, as large as the largest of them wants: between replays nothing
in it is alive. It is in pages of 2 MiB where the system gives them. A replay while another thread is in one does not
wait for it, but runs the graph as it was; so does one under a mode of torch that sees every op, to count what tensors
hold, for instance.
"""

from __future__ import annotations

import mmap
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg

from ...kernels import dispatch_bypass
from ...kernels.ops.pointwise import OP
from ...kernels.ops.pointwise_program import parse
from .. import graph as graphs
from .. import liveness

ALIGNED = 64  # bytes: a line of a cache, and what torch aligns tensors to

_aten = torch.ops.aten
INTO: dict[Any, Any] = {  # torch's that compute there: of many ops the variant computes elsewhere, and copies
    _aten.mm.default: _aten.mm.out, _aten.bmm.default: _aten.bmm.out, _aten.addmm.default: _aten.addmm.out,
    _aten.add.Tensor: _aten.add.out, _aten.sub.Tensor: _aten.sub.out, _aten.mul.Tensor: _aten.mul.out,
    _aten.div.Tensor: _aten.div.out, _aten.neg.default: _aten.neg.out, _aten.sqrt.default: _aten.sqrt.out,
    _aten.exp.default: _aten.exp.out, _aten.cat.default: _aten.cat.out,
}  # fmt: skip
OURS = (
    "matmul", "matmul_t", "nll", "nll_backward", "rms_norm", "rms_norm_backward", "attention", "attention_backward", "silu",
    "silu_derivative", "turn",
)  # fmt: skip
_COPIES = (_aten._to_copy.default, _aten.clone.default)


class Slot(NamedTuple):
    """Where in the memory a tensor lies, and how."""

    offset: int
    nbytes: int
    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype


class View(NamedTuple):
    """A call that makes a view of what is in the memory; a node stands for the tensor of its name."""

    target: Callable[..., Any]
    args: Any
    kwargs: Any


@dataclass
class Placed:
    """A graph that computes into places, what these are, in order, and the memory in which they are at present.

    ``origin`` has for a node whose result others read the one of the graph before that it stands for.
    """

    module: GraphModule
    nbytes: int
    tensors: dict[str, Slot | View]
    origin: dict[Node, Node]
    memory: mmap.mmap | None = None


def place(graph: Graph) -> Placed | None:
    """A copy of ``graph`` whose results lie in one piece of memory, as far as they can; None where none can."""
    slots, nbytes = _lay_out(graph)
    if not slots:
        return None
    new, copies, tensors = Graph(), dict[Node, Node](), dict[str, Slot | View]()
    lent = _lent(graph)

    def fixed(name: str, what: Slot | View) -> Node:
        tensors[name] = what
        return new.get_attr(name)

    for node in graph.nodes:
        if node in slots:
            results = [slot and fixed(f"{node.name}_at_{i}", slot) for i, slot in enumerate(slots[node])]
            call = new.node_copy(node, copies.__getitem__)
            left = _write_to(call, results)
            copies[node] = call if isinstance(node.meta["val"], list | tuple) else results[0] or call
            for one in [user for user in node.users if user.target is operator.getitem]:
                i: Any = one.args[1]
                with new.inserting_after(call):
                    copies[one] = results[i] or new.call_function(operator.getitem, (call, left.index(i)))
        elif node not in copies:
            given = [copies[near] for near in node.all_input_nodes]
            if given and _is_seen(node) and all(near.target in tensors for near in given):
                args, kwargs = map_arg((node.args, node.kwargs), copies.__getitem__)
                copies[node] = fixed(node.name, View(node.target, args, kwargs))  # type: ignore[arg-type]
                copies[node].meta = node.meta
            else:
                copies[node] = new.node_copy(node, copies.__getitem__)
            if node in lent:
                copies[node].target = node.target.overloadpacket.lent
    for node in new.nodes:
        if not any(dispatch_bypass.is_lazy(t) for near in node.all_input_nodes for t in graphs.tensors(near)):
            node.target = dispatch_bypass.of(node.target) or node.target
    root, constants = torch.nn.Module(), {node.target: node for node in graph.nodes if node.op == "get_attr"}
    root.__dict__.update(dict.fromkeys(tensors) | {name: getattr(graph.owning_module, name) for name in constants})
    return Placed(GraphModule(root, new), nbytes, tensors, {copy: node for node, copy in copies.items()})


def _write_to(call: Node, results: Sequence[Node | None]) -> list[int]:
    """Let ``call`` write into ``results``; the results that it still gives, by their places before."""
    if call.target is OP:
        reads, write, text = call.args
        program, left = parse(str(text)), [i for i, into in enumerate(results) if into is None]
        over = [i for i, into in enumerate(results) if into is not None]
        new = tuple(program.new[i] for i in left)
        program = program._replace(new=new, over=(*program.over, *(program.new[i] for i in over)))
        call.args = (reads, [*write, *(results[i] for i in over)], program.text)  # type: ignore[misc]
        return left
    if call.target in _COPIES:
        call.target, call.args, call.kwargs = _aten.copy_.default, (results[0], call.args[0]), {}
        return []
    into = _into(call)
    names = [a.name for a in into._schema.arguments if a.alias_info is not None and a.alias_info.is_write]
    call.target, call.kwargs = into, {**call.kwargs, **dict(zip(names, results, strict=True))}
    return []


def _into(node: Node) -> Any:
    """The variant of a node's op that writes where it is told to; None where there is none."""
    if node.target in INTO:
        return INTO[node.target]
    ours = str(node.target).removeprefix("fquant.").removesuffix(".default")
    return (
        getattr(torch.ops.fquant, ours).out if str(node.target) == f"fquant.{ours}.default" and ours in OURS else None
    )


def _lay_out(graph: Graph) -> tuple[dict[Node, list[Slot | None]], int]:
    """For every node that can be placed where each of its results goes, and the bytes that this takes."""
    last, never = liveness.last_uses(graph), _elsewhere(graph)
    found = list[tuple[Node, int]]()
    spans = list[tuple[int, int, int]]()  # the node that makes it, the last that reads it, bytes
    for place, node in enumerate(graph.nodes):
        tensors = graphs.tensors(node) if _can_be_told(node) else []
        fit = [_is_whole(t) and t.untyped_storage()._cdata not in never for t in tensors]
        for i, t in enumerate(tensors):
            if all(fit) or (fit[i] and node.target is OP):
                found.append((node, i))
                spans.append((place, last[t.untyped_storage()._cdata], graphs.nbytes(t)))
    offsets, nbytes = offsets_of(spans)
    slots = dict[Node, list[Slot | None]]()
    for (node, i), offset in zip(found, offsets, strict=True):
        tensors = graphs.tensors(node)
        t = tensors[i]
        slot = Slot(offset, graphs.nbytes(t), t.shape, t.stride(), t.dtype)
        slots.setdefault(node, [None] * len(tensors))[i] = slot
    return slots, nbytes


def offsets_of(spans: Sequence[tuple[int, int, int]]) -> tuple[list[int], int]:
    """Where each of ``spans`` (first, last, bytes) goes, so that no two that meet overlap, and the bytes of all.

    The largest first, each into the smallest gap that is large enough.
    """
    order = sorted(range(len(spans)), key=lambda i: (-spans[i][2], spans[i][0]))
    known, offsets, total = torch.empty(4, len(spans), dtype=torch.int64, device="cpu"), [0] * len(spans), 0
    for count, i in enumerate(order):
        first, last, nbytes = spans[i]
        size = -(-nbytes // ALIGNED) * ALIGNED
        begin, end, low, high = known[:, :count]
        near = (begin <= last) & (end >= first)
        low, by = low[near].sort()
        reached = torch.cat([low.new_zeros(1), high[near][by].cummax(0).values])  # up to where all before it reach
        gaps = low - reached[:-1]
        room = torch.where(gaps >= size, gaps, torch.iinfo(torch.int64).max)
        best = int(room.argmin()) if (gaps >= size).any() else -1
        offsets[i] = int(reached[best])
        known[:, count] = torch.tensor([first, last, offsets[i], offsets[i] + size], dtype=torch.int64, device="cpu")
        total = max(total, offsets[i] + size)
    return offsets, total


def _can_be_told(node: Node) -> bool:
    """Whether there is a way to tell the op of a node where to write."""
    if node.op != "call_function" or any(not t.is_cpu or t.dtype is torch.float64 for t in graphs.tensors(node)):
        return False
    if node.target in _COPIES:
        return set(node.kwargs) <= {"dtype", "layout", "device", "memory_format"}
    return node.target is OP or _into(node) is not None


def _lent(graph: Graph) -> set[Node]:
    """The nodes whose op has a variant that lends its result, which is not written here, nor given to the caller."""
    declare = lambda node: isinstance(node.target, torch._ops.OpOverload)
    found = {n for n in graph.nodes if declare(n) and "lent" in n.target.overloadpacket.overloads()}
    if not found:
        return found
    outside = {storage for node in graphs.outputs(graph) for storage in graphs.storages(node)}
    outside |= {storage for node in graph.nodes for storage in graphs.written_storages(node)}
    return {node for node in found if not any(graphs.storages(near) & outside for near in (node, *node.users))}


def _is_seen(node: Node) -> bool:
    """Whether a node only says how memory is seen, and torch knows that it does."""
    known = isinstance(node.target, torch._ops.OpOverload) or node.target is operator.getitem
    return known and bool(graphs.tensors(node)) and graphs.is_view(node)


def _is_whole(t: Tensor) -> bool:
    """Whether a tensor is all of its memory, and is some."""
    return 0 < graphs.nbytes(t) == t.untyped_storage().nbytes() and t.storage_offset() == 0


def _elsewhere(graph: Graph) -> set[int]:
    """The memory that is the caller's, or is sent or received, and so is none of ours."""
    outside = [node for node in graph.nodes if node.op == "placeholder"] + graphs.outputs(graph)
    for node in graph.nodes:
        if node.op == "call_function" and (graphs.collective(node) or graphs.is_wait(node)):
            outside += [node, *graphs.read_nodes(node)]
    return {storage for node in outside for storage in graphs.storages(node)}
