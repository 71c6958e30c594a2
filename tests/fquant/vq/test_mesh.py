"""Codebooks on ranks: for any split of the rows, all ranks have the book of one process on all rows.

Scenarios in which vector-quantize-pytorch hangs, aborts or silently diverges are in ``test_scenarios``.
"""

from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch.func import grad, grad_and_value

import shard
from fquant import jit, optim, random, vq
from tests.helpers import ranks
from tests.helpers.vq.mesh import AXES, ROWS, STEPS, D, K, batch, cut_of, same, spread

pytestmark = pytest.mark.xdist_group("ranks")
SPLITS = {  # rows of each rank
    "2 even": (30, 30),
    "2 uneven": (41, 19),
    "2, the first empty": (0, 60),
    "2, the last empty": (60, 0),
    "3 even": (20, 20, 20),
    "3, one empty": (50, 0, 10),
    "3, two empty": (0, 0, 60),
}
KINDS = {
    "plain": {},
    "cosine": {"metric": "cosine"},
    "heads": {"heads": 2},
    "learnable": {"learnable": True},
    "affine": {"affine": True},
}


def kept(step):
    """Return the mask of a step."""
    return torch.rand(ROWS, generator=torch.Generator().manual_seed(step)) > 0.3


def run(mesh, cut, options, steps=STEPS, masked=False, captured=False):
    """Train on the rows ``cut`` of every batch; return the results and the collectives of each step.

    Without a mesh, ``cut`` has all rows.
    """
    psum = partial(shard.psum, mesh=mesh, axes=AXES) if mesh else lambda t: t
    book, opt = spread(vq.init(3, K, D, **options)), optim.sgd(0.5)
    state, values, counts = opt.init(book.codes), [], []

    def loss(codes, book, x, key, mask, row_offset, total):
        book = replace(book, codes=codes)
        out = vq.apply(book, x, key, mask=mask, draw=True, row_offset=row_offset, losses=("commitment",))
        return out.losses["commitment"].sum / total, out

    def step(book, state, x, key, mask, row_offset):
        total = torch.tensor(float(ROWS * D))  # the size of the whole batch, known to every rank
        f = grad_and_value(loss, has_aux=True)
        grads, (value, out) = f(book.codes, book, x, key, mask, row_offset, total)
        sums = {"stats": out.stats, "grads": grads, "value": value}
        if book.affine is not None:  # in float64, so another collective
            sums["moments"] = vq.moments(book, x, mask)
        sums = psum(sums)
        if book.learnable:
            updates, state = opt.update(sums["grads"], state, book.codes)
            book = replace(book, codes=optim.apply_updates(book.codes, updates))
        book = vq.update(book, sums["stats"], threshold=1.0)
        book = vq.shift(book, sums["moments"]) if book.affine is not None else book
        return book, state, sums["value"], sums["stats"]

    step = jit(step) if captured else step
    for i in range(steps):
        x, mask = batch(i, options.get("heads"))[cut], kept(i)[cut] if masked else None
        row_offset = shard.rows(len(x) if mask is None else mask.sum(), mesh, AXES) if mesh else None
        if masked:
            x = torch.where(torch.arange(ROWS)[cut].reshape(-1, *[1] * (x.ndim - 1)) % 13 == 5, torch.nan, x)
        with shard.traffic() as traffic:
            book, state, value, stats = step(book, state, x, random.fold(random.key(9), i), mask, row_offset)
        values.append(value)
        counts.append([call[:2] for call in traffic.calls])
    return {"book": book, "values": values, "stats": stats}, counts


def ranked(sizes, kinds, **how):
    """Return :func:`run` of each of ``kinds``."""
    mesh = shard.mesh(fsdp=len(sizes))
    return {kind: run(mesh, cut_of(sizes), KINDS[kind], **how) for kind in kinds}


QUICK = ("2 uneven", "3, one empty")


@pytest.fixture(scope="module")
def alone():
    """Return the result of one process for each kind."""
    return {kind: run(None, slice(None), options)[0] for kind, options in KINDS.items()}


