"""The memory plan of a captured graph: an offset in one piece of memory for every result, assigned before it runs.

A graph says when each result is made and when it is last read. So memory is assigned once, as a compiler assigns
registers: results that are never live together may share a place (``offsets.py``). Allocated one by one, the results
of a step fragment the heap, which grows to a quarter more than it holds. Planned, they need a few hundredths more than
the peak of live bytes.

An op is planned through its out variant, if that computes there (``out_variants.py``), or composed there
(``composed.py``). So are pointwise programs, and casts, which become copies. Any other op of torch takes its planned
places itself, when it allocates (``pool.py``). Parts of a concatenation are computed in
the memory of the whole (``concatenation.py``). A view of a planned result is always the same tensor, and is made once.
Results of ops of others and of the graph itself are in the pool. So is what a collective sends or receives, because
it may be in flight when an error ends a replay. A collective with a ``lent`` overload returns its receive buffer rather
than a copy (``shard/transport/gloo.py``). The plan calls that if nothing writes or returns it. A sum over ranks is
written over its addend if nothing else reads that. A step of an optimiser with packed moments writes over the parameter
and the moments that are donated.
"""

import ctypes
import mmap
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node
from torch.fx._lazy_graph_module import _LazyGraphModule
from torch.fx.node import map_arg

from ...kernels import dispatch
from ...kernels.ops.pointwise import OP
from .. import graph as graphs
from .. import liveness
from ..passes.gate_steps import STEPS
from ..passes.reinplace import redirect
from . import pool
from .composed import COMPOSED, compose
from .concatenation import assign_with_parts
from .offsets import Span
from .out_variants import out_variant, result_names

_aten = torch.ops.aten
_COPIES = (_aten._to_copy.default, _aten.clone.default)
_SUM = "_c10d_functional.all_reduce.default"  # by name, because a build of torch may lack the op


class Slot(NamedTuple):
    """The offset in the memory of a tensor that is like the fake tensor ``like``."""

    offset: int
    like: Tensor


class View(NamedTuple):
    """A call that views planned tensors, for which the nodes of their names stand."""

    target: Callable[..., Any]
    args: Any
    kwargs: Any


@dataclass
class MemoryPlan:
    """A graph that computes into planned memory: its tensors there in order of creation, and their current memory."""

    module: GraphModule
    nbytes: int
    tensors: dict[str, Slot | View]
    origin: dict[Node, Node]  # for nodes of ``module``, the nodes of the unplanned graph that they compute
    places: list[tuple["ctypes.Array[pool.Place]", list[Slot]]]  # set aside for results of other ops (pool.py)
    is_large: bool  # False if no tensor of the graph is large enough for the pool
    memory: mmap.mmap | None = None


