"""Graph simplification: dead code, aliases, common views and small tensors, constants and, last, products with 1.

Other passes leave unused views. In a plan they cost no memory. But torch's interpreter, by which CUDA graphs are
recorded, keeps them to its end, and their memory with them.
"""

import operator

import torch
from torch import Tensor
from torch.fx import Graph, Node

from .. import graph as graphs

_aten = torch.ops.aten
_IDENTITIES = (_aten.detach.default, _aten.alias.default)  # without autograd they return their argument
_CONSTANTS = {_aten.ones_like.default: 1, _aten.zeros_like.default: 0}  # which read only the argument's shape
_EMPTY = (_aten.new_empty.default, _aten.empty.memory_format)
_SMALL = 4096  # bytes of a tensor that is computed once: larger ones may cost more to hold than to compute again
_PRODUCTS = (_aten.mul.Tensor, _aten.mul.Scalar)  # with 1 if the alpha of an adapter is its rank
_VIEWS = {  # of ops that change a tensor's own metadata, which a replay in planned memory would apply each time
    _aten.squeeze_.default: _aten.squeeze.default, _aten.squeeze_.dim: _aten.squeeze.dim,
    _aten.squeeze_.dims: _aten.squeeze.dims, _aten.unsqueeze_.default: _aten.unsqueeze.default,
    _aten.t_.default: _aten.t.default, _aten.transpose_.default: _aten.transpose.int,
}  # fmt: skip


def simplify(graph: Graph) -> None:
    """Remove unused nodes, aliases, repeated views and small tensors, and reads where only the shape matters.

    A gradient begins with ``ones_like`` of the loss, which would keep that value live and computed. A wait returns the
    tensor that was issued; the trace has another for it.
    """
    for node in graph.nodes:
        if node.target in _VIEWS and node.args[0].op != "placeholder":  # which changes as it does uncaptured
            node.target = _VIEWS[node.target]
    for node in list(graph.nodes):
        fill = node.args[1] if node.target is _aten.full_like.default else _CONSTANTS.get(node.target)
        if node.target in _IDENTITIES:
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)
        elif isinstance(fill, int | float):
            replace_with_full(graph, node, fill)
        elif graphs.is_wait(node) and graphs.is_issue(node.all_input_nodes[0]):
            node.all_input_nodes[0].meta["val"] = node.meta["val"]
    _deduplicate_views(graph)
    _deduplicate_small(graph)
    graph.eliminate_dead_code()


def _deduplicate_views(graph: Graph) -> None:
    """Make each view, by storage, offset, shape and strides, once until its memory is written."""
    known = dict[int, dict[object, Node]]()  # by storage
    for node in list(graph.nodes):
        if node.op not in ("call_function", "placeholder") or graphs.is_issue(node):
            continue  # a result in flight must not be viewed
        if node.op == "call_function" and node.target is not operator.getitem:
            declared = isinstance(node.target, torch._ops.OpOverload)
            for storage in graphs.written_storages(node) if declared else list(known):
                known.pop(storage, None)
        value = node.meta.get("val")
        if not isinstance(value, Tensor) or value.layout != torch.strided:
            continue
        (storage,) = graphs.storages(node)
        view = (value.storage_offset(), value.shape, value.stride(), value.dtype, value.is_conj(), value.is_neg())
        first = known.setdefault(storage, {}).setdefault(view, node)
        if first is not node and graphs.is_view(node) and not graphs.is_wait(node):
            node.replace_all_uses_with(first, delete_user_cb=lambda user: user.op != "output")


def _deduplicate_small(graph: Graph) -> None:
    """Compute each small tensor once, by the ops and arguments that make it, unless it is written or returned."""
    written, returned = graphs.all_written_storages(graph), graphs.all_storages(graphs.outputs(graph))
    known = dict[object, Node]()
    for node in list(graph.nodes):
        op, memory = node.target, graphs.sizes(node)
        if not isinstance(op, torch._ops.OpOverload) or sum(memory.values()) > _SMALL or op._schema.is_mutable:
            continue
        key: object = (id(op), repr(node.args), repr(node.kwargs))
        if op in _EMPTY and not sum(memory.values()):
            key = (graphs.tensor_layouts(node), graphs.tensors(node)[0].device)
        elif op is not _aten._to_copy.default and torch.Tag.pointwise not in op.tags:
            continue
        is_fixed = graphs.storages(node) & returned or graphs.all_storages((node, *node.all_input_nodes)) & written
        if is_fixed or torch.Tag.nondeterministic_seeded in op.tags:
            continue
        first = known.setdefault(key, node)
        if first is not node:
            graphs.replace_uses(node, first)
            graph.erase_node(node)


def remove_products_with_one(graph: Graph) -> None:
    """Replace products with the number 1 by their factor, unless its memory is written, or an input's or a result's.

    Call this pass last: examples/plan infers the cost of many layers from that of a few, which must be fused alike.
    """
    fixed = graphs.all_storages([*graph.find_nodes(op="placeholder"), *graphs.outputs(graph)])
    fixed |= graphs.all_written_storages(graph)
    for node in list(graph.nodes):
        if node.target not in _PRODUCTS or type(node.args[1]) not in (int, float) or node.args[1] != 1:
            continue
        (factor,) = node.all_input_nodes
        same = graphs.tensor_layouts(factor) == graphs.tensor_layouts(node)
        if same and not fixed & graphs.all_storages((factor, node)):
            graphs.replace_uses(node, factor)
            graph.erase_node(node)


def remove_unused_views(graph: Graph) -> None:
    """Remove unused views, and those that only they used."""
    for node in reversed(list(graph.nodes)):
        unused = not node.users and graphs.storages(node) and not node.is_impure()
        if unused and graphs.is_view(node) and not graphs.is_wait(node):
            graph.erase_node(node)


def replace_with_full(graph: Graph, node: Node, fill: float) -> bool:
    """Replace a node by a constant of its shape and dtype; return False if its result is not contiguous."""
    (t,) = graphs.tensors(node)
    if not t.is_contiguous() or t.layout != torch.strided:
        return False
    kind = {"dtype": t.dtype, "device": t.device, "pin_memory": False}
    node.replace_all_uses_with(graphs.insert_before(node, _aten.full.default, (list(t.shape), fill), t, kind))
    graph.erase_node(node)
    return True