@pytest.mark.parametrize("split", [s if s in QUICK else pytest.param(s, marks=pytest.mark.slow) for s in SPLITS])
def test_training_is_that_of_one_process(split, alone):
    each = ranks.run(len(SPLITS[split]), ranked, SPLITS[split], list(KINDS), timeout=20.0)
    for kind, want in alone.items():
        results, counts = zip(*(found[kind] for found in each), strict=True)
        same([{kind: one} for one in results], {kind: want})
        start, heads = spread(vq.init(3, K, D, **KINDS[kind])), KINDS[kind].get("heads", 1)
        assert (want["stats"].hits > 0).all() and (want["book"].codes - start.codes).any()
        for calls in [call for one in counts for call in one]:
            first, *rest = calls
            grads = heads * K * D
            assert first == ("all_reduce", 4 * (heads * K * (2 * D + 2) + 2 + grads + 1))
            assert len(rest) == (kind == "affine")


@pytest.mark.parametrize("split", ["2 uneven", "3, one empty"])
def test_masks_and_broken_rows(split):
    kinds = ("plain", "heads")
    each = ranks.run(len(SPLITS[split]), partial(ranked, masked=True), SPLITS[split], kinds, timeout=10.0)
    for kind in kinds:
        want, _ = run(None, slice(None), KINDS[kind], masked=True)
        assert want["stats"].lost > 0 and want["stats"].kept < 50 * KINDS[kind].get("heads", 1)
        same([found[kind][0] for found in each], want)


def test_captured_steps_are_those_of_one_process_too(alone):
    results = [found["plain"] for found in ranks.run(2, partial(ranked, captured=True), (41, 19), ["plain"])]
    same([one for one, _ in results], alone["plain"])
    assert all(len(calls) == 1 for _, counts in results for calls in counts)


def plain_bytes(sizes):
    mesh, book = shard.mesh(fsdp=2), vq.init(0, K, D)
    x = batch(0)[cut_of(sizes)]
    with shard.traffic() as traffic:
        vq.ema(book, shard.psum(vq.stats(book, x, vq.encode(book, x)), mesh, AXES))
    return traffic.calls


def test_an_update_is_one_sum_of_counts_and_sums():
    assert ranks.run(2, plain_bytes, (30, 30)) == [[("all_reduce", 4 * (K * (D + 1) + 2), 2)]] * 2


CLUSTERED = [(kind, masked) for kind in ("plain", "cosine", "heads") for masked in (False, True)]


def clustered(sizes):
    mesh, cut, found = shard.mesh(fsdp=len(sizes)), cut_of(sizes), []
    for kind, masked in CLUSTERED:
        x, mask = batch(0, KINDS[kind].get("heads"))[cut], kept(0)[cut] if masked else None
        with shard.traffic() as traffic:
            row_offset = shard.rows(len(x) if mask is None else mask.sum(), mesh, AXES)
            psum = partial(shard.psum, mesh=mesh, axes=AXES)
            book = vq.kmeans(
                vq.init(3, K, D, **KINDS[kind]), x, random.key(1), 5, mask=mask, row_offset=row_offset, psum=psum
            )
        found.append((book, traffic.count("all_reduce")))
    return found


@pytest.mark.parametrize("split", ["2, the first empty", "3, one empty"])
def test_kmeans_is_that_of_one_process(split):
    """The start too, for which vector-quantize-pytorch draws other rows on ranks, and fails with heads."""
    each = ranks.run(len(SPLITS[split]), clustered, SPLITS[split])
    for (kind, masked), *of_ranks in zip(CLUSTERED, *each, strict=True):
        x, mask = batch(0, KINDS[kind].get("heads")), kept(0) if masked else None
        want = vq.kmeans(vq.init(3, K, D, **KINDS[kind]), x, random.key(1), 5, mask=mask)
        results, counts = zip(*of_ranks, strict=True)
        same([{kind: one} for one in results], {kind: want})
        assert set(counts) == {1 + 1 + 5}  # the numbers of rows, the first rows, an iteration each


def uneven_batches(batches):
    """Train on ranks with different numbers of batches: a rank without a batch has no rows."""
    mesh, rank = shard.mesh(fsdp=len(batches)), dist.get_rank()
    book = spread(vq.init(3, K, D))
    for i in range(max(batches)):
        x = batch(10 * rank + i, n=20 if i < batches[rank] else 0)
        row_offset = shard.rows(len(x), mesh, AXES)
        stats = shard.psum(
            vq.apply(book, x, random.fold(random.key(0), i), draw=True, row_offset=row_offset).stats, mesh, AXES
        )
        book = vq.update(book, stats, threshold=1.0)
    return book


