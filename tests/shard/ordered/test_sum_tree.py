"""The tree over rows: any cut of the rows gives the sums of a naive pairwise loop, to the bit."""

import itertools
import operator

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shard.ordered.sum_tree import Rows, joined, nodes, partial_sums, split


def naive(rows):
    """Add neighbours until one row is left."""
    while len(rows) > 1:
        rows = [sum(rows[i + 1 : i + 2], rows[i]) for i in range(0, len(rows), 2)]
    return rows[0]


@given(st.integers(1, 40).flatmap(lambda n: st.tuples(st.just(n), st.sets(st.integers(1, n), max_size=6))))
def test_any_cut_gives_the_same_bits(case):
    total, cuts = case
    x = torch.randn(total, 3, generator=torch.Generator().manual_seed(total))
    found = {}
    for start, stop in itertools.pairwise([0, *sorted(cuts - {total}), total]):
        rows = Rows(start, stop, total)
        found |= dict(zip(nodes(rows), partial_sums(x[start:stop], rows), strict=True))
        found = joined(found, total, operator.add)
    (root,) = found.values()
    assert torch.equal(root, naive(list(x)))


@given(st.integers(1, 60), st.data())
def test_nodes_are_the_largest_whose_union_is_the_range(total, data):
    start = data.draw(st.integers(0, total - 1))
    stop = data.draw(st.integers(start + 1, total))
    found = nodes(Rows(start, stop, total))
    covered = [row for level, index in found for row in range(index << level, min(index + 1 << level, total))]
    assert sorted(covered) == list(range(start, stop))
    parents = {(level + 1, index // 2) for level, index in found} - {(level, 0) for level in range(1, 8)}
    inside = [
        (level, index) for level, index in parents if index << level >= start and min(index + 1 << level, total) <= stop
    ]
    assert not inside
    assert len(found) <= 2 * total.bit_length()


def test_aligned_ranges_are_one_node():
    assert [nodes(rows) for rows in split(16, 4)] == [[(2, 0)], [(2, 1)], [(2, 2)], [(2, 3)]]


@pytest.mark.parametrize(("total", "ranks"), [(8, 3), (7, 2), (5, 5), (12, 8), (3, 1)])
def test_the_rows_of_ranks_are_those_of_tensor_split(total, ranks):
    parts = torch.arange(total).tensor_split(ranks)
    assert [list(range(rows.start, rows.stop)) for rows in split(total, ranks)] == [part.tolist() for part in parts]
