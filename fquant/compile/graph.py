"""The memory of a captured graph: what each node reads, writes and shares, and how passes change it.

A node's ``meta["val"]`` is a fake tensor, or a list of them. Two nodes share memory exactly if their fake tensors share
a storage, as a view and its base do. Nothing here runs an op.

A collective is two nodes, one that issues it and one that waits for it. Between them it is in flight, and reads the
inputs of the first while other nodes run. So a wait counts as a reader of these inputs. A *transfer*, between a device
and the host, is two nodes too.
"""

import operator
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx import Graph, Node
from torch.fx.node import map_arg

Pass = Callable[[Graph], None]  # changes a graph in place and keeps its inputs and the values of its results

_SIZES = "sizes"  # of a node's meta: its value, and the bytes of each storage of that
PLACE = ("stack_trace", "backward")  # of a node's meta: where the user's code calls it, and whether in a backward
_FUNCTIONAL = "_c10d_functional."
LEAF = "leaf "  # before a path, in what ranks compare
_noted: dict[str, None] = {}
_WAIT = _FUNCTIONAL + "wait_tensor.default"  # by name, because a build of torch may lack the op
_ARRIVED = "fquant.arrived.default"  # of shard.transport.host, as the transfers
_STORE = "fquant.store.default"
_TRANSFERS = {"fquant.fetch.default": "fetch"} | dict.fromkeys(
    ("fquant.stash.default", _STORE, "fquant.store_.default"), "stash"
)
_COLLECTIVES = {  # those whose op has another name
    _FUNCTIONAL + "all_gather_into_tensor": "all_gather",
    _FUNCTIONAL + "reduce_scatter_tensor": "reduce_scatter",
    "fquant.all_gather": "all_gather",  # all three of shard.transport.gloo
    "fquant.reduce_scatter": "reduce_scatter",
    "fquant.all_to_all": "all_to_all",
}


def check(passes: Sequence[Pass]) -> None:
    """Raise TypeError unless ``passes`` is a sequence of functions."""
    if not isinstance(passes, Sequence) or isinstance(passes, str):
        raise TypeError(f"passes is a {type(passes).__name__}; wanted a sequence of functions of a graph")
    for i, change in enumerate(passes):
        if not callable(change):
            raise TypeError(f"passes[{i}] is a {type(change).__name__}; wanted a function of a graph")


def run(graph: Graph, passes: Sequence[Pass]) -> None:
    """Apply ``passes`` to the graph in order.

    Raises TypeError for a pass that returns a value, RuntimeError for a node left before one of its arguments.
    """
    check(passes)
    for i, change in enumerate(passes):
        if (returned := change(graph)) is not None:  # type: ignore[func-returns-value]
            kind = type(returned).__name__
            raise TypeError(f"passes[{i}] returned a {kind}; wanted None, the graph being changed in place")
        graph.lint()


def _name(target: object) -> str:
    if not isinstance(target, torch._ops.OpOverload):
        return str(target)
    if (known := _NAMES.get(id(target))) is None:  # by id, because the hash of an op is computed in Python
        known = _NAMES[id(target)] = (target, str(target))
    return known[1]


_NAMES: dict[int, tuple[torch._ops.OpOverload, str]] = {}


def tensors(node: Node) -> list[Tensor]:
    """Return the fake tensors that a node returns."""
    value = node.meta.get("val")
    if isinstance(value, Tensor):
        return [value]
    return [t for t in value if isinstance(t, Tensor)] if isinstance(value, list | tuple) else []


def shape(node: Node) -> torch.Size:
    """Return the shape of a node's first tensor."""
    return tensors(node)[0].shape


def storages(node: Node) -> Set[int]:
    """Return the identities of the storages of a node's results."""
    return sizes(node).keys()


def all_storages(nodes: Iterable[Node]) -> set[int]:
    """Return the identities of the storages of all ``nodes``."""
    return set[int]().union(*map(sizes, nodes))


def sizes(node: Node) -> Mapping[int, int]:
    """Return the bytes of each storage of a node's results."""
    value, known = node.meta.get("val"), node.meta.get(_SIZES)
    if known is None or known[0] is not value:  # passes replace the value, and ask for it many times
        found = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors(node)}
        known = node.meta[_SIZES] = (value, found)
    return known[1]


def storages_on_device(graph: Graph) -> set[int]:
    """Return the storages in the memory of the graph's device, which is the host if no tensor is elsewhere."""
    found = {t.untyped_storage()._cdata: t.is_cpu for node in graph.nodes for t in tensors(node)}
    return {storage for storage, on_host in found.items() if not on_host} or set(found)


def storages_offloaded(graph: Graph) -> set[int]:
    """Return the storages of the host that fetches read and stashes make."""
    fetched = (node.all_input_nodes[0] for node in graph.nodes if transfer(node) == "fetch")
    return all_storages((*fetched, *(node for node in graph.nodes if transfer(node) == "stash")))


def nbytes(t: Tensor) -> int:
    """Return the bytes of a tensor's elements."""
    return t.numel() * t.element_size()


def is_wait(node: Node) -> bool:
    """Return True if a node waits for a functional collective or for a transfer."""
    return _name(node.target) in (_WAIT, _ARRIVED)


def read_nodes(node: Node) -> list[Node]:
    """Return the nodes whose memory a node reads; a wait reads the inputs of its collective or transfer too."""
    if not is_wait(node):
        return node.all_input_nodes
    return [*node.all_input_nodes, *issue_of(node).all_input_nodes]


def issue_of(wait: Node) -> Node:
    """Return the node that issued the collective or transfer that ``wait`` waits for."""
    (issued,) = wait.all_input_nodes
    return issued.all_input_nodes[0] if issued.target is operator.getitem else issued


