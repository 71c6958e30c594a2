"""A sharded book equals the book of one process on every rank, and sends the documented bytes."""

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch.func import grad, jvp, vmap

import shard
from fquant import jit, random, tree, vq
from fquant.vq import mean, sharded
from tests.helpers import ranks
from tests.helpers.vq.peers import assert_close, drawn
from tests.helpers.vq.sharded import gradients_are_those_of_all_rows, one_book, steps

K, D, N = 23, 5, 30
BOOKS = {
    "euclidean": {},
    "cosine": {"metric": "cosine"},
    "learnable": {"learnable": True},
}
SPLITS = [[20, 10], [7, 23, 0]]  # rows of each rank
MORE_SPLITS = [[0, 30], [15, 15], [10, 10, 10], [0, 0, 30]]


def whole(name, codes=K, dim=D):
    book = vq.init(0, codes, dim, **BOOKS[name])
    if name == "cosine":
        return book
    spread = drawn(codes, dim, seed=4)
    return replace(book, codes=spread, sums=spread.clone(), counts=1 + torch.arange(codes) % 3 * 1.0)


def data(rows=N, dim=D):
    """Return rows, two of them not finite, and a mask."""
    x = drawn(rows, dim, seed=1)
    x[4], x[17, 2] = torch.nan, torch.inf
    return x, torch.arange(rows) % 6 > 0


@pytest.mark.xdist_group("ranks")
@pytest.mark.parametrize(
    "split", SPLITS + [pytest.param(s, marks=pytest.mark.slow, id=str(s)) for s in MORE_SPLITS], ids=str
)
@pytest.mark.parametrize("name", BOOKS)
def test_parts_are_one_book(name, split):
    book = one_book(whole(name), *data(), split, 1.5)
    assert (book.counts == 1.5).sum() > 3  # codes restarted


@pytest.mark.xdist_group("ranks")
@pytest.mark.parametrize("split", [pytest.param([20, 10], marks=pytest.mark.slow), [7, 0, 23]], ids=str)
def test_gradients_of_codes_are_those_of_all_rows(split):
    gradients_are_those_of_all_rows(whole("learnable"), (N, D), split)


def large(rows, codes, dim):
    mesh, rank = shard.mesh(fsdp=dist.get_world_size()), dist.get_rank()
    exchange = shard.exchange_rows(mesh, "fsdp", max_rows=rows)
    part = sharded.take_codes(whole("euclidean", codes, dim), *shard.local_range(codes, mesh, "fsdp"))
    x = drawn(rows * dist.get_world_size(), dim, seed=1)[rows * rank : rows * rank + rows]
    with shard.traffic() as seen:
        got = sharded.apply(part, x, exchange=exchange)
        after = sharded.update(part, got.stats, exchange=exchange)
    return got.codes, after.book.codes, seen.payload()


@pytest.mark.xdist_group("ranks")
@pytest.mark.slow
def test_65536_codes_of_256_numbers():
    found = ranks.run(2, large, 256, 65536, 256, timeout=300.0)
    book = whole("euclidean", 65536, 256)
    got = vq.apply(book, drawn(512, 256, seed=1))
    assert torch.equal(torch.cat([f[0] for f in found]), got.codes)
    assert_close(torch.cat([f[1] for f in found]), vq.update(book, got.stats).codes, 1e-6)
    wire = 2 * 512 * 256 * 4 + 512 * 8 + 3 * 4  # rows both ways, keys, and the sums of an update
    assert all(f[2] == wire for f in found) and wire < 65536 * 257 * 4 / 60  # of the stats


def ties(split):
    mesh, rank = shard.mesh(fsdp=len(split)), dist.get_rank()
    exchange = shard.exchange_rows(mesh, "fsdp", max_rows=8)
    codes = torch.arange(12.0).remainder(4)[:, None].expand(12, 3)  # each three times, on different ranks
    book = replace(vq.init(0, 12, 3), codes=codes.contiguous())
    x = torch.tensor([[0.0] * 3, [1.0] * 3, [1.5] * 3, [9.0] * 3, [-0.0, 0, 0], [3e38] * 3, [-5.0] * 3])
    return sharded.encode(
        sharded.take_codes(book, *shard.local_range(12, mesh, "fsdp")), x[: split[rank]], exchange=exchange
    )


@pytest.mark.xdist_group("ranks")
def test_of_equally_near_codes_the_lowest_number_counts():
    for split in ([7, 3], [2, 7, 0]):
        for codes, n in zip(ranks.run(len(split), ties, split), split, strict=True):
            assert codes.tolist() == [0, 1, 1, 3, 0, -1, 0][:n]


@pytest.mark.parametrize("name", BOOKS)
def test_alone_it_is_the_book(name):
    x, mask = data()
    seen, book = steps(whole(name), vq.apply, vq.update, x, mask, 1.5)
    got, part = steps(sharded.take_codes(whole(name), 0, K), sharded.apply, sharded.update, x, mask, 1.5)
    assert_close(got, seen, 0.0)
    assert_close(part.book, book, 1e-6)
    assert torch.equal(sharded.encode(part, x.reshape(2, 15, D)), vq.encode(part.book, x.reshape(2, 15, D)))
    drawn_too = {"key": random.key(0), "draw": True}
    mine, theirs = sharded.apply(part, x, **drawn_too).stats, vq.apply(part.book, x, **drawn_too).stats
    threshold = float(theirs.counts.median())  # some counts are exactly this
    wanted = vq.update(part.book, theirs, decay=0.0, threshold=threshold)
    assert_close(sharded.update(part, mine, decay=0.0, threshold=threshold).book, wanted, 1e-6)
    low = sharded.apply(part, x.bfloat16())
    assert low.x.dtype is torch.bfloat16 and low.stats.local.sums.dtype is torch.float32


