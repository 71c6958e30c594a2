"""What the nodes of a captured graph do, which share memory, and how passes change it.

A graph is torch.fx's: a list of nodes in the order in which they run, each a call of one op with the results of earlier
ones. ``meta["val"]`` of a node is a fake tensor, or a list of them: shape, dtype, strides and, by its storage, which
memory the result lies in. A view has the storage of what it views, so two nodes share memory exactly where their fake
tensors share a storage. Everything here reads only that; nothing runs an op.

A collective is two nodes: one issues it and one waits for it. Between them it is in flight: it reads what it was given
and writes what the wait will give, while other nodes run. So to the memory of a collective both belong to both.
"""

from __future__ import annotations

import operator
from collections import deque
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx import Graph, Node
from torch.fx.node import map_arg

Pass = Callable[[Graph], None]  # changes a graph in place, but for its inputs and what its results are

_aten = torch.ops.aten
_WAIT = "_c10d_functional.wait_tensor.default"  # by name: not every build of torch has it
_FUNCTIONAL = "_c10d_functional."
_ISSUES = {  # of the others of torch the name is the op's
    _FUNCTIONAL + "all_gather_into_tensor": "all_gather",
    _FUNCTIONAL + "reduce_scatter_tensor": "reduce_scatter",
    "fquant.all_gather": "all_gather",  # of shard.transport.gloo, as the next
    "fquant.reduce_scatter": "reduce_scatter",
}


def check(passes: Sequence[Pass]) -> None:
    """Raise TypeError unless ``passes`` is a sequence of functions."""
    if not isinstance(passes, Sequence) or isinstance(passes, str):
        raise TypeError(f"passes is a {type(passes).__name__}; wanted a sequence of functions of a graph")
    for i, change in enumerate(passes):
        if not callable(change):
            raise TypeError(f"passes[{i}] is a {type(change).__name__}; wanted a function of a graph")


def run(graph: Graph, passes: Sequence[Pass]) -> None:
    """Let each of ``passes`` change the graph, in order.

    Raises TypeError for one that returns something, RuntimeError where a node is left before what it uses.
    """
    check(passes)
    for i, change in enumerate(passes):
        returned: object = change(graph)
        if returned is not None:
            raise TypeError(
                f"passes[{i}] returned a {type(returned).__name__}; wanted None, the graph being changed in place"
            )
        graph.lint()


def tensors(node: Node) -> list[Tensor]:
    """The fake tensors that a node gives."""
    value = node.meta.get("val")
    return [t for t in (value if isinstance(value, list | tuple) else [value]) if isinstance(t, Tensor)]


def storages(node: Node) -> set[int]:
    """What tells the memory of a node's results from that of others."""
    return {t.untyped_storage()._cdata for t in tensors(node)}


def nbytes(t: Tensor) -> int:
    """Bytes of a tensor."""
    return t.numel() * t.element_size()


def is_wait(node: Node) -> bool:
    """Whether a node waits for a functional collective."""
    return str(node.target) == _WAIT


def read_nodes(node: Node) -> list[Node]:
    """The nodes whose memory a node reads; a wait reads what its collective was given."""
    if not is_wait(node):
        return node.all_input_nodes
    return [*node.all_input_nodes, *issue(node).all_input_nodes]


def issue(wait: Node) -> Node:
    """The node that issues the collective that ``wait`` waits for."""
    (node,) = wait.all_input_nodes
    return node.all_input_nodes[0] if node.target is operator.getitem else node


def collective(node: Node) -> str | None:
    """What a node issues: all_gather, reduce_scatter, all_reduce ...; None where it issues no functional collective."""
    return issued(node.target)


def issued(target: object) -> str | None:
    """What an op issues, as :func:`collective` says of a node."""
    op = str(target).rpartition(".")[0]
    if op.startswith(_FUNCTIONAL) and str(target) != _WAIT:
        return _ISSUES.get(op, op.removeprefix(_FUNCTIONAL))
    return _ISSUES.get(op)


def is_view(node: Node) -> bool:
    """Whether a node's results lie in memory that was there before, and nothing is written."""
    before = {storage for near in node.all_input_nodes for storage in storages(near)}
    writes = isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable
    return bool(before) and storages(node) <= before and not writes


def written_storages(node: Node) -> set[int]:
    """The memory that a node writes beside making its results; ValueError for a call that does not declare it."""
    if node.op in ("placeholder", "get_attr", "output") or node.target is operator.getitem:
        return set()
    if not isinstance(node.target, torch._ops.OpOverload):
        raise ValueError(f"{node.name}: {node.target} does not declare what it writes; make it a torch.library op")
    found: set[int] = set()
    for i, argument in enumerate(node.target._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            map_arg(
                node.args[i] if i < len(node.args) else node.kwargs.get(argument.name),
                lambda near: found.update(storages(near)),
            )
    return found


def replace_uses(old: Node, new: Node, users: Iterable[Node] | None = None) -> None:
    """Let ``new`` be used wherever ``old`` was, or by ``users``; what was a view of ``old`` is one of ``new``."""
    memory, left = storages(old), deque(old.users if users is None else users)
    for node in left:
        node.replace_input_with(old, new)
    while left:
        node = left.popleft()
        if memory & storages(node):
            refresh_value(node)
            left.extend(node.users)


def refresh_value(node: Node) -> None:
    """Say anew what a node gives, of what its arguments are: memory of its own, unless it is a view, or waits."""
    args, kwargs = map_arg((node.args, node.kwargs), lambda near: near.meta["val"])
    if is_wait(node):
        node.meta["val"] = args[0]
        return
    with next(t.fake_mode for t in tensors(node) if isinstance(t, FakeTensor)):
        node.meta["val"] = node.target(*args, **kwargs)  # type: ignore[operator]


def sizes(node: Node) -> dict[int, int]:
    """Bytes of each storage that a node's results lie in."""
    return {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors(node)}


def outputs(graph: Graph) -> list[Node]:
    """The nodes that the graph returns, in order; a node may be returned more than once."""
    (returned,) = graph.output_node().args
    assert isinstance(returned, Sequence)
    return [node for node in returned if isinstance(node, Node)]


def tensor_layout(t: Tensor) -> tuple[torch.dtype, torch.Size, tuple[int, ...]]:
    """A tensor's dtype, shape and strides, where these mean something: not of one element, nor of none."""
    strides = (step if size > 1 and t.numel() else 0 for size, step in zip(t.shape, t.stride(), strict=True))
    return t.dtype, t.shape, tuple(strides)


def tensor_layouts(node: Node) -> object:
    """What a node's tensors and those that they are written over have in common."""
    return tuple((tensor_layout(t), t.device) for t in tensors(node))


def describe(t: Tensor) -> str:
    """A tensor's dtype and shape, as ``float32[2, 3]``."""
    return f"{str(t.dtype).removeprefix('torch.')}{list(t.shape)}"
