"""Passes over a captured graph: which nodes share memory, what can go, what can be written in place.

A graph is torch.fx's: a list of nodes in the order in which they run, each a call of one op with the results of earlier
ones. ``meta["val"]`` of a node is a fake tensor, or a list of them: shape, dtype, strides and, by its storage, which
memory the result lies in. A view has the storage of what it views, so two nodes share memory exactly where their fake
tensors share a storage. Everything here reads only that; nothing runs an op.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor
from torch.fx import Graph, Node

_aten = torch.ops.aten
IDENTITIES = (_aten.detach.default, _aten.alias.default)  # without autograd they are their argument
CONSTANTS = {_aten.ones_like.default: 1, _aten.zeros_like.default: 0}  # of which the argument says the shape only


def tidy(graph: Graph) -> None:
    """Take out nodes that nobody uses, views that are their argument, and reads of what is asked for its shape only.

    A gradient begins with ones like the value, which would keep the whole value, and compute it where nobody asks.
    """
    for node in list(graph.nodes):
        if node.op == "call_function" and node.target in IDENTITIES:
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)
        elif node.op == "call_function" and node.target in CONSTANTS:
            _without_argument(graph, node, CONSTANTS[node.target])
    graph.eliminate_dead_code()


def _without_argument(graph: Graph, node: Node, fill: int) -> None:
    (t,) = tensors(node)
    if not t.is_contiguous() or t.layout != torch.strided:
        return
    with graph.inserting_before(node):
        full = graph.call_function(
            _aten.full.default, (list(t.shape), fill), {"dtype": t.dtype, "device": t.device, "pin_memory": False}
        )
    full.meta["val"] = t
    node.replace_all_uses_with(full)
    graph.erase_node(node)


def tensors(node: Node) -> list[Tensor]:
    """The fake tensors that a node gives."""
    value = node.meta.get("val")
    return [t for t in (value if isinstance(value, list | tuple) else [value]) if isinstance(t, Tensor)]


def storages(node: Node) -> set[int]:
    """What tells the memory of a node's results from that of others."""
    return {t.untyped_storage()._cdata for t in tensors(node)}


@dataclasses.dataclass(frozen=True)
class Peak:
    """Where in a graph the most memory is held: after the node at ``place``, by the nodes that made ``holding``."""

    place: int
    nbytes: int
    holding: dict[int, Node]  # by storage


def peak(graph: Graph) -> Peak:
    """The peak. Arguments are held from the beginning to the end, what a node makes until its last use or a view's."""
    last, alive, now = last_uses(graph), dict[int, Node](), 0
    sizes = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for node in graph.nodes for t in tensors(node)}
    found = Peak(0, 0, {})
    for place, node in enumerate(graph.nodes):
        for storage in storages(node) - alive.keys():
            alive[storage] = node
            now += sizes[storage]
        if now > found.nbytes:
            found = Peak(place, now, dict(alive))
        for near in (node, *node.all_input_nodes):
            for storage in storages(near) & alive.keys():
                if last[storage] == place and node.op != "output" and alive[storage].op != "placeholder":
                    now -= sizes[storage]
                    del alive[storage]
    return found


def last_uses(graph: Graph) -> dict[int, int]:
    """For every storage the place in the graph of the last node that makes, views, reads or returns it."""
    last: dict[int, int] = {}
    for place, node in enumerate(graph.nodes):
        for near in (node, *node.all_input_nodes):
            for storage in storages(near):
                last[storage] = place
    return last


def outputs(graph: Graph) -> list[Node]:
    """The nodes that the graph returns, in order; a node may be returned more than once."""
    (returned,) = graph.output_node().args
    assert isinstance(returned, Sequence)
    return [node for node in returned if isinstance(node, Node)]


def donate(graph: Graph, donated: Mapping[str, Node]) -> None:
    """Write results over inputs: every donated placeholder takes a result of its shape, dtype, strides and device.

    Results are matched in order. One is copied in as soon as it exists and nobody reads the old value any more, and
    whoever uses it later reads the input instead, so that it is not kept beside it.

    Raises ValueError, naming the input, where no result is left that fits.
    """
    returned = outputs(graph)
    held = {storage for node in graph.nodes if node.op == "placeholder" for storage in storages(node)}
    free = [node for node in dict.fromkeys(returned) if not storages(node) & held]
    given = set[int]().union(*map(storages, returned))
    nodes = list(graph.nodes)
    readers: dict[int, list[Node]] = {}
    for node in nodes:
        if node.op != "output":
            for storage in storages(node).union(*map(storages, node.all_input_nodes)) & held:
                readers.setdefault(storage, []).append(node)
    place = {node: i for i, node in enumerate(nodes)}
    for path, placeholder in donated.items():
        if storages(placeholder) & given:
            continue  # it is returned itself, or a view of it
        result = next((node for node in free if _alike(node, placeholder)), None)
        if result is None:
            (t,) = tensors(placeholder)
            raise ValueError(
                f"donate: {path} is {describe(t)}, and no result of this kind is left to take its place; "
                "do not donate it"
            )
        free.remove(result)
        (memory,) = storages(placeholder)
        after = max([result, placeholder, *readers[memory]], key=place.__getitem__)
        if after.op == "placeholder":
            after = [node for node in nodes if node.op == "placeholder"][-1]
        _write(graph, placeholder, result, after, place)


def _alike(node: Node, placeholder: Node) -> bool:
    found, (wanted,) = tensors(node), tensors(placeholder)
    kind: Callable[[Tensor], object] = lambda t: (t.shape, t.dtype, t.stride(), t.device)
    return len(found) == 1 and kind(found[0]) == kind(wanted)


def _write(graph: Graph, placeholder: Node, result: Node, after: Node, place: Mapping[Node, int]) -> None:
    """Put a copy of ``result`` into ``placeholder``, behind both the result and the last reader of the old value."""
    users = [node for node in result.users if node in place and place[node] > place[after]]
    with graph.inserting_after(after):
        copy = graph.call_function(_aten.copy_.default, (placeholder, result))
    copy.meta["val"] = placeholder.meta["val"]
    for user in users:
        user.replace_input_with(result, copy)


def describe(t: Tensor) -> str:
    """A tensor's dtype and shape, as ``float32[2, 3]``."""
    return f"{str(t.dtype).removeprefix('torch.')}{list(t.shape)}"
