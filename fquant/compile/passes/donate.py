"""Donation: write results of a captured graph over arguments that the caller gives away.

A new value of a parameter, or of an optimiser's moment, takes the memory of the old one after the last read of that.
A result that is the argument with some elements replaced, such as a cache with one more token, is not copied: the op
that replaces them becomes the one that writes in place. So does a copy to the memory of the host (``graph.stored``).
"""

from collections import Counter, deque
from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node

from ... import tree
from ..graph import (
    all_storages,
    describe,
    is_issue,
    outputs,
    rebase_views,
    replace_uses,
    storages,
    stored,
    tensor_layouts,
    tensors,
    written_storages,
)  # fmt: skip
from ..liveness import last_uses

aten = torch.ops.aten
IN_PLACE = {  # of ops that replace some elements of their first argument
    aten.scatter.src: aten.scatter_.src,
    aten.index_copy.default: aten.index_copy_.default,
    aten.index_put.default: aten.index_put_.default,
}


def written_over(bound: dict[str, Any], donate: Collection[str]) -> set[int]:
    """Return the ids of the donated tensors whose memory no other tensor shares, as far as torch knows."""
    if not donate:
        return set()
    given = {name: _tensors(x) for name, x in bound.items()}
    times = Counter(id(t) for tensors in given.values() for t in tensors)
    donated = [t for name in donate for t in given.get(name, ())]
    return {id(t) for t in donated if times[id(t)] == 1 and (t.is_meta or _holders(t) == 1)}


def donate(graph: Graph, donated: Mapping[str, Node]) -> list[Node]:
    """Write a result over every donated placeholder, of its shape, dtype, strides and device.

    Results are matched in order. One is copied in after its own last write and the last read of the old value. Later
    uses of the result read the placeholder instead, so that the result is not kept beside it. Return the placeholders
    that are written over; one that the graph returns, itself or as a view, is not. Raises ValueError if no result is
    left, or if a donated tensor on the host is read behind the copy that is to replace it.
    """
    nodes, last, returned = list(graph.nodes), last_uses(graph), outputs(graph)
    place = {node: i for i, node in enumerate(nodes)}
    last_writes = {storage: i for i, node in enumerate(nodes) for storage in written_storages(node)}
    placeholders = graph.find_nodes(op="placeholder")
    inputs, kept = all_storages(placeholders), all_storages(returned)
    free: dict[object, deque[Node]] = {}
    in_place_of = {issue.args[0]: node for node in returned if (issue := stored(node)) is not None}
    taken = list[Node]()
    for node in dict.fromkeys(returned):
        if not storages(node) & inputs:
            free.setdefault(tensor_layouts(node), deque()).append(node)
    for path, placeholder in donated.items():
        if storages(placeholder) & kept:
            continue
        if not (fitting := free.get(tensor_layouts(placeholder))):
            (t,) = tensors(placeholder)
            raise ValueError(
                f"donate: {path} is {describe(t)}, and no result of this kind is left to take its place; "
                "do not donate it"
            )
        result = _own(fitting, in_place_of.get(placeholder))
        if (issue := stored(result)) is not None:
            _store_over(placeholder, path, issue, result, place)
            taken.append(placeholder)
            continue
        if _replaces_elements(result, placeholder, place, last):
            memory = storages(result)
            result.target, result.meta["val"] = IN_PLACE[result.target], placeholder.meta["val"]  # type: ignore[index]
            rebase_views(result.users, memory)
            taken.append(placeholder)
            continue
        ends = [last[storage] for storage in storages(placeholder)]
        after = nodes[max(place[result], *ends, *(last_writes.get(storage, 0) for storage in storages(result)))]
        users = [node for node in result.users if node in place and place[node] > place[after]]
        with graph.inserting_after(after if after.op != "placeholder" else placeholders[-1]):
            copy = graph.call_function(torch.ops.aten.copy_.default, (placeholder, result))
        copy.meta["val"] = placeholder.meta["val"]
        replace_uses(result, copy, users)
        taken.append(placeholder)
    return taken


def _replaces_elements(result: Node, placeholder: Node, place: Mapping[Node, int], last: Mapping[int, int]) -> bool:
    """Return True if ``result`` is a placeholder with elements replaced, and the last reader of its old value."""
    if result.target not in IN_PLACE or result.args[0] is not placeholder:
        return False
    others = (x for x in result.all_input_nodes if x is not placeholder)
    aliased = any(storages(x) & storages(placeholder) for x in others)
    return not aliased and all(last[storage] == place[result] for storage in storages(placeholder))


def _own(fitting: deque[Node], own: Node | None) -> Node:
    """Take the result ``own``, which is stored in the place of the placeholder, if it fits; else the first."""
    if own is None or own not in fitting:
        return fitting.popleft()
    fitting.remove(own)
    return own


def _store_over(placeholder: Node, path: str, issue: Node, result: Node, place: Mapping[Node, int]) -> None:
    """Let a copy to the memory of the host write over ``placeholder``; ``result`` is its wait."""
    reads, views, memory = [-1], [placeholder], storages(placeholder)
    for node in views:
        for user in (x for x in node.users if x is not issue):
            reads += [place[x] for x in (user, *(user.users if is_issue(user) else ()))]
            views += [user] if storages(user) & memory else []
    if max(reads) > place[issue]:
        fix = "read it before the step, or do not donate it"
        raise ValueError(f"donate: {path} is read after its new value is copied to the host in its place; {fix}")
    old = storages(issue)
    issue.target, issue.args = torch.ops.fquant.store_.default, (placeholder, issue.args[1])
    for node in (issue, result):
        node.meta["val"] = placeholder.meta["val"]
    rebase_views(result.users, old)


def _tensors(x: Any) -> list[Tensor]:
    return [leaf for leaf in tree.leaves(x) if isinstance(leaf, Tensor)]


def _holders(t: Tensor) -> int:
    """Return the number of tensors that share the memory of ``t``, itself included."""
    return torch._C._storage_Use_Count(t.untyped_storage()._cdata) - 1  # type: ignore[attr-defined]  # less this call's
