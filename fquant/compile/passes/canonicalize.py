"""turn: the halves of rotary embeddings, in a captured graph, as one node that may be a step of a program.

    cat([-x[..., h:], x[..., :h]], -1)        # x f[... 2h]: turn(x, h)
    cat([x[..., h:], -x[..., :h]], -1)        # turn(x, -h), its transpose, as a gradient has it

Halves are told by where they lie, so it does not matter whether x was sliced, split or chunked.

untangle: what stands between elementwise nodes of a captured graph, and would keep them from being one program.

Ops in place, which say over what they are written; casts to a wider dtype that several steps share; views between a
step and the next; and halves that a rotary embedding swaps (fquant/compile/passes/canonicalize.py). Each is put aside by nodes of the same
bits, for fquant/compile/passes/fuse_pointwise.py, which comes next.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch.fx import Graph, Node

from ...kernels.ops.pointwise_program import DTYPES, Step, is_turned
from ...kernels.ops.rotate_half import OP
from .. import graph as graphs
from .pointwise_lowering import FULL, constant, step_of

_aten = torch.ops.aten
_FLOATS = tuple(DTYPES.values())


def turn(graph: Graph) -> None:
    """Replace every negation and concatenation of halves by one node."""
    written = set[int]().union(*map(graphs.written_storages, graph.nodes))
    for node in list(graph.nodes):
        found = _found(node) if node.target is _aten.cat.default else None
        if found is None or graphs.storages(found[0]) & written:  # a half may have been read before that
            continue
        with graph.inserting_before(node):
            new = graph.call_function(OP, found)
        new.meta["val"] = node.meta["val"]
        node.replace_all_uses_with(new)
        _erase(graph, node)


def _found(cat: Node) -> tuple[Node, int] | None:
    """What is turned, and by which half; None where it is something else that is put together."""
    parts, *dim = cat.args
    t = cat.meta["val"]
    if len(parts) != 2 or (*dim, *cat.kwargs.values())[:1] not in ((-1,), (t.ndim - 1,)):  # type: ignore[arg-type]
        return None
    if t.dtype not in _FLOATS or not t.is_cpu or not t.is_contiguous() or t.numel() == 0:
        return None
    if not is_turned(t.shape, half := t.shape[-1] // 2):
        return None
    negated = [part.target is _aten.neg.default for part in parts]  # type: ignore[union-attr]
    if negated[0] == negated[1]:
        return None
    halves = [part.args[0] if minus else part for part, minus in zip(parts, negated, strict=True)]  # type: ignore
    whole = _whole(halves[0])
    if whole is None or whole is not _whole(halves[1]) or graphs.tensors(whole)[0].shape != t.shape:
        return None
    (x,) = graphs.tensors(whole)
    starts = tuple(part.meta["val"].storage_offset() - x.storage_offset() for part in halves)
    alike = all(p.meta["val"].shape[-1] == half and p.meta["val"].stride() == x.stride() for p in halves)
    if not alike or x.dtype != t.dtype or starts != (half * x.stride(-1), 0):
        return None
    return whole, half if negated[0] else -half


def _whole(part: Node) -> Node | None:
    """What ``part`` is a part of."""
    if part.target is operator.getitem:
        part = part.args[0]  # type: ignore[assignment]
        return part.args[0] if part.target is _aten.split.Tensor else None  # type: ignore[return-value]
    return part.args[0] if part.target is _aten.slice.Tensor else None  # type: ignore[return-value]


def _erase(graph: Graph, node: Node) -> None:
    """Take out a node that nobody uses, and what was there for it alone."""
    near = node.all_input_nodes
    graph.erase_node(node)
    for one in near:
        if not one.users and one.op == "call_function":
            _erase(graph, one)


_aten = torch.ops.aten
_IN_PLACE: dict[Any, Any] = {
    _aten.add_.Tensor: _aten.add.Tensor, _aten.sub_.Tensor: _aten.sub.Tensor,
    _aten.mul_.Tensor: _aten.mul.Tensor, _aten.div_.Tensor: _aten.div.Tensor,
}  # fmt: skip
_FILL = _aten.fill_.Scalar
_VIEWS = (_aten.view.default, _aten._unsafe_view.default)


def untangle(graph: Graph) -> None:
    """Put aside what stands between elementwise nodes."""
    turn(graph)
    _unwrite(graph)
    _spread(graph)
    _see_first(graph)


def _unwrite(graph: Graph) -> None:
    """Give results memory of their own where they were written over what nobody else reads."""
    for node in list(graph.nodes):
        first = node.args[0] if node.args else None
        if not isinstance(first, Node) or first.op != "call_function" or len(first.users) > 1:
            continue
        if any(graphs.storages(first) & graphs.storages(near) for near in first.all_input_nodes):
            continue  # its memory is another's
        if node.target is _FILL:
            (t,) = graphs.tensors(node)
            if t.is_contiguous():
                kwargs = {"dtype": t.dtype, "device": t.device, "pin_memory": False}
                node.target, node.args, node.kwargs = FULL, (list(t.shape), node.args[1]), kwargs
                graph.erase_node(first)
        elif (
            node.target in _IN_PLACE and graphs.tensor_layouts(first) == graphs.tensor_layouts(node) and _is_kept(node)
        ):
            with graph.inserting_before(node):
                new = graph.call_function(_IN_PLACE[node.target], node.args, node.kwargs)
            new.meta["val"] = node.meta["val"]
            graphs.refresh_value(new)
            graphs.replace_uses(node, new)
            graph.erase_node(node)


def _is_kept(node: Node) -> bool:
    """Whether an op in place would give what it writes over, dtype and layout, if it wrote elsewhere."""
    values: list[Any] = [graphs.tensors(x)[0] if isinstance(x, Node) else x for x in node.args[:2]]
    into, other = values
    return into.is_contiguous() and torch.result_type(into, other) == into.dtype


def _spread(graph: Graph) -> None:
    """Widen again for every step that reads a widened tensor: a program does it on the way, and reads half as much."""
    for node in list(graph.nodes):
        if node.target is not _aten._to_copy.default or step_of(node) is None:
            continue
        (narrow,), (wide,) = graphs.tensors(node.all_input_nodes[0]), graphs.tensors(node)
        if narrow.itemsize < wide.itemsize and all(step_of(user) not in (None, "copy") for user in node.users):
            for user in list(node.users)[1:]:
                with graph.inserting_before(user):
                    again = graph.node_copy(node)
                graphs.refresh_value(again)
                user.replace_input_with(node, again)


def _see_first(graph: Graph) -> None:
    """See a step's arguments in another shape, rather than its result, where a step reads that: so they may be one."""
    for view in list(graph.nodes):
        if view.target not in _VIEWS or not any(isinstance(step_of(user), Step) for user in view.users):
            continue
        (made,) = view.all_input_nodes
        step, near = step_of(made), made.all_input_nodes
        fit = all(_shape(x) == _shape(made) and graphs.tensors(x)[0].is_contiguous() for x in near)
        alone = len(made.users) == 1 and not any(step_of(x) or constant(x) is not None for x in near)
        if not isinstance(step, Step) or step.op == "turn" or not fit or not alone:
            continue
        with graph.inserting_before(made):
            seen = {x: graph.call_function(_aten.view.default, (x, list(_shape(view)))) for x in near}
            new = graph.node_copy(made, seen.__getitem__)
        for node, like in [*((node, x) for x, node in seen.items()), (new, made)]:
            node.meta["val"] = like.meta["val"]
            graphs.refresh_value(node)
        graphs.replace_uses(view, new)
        graph.erase_node(view)
        graph.erase_node(made)


def _shape(node: Node) -> torch.Size:
    return graphs.tensors(node)[0].shape