def plan_memory(graph: Graph) -> MemoryPlan | None:
    """Return a copy of ``graph`` whose results are in one piece of memory if possible; None if none can be."""
    over = _steps_in_place(graph)
    slots, own, nbytes, joined = _assign_slots(graph, over)
    if not slots and not own:
        return None
    new, copies, tensors = Graph(), dict[Node, Node](), dict[str, Slot | View]()
    calls = dict[Node, Node]()  # those that return no result
    sums = _sums_in_place(graph)
    written = graphs.all_written_storages(graph) | graphs.all_storages(x for node in sums for x in node.all_input_nodes)
    kept = graphs.all_storages(graphs.outputs(graph)) | written

    def planned(name: str, value: Slot | View) -> Node:
        tensors[name] = value
        return new.get_attr(name)

    for node in graph.nodes:
        if node in joined:
            (whole,) = slots[node]
            assert whole is not None
            copies[node] = planned(node.name, whole)
        elif node in slots:
            results = [slot and planned(f"{node.name}_at_{i}", slot) for i, slot in enumerate(slots[node])]
            for i, copy in over.get(node, {}).items():
                results[i] = copies[copy] = copies[copy.args[0]]  # type: ignore[index]
            call = new.node_copy(node, copies.__getitem__)
            calls[call] = node
            remaining = _write_to(call, results)
            copies[node] = call if isinstance(node.meta["val"], list | tuple) else results[0] or call
            for item in [user for user in node.users if user.target is operator.getitem]:
                i: Any = item.args[1]
                with new.inserting_after(call):
                    copies[item] = results[i] or new.call_function(operator.getitem, (call, remaining.index(i)))
                copies[item].meta = item.meta
        elif node not in copies:
            arguments = [copies[argument] for argument in node.all_input_nodes]
            known = isinstance(node.target, torch._ops.OpOverload) or node.target is operator.getitem
            inside = arguments and all(argument.target in tensors for argument in arguments)
            if known and inside and graphs.tensors(node) and graphs.is_view(node):
                args, kwargs = map_arg((node.args, node.kwargs), copies.__getitem__)
                copies[node] = planned(node.name, View(node.target, args, kwargs))  # type: ignore[arg-type]
                copies[node].meta = node.meta
            else:
                copies[node] = new.node_copy(node, copies.__getitem__)
            packet: Any = getattr(node.target, "overloadpacket", None)
            if hasattr(packet, "lent") and not kept & graphs.all_storages((node, *node.users)):
                copies[node].target = packet.lent
            if node in sums:
                copies[node].target = torch.ops._c10d_functional.all_reduce_.default

    _call_kernels_directly(new, tensors)
    places = [(pool.places_of(slots), slots) for slots in own.values()]
    for node, (made, _) in zip(own, places, strict=True):
        copies[node].target = pool.with_places(copies[node].target, made)  # type: ignore[arg-type]
    root, constants = torch.nn.Module(), {node.target: node for node in graph.find_nodes(op="get_attr")}
    root.__dict__.update(dict.fromkeys(tensors) | {name: getattr(graph.owning_module, name) for name in constants})
    return MemoryPlan(
        _LazyGraphModule(root, new), nbytes, tensors, calls | {copy: node for node, copy in copies.items()}, places,
        any(graphs.nbytes(t) >= pool.LEAST for node in graph.nodes for t in graphs.tensors(node)),
    )  # fmt: skip


def _call_kernels_directly(graph: Graph, tensors: Mapping[str, Slot | View]) -> None:
    """Replace ops of a planned graph by the kernels that torch would choose, except where an operand is lazy."""

    def like(node: Node) -> Any:
        value = tensors.get(str(node.target))
        return value.like if isinstance(value, Slot) else node.meta.get("val")

    lazy = {node for node in graph.nodes if any(map(dispatch.is_lazy, graphs.tensors(node)))}
    for node in graph.nodes:
        if lazy.isdisjoint(node.all_input_nodes):
            is_known = all(like(argument) is not None for argument in node.all_input_nodes)
            given = map_arg((node.args, node.kwargs), like) if is_known else None
            node.target = dispatch.direct(node.target, given) or node.target


def _sums_in_place(graph: Graph) -> set[Node]:
    """Return the sums over ranks that may be written over their addend: the graph made it, and reads it no more."""
    given = graphs.all_storages((*graph.find_nodes(op="placeholder"), *graph.find_nodes(op="get_attr")))
    sums = {node for node in graph.nodes if str(node.target) == _SUM}
    found, later = set[Node](), dict[int, set[Node]]()  # readers of a storage behind the node
    for node in reversed(graph.nodes) if sums else ():
        if node in sums:
            (addend,) = node.all_input_nodes
            ((storage, held),) = graphs.sizes(addend).items()
            alike = graphs.tensor_layouts(addend) == graphs.tensor_layouts(node) and held in graphs.sizes(node).values()
            if alike and storage not in given and later.get(storage, set()) <= {*node.users}:
                found.add(node)
        for storage in graphs.all_storages(graphs.read_nodes(node)):
            later.setdefault(storage, set()).add(node)
    return found


def _steps_in_place(graph: Graph) -> dict[Node, dict[int, Node]]:
    """Return the results of steps of optimisers that are copied over an argument of the graph, with that copy.

    That must be the argument whose new value the result is, and the step the last to read it.
    """
    place = {node: i for i, node in enumerate(graph.nodes)}
    found = dict[Node, dict[int, Node]]()
    for node in [node for node in graph.nodes if str(node.target) in STEPS]:
        for item in node.users:
            i, copies = item.args[1] if item.target is operator.getitem else None, [*item.users]
            if i is None or len(copies) != 1 or copies[0].target is not _aten.copy_.default:
                continue
            old: Any = node.args[i + 1]  # type: ignore[operator]
            readers = [user for user in old.users if user is not copies[0]]
            last = all(place[user] <= place[node] for user in readers) and node.args.count(old) == 1
            alike = graphs.tensor_layouts(old) == graphs.tensor_layouts(item)
            if copies[0].args[0] is old and old.op == "placeholder" and last and alike:
                found.setdefault(node, {})[i] = copies[0]  # type: ignore[index]
    return found