@pytest.mark.parametrize("batches", [(3, 1), (0, 2), (1, 4, 2)])
def test_uneven_numbers_of_batches(batches):
    book = spread(vq.init(3, K, D))
    for i in range(max(batches)):
        x = torch.cat([batch(10 * rank + i, n=20) for rank, n in enumerate(batches) if i < n])
        book = vq.update(book, vq.apply(book, x, random.fold(random.key(0), i), draw=True).stats, threshold=1.0)
    same(ranks.run(len(batches), uneven_batches, batches, timeout=10.0), book)


def replicas():
    """Sum over dp alone: ranks along fsdp have the same rows, as in tensor parallelism."""
    mesh = shard.mesh(dp=2, fsdp=2)
    book, x = spread(vq.init(3, K, D)), batch(0).tensor_split(2)[mesh.get_local_rank("dp")]
    row_offset = shard.rows(len(x), mesh, ("dp",))
    stats = shard.psum(vq.apply(book, x, random.key(0), draw=True, row_offset=row_offset).stats, mesh, ("dp",))
    return vq.update(book, stats, threshold=1.0)


def test_replicas_of_rows_count_once():
    book = spread(vq.init(3, K, D))
    want = vq.update(book, vq.apply(book, batch(0), random.key(0), draw=True).stats, threshold=1.0)
    same(ranks.run(4, replicas, timeout=10.0), want)


def diverse(sizes):
    """Split the batch over ranks, with 5 positions."""
    mesh, book = shard.mesh(fsdp=len(sizes)), replace(spread(vq.init(3, K, D)), learnable=True)
    x = batch(0).reshape(-1, 5, D)[cut_of(sizes)]
    psum = partial(shard.psum, mesh=mesh, axes=AXES)

    def loss(x, codes):
        mean = vq.diversity(replace(book, codes=codes), x, 2.0, psum=psum)
        return mean.sum / (len(sizes) * 5), mean

    (dx, dcodes), mean = grad(loss, (0, 1), has_aux=True)(x, book.codes)
    return vq.mean(psum(mean)), psum(dcodes), dx


@pytest.mark.parametrize("sizes", [(8, 4), (0, 12), (5, 0, 7)])
def test_diversity_and_its_gradients_are_those_of_the_whole_batch(sizes):
    book, x = replace(spread(vq.init(3, K, D)), learnable=True), batch(0).reshape(-1, 5, D)
    loss = lambda x, codes: vq.mean(vq.diversity(replace(book, codes=codes), x, 2.0))
    dx, dcodes = grad(loss, (0, 1))(x, book.codes)
    results = ranks.run(len(sizes), diverse, sizes, timeout=10.0)
    same([one[:2] for one in results], (loss(x, book.codes), dcodes))
    torch.testing.assert_close(torch.cat([one[2] for one in results]), dx, rtol=1e-5, atol=1e-7)


def numbered(axes, over, sizes):
    mesh = shard.mesh(**axes)
    with shard.traffic() as traffic:
        found = shard.rows(sizes[dist.get_rank()], mesh, over)
        same = shard.rows(torch.tensor(sizes[dist.get_rank()]), mesh, over)
    assert [t.dtype for t in found] == [torch.int64] * 2 and all(map(torch.equal, found, same))
    return tuple(map(int, found)), len(traffic.calls)


@pytest.mark.parametrize(
    ("axes", "over", "sizes", "want", "sums"),
    [
        ({"fsdp": 3}, AXES, (4, 0, 7), [(0, 11), (4, 11), (4, 11)], 2),
        ({"fsdp": 1}, AXES, (5,), [(0, 5)], 0),
        ({"fsdp": 2}, (), (5, 6), [(0, 5), (0, 6)], 0),
        ({"dp": 2, "fsdp": 2}, AXES, (1, 2, 3, 4), [(0, 10), (1, 10), (3, 10), (6, 10)], 2),
        ({"dp": 2, "fsdp": 2}, ("dp",), (1, 1, 3, 3), [(0, 4), (0, 4), (1, 4), (1, 4)], 2),
        ({"dp": 2, "fsdp": 2}, ("fsdp",), (1, 2, 3, 4), [(0, 3), (1, 3), (0, 7), (3, 7)], 2),
    ],
)
def test_rows_are_numbered_over_ranks(axes, over, sizes, want, sums):
    assert ranks.run(len(sizes), numbered, axes, over, sizes) == [(each, sums) for each in want]
