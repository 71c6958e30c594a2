"""The pairwise cover: every pair of values occurs in it, and a table of one parameter is whole."""

from itertools import combinations, product

from tests.helpers.cases import covered


def test_every_pair_of_values_is_in_the_cover():
    cases = [dict(zip("abc", row, strict=True)) for row in product("wxyz", range(4), (None, [1]))]
    kept = [case for case, found in zip(cases, covered(cases), strict=True) if not found]
    assert 16 <= len(kept) < len(cases)
    for one, two in combinations("abc", 2):
        assert {(str(c[one]), str(c[two])) for c in kept} == {(str(c[one]), str(c[two])) for c in cases}


def test_one_parameter_is_not_cut():
    assert covered([{"name": name} for name in "abc"]) == [False] * 3
    assert covered([{"name": name} for name in "aab"]) == [False, True, False]
