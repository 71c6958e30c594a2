"""tidy: what a trace has and nobody needs is taken out of its graph, first and last of all passes.

A trace has a node for every view, however often it is made, for what is asked for its shape only, and for products with
the number 1.
"""

from __future__ import annotations

import operator

import torch
from torch import Tensor
from torch.fx import Graph, Node

from .. import graph as graphs

_aten = torch.ops.aten
_IDENTITIES = (_aten.detach.default, _aten.alias.default)  # without autograd they are their argument
_CONSTANTS = {_aten.ones_like.default: 1, _aten.zeros_like.default: 0}  # of which the argument says the shape only
_PRODUCTS = (_aten.mul.Tensor, _aten.mul.Scalar)
_IN_PLACE = {  # a tensor itself is seen otherwise, which a replay may have placed, and uses again
    _aten.squeeze_.default: _aten.squeeze.default, _aten.squeeze_.dim: _aten.squeeze.dim,
    _aten.squeeze_.dims: _aten.squeeze.dims, _aten.unsqueeze_.default: _aten.unsqueeze.default,
    _aten.t_.default: _aten.t.default, _aten.transpose_.default: _aten.transpose.int,
}  # fmt: skip


def simplify(graph: Graph) -> None:
    """Take out nodes that nobody uses, views that are there already, and reads of what is asked for its shape only.

    A gradient begins with ones like the value, which would keep the whole value, and compute it where nobody asks. A
    wait gives the tensor that was issued, for which the trace has another. A tensor that is seen otherwise from now on
    is a view of itself.
    """
    for node in graph.nodes:
        if node.target in _IN_PLACE and node.args[0].op != "placeholder":  # an argument changes, as it does uncaptured
            node.target = _IN_PLACE[node.target]
    for node in list(graph.nodes):
        if node.op == "call_function" and node.target in _IDENTITIES:
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)
        elif node.op == "call_function" and node.target in _CONSTANTS:
            _without_argument(graph, node, _CONSTANTS[node.target])
        elif node.target is _aten.full_like.default and isinstance(node.args[1], int | float):
            _without_argument(graph, node, node.args[1])
        elif graphs.is_wait(node) and graphs.collective(node.all_input_nodes[0]):
            node.all_input_nodes[0].meta["val"] = node.meta["val"]
    _see_once(graph)
    graph.eliminate_dead_code()


def _see_once(graph: Graph) -> None:
    """Let every view of some memory, by place, shape and strides, be made once, until the memory is written."""
    known = dict[int, dict[object, Node]]()  # by storage
    for node in list(graph.nodes):
        if node.op not in ("call_function", "placeholder") or (node.op == "call_function" and graphs.collective(node)):
            continue  # what is in flight is not to be seen
        if node.op == "call_function" and node.target is not operator.getitem:
            declared = isinstance(node.target, torch._ops.OpOverload)
            for storage in graphs.written_storages(node) if declared else list(known):
                known.pop(storage, None)
        value = node.meta.get("val")
        if not isinstance(value, Tensor) or value.layout != torch.strided:
            continue
        (storage,) = graphs.storages(node)
        place = (value.storage_offset(), value.shape, value.stride(), value.dtype, value.is_conj(), value.is_neg())
        first = known.setdefault(storage, {}).setdefault(place, node)
        if first is not node and graphs.is_view(node) and not graphs.is_wait(node):
            node.replace_all_uses_with(first, delete_user_cb=lambda user: user.op != "output")


def without_ones(graph: Graph) -> None:
    """Take out products with the number 1, as of an adapter whose alpha is its rank, where nobody could tell.

    Somebody could if one of the two were written over, or if an argument became a result. To be called last: a step of
    few layers, from which examples/plan/cli.py infers one of many, must not be fused or recomputed otherwise for it.
    """
    outer = [node for node in graph.nodes if node.op == "placeholder"] + graphs.outputs(graph)
    seen = {storage for node in outer for storage in graphs.storages(node)}
    seen |= {storage for node in graph.nodes if node.op == "call_function" for storage in graphs.written_storages(node)}
    for node in list(graph.nodes):
        if node.target not in _PRODUCTS or type(node.args[1]) not in (int, float) or node.args[1] != 1:
            continue
        (same,) = node.all_input_nodes
        if graphs.tensor_layouts(same) == graphs.tensor_layouts(node) and not seen & (
            graphs.storages(same) | graphs.storages(node)
        ):
            graphs.replace_uses(node, same)
            graph.erase_node(node)


def _without_argument(graph: Graph, node: Node, fill: float) -> None:
    (t,) = graphs.tensors(node)
    if not t.is_contiguous() or t.layout != torch.strided:
        return
    with graph.inserting_before(node):
        full = graph.call_function(
            _aten.full.default, (list(t.shape), fill), {"dtype": t.dtype, "device": t.device, "pin_memory": False}
        )
    full.meta["val"] = t
    node.replace_all_uses_with(full)
    graph.erase_node(node)