def collective(node: Node) -> str | None:
    """Return the collective that a node issues, e.g. "all_gather"; None if it issues none."""
    return issued(node.target)


def issued(target: object) -> str | None:
    """Return the collective that an op issues, e.g. "all_gather"; None if it issues none."""
    return _issued(_name(target))


@cache
def _issued(name: str) -> str | None:
    op = name.rpartition(".")[0]
    if op.startswith(_FUNCTIONAL) and name != _WAIT:
        return _COLLECTIVES.get(op, op.removeprefix(_FUNCTIONAL))
    return _COLLECTIVES.get(op)


def transfer(node: Node) -> str | None:
    """Return the transfer that a node issues, "fetch" to a device or "stash" to the host; None if it issues none."""
    return _TRANSFERS.get(_name(node.target))


def stored(node: Node) -> Node | None:
    """Return the issue of a store to new memory of the host that ``node`` waits for; None for any other node."""
    issue = issue_of(node) if _name(node.target) == _ARRIVED else node
    return issue if _name(issue.target) == _STORE else None


def is_issue(node: Node) -> bool:
    """Return True if a node issues a collective or a transfer, whose result is in flight until it is waited for."""
    return collective(node) is not None or transfer(node) is not None


def is_view(node: Node) -> bool:
    """Return True if a node only makes views of its arguments and writes nothing."""
    before = all_storages(node.all_input_nodes)
    writes = isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable
    return bool(before) and storages(node) <= before and not writes


def written_storages(node: Node) -> set[int]:
    """Return the storages that a node writes in place; raise ValueError for a call without a schema."""
    if node.op in ("placeholder", "get_attr", "output") or node.target is operator.getitem:
        return set()
    if not isinstance(node.target, torch._ops.OpOverload):
        raise ValueError(f"{node.name}: {node.target} does not declare what it writes; make it a torch.library op")
    found: set[int] = set()
    for i, argument in enumerate(node.target._schema.arguments if node.target._schema.is_mutable else ()):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = node.args[i] if i < len(node.args) else node.kwargs.get(argument.name)
            map_arg(value, lambda written: found.update(storages(written)))
    return found


def all_written_storages(graph: Graph) -> set[int]:
    """Return the storages that any node of a graph writes in place; raise ValueError for a call without a schema."""
    return set[int]().union(*map(written_storages, graph.nodes))


def replace_uses(old: Node, new: Node, users: Iterable[Node] | None = None) -> None:
    """Replace ``old`` by ``new`` in all its uses, or in ``users``, and rebase the views of ``old`` on ``new``."""
    memory, users = storages(old), list(old.users if users is None else users)
    for node in users:
        node.replace_input_with(old, new)
    rebase_views(users, memory)


def rebase_views(users: Iterable[Node], memory: Set[int]) -> None:
    """Compute the fake values of those of ``users`` again that were views of ``memory``, and of their views."""
    changed = deque(users)
    while changed:
        node = changed.popleft()
        if memory & storages(node):
            refresh_value(node)
            changed.extend(node.users)


def insert_before(at: Node, op: object, args: Any, value: object = None, kwargs: Any = None) -> Node:
    """Insert a call of ``op`` before a node; its fake value is computed unless given."""
    with at.graph.inserting_before(at):
        node = at.graph.call_function(op, args, kwargs)  # type: ignore[arg-type]
    node.meta |= {key: at.meta[key] for key in PLACE if key in at.meta}
    if value is None:
        refresh_value(node)
    else:
        node.meta["val"] = value
    return node


def refresh_value(node: Node) -> None:
    """Recompute a node's fake value from its arguments: a storage of its own, unless it is a view or a wait."""
    args, kwargs = map_arg((node.args, node.kwargs), lambda argument: argument.meta["val"])
    if is_wait(node):
        node.meta["val"] = args[0]
        return
    with next(t.fake_mode for x in (node, *node.all_input_nodes) for t in tensors(x) if isinstance(t, FakeTensor)):
        node.meta["val"] = node.target(*args, **kwargs)  # type: ignore[operator]


def outputs(graph: Graph) -> list[Node]:
    """Return the nodes that the graph returns, in order and with repetitions."""
    (returned,) = graph.output_node().args
    assert isinstance(returned, Sequence)
    return [node for node in returned if isinstance(node, Node)]


def tensor_layout(t: Tensor) -> tuple[torch.dtype, torch.Size, tuple[int, ...]]:
    """Return dtype, shape and strides of a tensor; strides that address nothing, of dims of size 1, are 0."""
    strides = (step if size > 1 and t.numel() else 0 for size, step in zip(t.shape, t.stride(), strict=True))
    return t.dtype, t.shape, tuple(strides)


def tensor_layouts(node: Node) -> object:
    """Return layout and device of a node's tensors; nodes that agree may be written over each other."""
    return tuple((tensor_layout(t), t.device) for t in tensors(node))


def describe(t: Tensor) -> str:
    """Return a tensor's dtype and shape as text, e.g. ``float32[2, 3]``."""
    return f"{str(t.dtype).removeprefix('torch.')}{list(t.shape)}"


def note_leaves(leaves: Sequence[str]) -> None:
    """Note that the trace under way has a collective of a tree with these ``leaves``: paths, dtypes and shapes."""
    _noted.update(dict.fromkeys(f"{LEAF}{leaf}" for leaf in leaves))


@contextmanager
def noting() -> Iterator[dict[str, None]]:
    """Yield what :func:`note_leaves` notes inside, each leaf once, in order; traces are made one at a time."""
    _noted.clear()
    yield _noted