@pytest.mark.skipif(torch.__version__ < "2.13", reason="torch before 2.13 cannot vmap view(dtype)")
@pytest.mark.parametrize("name", BOOKS)
def test_alone_under_transforms(name):
    """vmap equals a loop, capture is equal to the bit, and forward mode equals reverse mode."""
    part, (x, mask) = sharded.take_codes(whole(name), 3, 17), data()
    x, mask, keys = x.reshape(3, 10, D), mask.reshape(3, 10), random.fold(random.key(0), torch.arange(3))

    def step(part, x, key, mask):
        got = sharded.apply(part, x, key, mask=mask, draw=True, gradient=vq.directional)
        known = replace(got.stats, pool=got.stats.pool.nan_to_num())  # the marks of invalid rows
        return (*got[:3], known), sharded.update(part, got.stats, threshold=1.5), sharded.encode(part, x)

    loop = tree.map(lambda *t: torch.stack(t), *(step(part, *one) for one in zip(x, keys, mask, strict=True)))
    assert_close(vmap(step, (None, 0, 0, 0))(part, x, keys, mask), loop, 1e-6)
    captured, eager = jit(step)(part, x[0], keys[0], mask[0]), step(part, x[0], keys[0], mask[0])
    assert all(torch.equal(*both) for both in zip(tree.leaves(captured), tree.leaves(eager), strict=True))
    loss = lambda codes, x: slopes_of(replace(part, book=replace(part.book, codes=codes)), x)
    v = drawn(14, D, seed=7), drawn(10, D, seed=8)
    backwards = grad(loss, (0, 1))(part.book.codes, drawn(10, D, seed=9))
    forwards = jvp(loss, (part.book.codes, drawn(10, D, seed=9)), v)[1]
    assert_close(forwards, sum((a * b).sum() for a, b in zip(backwards, v, strict=True)), 1e-5)


def slopes_of(part, x):
    got = sharded.apply(part, x)
    return (got.x * torch.linspace(-1, 1, D)).sin().sum() + mean(got.losses["commitment"])


def spans(ranks_of):
    mesh = shard.mesh(fsdp=ranks_of)
    found = [shard.local_range(size, mesh, "fsdp") for size in (3, 7, 65536)]
    for f in (lambda: shard.local_range(2, mesh, "fsdp"), lambda: shard.exchange_rows(mesh, "fsdp", 0)):
        with pytest.raises(ValueError, match="2 rows over fsdp=3 leave ranks|max_rows is 0; wanted"):
            f()
    return found


@pytest.mark.xdist_group("ranks")
def test_every_code_lies_on_one_rank():
    for size, parts in zip((3, 7, 65536), zip(*ranks.run(3, spans, 3), strict=True), strict=True):
        assert [i for first, stop in parts for i in range(first, stop)] == list(range(size))
        lengths = [stop - first for first, stop in parts]
        assert max(lengths) - min(lengths) <= 1


def too_many():
    exchange = shard.exchange_rows(shard.mesh(fsdp=2), "fsdp", max_rows=4)
    sharded.encode(sharded.take_codes(whole("euclidean"), 0, K), drawn(5, D), exchange=exchange)


@pytest.mark.xdist_group("ranks")
def test_more_rows_than_were_said_are_refused():
    with pytest.raises(ranks.RankFailure, match="got 5 rows; wanted at most max_rows=4; use max_rows=5 on"):
        ranks.run(2, too_many)


PART, X = sharded.take_codes(whole("euclidean"), 3, 9), drawn(4, D)
WRONG = {
    "affine": (
        lambda: sharded.take_codes(vq.init(0, 4, 3, affine=True), 0, 2), ValueError, "the book is affine; wanted one"
    ),
    "beyond": (
        lambda: sharded.take_codes(whole("cosine"), 20, 24), ValueError, "codes 20 to 24 of 23; wanted some that"
    ),
    "none": (lambda: sharded.take_codes(whole("cosine"), 5, 5), ValueError, "codes 5 to 5 of 23"),
    "double": (lambda: sharded.encode(PART, X.double()), TypeError, "x: got torch.float64; wanted float32 or narrower"),
    "last dim": (lambda: sharded.apply(PART, drawn(2, 3)), ValueError, r"x: got shape \(2, 3\) for a book of 5"),
    "code": (lambda: sharded.decode(PART, torch.tensor([23])), IndexError, "codes: got 23 for a book of 23"),
    "floats": (lambda: sharded.decode(PART, torch.zeros(2)), TypeError, "codes: got torch.float32; wanted int64"),
    "key": (lambda: sharded.apply(PART, X, draw=True), ValueError, "key is None with draw=True"),
    "undrawn": (
        lambda: sharded.update(PART, sharded.apply(PART, X).stats, threshold=1.0), ValueError, "stats: got none drawn"
    ),
    "threshold": (
        lambda: sharded.update(PART, sharded.apply(PART, X).stats, reset=1.0), ValueError, "threshold is 0.0 and reset"
    ),
}  # fmt: skip


@pytest.mark.parametrize("f, error, message", WRONG.values(), ids=WRONG)
def test_contradictions_are_refused(f, error, message):
    with pytest.raises(error, match=message):
        f()
