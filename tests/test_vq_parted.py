"""A book whose codes lie on several ranks is on all of them what it is in one process, and says what it sends."""

from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch.func import grad, jvp, vmap

import shard
from fquant import jit, random, tree, vq
from fquant.vq import mean, parted

from . import ranks
from .peers import assert_close, drawn

# torch's own forward mode loads its decompositions through torch.jit.script, which it has deprecated itself.
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")
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
    """Rows, of which two are bad, and which count."""
    x = drawn(rows, dim, seed=1)
    x[4], x[17, 2] = torch.nan, torch.inf
    return x, torch.arange(rows) % 6 > 0


def steps(book, apply, update, x, mask, threshold):
    """Three steps, the last starting dead codes again: what each gives, and the book."""
    seen = []
    for i in range(3):
        got = apply(book, x + 0.1 * i, random.key(i), mask, draw=True, gradient=vq.directional)
        seen.append((got.x, got.codes, got.losses["commitment"]))
        book = update(book, got.stats, eps=0.1, threshold=threshold if i == 2 else 0.0)  # so that the smoothing shows
    return seen, book


def on_a_rank(book, x, mask, split, threshold, abreast):
    mesh, rank = shard.mesh(fsdp=len(split)), dist.get_rank()
    start = sum(split[:rank])
    x, mask = (t[start : start + split[rank]] for t in (x, mask))
    over = vq.Across(*shard.across(mesh, "fsdp", most=max(split) * abreast))
    part = parted.part(book, *shard.span(book.codes.shape[-2], mesh, "fsdp"))
    with shard.traffic() as one:
        got = parted.apply(part, x, random.key(0), mask, draw=True, over=over)
    with shard.traffic() as two:
        parted.update(part, got.stats, threshold=threshold, over=over)
    seen, after = steps(part, partial(parted.apply, over=over), partial(parted.update, over=over), x, mask, threshold)
    seen = [(out, codes, shard.psum(loss, mesh, ("fsdp",))) for out, codes, loss in seen]
    codes = parted.encode(part, x, over=over)
    counted = shard.psum((got.stats.own.kept, got.stats.own.lost), mesh, ("fsdp",))
    traffic = [sorted(call[0] for call in t.calls) for t in (one, two)]
    return seen, after.book, codes, parted.decode(part, codes, over=over), traffic, counted


def one_book(book, x, mask, split, threshold, abreast=1):
    """``book`` after the steps, which its parts on ranks with ``split`` rows take alike.

    ``abreast`` is how many rows that the book sees are one of x, of which heads may share it.
    """
    start, (seen, book) = book, steps(book, vq.apply, vq.update, x, mask, threshold)
    got = ranks.run(len(split), on_a_rank, start, x, mask, split, threshold, abreast)
    for i, (out, codes, loss) in enumerate(seen):
        assert_close(torch.cat([found[0][i][0] for found in got]), out, 1e-6)
        assert torch.equal(torch.cat([found[0][i][1] for found in got]), codes)
        assert all(abs(mean(found[0][i][2]) - mean(loss)) < 1e-6 for found in got)
    for field, dim in {"codes": -2, "sums": -2, "counts": -1}.items():
        assert_close(torch.cat([getattr(found[1], field) for found in got], dim), getattr(book, field), 1e-6)
    codes = vq.encode(start, x)
    assert torch.equal(torch.cat([found[2] for found in got]), codes)
    assert torch.equal(torch.cat([found[3] for found in got]), vq.decode(start, codes))
    stats = vq.apply(start, x, mask=mask).stats
    for found in got:
        assert found[4] == [["all_gather", "all_reduce", "reduce_scatter"], ["all_reduce"]]
        assert found[5] == (stats.kept, stats.lost)
    return book


@pytest.mark.xdist_group("ranks")
@pytest.mark.parametrize(
    "split", SPLITS + [pytest.param(s, marks=pytest.mark.slow, id=str(s)) for s in MORE_SPLITS], ids=str
)
@pytest.mark.parametrize("name", BOOKS)
def test_parts_are_one_book(name, split):
    book = one_book(whole(name), *data(), split, 1.5)
    assert (book.counts == 1.5).sum() > 3  # codes started again


def slopes(state, x, weight, apply):
    def loss(state, x):
        got = apply(state, x, gradient=vq.direct)
        back = apply(state, x, gradient=vq.rotation)
        return ((got.x + back.x) * weight).sum() + got.losses["commitment"].sum

    return grad(loss, (0, 1))(state, x)


