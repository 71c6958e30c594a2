"""turn: the halves of rotary embeddings, in a captured graph, as one node that may be a step of a program.

    cat([-x[..., h:], x[..., :h]], -1)        # x f[... 2h]: turn(x, h)
    cat([x[..., h:], -x[..., :h]], -1)        # turn(x, -h), its transpose, as a gradient has it

Halves are told by where they lie, so it does not matter whether x was sliced, split or chunked.
"""

from __future__ import annotations

import operator

import torch
from torch.fx import Graph, Node

from . import graph as graphs
from .kernels.program import DTYPES, is_turned
from .kernels.turn import OP

_aten = torch.ops.aten
_FLOATS = tuple(DTYPES.values())


def turn(graph: Graph) -> None:
    """Replace every negation and concatenation of halves by one node."""
    written = set[int]().union(*map(graphs.written, graph.nodes))
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
