"""Programs in which ranks contradict each other: on two and three ranks all of them raise.

The programs that agree are in ``test_scenarios``; there the ranks equal one process.
"""

import re
from dataclasses import replace
from functools import partial

import pytest
import torch.distributed as dist

import shard
from fquant import jit, random, vq
from shard import agree
from tests.helpers import ranks
from tests.helpers.vq.mesh import AXES, D, K, batch, cut_of, spread
from tests.helpers.vq.scenarios import SIZES, Here, book_of, learn, mine, total, worlds

pytestmark = pytest.mark.xdist_group("ranks")


def compared(here, change):
    """Compare books after ``change`` on this rank; the fingerprint detects a difference on all ranks."""
    book = change(here, book_of())
    agree.same("books", agree.fingerprint(book))


def loaded(here, book):
    return book if here.rank else vq.kmeans(book, batch(5), random.key(1))


def learned_alone(here, book):
    return learn(here._replace(mesh=None), book, mine(here, batch(0)))


def unnumbered(here):
    """Draw rows for dead codes on each rank as if it had all rows."""
    book = book_of()
    stats = vq.apply(book, mine(here, batch(0))[:9], random.key(0), draw=True).stats
    return vq.update(book, total(here, stats), threshold=2.0)


def unnumbered_kmeans(here):
    return vq.kmeans(vq.init(3, K, D), batch(0), random.key(1), psum=partial(total, here))


def too_few(here):
    x = mine(here, batch(0)[:12])
    row_offset = shard.rows(len(x), here.mesh, AXES)
    return vq.kmeans(vq.init(3, K, D), x, random.key(1), row_offset=row_offset, psum=partial(total, here))


def captured(here, programs):
    """Run the first of ``programs`` on rank 0, the second on others; each lists captured functions in order."""

    def train(book, x):
        return vq.ema(book, total(here, vq.stats(book, x, vq.encode(book, x))))

    def second(book, x):
        return train(book, x)

    def measure(book, x):
        return total(here, (x - vq.decode(book, vq.encode(book, x))).square().sum())

    book, x = book_of(), mine(here, batch(0))
    small = spread(vq.init(0, 5, D))
    steps = {f.__name__: partial(jit(f), book) for f in (train, second, measure)} | {
        "small": partial(jit(train), small)
    }
    for name in programs[here.rank > 0].split():
        steps[name](x)


def crossed(here):
    """Update two books of one shape in another order on rank 0, which crosses their sums, and compare the books."""
    step = jit(lambda book, x: vq.ema(book, total(here, vq.stats(book, x, vq.encode(book, x)))))
    books, x = {"a": book_of(1), "b": book_of(2)}, mine(here, batch(0))
    for name in "ab" if here.rank == 0 else "ba":
        books[name] = step(books[name], x)
    agree.same("books", agree.fingerprint(books))


NUMBERS = "stats: got [23] rows of one number; .*row_offset=shard.rows"
OTHER = "ranks are about to run different things: rank 0 {}; ranks? [1, 2]+ {}"
REFUSED = {
    "per-rank seeds": (
        partial(compared, change=lambda here, book: book_of(here.rank)), "books: ranks disagree on codes"
    ),
    "loaded on rank 0": (partial(compared, change=loaded), "books: ranks disagree on codes"),
    "counts of one rank say that codes are dead": (
        partial(compared, change=lambda here, book: replace(book, counts=book.counts * here.rank)),
        "books: ranks disagree on counts",
    ),
    "no sum": (partial(compared, change=learned_alone), "books: ranks disagree on codes"),
    "dead codes without numbers of rows": (unnumbered, NUMBERS),
    "k-means without numbers of rows": (unnumbered_kmeans, NUMBERS),
    "k-means of fewer rows than codes": (too_few, "kmeans: got 12 rows for 16 codes"),
    "one more training step on rank 0": (
        partial(captured, programs=("train train measure", "train measure")), OTHER.format("train", "measure")
    ),
    "uneven numbers of batches": (
        partial(captured, programs=("train measure", "train train measure")), OTHER.format("measure", "train")
    ),
    "a branch, or frozen, on one rank": (
        partial(captured, programs=("measure", "train measure")), OTHER.format("measure", "train")
    ),
    "two of one shape in opposite order": (
        partial(captured, programs=("train second", "second train")), OTHER.format("train", "second")
    ),
    "two of different sizes in opposite order": (
        partial(captured, programs=("train small", "small train")),
        OTHER.format(r"train \(leaf counts float32\[16\].*", r"train \(leaf counts float32\[5\]"),
    ),
    "two of one shape, one function": (crossed, "books: ranks disagree on a.codes"),
}  # fmt: skip


def refused_on_a_rank(name, sizes):
    return REFUSED[name][0](Here(shard.mesh(fsdp=len(sizes)), dist.get_rank(), cut_of(sizes), sizes))


@pytest.mark.parametrize("name, size", worlds(REFUSED))
def test_contradictions_raise_on_all_ranks(name, size):
    with pytest.raises(ranks.RankFailure) as caught:
        ranks.run(size, refused_on_a_rank, name, SIZES[size], timeout=10.0)
    failures = caught.value.failures
    assert sorted(failures) == list(range(size))
    for failure in failures.values():
        assert re.search(REFUSED[name][1], failure.message), failure
