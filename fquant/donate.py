"""donate: results of a captured graph written over arguments that the caller gives away.

A new value of a parameter, or of an optimiser's moment, takes the memory of the old one, as soon as nobody reads that.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping

import torch
from torch.fx import Graph, Node

from .graph import describe, kind, last_uses, outputs, storages, tensors


def donate(graph: Graph, donated: Mapping[str, Node]) -> None:
    """Write results over inputs: every donated placeholder takes a result of its shape, dtype, strides and device.

    Results are matched in order. One is copied in as soon as it exists and nobody reads the old value any more, and
    whoever uses it later reads the input instead, so that it is not kept beside it.

    Raises ValueError, naming the input, where no result is left that fits.
    """
    nodes, last, returned = list(graph.nodes), last_uses(graph), outputs(graph)
    place = {node: i for i, node in enumerate(nodes)}
    kept = {storage for node in returned for storage in storages(node)}
    held = {storage for node in nodes if node.op == "placeholder" for storage in storages(node)}
    free: dict[object, deque[Node]] = {}
    for node in dict.fromkeys(returned):
        if not storages(node) & held:
            free.setdefault(kind(node), deque()).append(node)
    for path, placeholder in donated.items():
        if storages(placeholder) & kept:
            continue  # it is returned itself, or a view of it
        if not (fitting := free.get(kind(placeholder))):
            (t,) = tensors(placeholder)
            raise ValueError(
                f"donate: {path} is {describe(t)}, and no result of this kind is left to take its place; "
                "do not donate it"
            )
        result = fitting.popleft()
        after = nodes[max(place[result], *(last[storage] for storage in storages(placeholder)))]
        users = [node for node in result.users if node in place and place[node] > place[after]]
        with graph.inserting_after(after if after.op != "placeholder" else _last_placeholder(nodes)):
            copy = graph.call_function(torch.ops.aten.copy_.default, (placeholder, result))
        copy.meta["val"] = placeholder.meta["val"]
        for user in users:
            user.replace_input_with(result, copy)


def _last_placeholder(nodes: Iterable[Node]) -> Node:
    return [node for node in nodes if node.op == "placeholder"][-1]
