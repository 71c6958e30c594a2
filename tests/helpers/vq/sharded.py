"""Comparison of a sharded book with the book of one process, for ``test_sharded`` and ``test_sharded_heads``."""

from functools import partial

import torch
import torch.distributed as dist
from torch.func import grad

import shard
from fquant import jit, random, tree, vq
from fquant.vq import mean, sharded
from tests.helpers import ranks
from tests.helpers.vq.peers import assert_close, drawn


def steps(book, apply, update, x, mask, threshold):
    """Run three steps, the last of which restarts dead codes; return their results and the book."""
    seen = []
    for i in range(3):
        got = apply(book, x + 0.1 * i, random.key(i), mask, draw=True, gradient=vq.directional)
        seen.append((got.x, got.codes, got.losses["commitment"]))
        book = update(book, got.stats, eps=0.1, threshold=threshold if i == 2 else 0.0)  # shows the smoothing
    return seen, book


def on_a_rank(book, x, mask, split, threshold, abreast):
    mesh, rank = shard.mesh(fsdp=len(split)), dist.get_rank()
    start = sum(split[:rank])
    x, mask = (t[start : start + split[rank]] for t in (x, mask))
    exchange = shard.exchange_rows(mesh, "fsdp", max_rows=max(split) * abreast)
    part = sharded.take_codes(book, *shard.local_range(book.codes.shape[-2], mesh, "fsdp"))
    with shard.traffic() as one:
        got = sharded.apply(part, x, random.key(0), mask, draw=True, exchange=exchange)
    with shard.traffic() as two:
        sharded.update(part, got.stats, threshold=threshold, exchange=exchange)
    seen, after = steps(
        part, partial(sharded.apply, exchange=exchange), partial(sharded.update, exchange=exchange), x, mask, threshold
    )
    seen = [(out, codes, shard.psum(loss, mesh, ("fsdp",))) for out, codes, loss in seen]
    codes = sharded.encode(part, x, exchange=exchange)
    counted = shard.psum((got.stats.local.kept, got.stats.local.lost), mesh, ("fsdp",))
    traffic = [sorted(call[0] for call in t.calls) for t in (one, two)]
    return seen, after.book, codes, sharded.decode(part, codes, exchange=exchange), traffic, counted


def one_book(book, x, mask, split, threshold, abreast=1):
    """Check that shards of ``book`` on ranks with ``split`` rows equal it in every step; return the book.

    ``abreast`` is the number of rows of the book in a row of x, which is above 1 if heads share the book.
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
    exchange = shard.exchange_rows(mesh, "fsdp", max_rows=max(split))
    part = sharded.take_codes(book, *shard.local_range(book.codes.shape[-2], mesh, "fsdp"))
    step = jit(lambda part, x, weight: slopes(part, x, weight, partial(sharded.apply, exchange=exchange)))
    eager = slopes(part, x, weight, partial(sharded.apply, exchange=exchange))
    captured = step(part, x, weight)
    assert all(torch.equal(*both) for both in zip(tree.leaves(eager), tree.leaves(captured), strict=True))
    return eager[0].book.codes, eager[1]


def gradients_are_those_of_all_rows(book, rows, split):
    """Check that gradients of ``book`` and of ``rows`` on ranks with ``split`` rows equal those of one process."""
    x, weight = drawn(*rows, seed=1), drawn(*rows, seed=2)
    by_book, by_x = slopes(book, x, weight, vq.apply)
    got = ranks.run(len(split), slopes_on_a_rank, book, x, weight, split)
    assert_close(torch.cat([found[0] for found in got], -2), by_book.codes, 1e-6)
    assert_close(torch.cat([found[1] for found in got]), by_x, 1e-6)
