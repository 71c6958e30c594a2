"""Deduplicate: gather once what would be gathered again soon, and use the first result again.

The last block of a forward, for example, is gathered again by the backward at once. Keeping its first result saves a
gather and costs its memory between the two uses.
"""

from dataclasses import dataclass

from torch.fx import Graph

from fquant.compile import graph

from .gathers import check_budget, gathers, positions


@dataclass(frozen=True)
class DeduplicateGathers:
    """Gather a shard once if its next gather comes soon, and use the first result again.

    The nearest pairs of gathers are joined first. The bytes held between a first gather and its second are at no time
    more than ``budget``. None joins all pairs, so that a step gathers every shard once.

    Raises ValueError for a bad ``budget``. The pass raises the errors of :func:`gathers`.
    """

    budget: int | None = None

    def __post_init__(self) -> None:
        check_budget("deduplicate_gathers", self.budget)

    def __call__(self, g: Graph) -> None:
        found, (at, written), returned = gathers(g), positions(g), graph.all_storages(graph.outputs(g))
        latest: dict[object, int] = {}
        pairs = []  # (distance, first, second) of gathers with equal results
        for k, x in enumerate(found):
            if x.key in latest:
                pairs.append((k - latest[x.key], latest[x.key], k))
            latest[x.key] = k
        held = [0] * len(found)  # bytes that are kept from wait i to the next
        result = [x.wait for x in found]
        for _, i, k in sorted(pairs):
            first, second = found[i], found[k]
            memory = graph.all_storages((first.wait, second.wait))
            if self.budget is not None and max(held[i:k]) + first.nbytes > self.budget:
                continue
            changed = written(first.reads, at[first.issue], at[second.wait]) or written(memory, 0, len(at))
            if changed or memory & returned:
                continue
            held[i:k] = [n + first.nbytes for n in held[i:k]]
            graph.replace_uses(second.wait, result[i])
            result = [result[i] if wait is second.wait else wait for wait in result]
            for node in reversed(second.nodes):
                if not node.users:
                    g.erase_node(node)


deduplicate_gathers = DeduplicateGathers
