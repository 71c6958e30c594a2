"""regather: what was gathered for the forward is gathered again for the backward, and not kept between.

    comm = shard.comm(mesh, rules, recompute=False)
    step = jit(step, passes=(regather(), schedule.prefetch()))

A backward needs its block's weights once more. Recomputing the block gathers them again, and computes the block again
too; not recomputing it keeps what was gathered, which is the whole model on every rank. In a captured step the one can
be had without the other: the gather is put once more before the first use in the backward, the views of its result
with it, and the first result is freed when the forward is done with it, as FSDP does it in hooks (Zhao et al. 2023).

What is forward and what is backward, a graph does not say. But a block's uses come in runs, between which other blocks
are gathered; so a use behind the wait for another gather that nothing in this run needed is one of a new run. That
reads the order of gathers and of their uses, which is the same on every rank, and nothing else.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch.fx import Graph, Node

from fquant.compile import graph

from .gathers import Gather, gathers, writers


@dataclass(frozen=True)
class Regather:
    """The pass of :func:`regather`."""

    def __call__(self, g: Graph) -> None:
        """Gather again in ``g``."""
        found, written = gathers(g), writers(g)
        place = {node: i for i, node in enumerate(g.nodes)}
        waits = [place[x.wait] for x in found]
        returned = {storage for node in graph.outputs(g) for storage in graph.storages(node)}
        uses = _uses(g, found)
        for x in found:
            (memory,) = graph.storages(x.wait)
            run: list[Node] = []
            later: list[list[Node]] = []
            for node in uses[memory]:
                if run and any(place[run[-1]] < wait < place[node] for wait in waits):
                    later.append([])
                run = later[-1] if later else run
                run.append(node)
            last = place[later[-1][-1]] if later else 0
            if memory in returned or written(x.reads | {memory}, place[x.issue], last):
                continue  # it is kept, or would not be the same again
            for run in later:
                _once_more(g, x, memory, run)


def regather_blocks() -> Regather:
    """A pass that gathers a shard once for every run of uses that other gathers lie between.

    It raises what the passes of ``shard.schedule`` raise.
    """
    return Regather()


def _uses(g: Graph, found: list[Gather]) -> dict[int, list[Node]]:
    """Who reads, or views, what each gather brought, in order."""
    uses: dict[int, list[Node]] = {storage: [] for x in found for storage in graph.storages(x.wait)}
    own = {node for x in found for node in (x.issue, x.wait)}
    for node in g.nodes:
        if node not in own and node.op != "output":
            for storage in {storage for near in node.all_input_nodes for storage in graph.storages(near)} & uses.keys():
                uses[storage].append(node)
    return uses


def _once_more(g: Graph, x: Gather, memory: int, run: list[Node]) -> None:
    """Gather ``x`` again before the first of ``run``, whose nodes then read that."""
    copies: dict[Node, Node] = {x.source: x.source}
    inside = set(run)

    def copy(node: Node) -> Node:
        if node not in copies:
            args = {near: copy(near) for near in node.all_input_nodes}
            with g.inserting_before(run[0]):
                new = g.node_copy(node, lambda near: args[near])
            graph.refresh_value(new)
            copies[node] = new
        return copies[node]

    for node in run:
        for near in node.all_input_nodes:
            if memory in graph.storages(near) and near not in inside:
                node.replace_input_with(near, copy(near))
        if memory in graph.storages(node):  # a view of it lies in the new memory now
            graph.refresh_value(node)
