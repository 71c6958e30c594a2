"""The memory around a recording: slots of arguments, copies to and from them, and results in the memory of arguments.

A recording has fixed addresses. An argument that moves is copied to a slot. A result that is in the memory of an
argument at the recording is in that of this call's argument at a replay.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.fx import Graph, Node

from .. import graph as graphs


class Of(NamedTuple):
    """A result in the memory of an argument: itself, or a view with an offset in bytes from the argument's start."""

    argument: int
    view: Tensor | None = None
    offset: int = 0


def results_of(graph: Graph) -> list[Of | int]:
    """Return for each result the argument in whose memory it is, or the number of a tensor of the pool."""
    given = graph.find_nodes(op="placeholder")
    owner = {storage: i for i, node in reversed([*enumerate(given)]) for storage in graphs.storages(node)}
    numbers, found = dict[Node, int](), list[Of | int]()
    for node in graphs.outputs(graph):
        (t,), (storage,) = graphs.tensors(node), graphs.storages(node)
        same = _returned_argument(node)
        if same.op == "placeholder":
            found.append(Of(given.index(same)))
        elif storage in owner:
            (of,) = graphs.tensors(given[owner[storage]])
            found.append(Of(owner[storage], t, _start(t) - _start(of)))
        else:
            found.append(numbers.setdefault(same, len(numbers)))
    return found


def _returned_argument(node: Node) -> Node:
    """Return the node whose tensor a node returns: its first argument's if it writes there, as ``copy_``, or waits."""
    while isinstance(node.target, torch._ops.OpOverload):
        if graphs.is_wait(node):
            node = node.all_input_nodes[0]
            continue
        returns, first = node.target._schema.returns, node.args[0] if node.args else None
        written = len(returns) == 1 and returns[0].alias_info is not None and returns[0].alias_info.is_write
        if not (written and isinstance(first, Node)):
            break
        node = first
    return node


def in_memory_of(argument: Tensor, of: Of) -> Tensor:
    """Return a result in the memory of ``argument``, which is one like that of the recording."""
    if of.view is None:
        return argument
    offset = (_start(argument) + of.offset) // of.view.element_size()
    return _viewed(argument, of.view.dtype, offset, of.view.shape, of.view.stride())


def usual(t: Tensor) -> Tensor:
    """Return ``t``, or a tensor in the same memory if it is one of inference mode, which cannot be written outside."""
    if not t.is_inference():
        return t
    with torch.inference_mode(False):
        return _viewed(t, t.dtype, int(t.storage_offset()), t.shape, t.stride())


def _viewed(t: Tensor, dtype: torch.dtype, offset: int, shape: Sequence[int], stride: Sequence[int]) -> Tensor:
    with torch.no_grad():
        return torch.empty(0, dtype=dtype, device=t.device).set_(t.untyped_storage(), offset, shape, stride)


def _start(t: Tensor) -> int:
    return int(t.storage_offset()) * t.element_size()


def slot(t: Tensor) -> Tensor:
    """Return memory for tensors like ``t``, at an address that is as aligned: kernels are compiled for that."""
    with torch.inference_mode(False):
        extent = 1 + sum((size - 1) * step for size, step in zip(t.shape, t.stride(), strict=True))
        raw = torch.empty(max(extent, 0) + 16, dtype=t.dtype, device=t.device)
        return raw.as_strided(t.shape, t.stride(), t.data_ptr() % 16 // t.element_size())


def copy(pairs: Iterable[tuple[Tensor, Tensor]]) -> None:
    """Copy the second tensor of each pair, which has the strides of the first, to the first."""
    by_dtype = dict[torch.dtype, tuple[list[Tensor], list[Tensor]]]()
    for to, t in pairs:
        if t.numel():
            targets, sources = by_dtype.setdefault(t.dtype, ([], []))
            targets.append(_once(to))
            sources.append(_once(t))
    with torch.no_grad():
        for targets, sources in by_dtype.values():
            torch._foreach_copy_(targets, sources, non_blocking=True)


def _once(t: Tensor) -> Tensor:
    """Return a view of ``t`` that has every element of its memory once, which an expanded tensor has not."""
    dims, extent = sorted((step, size) for size, step in zip(t.shape, t.stride(), strict=True) if step and size > 1), 1
    for step, size in dims:
        if step < extent:  # dims overlap
            whole = 1 + sum(step * (size - 1) for step, size in dims)
            return t.as_strided((whole,), (1,), t.storage_offset())
        extent += step * (size - 1)
    if any(size > 1 and not step for size, step in zip(t.shape, t.stride(), strict=True)):
        sizes = [size if step else 1 for size, step in zip(t.shape, t.stride(), strict=True)]
        return t.as_strided(sizes, t.stride(), t.storage_offset())
    return t