def _write_to(call: Node, results: Sequence[Node | None]) -> list[int]:
    """Let ``call`` write into ``results``; return the indices of the results that it still returns."""
    if call.target is OP:
        return redirect(call, {i: result for i, result in enumerate(results) if result is not None})
    if call.target in _COPIES:
        call.target, call.args, call.kwargs = _aten.copy_.default, (results[0], call.args[0]), {}
        return []
    if call.target in COMPOSED:
        (place,) = results
        assert place is not None
        compose(call, place)
        return []
    variant = out_variant(call.target)
    assert variant is not None
    call.target, call.kwargs = variant, {**call.kwargs, **dict(zip(result_names(variant), results, strict=True))}
    return []


def _assign_slots(
    graph: Graph, over: dict[Node, dict[int, Node]]
) -> tuple[dict[Node, list[Slot | None]], dict[Node, list[Slot]], int, set[Node]]:
    """Return the slots of the results of each node that can be planned, the bytes of all, and joins without a copy.

    Second are the slots that nodes take themselves (pool.py). The results ``over`` arguments need no slots; nodes whose
    other results cannot be planned are removed from it.
    """
    calls = [node for node in graph.nodes if graphs.is_issue(node) or graphs.is_wait(node)]
    in_flight = [x for node in calls for x in (node, *graphs.read_nodes(node))]
    external = graphs.all_storages((*graph.find_nodes(op="placeholder"), *graphs.outputs(graph), *in_flight))
    last, results = liveness.last_uses(graph), list[tuple[Node, int]]()
    spans, own, own_spans, seen = list[Span](), list[tuple[Node, int]](), list[Span](), set[int]()
    allocates = pool.install() is not None
    for place, node in enumerate(graph.nodes):
        tensors = graphs.tensors(node) if _can_write_to(node) else []
        least = 0 if str(node.target) in STEPS else 1  # bytes; moments in float32 have no scales
        fill = [graphs.nbytes(t) == t.untyped_storage().nbytes() and t.storage_offset() == 0 for t in tensors]
        fill = [full and graphs.nbytes(t) >= least for full, t in zip(fill, tensors, strict=True)]
        fit = [full and t.untyped_storage()._cdata not in external for full, t in zip(fill, tensors, strict=True)]
        placed = over.get(node, {})
        if not tensors or not all(ok or i in placed for i, ok in enumerate(fit)):
            over.pop(node, None)  # an op writes all its results into given memory, or none
            placed = {}
        for i, t in enumerate(tensors):
            if i in placed:
                continue
            if all(ok or k in placed for k, ok in enumerate(fit)) or (fit[i] and node.target is OP):
                results.append((node, i))
                spans.append((place, last[t.untyped_storage()._cdata], graphs.nbytes(t)))
        writes = any(made is node for made, _ in results[-len(tensors) :]) or node in over
        for i, t in enumerate(graphs.tensors(node) if allocates and pool.is_served(node) and not writes else []):
            held = t.untyped_storage()
            if held.nbytes() >= pool.LEAST and held._cdata not in external | seen:
                own.append((node, i))
                own_spans.append((place, last[held._cdata], held.nbytes()))
        seen |= graphs.storages(node)
    offsets, nbytes, joined = assign_with_parts(graph, results, [*spans, *own_spans], last)
    made = dict.fromkeys([*over, *(node for node, _ in results)])
    slots: dict[Node, list[Slot | None]] = {node: [None] * len(graphs.tensors(node)) for node in made}
    taken = dict[Node, list[Slot]]()
    for (node, i), offset in zip([*results, *own], offsets, strict=True):
        slot = Slot(offset, graphs.tensors(node)[i])
        if node in slots:
            slots[node][i] = slot
        else:
            taken.setdefault(node, []).append(slot)
    return slots, taken, nbytes, joined


def _can_write_to(node: Node) -> bool:
    """Return True if a node's op can compute into given tensors."""
    if node.op != "call_function":
        return False
    copies = node.target in _COPIES and set(node.kwargs) <= {"dtype", "layout", "device", "memory_format"}
    can = copies or node.target in COMPOSED or node.target is OP or out_variant(node.target) is not None
    return can and all(t.is_cpu and t.dtype is not torch.float64 for t in graphs.tensors(node))
