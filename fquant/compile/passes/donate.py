"""donate: results of a captured graph written over arguments that the caller gives away.

A new value of a parameter, or of an optimiser's moment, takes the memory of the old one, as soon as nobody reads that.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Collection, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node

from ... import tree
from ..graph import describe, outputs, replace_uses, storages, tensor_layouts, tensors, written_storages
from ..liveness import last_uses


def written_over(bound: dict[str, Any], donate: Collection[str]) -> set[int]:
    """The ids of the donated tensors whose memory no other, an argument or not, shares, as far as torch knows."""
    if not donate:
        return set()
    given = {name: _tensors(x) for name, x in bound.items()}
    times = Counter(id(t) for tensors in given.values() for t in tensors)
    donated = [t for name in donate for t in given.get(name, ())]
    return {id(t) for t in donated if times[id(t)] == 1 and (t.is_meta or _holders(t) == 1)}


def donate(graph: Graph, donated: Mapping[str, Node]) -> list[Node]:
    """Write results over inputs: every donated placeholder takes a result of its shape, dtype, strides and device.

    Return the placeholders that are written over. One that the graph returns, itself or as a view, is not.

    Results are matched in order. One is copied in as soon as it is what is returned, nobody writes it any more, and
    nobody reads the old value; whoever uses it later reads the input instead, so that it is not kept beside it.

    Raises ValueError, naming the input, where no result is left that fits.
    """
    nodes, last, returned = list(graph.nodes), last_uses(graph), outputs(graph)
    place = {node: i for i, node in enumerate(nodes)}
    done = {
        storage: i for i, node in enumerate(nodes) for storage in written_storages(node)
    }  # by when nobody writes it
    kept = {storage for node in returned for storage in storages(node)}
    held = {storage for node in nodes if node.op == "placeholder" for storage in storages(node)}
    free: dict[object, deque[Node]] = {}
    taken = list[Node]()
    for node in dict.fromkeys(returned):
        if not storages(node) & held:
            free.setdefault(tensor_layouts(node), deque()).append(node)
    for path, placeholder in donated.items():
        if storages(placeholder) & kept:
            continue  # it is returned itself, or a view of it
        if not (fitting := free.get(tensor_layouts(placeholder))):
            (t,) = tensors(placeholder)
            raise ValueError(
                f"donate: {path} is {describe(t)}, and no result of this kind is left to take its place; "
                "do not donate it"
            )
        result = fitting.popleft()
        ends = [last[storage] for storage in storages(placeholder)]
        after = nodes[max(place[result], *ends, *(done.get(storage, 0) for storage in storages(result)))]
        users = [node for node in result.users if node in place and place[node] > place[after]]
        with graph.inserting_after(after if after.op != "placeholder" else _last_placeholder(nodes)):
            copy = graph.call_function(torch.ops.aten.copy_.default, (placeholder, result))
        copy.meta["val"] = placeholder.meta["val"]
        replace_uses(result, copy, users)
        taken.append(placeholder)
    return taken


def _last_placeholder(nodes: Iterable[Node]) -> Node:
    return [node for node in nodes if node.op == "placeholder"][-1]


def _tensors(x: Any) -> list[Tensor]:
    return [leaf for leaf in tree.leaves(x) if isinstance(leaf, Tensor)]


def _holders(t: Tensor) -> int:
    """How many tensors share the memory of ``t``, itself included."""
    count: int = torch._C._storage_Use_Count(t.untyped_storage()._cdata)  # type: ignore[attr-defined]
    return count - 1  # without the handle that was made to ask
