"""The binary tree over the rows of a batch along which leaves are added.

    rows      0   1   2   3   4   5   6          a node (level, index) is the sum of rows
    level 1   0 ──┘   1 ──┘   2 ──┘   3          index·2^level up to (index + 1)·2^level, as far as there are
    level 2   0 ──────┘       1 ──────┘
    level 3   0 ──────────────┘                  the root: the sum of all

A parent is its left child plus its right child, or the left one alone at the end. So the order depends on the number of
rows alone. Consecutive rows are the union of some nodes, the largest of which ``nodes`` lists: at most two a level, and
one for a range as ranks mostly have it, 2^k rows that begin at a multiple of 2^k.
"""

import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")
Node = tuple[int, int]  # level, index


class Rows(NamedTuple):
    """Consecutive rows of a batch of ``total``."""

    start: int
    stop: int
    total: int


def split(total: int, ranks: int) -> list[Rows]:
    """Return the rows of each rank, as ``shard.share`` has them: consecutive, the first ranks with one more."""
    size, more = divmod(total, ranks)
    starts = [rank * size + min(rank, more) for rank in range(ranks + 1)]
    return [Rows(a, b, total) for a, b in itertools.pairwise(starts)]


def nodes(rows: Rows) -> list[Node]:
    """Return the largest nodes whose union is ``rows``, from the lowest level up."""
    return [node for node, _ in _subtrees(rows, list(range(rows.start, rows.stop)), lambda x: x[::2])]


def partial_sums(x: Tensor, rows: Rows) -> Tensor:
    """Return the sums [nodes ...] of ``x`` [rows ...] over each of the :func:`nodes`."""

    def halve(x: Tensor) -> Tensor:
        left, right = x[::2], x[1::2]
        return left + right if len(left) == len(right) else torch.cat([left[:-1] + right, left[-1:]])

    found = [t for _, t in _subtrees(rows, x, halve)]
    return found[0] if len(found) == 1 else torch.cat(found or [x])


def _subtrees(rows: Rows, x: Any, halve: Callable[[Any], Any]) -> Iterator[tuple[Node, Any]]:
    """Yield each of the largest nodes with the part of ``x`` that is left of it, halved at each level."""
    (start, stop, width), level = rows, 0
    while start < stop:
        if width == 1 or start % 2:  # the root, or a right child whose sibling is elsewhere
            yield (level, start), x[:1]
            start, x = start + 1, x[1:]
        if start < stop and stop % 2 and stop < width:  # a left child whose sibling is elsewhere
            yield (level, stop - 1), x[-1:]
            stop, x = stop - 1, x[:-1]
        if start == stop:
            return
        x, start, stop, width, level = halve(x), start // 2, -(-stop // 2), -(-width // 2), level + 1


def joined(found: Mapping[Node, T], total: int, add: Callable[[T, T], T]) -> dict[Node, T]:
    """Return ``found`` with every two siblings added, as far up the tree over ``total`` rows as that goes."""
    out, level, width = dict(found), 0, total
    while width > 1:
        for index in sorted(index for at, index in out if at == level and index % 2 == 0):
            if index + 1 == width:
                out[level + 1, index // 2] = out.pop((level, index))
            elif (level, index + 1) in out:
                out[level + 1, index // 2] = add(out.pop((level, index)), out.pop((level, index + 1)))
        level, width = level + 1, -(-width // 2)
    return out
