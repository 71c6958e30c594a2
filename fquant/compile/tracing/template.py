"""Templates: a part of a trace that is recorded once, and repeated with other tensors without running Python.

    template = record_template(recorder, f, given)       # f runs once, on stand-ins for the tensors ``given``
    results, nodes = repeat(recorder, inputs, template)  # its nodes again, with other inputs: no op is dispatched

The nodes of a template are recorded in a graph of their own, which is then dissolved. So only what ``f`` is given
becomes an input. A tensor that it closes over is the same node in every repetition. A repetition makes the nodes that
``f`` itself would make, and fake values with the same layouts: new memory, or views of what its own nodes hold.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._C._functorch import _add_batch_dim, get_unwrapped, is_batchedtensor, maybe_get_bdim, maybe_get_level
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx import Node
from torch.fx.node import map_aggregate, map_arg
from torch.utils._python_dispatch import _disable_current_modes

from ...device import META, memory_of
from ...kernels.dispatch import is_lazy
from ..graph import PLACE, tensors
from .tracer import Recorder

Dims = tuple[tuple[int, int], ...]  # level and mapped dim of each vmap around a tensor, the innermost first


class Layout(NamedTuple):
    """The layout of a fake tensor in its storage; ``offset`` is in bytes."""

    shape: torch.Size
    strides: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    offset: int


@dataclass(frozen=True)
class Made:
    """A fake result to be made: a view of tensor ``index`` of a node, whose ``offset`` was that; None is new memory.

    ``whole`` memory has exactly the extent of the layout; other memory has ``nbytes``, and the number ``storage``.
    """

    layout: Layout
    viewed: Node | None
    index: int
    offset: int
    whole: bool
    nbytes: int
    storage: int


class Call(NamedTuple):
    """A node of a template; ``value`` is its results, each tensor replaced by a Made."""

    node: Node
    args: Any
    kwargs: Any
    name: str
    value: Any


class Template(NamedTuple):
    """A recorded function: the nodes of its inputs, its calls, and the node and mapped dims of each result.

    ``closed_over`` are the nodes of tensors that it reads and is not given, other than constants.
    """

    inputs: list[Node]
    calls: list[Call]
    results: list[tuple[Node, Dims]]
    closed_over: list[Node]


def unwrap(t: Tensor) -> tuple[Tensor, Dims] | None:
    """Return the tensor inside of those vmaps that map ``t``; None if another transform wraps it, or it is lazy."""
    dims = list[tuple[int, int]]()
    while is_batchedtensor(t):
        dims.append((maybe_get_level(t), maybe_get_bdim(t)))
        t = get_unwrapped(t)
    return (t, tuple(dims)) if isinstance(t, FakeTensor) and not is_lazy(t) else None


def wrap(t: Tensor, dims: Dims) -> Tensor:
    """Return ``t`` as the vmaps of ``dims`` map it."""
    for level, dim in reversed(dims):
        t = _add_batch_dim(t, dim, level)
    return t


def layout_of(t: Tensor) -> Layout:
    """Return the layout of a fake tensor."""
    return Layout(t.shape, t.stride(), t.dtype, t.device, int(t.storage_offset()) * t.itemsize)


def record_template(recorder: Recorder, f: Callable[..., Sequence[Tensor]], given: Sequence[Tensor]) -> Template | None:
    """Record ``f`` of fake stand-ins for the tensors ``given``; None if a result is lazy."""
    with recorder.aside() as graph:
        inputs = [graph.placeholder(f"given{i}") for i in range(len(given))]
        unwrapped: list[Any] = [unwrap(t) for t in given]
        with _plainly():
            for node, (t, _) in zip(inputs, unwrapped, strict=True):
                node.meta["val"] = _new(
                    recorder.mode, Made(layout_of(t)._replace(offset=0), None, 0, 0, True, 0, 0), {}
                )
            stand_ins = [recorder.stand_for(node) for node in inputs]
        found = [unwrap(t) for t in f(*(wrap(t, dims) for t, (_, dims) in zip(stand_ins, unwrapped, strict=True)))]
        results = [(recorder.node_of(each[0]), each[1]) for each in found if each is not None]
    calls = [_call(node) for node in graph.nodes if node.op != "placeholder"]
    read = dict.fromkeys(x for node in graph.nodes for x in node.all_input_nodes)
    closed_over = [x for x in read if x.graph is not graph and x.op != "get_attr"]
    lazy = any(is_lazy(t) for node in graph.nodes for t in tensors(node))
    for node in reversed(graph.nodes):
        graph.erase_node(node)  # so that what f closes over has no users there
    return None if lazy or None in found else Template(inputs, calls, results, closed_over)


def repeat(
    recorder: Recorder, inputs: Sequence[tuple[Node, Node]], template: Template
) -> tuple[list[Tensor], list[Node]]:
    """Repeat a template with the second of each pair of nodes for the first; return its results and its nodes."""
    mapped, made = dict(inputs), list[Node]()
    with _plainly():
        for call in template.calls:
            args, kwargs = map_arg((call.args, call.kwargs), lambda node: mapped.get(node, node))
            node = recorder.graph.create_node("call_function", call.node.target, args, kwargs, call.name)
            node.meta = {key: call.node.meta[key] for key in PLACE if key in call.node.meta}
            node.meta["val"] = _values(recorder.mode, call.value, mapped)
            mapped[call.node] = node
            made.append(node)
        inner = [recorder.stand_for(mapped.get(node, node)) for node, _ in template.results]
    return [wrap(t, dims) for t, (_, dims) in zip(inner, template.results, strict=True)], made


def differing(recorder: Recorder, some: Template, other: Template) -> str | None:
    """Return None if two templates have equal calls, of equal constants, else the first that differ."""
    ours, theirs = (
        {node: i for i, node in enumerate([*x.inputs[: len(some.inputs)], *(call.node for call in x.calls)])}
        for x in (some, other)
    )
    text = lambda call, places: repr((call.node.target, *_numbered((call.args, call.kwargs), places)))
    for one, another in zip(some.calls, other.calls, strict=False):
        constants = zip(_constants(one), _constants(another), strict=False)
        if text(one, ours) != text(another, theirs) or not all(_equal(recorder, *pair) for pair in constants):
            return f"{another.node.target} for {one.node.target}"
    return None if len(some.calls) == len(other.calls) else f"{len(other.calls)} ops for {len(some.calls)}"


def _equal(recorder: Recorder, *constants: Node) -> bool:
    a, b = (getattr(recorder.root, str(node.target)) for node in constants)
    if a is b or isinstance(a, FakeTensor) or isinstance(b, FakeTensor):
        return a is b
    with _plainly():
        same = a.dtype == b.dtype and a.shape == b.shape
        return same and torch.equal(*map(memory_of, (a, b)))


@contextmanager
def _plainly() -> Iterator[None]:
    """Leave transforms and modes, to make fake tensors."""
    with temporarily_clear_interpreter_stack(), _disable_current_modes():
        yield


def _numbered(x: Any, places: dict[Node, int]) -> Any:
    named = lambda node: "a constant" if node.op == "get_attr" else f"%{places.get(node, node)}"
    return map_aggregate(x, lambda each: named(each) if isinstance(each, Node) else each)


def _constants(call: Call) -> list[Node]:
    found = list[Node]()
    map_arg((call.args, call.kwargs), lambda node: found.append(node) if node.op == "get_attr" else None)
    return found


def _call(node: Node) -> Call:
    given = {t.untyped_storage()._cdata: (x, i, t) for x in node.all_input_nodes for i, t in enumerate(tensors(x))}
    numbers = dict[int, int]()

    def made(t: Any) -> Any:
        if not isinstance(t, Tensor):
            return t
        storage = t.untyped_storage()
        if storage._cdata in given:
            viewed, index, base = given[storage._cdata]
            return Made(layout_of(t), viewed, index, int(base.storage_offset()) * base.itemsize, False, 0, 0)
        number = numbers.setdefault(storage._cdata, len(numbers))
        whole = storage.nbytes() == _extent(t) * t.itemsize and t.storage_offset() == 0
        return Made(layout_of(t), None, 0, 0, whole and number == len(numbers) - 1, storage.nbytes(), number)

    value = node.meta.get("val")
    value = type(value)(map(made, value)) if isinstance(value, list | tuple) else made(value)
    return Call(node, node.args, node.kwargs, node.name, value)


def _values(mode: FakeTensorMode, value: Any, mapped: dict[Node, Node]) -> Any:
    storages = dict[int, torch.UntypedStorage]()

    def one(x: Any) -> Any:
        if not isinstance(x, Made):
            return x
        if x.viewed is None:
            return _new(mode, x, storages)
        base = tensors(mapped.get(x.viewed, x.viewed))[x.index]
        offset = x.layout.offset + base.storage_offset() * base.itemsize - x.offset
        return _view(mode, base.untyped_storage(), x.layout._replace(offset=offset))

    return type(value)(map(one, value)) if isinstance(value, list | tuple) else one(value)


def _new(mode: FakeTensorMode, made: Made, storages: dict[int, torch.UntypedStorage]) -> FakeTensor:
    shape, strides, dtype, device, _ = made.layout
    if made.whole:
        return FakeTensor(mode, torch.empty_strided(shape, strides, dtype=dtype, device=META), device)
    if made.storage not in storages:
        storages[made.storage] = torch.empty(made.nbytes, dtype=torch.uint8, device=META).untyped_storage()
    return _view(mode, storages[made.storage], made.layout)


def _view(mode: FakeTensorMode, storage: torch.UntypedStorage, layout: Layout) -> FakeTensor:
    shape, strides, dtype, device, offset = layout
    plain = torch.empty(0, dtype=dtype, device=META).set_(storage, offset // dtype.itemsize, shape, strides)
    return FakeTensor(mode, plain, device)


def _extent(t: Tensor) -> int:
    return 1 + sum((n - 1) * step for n, step in zip(t.shape, t.stride(), strict=True)) if t.numel() else 0
