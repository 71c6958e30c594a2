"""Offsets in one piece of memory for results whose lives are known: those that are live together are disjoint.

The most bytes that are live at once are a lower bound of what this needs. Results are placed one after the other, each
into the smallest gap that is large enough. The order decides how near the sum comes to the bound, and no order is the
best for every graph. Three take turns until one is near enough, and otherwise the best is taken:

* the largest first, which is the best for most graphs (Pisarchyk & Lee 2020, "Efficient memory management for deep
  neural net inference");
* first those that are live where the most is live, as for recurrences of many steps;
* first those with the most bytes times duration, as for gradients of each example, which are few, large, and of equal
  sizes.
"""

from collections.abc import Iterator, Sequence

import numpy as np

ALIGNMENT = 64  # bytes: a cache line, and torch's own alignment
NEAR = 1.005  # times the bound: a further order is not tried

Span = tuple[int, int, int]  # the indices of the maker and of the last use, and bytes


def assign_offsets(spans: Sequence[Span]) -> tuple[list[int], int]:
    """Return offsets for ``spans``, disjoint if they are live together, and the bytes of all."""
    if not spans:
        return [], 0
    first, last, nbytes = np.array(spans, dtype=np.int64).T
    size = -(-nbytes // ALIGNMENT) * ALIGNMENT
    change = np.zeros(last.max() + 2, dtype=np.int64)
    np.add.at(change, first, size)
    np.subtract.at(change, last + 1, size)
    live = change.cumsum()  # bytes at each index
    best: tuple[list[int], int] | None = None
    for order in _orders(first, last, size, live):
        found = _place(first, last, size, order)
        if best is None or found[1] < best[1]:
            best = found
        if best[1] <= NEAR * live.max():
            break
    assert best is not None
    return best


def _orders(first: np.ndarray, last: np.ndarray, size: np.ndarray, live: np.ndarray) -> Iterator[np.ndarray]:
    yield np.lexsort((first, -size))  # the last key is compared first
    most = np.array([live[begin : end + 1].max() for begin, end in zip(first, last, strict=True)])
    yield np.lexsort((first, -size, -most))
    yield np.argsort(-(last - first + 1) * size, kind="stable")


def _place(first: np.ndarray, last: np.ndarray, size: np.ndarray, order: np.ndarray) -> tuple[list[int], int]:
    """Place spans in this order, each into the smallest gap that is large enough, or behind all others."""
    begin, end = first[order], last[order]
    low, high = np.zeros_like(size), np.zeros_like(size)  # of those that are placed, in this order
    offsets = [0] * len(order)
    for count, i in enumerate(order):
        together = (begin[:count] <= last[i]) & (end[:count] >= first[i])
        starts = low[:count][together]
        by_start = starts.argsort()
        starts = starts[by_start]
        gap_starts = np.concatenate(([0], np.maximum.accumulate(high[:count][together][by_start])))
        gaps = starts - gap_starts[:-1]
        fit = gaps >= size[i]
        best = np.where(fit, gaps, np.iinfo(np.int64).max).argmin() if fit.any() else -1
        offsets[i] = low[count] = gap_starts[best]
        high[count] = low[count] + size[i]
    return [int(offset) for offset in offsets], int(high.max())
