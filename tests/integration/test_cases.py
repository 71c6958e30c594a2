"""The pairwise cover: every pair of values occurs in it, and a table of one parameter is whole."""

from itertools import combinations, product
from typing import Any

from tests.helpers.cases import covered, each_value


def test_every_pair_of_values_is_in_the_cover():
    cases = [dict(zip("abc", row, strict=True)) for row in product("wxyz", range(4), (None, [1]))]
    kept = [case for case, found in zip(cases, covered(cases), strict=True) if not found]
    assert 16 <= len(kept) < len(cases)
    for one, two in combinations("abc", 2):
        assert {(str(c[one]), str(c[two])) for c in kept} == {(str(c[one]), str(c[two])) for c in cases}


def test_one_parameter_is_not_cut():
    assert covered([{"name": name} for name in "abc"]) == [False] * 3
    assert covered([{"name": name} for name in "aab"]) == [False, True, False]


def test_each_value():
    """Of a product of lists as many cases stay as the longest has values, and they are unlike each other."""
    cases: list[dict[str, Any]] = [dict(zip("abc", row, strict=True)) for row in product(range(3), "xyzw", ([1], [2]))]
    kept = [case for case, found in zip(cases, each_value(cases), strict=True) if not found]
    assert len(kept) == 4 and {case["a"] for case in kept} == {0, 1, 2} and {case["b"] for case in kept} == {*"xyzw"}
    assert each_value([{"name": name} for name in "aba"]) == [False, False, True]
    assert each_value([]) == []
