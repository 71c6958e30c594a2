"""The pairwise cover of a parametrised test: CI runs it, and ``-m slow`` runs the other cases.

A case is covered if every pair of values of two of its parameters occurs in cases before it. Faults mostly depend on
one parameter or on a pair (Kuhn, Wallace & Gallo 2004). So a cover finds them with few of a full product's cases.

Of a test that is marked ``each_value``, CI runs as many cases as let every value of every parameter occur. It is for
tests that take long, and whose parameters do not depend on each other.
"""

from collections.abc import Hashable, Iterable, Mapping
from itertools import combinations
from typing import Any

import pytest
from _pytest.mark.structures import ParameterSet

FEWEST = 12  # cases of a test that are all run


def covered(cases: Iterable[Mapping[str, Any]]) -> list[bool]:
    """Return for each of a test's ``cases`` whether all pairs of its values occur in cases before it."""
    seen, found = set[Hashable](), []
    for case in cases:
        items = [(name, _key(value)) for name, value in case.items()]
        pairs = {pair for pair in combinations(items, 2)} or set(items)
        found.append(pairs <= seen)
        seen |= pairs
    return found


def each_value(cases: Iterable[Mapping[str, Any]]) -> list[bool]:
    """Return for each of a test's ``cases`` whether others, few and unlike each other, have all of its values."""
    left = [{(name, _key(value)) for name, value in case.items()} for case in cases]
    found = [True] * len(left)
    while any(left):
        best = max(range(len(left)), key=lambda i: len(left[i]))
        found[best], new = False, left[best]
        left = [values - new for values in left]
    return found


def slow_after(kept: int, rows: Iterable[Any]) -> list[Any]:
    """Return ``rows`` as pytest parameters, all but the first ``kept`` marked slow."""
    params = [row if isinstance(row, ParameterSet) else _param(row) for row in rows]
    return [row if i < kept else row._replace(marks=[*row.marks, pytest.mark.slow]) for i, row in enumerate(params)]


def _param(row: Any) -> ParameterSet:
    return pytest.param(*row) if isinstance(row, tuple) else pytest.param(row)


def _key(value: Any) -> Hashable:
    """Return ``value`` itself if it is hashable, else its identity: parameters of a list are one object each."""
    try:
        hash(value)
    except TypeError:
        return id(value)
    return type(value), value
