"""Overlap reductions: let the gradients of a block travel while the block before it computes its own.

    step = jit(step, passes=(regather_blocks(), prefetch_gathers(), overlap_reductions()))

A backward issues the reduce-scatter of a block's gradients and, as traced, waits for it at once. The result is used
only after the backward, by the norm of all gradients. So the wait may be later. Until then the gradients of the whole
block stay in memory, as in FSDP (Zhao et al. 2023), which keeps one reduction under way too. The next block's gradients
are put side by side after the wait, so that never two blocks have such a buffer.
"""

from dataclasses import dataclass

from torch.fx import Graph

from fquant.compile import graph

from .gathers import COPIES, collective_name, positions, wait_of


@dataclass(frozen=True)
class OverlapReductions:
    """Wait for a reduce-scatter before the input of the ``depth``-th next one is made, or before its result is used.

    No collective moves, only waits, with casts of their results. Raises ValueError for a bad ``depth``.
    """

    depth: int = 1

    def __post_init__(self) -> None:
        if type(self.depth) is not int or self.depth < 1:
            raise ValueError(f"overlap_reductions: depth is {self.depth!r}; wanted an integer of at least 1")

    def __call__(self, g: Graph) -> None:
        issues = [node for node in g.nodes if collective_name(node) == "reduce_scatter"]
        (at, written), end = positions(g), g.output_node()
        for k, issue in enumerate(issues):
            later = issues[k + self.depth].all_input_nodes[0] if k + self.depth < len(issues) else end
            moved = [wait_of(issue)]
            while len(moved[-1].users) == 1 and (node := next(iter(moved[-1].users))).target in COPIES:
                moved.append(node)
            stop = min((*moved[-1].users, later), key=at.__getitem__)
            memory = graph.all_storages((*issue.all_input_nodes, *moved))
            if at[stop] > at[moved[-1]] and not written(memory, at[issue], at[stop]):
                for node in moved:
                    stop.prepend(node)


overlap_reductions = OverlapReductions
