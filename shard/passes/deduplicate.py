"""Deduplicate: split from shard.schedule."""

from __future__ import annotations

from dataclasses import dataclass

from torch.fx import Graph

from fquant.compile import graph

from .gathers import _checked, gathers, writers


@dataclass(frozen=True)
class Deduplicate:
    """The pass of :func:`keep`."""

    budget: int | None

    def __call__(self, g: Graph) -> None:
        """Take out gathers of ``g``."""
        _deduplicate(g, self.budget)


def deduplicate_gathers(budget: int | None = None) -> Deduplicate:
    """A pass that gathers a shard once where its next gather comes soon enough, and uses the first result again.

    The nearest pairs of gathers are joined first, as long as the bytes held between a first and its second are at no
    time more than ``budget``; None joins all of them, so that a step gathers every shard once.

    The pass raises what that of :func:`prefetch` raises.
    """
    return Deduplicate(_checked("keep", budget))


def _deduplicate(g: Graph, budget: int | None) -> None:
    found, written = gathers(g), writers(g)
    place = {node: i for i, node in enumerate(g.nodes)}
    kept = {storage for node in graph.outputs(g) for storage in graph.storages(node)}
    before: dict[object, int] = {}
    pairs = []
    for k, x in enumerate(found):
        if x.what in before:
            pairs.append((k - before[x.what], before[x.what], k))
        before[x.what] = k
    held = [0] * len(found)  # bytes that are kept from wait i to the next
    result = [x.wait for x in found]
    for _, i, k in sorted(pairs):
        one, two = found[i], found[k]
        memory = graph.storages(one.wait) | graph.storages(two.wait)
        if budget is not None and max(held[i:k]) + one.nbytes > budget:
            continue
        if written(one.reads, place[one.issue], place[two.wait]) or written(memory, 0, len(place)) or memory & kept:
            continue
        held[i:k] = [n + one.nbytes for n in held[i:k]]
        graph.replace_uses(two.wait, result[i])
        result = [result[i] if wait is two.wait else wait for wait in result]
        for node in (two.wait, two.issue, *reversed(two.chain)):
            if not node.users:
                g.erase_node(node)
