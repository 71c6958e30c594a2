"""Regather: free the gathered bytes of a block after its forward, and gather them again for its backward.

    comm = shard.comm(mesh, rules, recompute=False)
    step = jit(step, passes=(regather_blocks(), prefetch_gathers()))

A backward needs its block's weights once more. Recomputing the block gathers them again, but computes the block again
too. Without recomputation the gathered bytes stay, which is the whole model on every rank. A captured step can gather
again without recomputing: the pass copies the gather, with the views of its result, to the first use in the backward.
FSDP does the same in hooks (Zhao et al. 2023). A graph does not mark the backward, but a block's uses come in runs: a
use begins a new run if the wait for another gather comes between it and the use before.
"""

from torch.fx import Graph, Node

from fquant.compile import Pass, graph

from .gathers import Gather, gathers, positions


def regather_blocks() -> Pass:
    """Return a pass that gathers a shard once for each run of uses. The pass raises the errors of ``gathers``."""
    return _regather


def _regather(g: Graph) -> None:
    found, (at, written), returned = gathers(g), positions(g), graph.all_storages(graph.outputs(g))
    waits, uses = [at[x.wait] for x in found], _uses(g, found)
    for x in found:
        (memory,) = graph.storages(x.result)
        runs: list[list[Node]] = [[]]
        for node in uses[memory]:
            if runs[-1] and any(at[runs[-1][-1]] < wait < at[node] for wait in waits):
                runs.append([])
            runs[-1].append(node)
        last = at[runs[-1][-1]] if runs[1:] else 0
        if memory in returned or written(x.reads | {memory}, at[x.issue], last):
            continue  # it is kept anyway, or a second gather would have another result
        for run in runs[1:]:
            _gather_again(g, x, memory, run)


def _uses(g: Graph, found: list[Gather]) -> dict[int, list[Node]]:
    """Return the nodes that read or view the result of each gather, in order, by its memory."""
    uses: dict[int, list[Node]] = {storage: [] for storage in graph.all_storages(x.result for x in found)}
    own = {node for x in found for node in (*x.nodes, x.result)}
    for node in g.nodes:
        if node not in own and node.op != "output":
            for storage in graph.all_storages(node.all_input_nodes) & uses.keys():
                uses[storage].append(node)
    return uses


def _gather_again(g: Graph, x: Gather, memory: int, run: list[Node]) -> None:
    """Copy the gather ``x`` to the first node of ``run``, and let the nodes of ``run`` use the copy."""
    copies: dict[Node, Node] = {node: node for node in (x.source, *x.sides)}

    def copy(node: Node) -> Node:
        if node not in copies:
            args = {near: copy(near) for near in node.all_input_nodes}
            with g.inserting_before(run[0]):
                new = g.node_copy(node, args.__getitem__)
            graph.refresh_value(new)
            copies[node] = new
        return copies[node]

    for node in run:
        for near in node.all_input_nodes:
            if memory in graph.storages(near) and near not in run:
                node.replace_input_with(near, copy(near))
        if memory in graph.storages(node):  # a view, whose storage is now that of the copy
            graph.refresh_value(node)
