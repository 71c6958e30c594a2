"""A codebook sharded over ranks: each has some of the codes and some of the rows.

    exchange = shard.exchange_rows(mesh, "fsdp", max_rows=len(x))                        # the collectives, as functions
    state = sharded.init(key, 65536, 256, *shard.local_range(65536, mesh, "fsdp"))   # this rank's codes
    x, codes, losses, stats = sharded.apply(state, x, key, exchange=exchange)
    state = sharded.update(state, stats, exchange=exchange)

Rows travel to the codes: for 65,536 codes of 256 numbers and 8,192 rows that is 17 MB, and codes to rows 134 MB. An
all-gather brings the rows to all ranks, and each searches its own codes. An all-reduce takes the maximum of integer
keys: the score in the high half, the code in the low half, so of equally near codes the lowest wins. A reduce-scatter
returns the decoded rows, as sums in which all terms but one are zero. The stats of a rank's codes are then complete.
Codes equal those of one process, unless two are equally near to within the rounding of a matrix product.
"""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from .. import random, tree
from ..communication import ONE_PROCESS, RowExchange
from .codebook import book as books
from .codebook import rows
from .codebook import update as updates
from .codebook.encode import search
from .codebook.gradient_estimators import Estimator, rotation
from .codebook.losses import commitment
from .quantized import Key, Mask, Quantized, Seed
from .scalar.projection_layers import within

NO_CODE = -(2**63)  # the key of a row without a code
LOW = 2**32 - 1  # the low half of a key


@tree.node
class ShardedBook:
    """The codes from ``first`` on of a book of ``num_codes``, for every head, as a ``book`` of their own."""

    book: books.Book
    first: int = tree.static()
    num_codes: int = tree.static()


@tree.node
class ShardedStats:
    """The ``local`` stats of a rank's codes over the rows of all ranks; only ``kept`` and ``lost`` need a sum."""

    local: updates.Stats
    pool: Tensor | None = None  # f32[N D] or [N h D], the rows of all ranks
    drawn: Tensor | None = None  # i64[K] or [h K], the rows of the pool drawn for dead codes; -1 for none


def init(key: Seed, num_codes: int, dim: int, first: int = 0, stop: int | None = None, **options: Any) -> ShardedBook:
    """Create the codes ``first`` to ``stop`` (exclusive, default all) of the book of ``vq.init`` with ``options``."""
    return take_codes(books.init(key, num_codes, dim, **options), first, num_codes if stop is None else stop)


def take_codes(book: books.Book, first: int, stop: int) -> ShardedBook:
    """Take the codes ``first`` to ``stop`` (exclusive) of every head; ValueError for an affine book, or no codes."""
    if book.affine is not None:
        raise ValueError("sharded.take_codes: the book is affine; wanted one that is not")
    num_codes = book.codes.shape[-2]
    if not 0 <= first < stop <= num_codes:
        raise ValueError(f"sharded.take_codes: codes {first} to {stop} of {num_codes}; wanted some that the book has")
    codes, sums = (t[..., first:stop, :].clone() for t in (book.codes, book.sums))
    local = replace(book, codes=codes, counts=book.counts[..., first:stop].clone(), sums=sums)
    return ShardedBook(local, first, num_codes)


def encode(state: ShardedBook, x: Tensor, *, exchange: RowExchange = ONE_PROCESS) -> Tensor:
    """Return the nearest code of all ranks' for every row of ``x`` f[... D] (with heads [... h D]), i64[...].

    A row that is not finite has code -1. Two collectives. Raises what ``vq.encode`` does, and TypeError for float64.
    """
    _check(state, x)
    flat = _flatten(state, rows.at_least_float32(x.detach()), 1)
    return exchange.mine(_search(state, exchange.gather(flat), exchange), len(flat)).reshape(x.shape[:-1])


