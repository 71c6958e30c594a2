"""Offsets of spans: those that are live together lie apart, in hardly more than the most bytes of one moment."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fquant.compile.memory import offsets
from fquant.compile.memory.offsets import ALIGNMENT, assign_offsets

Span = st.tuples(st.integers(0, 30), st.integers(0, 12), st.integers(1, 500)).map(lambda s: (s[0], s[0] + s[1], s[2]))


def held(spans):
    """Return the most bytes that are live at once."""
    size = lambda n: -(-n // ALIGNMENT) * ALIGNMENT
    return max(sum(size(n) for first, last, n in spans if first <= at <= last) for at in range(43))


@given(st.lists(Span, min_size=1, max_size=25))
@settings(max_examples=150, deadline=None)
def test_what_is_there_together_lies_apart(spans):
    places, total = assign_offsets(spans)
    assert all(place % ALIGNMENT == 0 for place in places) and total >= held(spans)
    at = list(zip(spans, places, strict=True))
    assert max(place + n for (*_, n), place in at) <= total
    for i, ((first, last, n), low) in enumerate(at):
        for (other, until, size), begin in at[:i]:
            assert last < other or until < first or low + n <= begin or begin + size <= low


def test_places_are_used_again():
    chain = [(i, i + 1, 1000) for i in range(20)]
    assert assign_offsets(chain)[1] == 2 * 1024
    assert assign_offsets([*chain, (0, 30, 64), (5, 5, 64)])[1] == 2 * 1024 + 2 * 64
    assert assign_offsets([]) == ([], 0)


EXAMPLES = [  # what one order alone places in as little as is live at once
    [(0, 1, 384), (1, 5, 192), (2, 6, 64), (4, 8, 320), (5, 9, 64)],  # the largest first
    [(4, 4, 256), (4, 6, 192), (6, 9, 128), (6, 10, 192)],  # where the most is live
    [(1, 5, 64), (2, 2, 256), (5, 8, 128), (6, 9, 256)],  # the most bytes times duration
]


@pytest.mark.parametrize("alone", range(3))
def test_each_order_is_the_best_for_some(alone, monkeypatch):
    spans, orders = EXAMPLES[alone], offsets._orders
    assert assign_offsets(spans)[1] == held(spans)
    for i in range(3):
        monkeypatch.setattr(offsets, "_orders", lambda *given, i=i: [list(orders(*given))[i]])
        assert (assign_offsets(spans)[1] == held(spans)) == (i == alone)
