"""Rows of a full product of options of which CI runs a pairwise cover, and ``-m slow`` the rest.

Every pair of values of two options occurs together in the cover (Cohen et al. 1997, "The AETG system": greedy).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import combinations, product
from typing import Any

import pytest


def cover(rows: Sequence[tuple[Any, ...]]) -> set[int]:
    """Return the places of a few ``rows`` in which every pair of values of all rows occurs."""
    pairs = [{(i, j, repr(row[i]), repr(row[j])) for i, j in combinations(range(len(row)), 2)} for row in rows]
    left, chosen = set().union(*pairs) if pairs else set(), set[int]()
    while left:
        best = max(range(len(rows)), key=lambda k: (len(pairs[k] & left), -k))
        chosen.add(best)
        left -= pairs[best]
    return chosen


def pairwise(*options: Iterable[Any], id: Callable[[tuple[Any, ...]], str] | None = None) -> list[Any]:
    """Return the product of ``options`` as pytest parameters, marked slow outside of a pairwise cover."""
    rows = list(product(*map(list, options)))
    return slow_but(rows, cover(rows), id)


def every(rows: Iterable[tuple[Any, ...]], n: int, id: Callable[[tuple[Any, ...]], str] | None = None) -> list[Any]:
    """Return ``rows`` as pytest parameters, marked slow but for every ``n``-th."""
    rows = list(rows)
    return slow_but(rows, set(range(0, len(rows), n)), id)


def slow_but(rows: Sequence[tuple[Any, ...]], kept: set[int], id: Callable[..., str] | None) -> list[Any]:
    """Return ``rows`` as pytest parameters, marked slow but for those at the places ``kept``."""
    return [
        pytest.param(*row, marks=[] if i in kept else pytest.mark.slow, id=None if id is None else id(row))
        for i, row in enumerate(rows)
    ]
