"""untangle: what stands between elementwise nodes of a captured graph, and would keep them from being one program.

Ops in place, which say over what they are written; casts to a wider dtype that several steps share; views between a
step and the next; and halves that a rotary embedding swaps (fquant/turn.py). Each is put aside by nodes of the same
bits, for fquant/fuse.py, which comes next.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Graph, Node

from . import graph as graphs
from .kernels.program import Step
from .steps import FULL, constant, step_of
from .turn import turn

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
        elif node.target in _IN_PLACE and graphs.kinds(first) == graphs.kinds(node) and _is_kept(node):
            with graph.inserting_before(node):
                new = graph.call_function(_IN_PLACE[node.target], node.args, node.kwargs)
            new.meta["val"] = node.meta["val"]
            graphs.revalue(new)
            graphs.substitute(node, new)
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
                graphs.revalue(again)
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
            graphs.revalue(node)
        graphs.substitute(view, new)
        graph.erase_node(view)
        graph.erase_node(made)


def _shape(node: Node) -> torch.Size:
    return graphs.tensors(node)[0].shape
