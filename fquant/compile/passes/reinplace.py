"""Reinplacing: results of pointwise programs (``fuse_pointwise.py``) written over their dead arguments.

Behind a program one of its arguments is often dead, such as the terms of a sum of gradients. A result of the same
layout takes its memory, so that less is held, and the memory that is written is in the cache already.
"""

import operator
from collections.abc import Mapping
from typing import Any

from torch.fx import Graph, Node

from ...kernels.ops.pointwise import OP
from ...kernels.ops.pointwise_program import parse
from .. import graph as graphs
from .. import liveness


def reinplace(graph: Graph) -> None:
    """Let each program write results over dead arguments of their layout."""
    last = liveness.last_uses(graph)
    given = graphs.all_storages(graph.find_nodes(op="placeholder"))
    for place, node in enumerate(list(graph.nodes)):
        if node.target is OP:
            dead = [x for x in _sole_reads(node) if last[_storage(x)] == place and _storage(x) not in given]
            _write_over(graph, node, dead, last)


def _sole_reads(node: Node) -> list[Node]:
    """Return the arguments of a program that fill their storage and are its only readers of that."""
    reads: Any = node.args[0]
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