def decode(
    state: ShardedBook, codes: Tensor, dtype: torch.dtype | None = None, *, exchange: RowExchange = ONE_PROCESS
) -> Tensor:
    """Look up ``codes`` as ``vq.decode`` does, with its errors: [... D] in ``dtype`` or the book's. Two collectives."""
    books.check_lookup(state.book, codes, state.num_codes)
    flat = _flatten(state, within(codes, state.num_codes))  # a code that no rank has would decode to zero
    gathered = exchange.gather(flat)  # padded with zeros, whose rows are cut off below
    found = exchange.scatter(books.decode(state.book, _local_codes(state, gathered)))[: len(flat)]
    return found.reshape(*codes.shape, found.shape[-1]).to(dtype or found.dtype)


def apply(
    state: ShardedBook,
    x: Tensor,
    key: Key = None,
    mask: Mask = None,
    *,
    gradient: Estimator = rotation,
    draw: bool = False,
    exchange: RowExchange = ONE_PROCESS,
) -> Quantized:
    """Quantise this rank's rows ``x`` f[... D] (with heads [... h D]) by the codes of all ranks, with ShardedStats.

    Arguments are those of ``vq.apply``; rows are numbered rank after rank. The loss is the commitment of this rank's
    rows. Three collectives. Raises what :func:`encode` does, and ValueError for a missing key.
    """
    _check(state, x)
    if draw and key is None:
        raise ValueError("key is None with draw=True, which needs one")
    kept = torch.ones_like(x[..., 0], dtype=torch.bool) if mask is None else rows.row_mask(mask, x)
    point, valid = rows.zero_invalid(rows.at_least_float32(x), kept)
    # A lost row travels as inf, and a masked one as nan, which is also what rows are padded with.
    marks = torch.where(kept, torch.inf, torch.nan).to(point.dtype)[..., None]
    sent = _flatten(state, torch.where(valid[..., None], point, marks).detach(), 1)
    size, gathered = len(sent), exchange.gather(sent)  # [N D] or [N h D]
    all_kept = ~gathered.isnan().any(-1)
    all_codes = _search(state, gathered, exchange)
    local_codes = _local_codes(state, all_codes)
    q = exchange.scatter(books.decode(state.book, local_codes))[:size].reshape(x.shape).to(point.dtype)
    codes = exchange.mine(all_codes, size).reshape(x.shape[:-1])
    valid = codes >= 0
    start = rows.unit(point) if state.book.metric == "cosine" else point
    keys = None
    if key is not None:
        numbers = rows.flatten_heads(state.book, exchange.mine(all_kept.cumsum(0) - 1, size))
        keys = rows.unflatten_heads(rows.row_keys(random.fold(key, "gradient"), numbers), x)
    out = torch.where(valid[..., None], gradient(start, q, None, keys), 0).to(x.dtype)
    local = updates.stats(state.book, gathered, local_codes)
    num_kept = kept.sum().to(local.kept.dtype)
    stats = ShardedStats(replace(local, kept=num_kept, lost=num_kept - valid.sum()))
    if draw and key is not None:
        drawn = _draw(state, random.fold(key, "draw"), gathered, all_kept, all_codes >= 0)
        stats = replace(stats, pool=gathered, drawn=drawn)
    return Quantized(out, codes, {"commitment": commitment(start, q, valid)}, stats)


def update(
    state: ShardedBook,
    stats: ShardedStats,
    decay: float = updates.DECAY,
    eps: float = updates.EPS,
    threshold: float = 0.0,
    reset: float | None = None,
    exchange: RowExchange = ONE_PROCESS,
) -> ShardedBook:
    """Update this rank's codes as ``vq.update`` does, with its errors. One collective, of few numbers."""
    updates.check_threshold(threshold, reset)
    book = updates.move(state.book, stats.local, decay)
    rank, num_ranks = exchange.rank, exchange.num_ranks
    dead = book.counts < threshold
    is_rank = torch.arange(num_ranks, device=dead.device) == rank
    num_dead = torch.where(is_rank.reshape(-1, *[1] * (dead.ndim - 1)), dead.sum(-1), 0)  # [ranks] or [ranks h]
    total, num_dead = exchange.sum((book.counts.sum(-1, keepdim=True), num_dead.to(book.counts.dtype)))
    book = book if book.learnable else updates.refresh(book, eps, (total, state.num_codes))
    if threshold:
        before = num_dead[:rank].sum(0).long()[..., None]  # [1] or [h 1]
        book = _expire(book, stats, dead, before, threshold if reset is None else reset)
    return replace(state, book=book)


