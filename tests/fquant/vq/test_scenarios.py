"""Codebooks on two and three ranks in scenarios where vector-quantize-pytorch hangs, aborts, or silently diverges.

A scenario is a program that every rank runs on its own rows; some ranks have none. After it all ranks have the result
of one process on all rows, even if rank 0 does more. Programs in which ranks contradict each other are in
``test_contradictions``, plain training is in ``test_mesh``. Losses of LFQ and FSP that are not sums are in
``test_scalar_mesh``, other quantisers in ``test_family``.
"""

from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch.func import grad
from torch.utils.checkpoint import checkpoint

import shard
from fquant import random, remat, tree, vq
from fquant.vq.composite import beam, grouped, residual
from tests.helpers import ranks
from tests.helpers.vq.mesh import AXES, ROWS, D, K, batch, cut_of, same, spread
from tests.helpers.vq.peers import drawn
from tests.helpers.vq.scenarios import SIZES, Here, book_of, learn, mine, total, worlds

pytestmark = pytest.mark.xdist_group("ranks")


def evaluate(book, x):
    """Run evaluation and the local part of training, and check that neither communicates."""
    with shard.traffic() as traffic:
        vq.decode(book, vq.encode(book, x, top=3))
        out = vq.apply(book, x, random.key(5), draw=True, row_offset=(0, ROWS), temperature=1.0)
        vq.update(book, out.stats, threshold=2.0)
        vq.perplexity(out.stats.counts)
        if book.affine is not None:
            vq.shift(book, vq.moments(book, x))
    assert not traffic.calls


def own_seeds(here):
    """Start ranks with codes of their own, and broadcast those of rank 0."""
    book = book_of(here.rank)
    book = book if here.mesh is None else shard.replicate(book, here.mesh)
    for i in range(3):
        book = learn(here, book, mine(here, batch(i)), i)
    return book


def loaded_on_rank_0(here):
    """Load a trained book with dead codes on rank 0; the others have a new one."""
    book = book_of()
    if here.rank == 0:
        book = vq.kmeans(book, batch(5), random.key(1))
        book = replace(book, counts=torch.where(torch.arange(K) < 5, 0.0, book.counts))
    book = book if here.mesh is None else shard.replicate(book, here.mesh)
    return learn(here, book, mine(here, batch(0)))


def checkpointed(here):
    """Quantise inside activation checkpointing, of three kinds: the stats are counted once."""
    book, x = book_of(), mine(here, batch(0))

    def block(w, book, x):
        out = vq.apply(book, x @ w)
        return vq.mean(out.losses["commitment"]) + out.x.sum(), out.stats

    def flat(w):
        loss, stats = block(w, book, x)
        return loss, *tree.leaves(stats)

    wanted, stats = grad(block, has_aux=True)(torch.eye(D), book, x)
    found, again = grad(lambda *args: remat(block)(*args), has_aux=True)(torch.eye(D), book, x)
    assert torch.equal(found, wanted)
    each = [stats, again]
    for reentrant in (False, True):
        w = torch.eye(D, requires_grad=True)
        loss, *leaves = checkpoint(flat, w, use_reentrant=reentrant)
        loss.backward()
        assert w.grad is not None and torch.equal(w.grad, wanted)
        each.append(tree.unflatten(tree.structure(stats), [t.detach() for t in leaves]))
    return [vq.ema(book, one) for one in total(here, each)]


def accumulated(here):
    """Accumulate three batches for one update without a collective; rows for dead codes come from the first."""
    book, each = replace(book_of(), counts=torch.zeros(K)), []
    for i in range(3):
        x = mine(here, batch(i))
        row_offset = None if here.mesh is None or i else shard.rows(len(x), here.mesh, AXES)
        with shard.traffic() as traffic:
            each.append(vq.apply(book, x, random.key(2), draw=i == 0, row_offset=row_offset).stats)
        assert not traffic.calls
    return vq.update(book, total(here, vq.add(*each)), threshold=2.0)


