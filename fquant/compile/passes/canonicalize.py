"""Canonicalisation for pointwise fusion: rewrites that remove what keeps elementwise nodes from being one program.

    cat([-x[..., h:], x[..., :h]], -1)        # becomes turn(x, h), x f[... 2h]: rotary embeddings
    cat([x[..., h:], -x[..., :h]], -1)        # becomes turn(x, -h), its transpose, which gradients have
    x.double().sqrt().float()                 # becomes root(x), x f32
    x.mul_(y)                                 # becomes x * y, if only this node uses x
    wide = x.float(); a * wide; b * wide      # becomes a cast per step, because a program then reads the narrow x
    (a * b).view(shape) + c                   # becomes a.view(shape) * b.view(shape) + c

Each keeps every bit. Halves are recognised by their memory offsets, so x may be sliced, split or chunked.
"""

import operator
from collections.abc import Collection
from typing import Any

import torch
from torch.fx import Graph, Node
from torch.fx.node import map_arg

from ...kernels.dispatch import runs_programs
from ...kernels.ops.pointwise import ROOT, ROTATE_HALF
from ...kernels.ops.pointwise_program import Step, is_turned
from .. import graph as graphs
from .pointwise_lowering import FLOATS, constant_value, step_of
from .simplify import replace_with_full

_aten = torch.ops.aten
_OUT_OF_PLACE = {
    getattr(_aten, name + "_").Tensor: getattr(_aten, name).Tensor for name in ("add", "sub", "mul", "div")
}
_VIEWS = (_aten.view.default, _aten._unsafe_view.default)


def canonicalize(graph: Graph) -> None:
    """Rewrite halves, roots, in-place ops, shared casts and views between elementwise nodes into forms that fuse."""
    _replace_rotary_halves(graph)
    _replace_roots(graph)
    _functionalize(graph)
    _duplicate_casts(graph)
    _hoist_views(graph)


def _replace_rotary_halves(graph: Graph) -> None:
    written = graphs.all_written_storages(graph)
    for node in list(graph.nodes):
        matched = _match_rotary_halves(node) if node.target is _aten.cat.default else None
        if matched is None or graphs.storages(matched[0]) & written:  # a half may have been read before the write
            continue
        node.replace_all_uses_with(graphs.insert_before(node, ROTATE_HALF, matched, node.meta["val"]))
        erase_unused(graph, [node])