def slopes_on_a_rank(book, x, weight, split):
    mesh, rank = shard.mesh(fsdp=len(split)), dist.get_rank()
    start = sum(split[:rank])
    x, weight = (t[start : start + split[rank]] for t in (x, weight))
    over = vq.Across(*shard.across(mesh, "fsdp", most=max(split)))
    part = parted.part(book, *shard.span(book.codes.shape[-2], mesh, "fsdp"))
    step = jit(lambda part, x, weight: slopes(part, x, weight, partial(parted.apply, over=over)))
    eager = slopes(part, x, weight, partial(parted.apply, over=over))
    captured = step(part, x, weight)
    assert all(torch.equal(*both) for both in zip(tree.leaves(eager), tree.leaves(captured), strict=True))
    return eager[0].book.codes, eager[1]


def gradients_are_those_of_all_rows(book, rows, split):
    """Gradients of ``book`` and of so many ``rows``, on ranks with ``split`` of them, and in one process."""
    x, weight = drawn(*rows, seed=1), drawn(*rows, seed=2)
    by_book, by_x = slopes(book, x, weight, vq.apply)
    got = ranks.run(len(split), slopes_on_a_rank, book, x, weight, split)
    assert_close(torch.cat([found[0] for found in got], -2), by_book.codes, 1e-6)
    assert_close(torch.cat([found[1] for found in got]), by_x, 1e-6)


@pytest.mark.xdist_group("ranks")
@pytest.mark.parametrize("split", [pytest.param([20, 10], marks=pytest.mark.slow), [7, 0, 23]], ids=str)
def test_gradients_of_codes_are_those_of_all_rows(split):
    gradients_are_those_of_all_rows(whole("learnable"), (N, D), split)


def large(rows, codes, dim):
    mesh, rank = shard.mesh(fsdp=dist.get_world_size()), dist.get_rank()
    over = vq.Across(*shard.across(mesh, "fsdp", most=rows))
    part = parted.part(whole("euclidean", codes, dim), *shard.span(codes, mesh, "fsdp"))
    x = drawn(rows * dist.get_world_size(), dim, seed=1)[rows * rank : rows * rank + rows]
    with shard.traffic() as seen:
        got = parted.apply(part, x, over=over)
        after = parted.update(part, got.stats, over=over)
    return got.codes, after.book.codes, seen.payload()


@pytest.mark.xdist_group("ranks")
@pytest.mark.slow
def test_65536_codes_of_256_numbers():
    found = ranks.run(2, large, 256, 65536, 256, timeout=300.0)
    book = whole("euclidean", 65536, 256)
    got = vq.apply(book, drawn(512, 256, seed=1))
    assert torch.equal(torch.cat([f[0] for f in found]), got.codes)
    assert_close(torch.cat([f[1] for f in found]), vq.update(book, got.stats).codes, 1e-6)
    wire = 2 * 512 * 256 * 4 + 512 * 8 + 3 * 4  # rows there and back, keys, and the numbers of an update
    assert all(f[2] == wire for f in found) and wire < 65536 * 257 * 4 / 60  # of what stats would be


def ties(split):
    mesh, rank = shard.mesh(fsdp=len(split)), dist.get_rank()
    over = vq.Across(*shard.across(mesh, "fsdp", most=8))
    codes = torch.arange(12.0).remainder(4)[:, None].expand(12, 3)  # each three times, here and elsewhere
    book = replace(vq.init(0, 12, 3), codes=codes.contiguous())
    x = torch.tensor([[0.0] * 3, [1.0] * 3, [1.5] * 3, [9.0] * 3, [-0.0, 0, 0], [3e38] * 3, [-5.0] * 3])
    return parted.encode(parted.part(book, *shard.span(12, mesh, "fsdp")), x[: split[rank]], over=over)


@pytest.mark.xdist_group("ranks")
def test_of_equally_near_codes_the_lowest_number_counts():
    for split in ([7, 3], [2, 7, 0]):
        for codes, n in zip(ranks.run(len(split), ties, split), split, strict=True):
            assert codes.tolist() == [0, 1, 1, 3, 0, -1, 0][:n]


@pytest.mark.parametrize("name", BOOKS)
def test_alone_it_is_the_book(name):
    x, mask = data()
    seen, book = steps(whole(name), vq.apply, vq.update, x, mask, 1.5)
    got, part = steps(parted.part(whole(name), 0, K), parted.apply, parted.update, x, mask, 1.5)
    assert_close(got, seen, 0.0)
    assert_close(part.book, book, 1e-6)
    assert torch.equal(parted.encode(part, x.reshape(2, 15, D)), vq.encode(part.book, x.reshape(2, 15, D)))
    drawn_too = {"key": random.key(0), "draw": True}
    mine, theirs = parted.apply(part, x, **drawn_too).stats, vq.apply(part.book, x, **drawn_too).stats
    threshold = float(theirs.counts.median())  # which some have got exactly
    wanted = vq.update(part.book, theirs, decay=0.0, threshold=threshold)
    assert_close(parted.update(part, mine, decay=0.0, threshold=threshold).book, wanted, 1e-6)
    low = parted.apply(part, x.bfloat16())
    assert low.x.dtype is torch.bfloat16 and low.stats.own.sums.dtype is torch.float32