def replicas(here):
    """Sum over ``dp`` alone, because all ranks have the same rows, as in tensor parallelism."""
    book = book_of()
    for i in range(3):
        book = learn(here, book, batch(i), i, axes=("dp",))
    return book


def two_books(here, sizes):
    """Apply two books in another order on each rank, and sum the stats of both together."""
    books = {name: spread(vq.init(i, size, D)) for i, (name, size) in enumerate(zip("ab", sizes, strict=True))}
    stats = {}
    for i in (0, 1) if here.rank == 0 else (1, 0):
        stats["ab"[i]] = vq.apply(books["ab"[i]], mine(here, batch(i))).stats
    with shard.traffic() as traffic:
        found = total(here, [stats["a"], stats["b"]])
    assert here.mesh is None or traffic.count("all_reduce") == 1
    return [vq.ema(books[name], one) for name, one in zip("ab", found, strict=True)]


def more_dead_codes_than_rows(here):
    book = replace(book_of(), counts=torch.zeros(K))
    after = learn(here, book, mine(here, batch(0)[:6]))
    moved = (torch.cdist(after.codes, batch(0)[:6]) < 1e-6).any(1)
    assert moved.sum() == 6 and len({tuple(code) for code in after.codes.tolist()}) == K
    return after


def a_forward_more(here):
    """Evaluate on rank 0, with a local step, between the steps of all ranks."""
    book = book_of(affine=True)
    for i in range(2):
        x = mine(here, batch(i))
        if here.rank == 0:
            evaluate(book, x)
        moments = total(here, vq.moments(book, x))
        book = vq.shift(learn(here, book, x, i), moments)
    return book


def an_empty_mask(here):
    """Mask all rows of rank 0 while codes are dead."""
    book = replace(book_of(), counts=torch.zeros(K))
    return learn(here, book, mine(here, batch(0)), mask=mine(here, torch.arange(ROWS) >= here.sizes[0]))


def frozen(here):
    """Keep the old book on rank 0, which still contributes its rows to the update."""
    book = book_of()
    after = learn(here, book, mine(here, batch(0)))
    kept = book if here.rank == 0 else after
    evaluate(kept, batch(0))
    return after


def frozen_under_a_beam(here):
    """Keep the old state on rank 0, of a residual with beam search."""
    state, x = residual.init_books(0, 7, D, 3), mine(here, batch(0))
    state = tree.map_at(r"layers\.\d+\.codes", lambda t: drawn(*t.shape, seed=len(t)), state)
    before = tree.map(torch.clone, state)
    row_offset = None if here.mesh is None else shard.rows(len(x), here.mesh, AXES)
    with shard.traffic() as traffic:
        codes = beam.encode(state, x, 4)
        out = residual.apply(state, x, random.key(3), codes=codes, draw=True, row_offset=row_offset)
    after = residual.update(state, total(here, out.stats), threshold=1.0)
    with shard.traffic() as more:
        kept = beam.encode(state if here.rank == 0 else after, batch(0), 4)
        again = beam.encode(state, batch(0), 4)
    assert not traffic.calls and not more.calls
    assert torch.equal(out.codes, codes) and torch.equal(again[here.cut], codes)
    assert torch.equal(kept, again) == (here.rank == 0)
    same([before], state)
    return after


def another_branch(here):
    """Pass only the rows of rank 0 to the book."""
    x = batch(0)[: here.sizes[0]]
    return learn(here, book_of(), x if here.rank == 0 else x[:0])


def evaluated_before_kmeans(here):
    book, x = vq.init(3, K, D), mine(here, batch(0))
    if here.rank == 0:
        evaluate(book, x)
    row_offset = None if here.mesh is None else shard.rows(len(x), here.mesh, AXES)
    book = vq.kmeans(book, x, random.key(1), 4, row_offset=row_offset, psum=partial(total, here))
    return learn(here, book, x)