def _expire(book: books.Book, stats: ShardedStats, dead: Tensor, before: Tensor, count: float) -> books.Book:
    """Restart the dead codes of ``book`` at drawn rows; ``before`` [1] or [h 1] are dead on the ranks before."""
    if stats.pool is None or stats.drawn is None:
        raise ValueError("stats: got none drawn, wanted rows to start dead codes at; use apply with key and draw=True")
    if not len(stats.pool):
        return book
    restarts, turn = updates.assign_drawn(dead, stats.drawn >= 0, before)
    index = stats.drawn.gather(-1, turn).clamp(min=0)
    pool = rows.flatten_heads(book, stats.pool, 1)  # [h N D]
    row = pool.gather(1, index.reshape(len(pool), -1, 1).expand(-1, -1, pool.shape[-1])).reshape(book.codes.shape)
    row = row.to(book.codes.dtype)
    return updates.restart_at(book, restarts, rows.unit(row) if book.metric == "cosine" else row, count)


def _flatten(state: ShardedBook, t: Tensor, dims: int = 0) -> Tensor:
    """Reshape ``t`` [... (h) *rest] to [n (h) *rest], where ``rest`` has ``dims`` dims."""
    return t.reshape(-1, *t.shape[t.ndim - dims - (state.book.codes.ndim - 2) :])


def _search(state: ShardedBook, x: Tensor, exchange: RowExchange) -> Tensor:
    """Return the nearest code i64[N] or [N h] of all ranks', for rows x f32[N D] or [N h D]."""
    codes, score = (rows.unflatten_heads(t[..., 0], x) for t in search(state.book, x))
    bits = (score + 0.0).view(torch.int32).long()  # the sum turns -0.0 into 0.0
    ordered = torch.where(bits >= 0, bits, bits ^ 0x7FFFFFFF)  # in the order of the scores
    key = torch.where(codes < 0, NO_CODE, (ordered << 32) + (LOW - codes - state.first))
    key = exchange.largest(key)
    return torch.where(key == NO_CODE, -1, LOW - (key & LOW))


def _local_codes(state: ShardedBook, codes: Tensor) -> Tensor:
    """Number ``codes`` within this rank's, -1 for those of other ranks."""
    local = codes - state.first
    return torch.where((local >= 0) & (local < state.book.codes.shape[-2]), local, -1)


def _draw(state: ShardedBook, key: Tensor, x: Tensor, kept: Tensor, valid: Tensor) -> Tensor:
    """Return the indices in x [N D] or [N h D] of the rows that a whole Book draws, i64[K] or [h K]; -1 for none."""
    kept, valid = (rows.flatten_heads(state.book, t) for t in (kept, valid))  # [h N]
    index = torch.arange(len(x), dtype=torch.float64, device=x.device)  # drawn instead of the rows
    drawn, hits = rows.draw(key, state.num_codes, index[:, None].expand(*kept.shape, 1), kept, valid, None)
    return torch.where(hits > 0, drawn[..., 0].long(), -1).reshape(*state.book.codes.shape[:-2], state.num_codes)


def _check(state: ShardedBook, x: Tensor) -> None:
    rows.check(state.book, x)
    updates.check_float32(state.book)
    if x.dtype is torch.float64:
        raise TypeError("x: got torch.float64; wanted float32 or narrower, whose scores are compared whole")