@pytest.mark.skipif(torch.__version__ < "2.13", reason="torch before 2.13 cannot vmap view(dtype)")
@pytest.mark.parametrize("name", BOOKS)
def test_alone_under_transforms(name):
    """Mapped it is a loop, captured equal to the bit, and forwards what it is backwards."""
    part, (x, mask) = parted.part(whole(name), 3, 17), data()
    x, mask, keys = x.reshape(3, 10, D), mask.reshape(3, 10), random.fold(random.key(0), torch.arange(3))

    def step(part, x, key, mask):
        got = parted.apply(part, x, key, mask=mask, draw=True, gradient=vq.directional)
        known = replace(got.stats, pool=got.stats.pool.nan_to_num())  # what marks rows that have no code
        return (*got[:3], known), parted.update(part, got.stats, threshold=1.5), parted.encode(part, x)

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
    got = parted.apply(part, x)
    return (got.x * torch.linspace(-1, 1, D)).sin().sum() + mean(got.losses["commitment"])


def spans(ranks_of):
    mesh = shard.mesh(fsdp=ranks_of)
    found = [shard.span(size, mesh, "fsdp") for size in (3, 7, 65536)]
    for f in (lambda: shard.span(2, mesh, "fsdp"), lambda: shard.across(mesh, "fsdp", 0)):
        with pytest.raises(ValueError, match=r"span: 2 over fsdp=3 leaves ranks with none|across: most is 0; wanted"):
            f()
    return found


@pytest.mark.xdist_group("ranks")
def test_every_code_lies_on_one_rank():
    for size, parts in zip((3, 7, 65536), zip(*ranks.run(3, spans, 3), strict=True), strict=True):
        assert [i for first, stop in parts for i in range(first, stop)] == list(range(size))
        lengths = [stop - first for first, stop in parts]
        assert max(lengths) - min(lengths) <= 1


def too_many():
    over = vq.Across(*shard.across(shard.mesh(fsdp=2), "fsdp", most=4))
    parted.encode(parted.part(whole("euclidean"), 0, K), drawn(5, D), over=over)


@pytest.mark.xdist_group("ranks")
def test_more_rows_than_were_said_are_refused():
    with pytest.raises(ranks.RankFailure, match="across: 5 rows, and this is for at most 4 a rank; use most=5 on all"):
        ranks.run(2, too_many)


PART, X = parted.part(whole("euclidean"), 3, 9), drawn(4, D)
WRONG = {
    "affine": (lambda: parted.part(vq.init(0, 4, 3, affine=True), 0, 2), ValueError, "the book is affine; wanted one"),
    "beyond": (lambda: parted.part(whole("cosine"), 20, 24), ValueError, "codes 20 to 24 of 23; wanted some that"),
    "none": (lambda: parted.part(whole("cosine"), 5, 5), ValueError, "codes 5 to 5 of 23"),
    "double": (lambda: parted.encode(PART, X.double()), TypeError, "x: got torch.float64; wanted float32 or narrower"),
    "last dim": (lambda: parted.apply(PART, drawn(2, 3)), ValueError, r"x: got shape \(2, 3\) for a book of 5"),
    "code": (lambda: parted.decode(PART, torch.tensor([23])), IndexError, "codes: got 23 for a book of 23"),
    "floats": (lambda: parted.decode(PART, torch.zeros(2)), TypeError, "codes: got torch.float32; wanted int64"),
    "key": (lambda: parted.apply(PART, X, draw=True), ValueError, "key is None with draw=True"),
    "undrawn": (
        lambda: parted.update(PART, parted.apply(PART, X).stats, threshold=1.0), ValueError, "stats: got none drawn"
    ),
    "threshold": (
        lambda: parted.update(PART, parted.apply(PART, X).stats, reset=1.0), ValueError, "threshold is 0.0 and reset"
    ),
}  # fmt: skip


@pytest.mark.parametrize("f, error, message", WRONG.values(), ids=WRONG)
def test_contradictions_are_refused(f, error, message):
    with pytest.raises(error, match=message):
        f()