def groups(here):
    """Quantise once more on rank 0, with a depth of its own."""
    books = grouped.init(0, [partial(residual.init_books, num_codes=7, width=D // 2, num_layers=3, dropout=True)] * 2)
    books = tree.map_at(r"groups\.\d+\.layers\.\d+\.codes", lambda t: 30 * t, books)
    scalars = grouped.init(1, [partial(residual.init_fsq, levels=(5, 3), num_layers=3, dropout=True)] * 2)
    found, x, key = [], mine(here, batch(0)), random.key(4)
    for state in (books, scalars):
        if here.rank == 0:
            with shard.traffic() as traffic:
                grouped.apply(state, x, random.key(8))
            assert not traffic.calls
        out = grouped.apply(state, x, key)
        found.append(grouped.update(state, total(here, out.stats)))
    return found[0]


def interleaved(here):
    """Overlap a user's all-reduce with the quantiser; rank 0 starts it before, the others after."""
    book, x, work = book_of(), mine(here, batch(0)), None
    other = torch.arange(3.0) + here.rank
    if here.mesh is None:
        other = sum(torch.arange(3.0) + i for i in range(len(here.sizes)))
    elif here.rank == 0:
        work = dist.all_reduce(other, async_op=True)
    stats = vq.apply(book, x).stats
    if here.mesh is not None and here.rank > 0:
        work = dist.all_reduce(other, async_op=True)
    if work is not None:
        work.wait()
    return vq.ema(book, total(here, stats)), other


def implicit_and_dropout(here):
    """Train implicit codebooks with dropout: networks of dropped layers have zero gradients on every rank."""
    state = residual.init_implicit(0, 7, D, 3, depth=1, dropout=True)
    state = tree.map_at(r"layers\.\d+(\.book)?\.codes", lambda t: drawn(*t.shape, seed=len(t)), state)
    depths = set()
    for i in range(4):
        key, x = random.key(i), mine(here, batch(i))
        depths.add(int(residual.draw_depth(state, key)))

        def loss(state, x=x, key=key):
            out = residual.apply(state, x, key)
            return (out.losses["commitment"].sum.sum() + out.x.sum()) / (ROWS * D), out.stats

        slope, stats = total(here, grad(loss, has_aux=True)(state))
        state = residual.update(state, stats)
        state = tree.map(lambda t, g: t - 0.1 * g, state, slope)
    assert len(depths) > 1
    return state


EQUAL = {  # by the name of the failure in vector-quantize-pytorch
    "per-rank seeds": own_seeds,
    "different initted: loaded on rank 0": loaded_on_rank_0,
    "activation checkpointing": checkpointed,
    "no_sync, micro-batches": accumulated,
    "tensor-parallel replicas": replicas,
    "two of one shape in opposite order": partial(two_books, sizes=(K, K)),
    "two of different sizes in opposite order": partial(two_books, sizes=(K, 5)),
    "more dead codes than rows": more_dead_codes_than_rows,
    "one more forward, and affine evaluation, on rank 0": a_forward_more,
    "a mask that is empty on one rank while codes are dead": an_empty_mask,
    "frozen on one rank": frozen,
    "frozen on one rank, under a beam": frozen_under_a_beam,
    "a branch of one rank": another_branch,
    "evaluated before k-means on rank 0": evaluated_before_kmeans,
    "grouped residuals on rank 0": groups,
    "a user's sum in another order": interleaved,
    "implicit codebooks and dropout": implicit_and_dropout,
}


def on_a_rank(name, sizes, axes):
    return EQUAL[name](Here(shard.mesh(**axes), dist.get_rank(), cut_of(sizes), sizes))


@pytest.mark.parametrize("name, size", worlds(EQUAL))
def test_ranks_are_one_process(name, size):
    sizes = SIZES[size]
    want = EQUAL[name](Here(None, 0, slice(0, ROWS), sizes))
    same(ranks.run(size, on_a_rank, name, sizes, {"fsdp": size}, timeout=10.0), want)
