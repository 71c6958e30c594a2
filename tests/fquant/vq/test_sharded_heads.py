"""A sharded book with heads, or shared by heads, equals the book of one process."""

from dataclasses import replace

import pytest
import torch
from torch.func import vmap

from fquant import random, vq
from fquant.vq import sharded
from tests.helpers.vq.peers import assert_close, drawn
from tests.helpers.vq.sharded import gradients_are_those_of_all_rows, one_book, steps

K, D, N, HEADS = 11, 5, 30, 3
BOOKS = {
    "heads": {"heads": HEADS},
    "cosine": {"heads": HEADS, "metric": "cosine"},
    "learnable": {"heads": HEADS, "learnable": True},
    "shared": {},  # rows [n h D] of a book without heads
}
SPLITS = [[7, 23, 0]]  # rows of each rank
MORE_SPLITS = [[20, 10], [0, 30], [10, 10, 10], [0, 0, 30]]
slow = lambda cases: [pytest.param(case, marks=pytest.mark.slow, id=str(case)) for case in cases]


def whole(name):
    book = vq.init(0, K, D, **BOOKS[name])
    if name == "cosine":
        return book
    spread = drawn(*book.codes.shape, seed=4)
    counts = (1 + torch.arange(book.counts.numel()) % 3 * 1.0).reshape(book.counts.shape)
    return replace(book, codes=spread, sums=spread.clone(), counts=counts)


def data(of_heads=True):
    """Return rows [30 h D], some not finite in one head or in all, and a mask by head or for all heads."""
    x = drawn(N, HEADS, D, seed=1)
    x[4], x[17, 1, 2] = torch.nan, torch.inf
    mask = torch.arange(N * HEADS).reshape(N, HEADS) % 7 > 0
    return x, mask if of_heads else mask[:, 0].clone()


@pytest.mark.xdist_group("ranks")
@pytest.mark.parametrize("split", SPLITS + slow(MORE_SPLITS), ids=str)
@pytest.mark.parametrize("name, of_heads", [(name, True) for name in BOOKS] + [("heads", False)], ids=str)
def test_parts_are_one_book(name, of_heads, split):
    book = one_book(whole(name), *data(of_heads), split, 2.5, HEADS if name == "shared" else 1)
    assert (book.counts == 2.5).sum() > 1  # codes restarted


@pytest.mark.xdist_group("ranks")
@pytest.mark.slow
def test_gradients_of_codes_are_those_of_all_rows():
    gradients_are_those_of_all_rows(whole("learnable"), (N, HEADS, D), [7, 0, 23])


@pytest.mark.parametrize("name", BOOKS)
def test_alone_it_is_the_book(name):
    x, mask = data()
    seen, book = steps(whole(name), vq.apply, vq.update, x, mask, 2.5)
    got, part = steps(sharded.take_codes(whole(name), 0, K), sharded.apply, sharded.update, x, mask, 2.5)
    for (out, codes, loss), (same, equal, near) in zip(got, seen, strict=True):
        assert torch.equal(out, same) and torch.equal(codes, equal)
        assert_close(loss, near, 1e-6)  # the terms are added in another order
    assert_close(part.book, book, 1e-6)
    folded = x.reshape(2, 15, HEADS, D)
    assert torch.equal(sharded.encode(part, folded), vq.encode(part.book, folded))
    one = sharded.encode(part, x[0])  # a row without leading dims
    assert torch.equal(one, vq.encode(part.book, x[0])) and sharded.decode(part, one).shape == (HEADS, D)
    if torch.__version__ >= "2.13":  # older versions cannot vmap view(dtype)
        mapped = vmap(lambda x: sharded.encode(part, x))(folded)
        assert torch.equal(mapped, vq.encode(part.book, folded))


@pytest.mark.parametrize("name", BOOKS)
def test_of_no_rows_a_part_stays_as_it_is(name):
    part = sharded.take_codes(whole(name), 2, 9)
    got = sharded.apply(part, torch.zeros(0, HEADS, D), random.key(0), draw=True)
    assert got.x.shape == (0, HEADS, D) and got.codes.shape == (0, HEADS)
    after = sharded.update(part, got.stats, decay=0.5, threshold=1.5)
    assert torch.equal(after.book.counts, part.book.counts / 2)  # they decay, and there is no row to restart at


def test_contradictions_are_refused():
    part = sharded.take_codes(whole("heads"), 2, 9)
    with pytest.raises(ValueError, match=r"codes: got shape \(4, 2\); wanted \[... 3\], a code for each of the heads"):
        sharded.decode(part, torch.zeros(4, 2).long())
    with pytest.raises(ValueError, match=r"x: got shape \(4, 2, 5\) for a book of 5 dims; wanted \[... 3 5\]"):
        sharded.encode(part, torch.zeros(4, 2, D))
    with pytest.raises(IndexError, match="codes: got 11 for a book of 11"):
        sharded.decode(part, torch.full((4, HEADS), 11))