def _match_rotary_halves(cat: Node) -> tuple[Node, int] | None:
    """Return the node whose halves ``cat`` swaps, and the signed half; None for any other concatenation."""
    args: Any = cat.args
    parts, *dim = args
    t = cat.meta["val"]
    if len(parts) != 2 or (*dim, *cat.kwargs.values())[:1] not in ((-1,), (t.ndim - 1,)):
        return None
    if t.dtype not in FLOATS or not runs_programs(t.device.type) or not t.is_contiguous() or t.numel() == 0:
        return None
    negated = [part.target is _aten.neg.default for part in parts]
    if negated[0] == negated[1] or not is_turned(t.shape, half := t.shape[-1] // 2):
        return None
    halves = [part.args[0] if minus else part for part, minus in zip(parts, negated, strict=True)]
    source = _sliced_node(halves[0])
    if source is None or source is not _sliced_node(halves[1]) or graphs.shape(source) != t.shape:
        return None
    (x,) = graphs.tensors(source)
    starts = tuple(part.meta["val"].storage_offset() - x.storage_offset() for part in halves)
    alike = all(p.meta["val"].shape[-1] == half and p.meta["val"].stride() == x.stride() for p in halves)
    if not alike or x.dtype != t.dtype or starts != (half * x.stride(-1), 0):
        return None
    return source, half if negated[0] else -half


def _replace_roots(graph: Graph) -> None:
    """Replace roots in float64 between casts from and to float32."""
    cast, kinds = _aten._to_copy.default, [torch.float32, torch.float64, torch.float64, torch.float32]
    for node in list(graph.nodes):
        chain = [node]  # from the result to the argument, three steps of one argument each
        for target in (cast, _aten.sqrt.default, cast):
            chain += chain[-1].all_input_nodes if chain[-1].target is target else []
        if len(chain) != len(kinds):
            continue
        x, *_, y = values = [graphs.tensors(each)[0] for each in reversed(chain)]
        if [t.dtype for t in values] != kinds or x.device != y.device or not y.is_contiguous():
            continue
        if runs_programs(y.device.type):
            node.replace_all_uses_with(graphs.insert_before(node, ROOT, (chain[-1],), node.meta["val"]))
            erase_unused(graph, [node])


def _sliced_node(part: Any) -> Node | None:
    """Return the node of which ``part`` is a slice or a split."""
    op, part = (_aten.split.Tensor, part.args[0]) if part.target is operator.getitem else (_aten.slice.Tensor, part)
    return part.args[0] if part.target is op else None


def erase_unused(graph: Graph, nodes: Collection[Node]) -> None:
    """Erase ``nodes``, which are in order, and the nodes that only they used."""
    for node in reversed([*nodes]):
        arguments = node.all_input_nodes
        graph.erase_node(node)
        erase_unused(graph, [x for x in arguments if not x.users and x.op == "call_function" and x not in nodes])


def _functionalize(graph: Graph) -> None:
    """Replace in-place ops on a result that only they use by ops with a result of their own."""
    for node in list(graph.nodes):
        written = node.args[0] if node.args else None
        if not isinstance(written, Node) or written.op != "call_function" or len(written.users) > 1:
            continue
        if graphs.storages(written) & graphs.all_storages(written.all_input_nodes):
            continue  # a view, whose base may be read
        if node.target is _aten.fill_.Scalar:
            if replace_with_full(graph, node, node.args[1]):  # type: ignore[arg-type]
                graph.erase_node(written)
        elif node.target in _OUT_OF_PLACE and _keeps_layout(node):
            new = graphs.insert_before(node, _OUT_OF_PLACE[node.target], node.args, kwargs=node.kwargs)
            graphs.replace_uses(node, new)
            graph.erase_node(node)


def _keeps_layout(node: Node) -> bool:
    """Return True if the out-of-place op returns the dtype and layout that the in-place op writes over."""
    values: list[Any] = [graphs.tensors(x)[0] if isinstance(x, Node) else x for x in node.args[:2]]
    written, other = values
    same = graphs.tensor_layout(written) == graphs.tensor_layout(graphs.tensors(node)[0])
    return same and written.is_contiguous() and torch.result_type(written, other) == written.dtype


def _duplicate_casts(graph: Graph) -> None:
    """Cast a narrow tensor again for each step that reads it widened: a program casts as it reads half the bytes."""
    for node in list(graph.nodes):
        if node.target is not _aten._to_copy.default or step_of(node) is None:
            continue
        (narrow,), (wide,) = graphs.tensors(node.all_input_nodes[0]), graphs.tensors(node)
        if narrow.itemsize < wide.itemsize and all(step_of(user) not in (None, "copy") for user in node.users):
            for user in list(node.users)[1:]:
                with graph.inserting_before(user):
                    cast = graph.node_copy(node)
                graphs.refresh_value(cast)
                user.replace_input_with(node, cast)


def _hoist_views(graph: Graph) -> None:
    """View a step's arguments rather than its result, if another step reads that view: so the two may fuse."""
    for view in list(graph.nodes):
        if view.target not in _VIEWS or not any(isinstance(step_of(user), Step) for user in view.users):
            continue
        (viewed,) = view.all_input_nodes
        step, arguments = step_of(viewed), viewed.all_input_nodes
        fit = all(graphs.shape(x) == graphs.shape(viewed) and graphs.tensors(x)[0].is_contiguous() for x in arguments)
        alone = len(viewed.users) == 1 and not any(step_of(x) or constant_value(x) is not None for x in arguments)
        if not isinstance(step, Step) or step.op == "turn" or not fit or not alone:
            continue
        shape = list(graphs.shape(view))
        views = {x: graphs.insert_before(viewed, _aten.view.default, (x, shape)) for x in arguments}
        args, kwargs = map_arg((viewed.args, viewed.kwargs), views.__getitem__)
        graphs.replace_uses(view, graphs.insert_before(viewed, viewed.target, args, kwargs=kwargs))
        erase_unused(graph, [viewed, view])
