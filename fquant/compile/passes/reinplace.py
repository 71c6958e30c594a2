"""reuse: what an elementwise program makes is written over what it reads, where nobody reads that any more.

Behind a program (fquant/compile/passes/fuse_pointwise.py) one of its arguments is often dead: the sum of two gradients needs neither of them. So
a result of the same kind takes its memory: less is held, and what is written is in the cache already, where fresh
memory would have to be fetched, or had from the system.
"""

from __future__ import annotations

import operator

from torch.fx import Graph, Node

from ...kernels.ops.pointwise import OP
from ...kernels.ops.pointwise_program import parse
from .. import graph as graphs
from .. import liveness


def reinplace(graph: Graph) -> None:
    """Let every program write over its dead arguments what it can."""
    last = liveness.last_uses(graph)
    given = {storage for node in graph.nodes if node.op == "placeholder" for storage in graphs.storages(node)}
    for place, node in enumerate(list(graph.nodes)):
        if node.target is OP:
            dead = [read for read in _whole(node) if last[_storage(read)] == place and _storage(read) not in given]
            _write_over(graph, node, dead, last)


def _whole(node: Node) -> list[Node]:
    """What a program reads that is all of its memory, and the only one to read that."""
    reads: list[Node] = node.args[0]  # type: ignore[assignment]
    out = []
    for read in reads:
        (t,), memory = graphs.tensors(read), graphs.sizes(read)
        alone = all(near is read or not memory.keys() & graphs.storages(near) for near in reads)
        if alone and t.is_contiguous() and list(memory.values()) == [graphs.nbytes(t)]:
            out.append(read)
    return out


def _write_over(graph: Graph, node: Node, dead: list[Node], last: dict[int, int]) -> None:
    """Take ``dead`` arguments for results of their kind, in order."""
    reads, write, text = node.args
    program, made = parse(str(text)), {int(one.args[1]): one for one in node.users}  # type: ignore[arg-type]
    taken = dict[int, Node]()
    for i, one in made.items():
        fitting = [
            read
            for read in dead
            if graphs.tensor_layouts(read) == graphs.tensor_layouts(one) and read not in taken.values()
        ]
        if fitting:
            taken[i] = fitting[0]
    if not taken:
        return
    new = [i for i in range(len(program.new)) if i not in taken]
    over = [program.new[i] for i in taken]
    program = program._replace(new=tuple(program.new[i] for i in new), over=(*program.over, *over))
    node.args = (reads, [*write, *taken.values()], program.text)  # type: ignore[misc]
    node.meta["val"] = [node.meta["val"][i] for i in new]
    for i, read in taken.items():
        last[_storage(read)] = last[_storage(made[i])]
        graphs.replace_uses(made[i], read)
        graph.erase_node(made[i])
    for i, one in made.items():
        if i not in taken:
            one.args = (node, new.index(i))
    assert all(user.target is operator.getitem for user in node.users)


def _storage(node: Node) -> int:
    (storage,) = graphs.storages(node)
    return storage
