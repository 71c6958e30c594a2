"""Reinplacing: results written over dead arguments, of pointwise programs (``fuse_pointwise.py``) and of the loss.

Behind a program one of its arguments is often dead, such as the terms of a sum of gradients. A result of the same
layout takes its memory, so that less is held, and the memory that is written is in the cache already. On the host the
gradient of logits is written over the logits, row by row.
"""

import operator
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.fx import Graph, Node

from ...kernels.ops.pointwise import OP
from ...kernels.ops.pointwise_program import parse
from .. import graph as graphs
from .. import liveness

_SLOPE = "fquant.nll_backward.default"


def reinplace(graph: Graph) -> None:
    """Let programs, and gradients of losses, write results over dead arguments of their layout."""
    last = liveness.last_uses(graph)
    given = graphs.all_storages(graph.find_nodes(op="placeholder"))
    for place, node in enumerate(list(graph.nodes)):
        if node.target is OP or str(node.target) == _SLOPE:
            reads: Any = node.args[0] if node.target is OP else node.args[:1]
            dead = [x for x in _sole_reads(reads) if last[_storage(x)] == place and _storage(x) not in given]
            (_write_over if node.target is OP else _write_over_logits)(graph, node, dead, last)


def _sole_reads(reads: Sequence[Node]) -> list[Node]:
    """Return those of the arguments of a program that fill their storage and are its only readers of that."""
    found = []
    for read in reads:
        (t,), memory = graphs.tensors(read), graphs.sizes(read)
        alone = all(other is read or not memory.keys() & graphs.storages(other) for other in reads)
        if alone and t.is_contiguous() and list(memory.values()) == [graphs.nbytes(t)]:
            found.append(read)
    return found


def _write_over(graph: Graph, node: Node, dead: list[Node], last: dict[int, int]) -> None:
    """Give each result of a program, in order, the memory of the first of the ``dead`` arguments that fits."""
    results: dict[int, Any] = {user.args[1]: user for user in node.users}  # type: ignore[misc]
    targets = dict[int, Node]()
    for i, result in results.items():
        fitting = [x for x in dead if graphs.tensor_layouts(x) == graphs.tensor_layouts(result)]
        if free := [x for x in fitting if x not in targets.values()]:
            targets[i] = free[0]
    if not targets:
        return
    remaining = redirect(node, targets)
    node.meta["val"] = [node.meta["val"][i] for i in remaining]
    for i, result in results.items():
        assert result.target is operator.getitem
        if i in targets:
            last[_storage(targets[i])] = last[_storage(result)]
            graphs.replace_uses(result, targets[i])
            graph.erase_node(result)
        else:
            result.args = (node, remaining.index(i))


def _write_over_logits(graph: Graph, node: Node, dead: list[Node], last: dict[int, int]) -> None:
    """Give the gradient of a loss the memory of the logits if they are ``dead``, on the host."""
    losses, slope = graphs.tensors(node)
    if not dead or not losses.is_cpu or slope.dtype is torch.float64:
        return
    made, kwargs = torch.ops.aten.empty.memory_format, {"dtype": losses.dtype, "device": losses.device}
    results = graphs.insert_before(node, made, (list(losses.shape),), losses, kwargs), dead[0]
    last[_storage(dead[0])] = last[slope.untyped_storage()._cdata]
    for item in list(node.users):
        graphs.replace_uses(item, results[item.args[1]])  # type: ignore[index]
        graph.erase_node(item)
    node.target, node.kwargs = torch.ops.fquant.nll_backward.out, dict(zip(("out0", "out1"), results, strict=True))
    node.meta["val"] = ()


def redirect(node: Node, targets: Mapping[int, Node]) -> list[int]:
    """Let a program write results, by index, over ``targets``; return the indices of those that it still returns."""
    args: Any = node.args
    reads, write, text = args
    program = parse(text)
    remaining = [i for i in range(len(program.new)) if i not in targets]
    over = (*program.over, *(program.new[i] for i in targets))
    program = program._replace(new=tuple(program.new[i] for i in remaining), over=over)
    node.args = (reads, [*write, *targets.values()], program.text)
    return remaining


def _storage(node: Node) -> int:
    (storage,) = graphs.storages(node)
    return storage
