"""A book with heads, or shared by them, whose codes lie on several ranks is what it is in one process."""

from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch.func import grad, vmap

import shard
from fquant import jit, random, tree, vq
from fquant.vq import mean, parted

from . import ranks
from .peers import assert_close, drawn

K, D, N, HEADS = 11, 5, 30, 3
BOOKS = {
    "heads": {"heads": HEADS},
    "cosine": {"heads": HEADS, "metric": "cosine"},
    "learnable": {"heads": HEADS, "learnable": True},
    "shared": {},  # rows [n h D] of a book without heads
}
SPLITS = [[20, 10], [7, 23, 0]]  # rows of each rank
MORE_SPLITS = [[0, 30], [10, 10, 10], [0, 0, 30]]
slow = lambda cases: [pytest.param(case, marks=pytest.mark.slow, id=str(case)) for case in cases]


def whole(name):
    book = vq.init(0, K, D, **BOOKS[name])
    if name == "cosine":
        return book
    spread = drawn(*book.codes.shape, seed=4)
    counts = (1 + torch.arange(book.counts.numel()) % 3 * 1.0).reshape(book.counts.shape)
    return replace(book, codes=spread, sums=spread.clone(), counts=counts)


def data(of_heads=True):
    """Rows [30 h D], of which some are bad in one head or in all; which count, head by head or for all of them."""
    x = drawn(N, HEADS, D, seed=1)
    x[4], x[17, 1, 2] = torch.nan, torch.inf
    mask = torch.arange(N * HEADS).reshape(N, HEADS) % 7 > 0
    return x, mask if of_heads else mask[:, 0].clone()


def steps(book, apply, update, x, mask):
    """Three steps, the last starting dead codes again: what each gives, and the book."""
    seen = []
    for i in range(3):
        got = apply(book, x + 0.1 * i, random.key(i), mask, draw=True, gradient=vq.directional)
        seen.append((got.x, got.codes, got.losses["commitment"]))
        book = update(book, got.stats, eps=0.1, threshold=2.5 if i == 2 else 0.0)  # so that the smoothing shows
    return seen, book


def on_a_rank(name, split, of_heads):
    mesh, rank = shard.mesh(fsdp=len(split)), dist.get_rank()
    start = sum(split[:rank])
    x, mask = (t[start : start + split[rank]] for t in data(of_heads))
    most = max(split) * (HEADS if name == "shared" else 1)
    over = vq.Across(*shard.across(mesh, "fsdp", most=most))
    part = parted.part(whole(name), *shard.span(K, mesh, "fsdp"))
    with shard.traffic() as one:
        got = parted.apply(part, x, random.key(0), mask, draw=True, over=over)
    with shard.traffic() as two:
        parted.update(part, got.stats, threshold=2.5, over=over)
    seen, after = steps(part, partial(parted.apply, over=over), partial(parted.update, over=over), x, mask)
    seen = [(out, codes, shard.psum(loss, mesh, ("fsdp",))) for out, codes, loss in seen]
    codes = parted.encode(part, x, over)
    counted = shard.psum((got.stats.own.kept, got.stats.own.lost), mesh, ("fsdp",))
    traffic = [sorted(call[0] for call in t.calls) for t in (one, two)]
    return seen, after.book, codes, parted.decode(part, codes, over), traffic, counted


@pytest.mark.xdist_group("ranks")
@pytest.mark.parametrize("split", SPLITS + slow(MORE_SPLITS), ids=str)
@pytest.mark.parametrize("name, of_heads", [(name, True) for name in BOOKS] + [("heads", False)], ids=str)
def test_parts_are_one_book(name, of_heads, split):
    x, mask = data(of_heads)
    seen, book = steps(whole(name), vq.apply, vq.update, x, mask)
    got = ranks.run(len(split), on_a_rank, name, split, of_heads)
    for i, (out, codes, loss) in enumerate(seen):
        assert_close(torch.cat([found[0][i][0] for found in got]), out, 1e-6)
        assert torch.equal(torch.cat([found[0][i][1] for found in got]), codes)
        assert all(abs(mean(found[0][i][2]) - mean(loss)) < 1e-6 for found in got)
    of_code = {"codes": -2, "sums": -2, "counts": -1}
    for field, dim in of_code.items():
        assert_close(torch.cat([getattr(found[1], field) for found in got], dim), getattr(book, field), 1e-6)
    assert (book.counts == 2.5).sum() > 1  # codes started again
    codes = vq.encode(whole(name), x)
    assert torch.equal(torch.cat([found[2] for found in got]), codes)
    assert torch.equal(torch.cat([found[3] for found in got]), vq.decode(whole(name), codes))
    stats = vq.apply(whole(name), x, mask=mask).stats
    for found in got:
        assert found[4] == [["all_gather", "all_reduce", "reduce_scatter"], ["all_reduce"]]
        assert found[5] == (stats.kept, stats.lost)


