"""Concatenations without a copy: the parts are computed where the whole is to be.

    y = cat([a @ b, c @ d])        # the products write into the two halves of y, and nothing is left to do

A part must be made in the graph, fill its memory, be read last by the concatenation, and be none itself. It must be one
piece of the whole, so the dim that is joined is the first of those that are not 1. Parts begin at multiples of
``ALIGNMENT`` bytes, because the bits of a product may depend on that. The memory of the whole is held from the first
part on. Where that would raise the peak, the parts are copied.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch.fx import Graph, Node

from .. import graph as graphs
from .offsets import ALIGNMENT, Span, assign_offsets

_aten = torch.ops.aten
_JOINS = (_aten.cat.default, _aten.stack.default)
Result = tuple[Node, int]  # a node, and the number of its result
Parts = list[tuple[int, int]]  # the numbers of results, and the byte of the whole at which each starts


def assign_with_parts(
    graph: Graph, results: Sequence[Result], spans: Sequence[Span], last: Mapping[int, int]
) -> tuple[list[int], int, set[Node]]:
    """Return the offsets of planned results and the bytes of all, and the concatenations that need no copy.

    ``spans`` are those of the results without that, and ``last`` the last use of each storage.
    """
    wholes = _without_more_memory(spans, _parts(graph, {result: i for i, result in enumerate(results)}, last))
    begins, inside = [first for first, _, _ in spans], set[int]()
    for whole, parts in wholes.items():
        begins[whole] = min(spans[part][0] for part, _ in parts)
        inside.update(part for part, _ in parts)
    kept = [i for i in range(len(spans)) if i not in inside]
    found, nbytes = assign_offsets([(begins[i], *spans[i][1:]) for i in kept])
    offsets = dict(zip(kept, found, strict=True))
    for whole, parts in wholes.items():
        offsets |= {part: offsets[whole] + start for part, start in parts}
    return [offsets[i] for i in range(len(spans))], nbytes, {results[whole][0] for whole in wholes}


def _without_more_memory(spans: Sequence[Span], wholes: dict[int, Parts]) -> dict[int, Parts]:
    """Return those of ``wholes`` that may be held from their first part on without a higher peak."""
    if not wholes:
        return wholes
    live = np.zeros(max(end for _, end, _ in spans) + 1, dtype=np.int64)
    for first, end, nbytes in spans:
        live[first : end + 1] += nbytes
    peak, found = live.max(), dict[int, Parts]()
    for whole, parts in wholes.items():
        at, _, nbytes = spans[whole]
        begin = min(spans[part][0] for part, _ in parts)
        change = np.full(at + 1 - begin, nbytes)
        change[-1] = 0  # there it is live already
        for first, end, size in (spans[part] for part, _ in parts):
            change[first - begin : end + 1 - begin] -= size
        if (live[begin : at + 1] + change).max() <= peak:
            live[begin : at + 1] += change
            found[whole] = parts
    return found


def _parts(graph: Graph, numbers: Mapping[Result, int], last: Mapping[int, int]) -> dict[int, Parts]:
    """Return by the number of its result the parts of each concatenation that may be computed where it is to be."""
    owner = {graphs.tensors(node)[i].untyped_storage()._cdata: number for (node, i), number in numbers.items()}
    found = dict[int, Parts]()
    for place, join in enumerate(graph.nodes):
        if join.target not in _JOINS or (join, 0) not in numbers:
            continue
        given: Any = join.args[0]
        storages, starts = [graphs.tensors(x)[0].untyped_storage()._cdata for x in given], _starts(join, given)
        alone = len({*storages}) == len(storages) and all(last[storage] == place for storage in storages)
        makers = [owner[storage] for storage in storages if storage in owner]
        if starts is not None and alone and len(makers) == len(storages) and found.keys().isdisjoint(makers):
            found[numbers[join, 0]] = list(zip(makers, starts, strict=True))
    return found


def _starts(join: Node, parts: Sequence[Node]) -> list[int] | None:
    """Return the byte of the whole at which each part starts; None if one is no aligned piece of it."""
    (whole,) = graphs.tensors(join)
    dim: Any = join.args[1] if len(join.args) > 1 else 0
    if math.prod(whole.shape[: dim % whole.ndim]) != 1 or not whole.is_contiguous():
        return None
    starts = [0]
    for (t,) in map(graphs.tensors, parts):
        fills = t.is_contiguous() and t.numel() and graphs.nbytes(t) == t.untyped_storage().nbytes()
        if not fills or t.dtype != whole.dtype or starts[-1] % ALIGNMENT:
            return None
        starts.append(starts[-1] + graphs.nbytes(t))
    return starts[:-1]