def slopes(state, x, weight, apply):
    def loss(state, x):
        got = apply(state, x, gradient=vq.direct)
        back = apply(state, x, gradient=vq.rotation)
        return ((got.x + back.x) * weight).sum() + got.losses["commitment"].sum

    return grad(loss, (0, 1))(state, x)


def slopes_on_a_rank(split):
    mesh, rank = shard.mesh(fsdp=len(split)), dist.get_rank()
    start = sum(split[:rank])
    x, weight = (drawn(N, HEADS, D, seed=seed)[start : start + split[rank]] for seed in (1, 2))
    over = vq.Across(*shard.across(mesh, "fsdp", most=max(split)))
    part = parted.part(whole("learnable"), *shard.span(K, mesh, "fsdp"))
    eager = slopes(part, x, weight, partial(parted.apply, over=over))
    captured = jit(lambda part, x, weight: slopes(part, x, weight, partial(parted.apply, over=over)))(part, x, weight)
    assert all(torch.equal(*both) for both in zip(tree.leaves(eager), tree.leaves(captured), strict=True))
    return eager[0].book.codes, eager[1]


@pytest.mark.xdist_group("ranks")
def test_gradients_of_codes_are_those_of_all_rows():
    split = [7, 0, 23]
    x, weight = (drawn(N, HEADS, D, seed=seed) for seed in (1, 2))
    by_book, by_x = slopes(whole("learnable"), x, weight, vq.apply)
    got = ranks.run(len(split), slopes_on_a_rank, split)
    assert_close(torch.cat([found[0] for found in got], 1), by_book.codes, 1e-6)
    assert_close(torch.cat([found[1] for found in got]), by_x, 1e-6)


@pytest.mark.parametrize("name", BOOKS)
def test_alone_it_is_the_book(name):
    x, mask = data()
    seen, book = steps(whole(name), vq.apply, vq.update, x, mask)
    got, part = steps(parted.part(whole(name), 0, K), parted.apply, parted.update, x, mask)
    for (out, codes, loss), (same, equal, near) in zip(got, seen, strict=True):
        assert torch.equal(out, same) and torch.equal(codes, equal)
        assert_close(loss, near, 1e-6)  # whose terms are added in another order
    assert_close(part.book, book, 1e-6)
    folded = x.reshape(2, 15, HEADS, D)
    assert torch.equal(parted.encode(part, folded), vq.encode(part.book, folded))
    one = parted.encode(part, x[0])  # a row without dims before it
    assert torch.equal(one, vq.encode(part.book, x[0])) and parted.decode(part, one).shape == (HEADS, D)
    mapped = vmap(lambda x: parted.encode(part, x))(folded)
    assert torch.equal(mapped, vq.encode(part.book, folded))


@pytest.mark.parametrize("name", BOOKS)
def test_of_no_rows_a_part_stays_as_it_is(name):
    part = parted.part(whole(name), 2, 9)
    got = parted.apply(part, torch.zeros(0, HEADS, D), random.key(0), draw=True)
    assert got.x.shape == (0, HEADS, D) and got.codes.shape == (0, HEADS)
    after = parted.update(part, got.stats, decay=0.5, threshold=1.5)
    assert torch.equal(after.book.counts, part.book.counts / 2)  # they fade, and no row is there to start at


def test_contradictions_are_refused():
    part = parted.part(whole("heads"), 2, 9)
    with pytest.raises(ValueError, match=r"codes: got shape \(4, 2\); wanted \[... 3\], a code for each of the heads"):
        parted.decode(part, torch.zeros(4, 2).long())
    with pytest.raises(ValueError, match=r"x: got shape \(4, 2, 5\) for a book of 5 dims; wanted \[... 3 5\]"):
        parted.encode(part, torch.zeros(4, 2, D))
    with pytest.raises(ValueError, match="codes: got 11 for a book of 11"):
        parted.decode(part, torch.full((4, HEADS), 11))
