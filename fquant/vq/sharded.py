"""parted: a book too large for one process, of which each has some of the codes, and some of the rows.

    over = shard.exchange_rows(mesh, "fsdp", max_rows=len(x))                          # what travels, as functions
    part = parted.init(key, 65536, 256, *shard.local_range(65536, mesh, "fsdp"))      # the codes from first to stop
    x, codes, losses, stats = parted.apply(part, x, key, over=over)
    part = parted.update(part, stats, over=over)

Let N rows of D numbers meet K codes. Either come together in one place, in each step:

    rows go to the codes     N·D·4 bytes gathered, N·8 compared, N·D·4 scattered
    codes go to the rows     K·D·4 bytes gathered, and as stats K·(D + 1)·4 summed

With 65,536 codes of 256 numbers and 8,192 rows that is 17 MB or 134, and what a process keeps is smaller by as much as
there are others; so rows travel. Each process finds the nearest of its own codes for the rows of all, and the best of
these is one maximum of whole numbers, which hold the score above and the number of the code below: of equal scores the
lowest number is left, as in one process. What the rows are quantised to is one sum in which each term but one is zero.

Since the rows of all are there, stats of a process's own codes need nothing more. For the smoothing, and for dead codes
to be told apart, an update sums a few numbers, in one collective of fixed shape. Collectives of a step: an all-gather,
an all-reduce, a reduce-scatter, whatever the rows are; of an update an all-reduce.

*Heads.* Of a book with heads each part has some codes of every head; a row [h D] travels whole, and what has D numbers
above has h·D. Heads that share a book are more rows of it, as everywhere.

A row has the code that it has in one process on all rows but where two codes are as near to within a rounding, which a
matrix product of another shape may round differently.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from .. import random
from ..communication import ONE_PROCESS, RowExchange
from ..kernels.ops.nearest import nearest
from ..tree import node, static
from .codebook import book as books
from .codebook import rows
from .codebook.book import Book, Metric, check_codes, tables
from .codebook.gradient_estimators import Path, rotation
from .codebook.losses import commitment
from .codebook.rows import unit, wide
from .codebook.update import DECAY, EPS, Stats, check_wide, move, refresh
from .codebook.update import stats as stats_of
from .quantized import Quantized
from .scalar import mixed_radix

NOTHING = -(2**63)  # the key of a row that has no code
LOW = 2**32 - 1  # the lower half of a key


@node
class ShardedBook:
    """The codes ``first``, ``first + 1`` ... of a book of ``num_codes``, of every head, as a ``book`` of their own."""

    book: Book
    first: int = static()
    num_codes: int = static()


@node
class ShardedStats:
    """What a part learns from the rows of all; ``own`` is local, and only ``kept`` and ``lost`` are still to be summed.

    With a key, ``pool`` f32[N D] (with heads [N h D]) are the rows of all, and ``at`` i64[K] or [h K] is where those
    drawn for dead codes are in it, -1 where nothing was drawn.
    """

    own: Stats
    pool: Tensor | None = None
    at: Tensor | None = None


def init(
    key: int | Tensor,
    num_codes: int,
    dim: int,
    first: int = 0,
    stop: int | None = None,
    *,
    heads: int | None = None,
    metric: Metric = "euclidean",
    learnable: bool = False,
) -> ShardedBook:
    """The codes ``first`` to ``stop`` (without it), by default all, of the book that ``init`` of a Book makes of these.

    All codes are drawn for it, and the others forgotten. Raises what ``init`` of a Book and :func:`part` do.
    """
    book = books.init(key, num_codes, dim, heads=heads, metric=metric, learnable=learnable)
    return take_codes(book, first, num_codes if stop is None else stop)


def take_codes(book: Book, first: int, stop: int) -> ShardedBook:
    """The codes ``first`` to ``stop`` (without it) of a book, with heads those of each.

    Raises ValueError for an affine book, and codes that it does not have, or none.
    """
    if book.affine is not None:
        raise ValueError("parted.part: the book is affine; wanted one that is not")
    num_codes = book.codes.shape[-2]
    if not 0 <= first < stop <= num_codes:
        raise ValueError(f"parted.part: codes {first} to {stop} of {num_codes}; wanted some that the book has")
    codes, sums = (t[..., first:stop, :].clone() for t in (book.codes, book.sums))
    own = replace(book, codes=codes, counts=book.counts[..., first:stop].clone(), sums=sums)
    return ShardedBook(own, first, num_codes)


def encode(part: ShardedBook, x: Tensor, *, over: RowExchange = ONE_PROCESS) -> Tensor:
    """The nearest code of every row of ``x`` f[... D] (with heads [... h D]), of all parts': i64[...], -1 for a row
    that is not finite.

    Two collectives: rows travel, and keys. Raises what ``encode`` of a Book does, and TypeError for float64.
    """
    _check(part, x)
    flat = _flat(part, wide(x.detach()), 1)
    return over.mine(_search(part, over.gather(flat), over), len(flat)).reshape(x.shape[:-1])


def decode(
    part: ShardedBook, codes: Tensor, dtype: torch.dtype | None = None, *, over: RowExchange = ONE_PROCESS
) -> Tensor:
    """What ``codes`` i64[...] (with heads [... h]) stand for, [... D] in ``dtype``, or the book's; zeros for -1. Two
    collectives: codes travel, and rows.

    Raises TypeError for another dtype, ValueError for another number of heads, IndexError for codes beyond the book.
    """
    if codes.dtype is not torch.int64:
        raise TypeError(f"codes: got {codes.dtype}; wanted int64, as from encode")
    heads = part.book.codes.shape[:-2]
    if codes.shape[codes.ndim - len(heads) :] != heads:
        raise ValueError(
            f"codes: got shape {tuple(codes.shape)}; wanted [... {heads[0]}], a code for each of the heads"
        )
    check_codes(part.num_codes, codes)
    flat = _flat(part, mixed_radix.within(codes, part.num_codes))  # else no part would have it, and it would be zero
    asked = over.gather(flat)  # filled up with zeros, whose rows are left out again
    found = over.scatter(_lookup(part, asked))[: len(flat)].reshape(*codes.shape, part.book.codes.shape[-1])
    return found if dtype is None else found.to(dtype)


def apply(
    part: ShardedBook,
    x: Tensor,
    key: Tensor | None = None,
    mask: Tensor | None = None,
    *,
    gradient: Path = rotation,
    draw: bool = False,
    over: RowExchange = ONE_PROCESS,
) -> Quantized:
    """``x`` f[... D] (with heads [... h D]), this process's rows, quantised by all parts: what ``apply`` of a Book
    does, with PartStats.

    Rows are numbered process after process, so there is no ``where``. The loss is the commitment of this process's
    rows. Three collectives. Raises what :func:`encode` does, and ValueError for want of a key.
    """
    _check(part, x)
    if draw and key is None:
        raise ValueError("key is None with draw=True, which needs one")
    asked = torch.ones(x.shape[:-1], dtype=torch.bool, device=x.device) if mask is None else rows.asked(mask, x)
    point, live = rows.settle(wide(x), asked)
    # What is kept and not finite is told from what is masked: one is inf, the other, as what is filled up, nan.
    marks = torch.where(asked, torch.inf, torch.nan).to(point.dtype)[..., None]
    sent = _flat(part, torch.where(live[..., None], point, marks).detach(), 1)
    size, everyone = len(sent), over.gather(sent)  # [N D] or [N h D]
    there = ~everyone.isnan().any(-1)
    codes = _search(part, everyone, over)
    q = over.scatter(_lookup(part, codes))[:size].reshape(x.shape).to(point.dtype)
    mine = over.mine(codes, size).reshape(x.shape[:-1])
    live = mine >= 0
    start = unit(point) if part.book.metric == "cosine" else point
    each = None
    if key is not None:
        number = rows.lay(part.book, over.mine(there.cumsum(0) - 1, size))
        each = rows.back(part.book, rows.keys(random.fold(key, "gradient"), number), x)
    out = torch.where(live[..., None], gradient(start, q, None, each), 0).to(x.dtype)
    found = stats_of(part.book, everyone, _own(part, codes))
    number = asked.sum().to(found.kept.dtype)
    found = ShardedStats(replace(found, kept=number, lost=number - live.sum()))
    if draw and key is not None:
        found = replace(found, pool=everyone, at=_drawn(part, random.fold(key, "draw"), everyone, there, codes >= 0))
    return Quantized(out, mine, {"commitment": commitment(start, q, live)}, found)


def update(
    part: ShardedBook,
    stats: ShardedStats,
    decay: float = DECAY,
    eps: float = EPS,
    threshold: float = 0.0,
    reset: float | None = None,
    over: RowExchange = ONE_PROCESS,
) -> ShardedBook:
    """``part`` after a step: what ``update`` of a Book does, of its own codes. One collective, of a few numbers.

    Raises what that does.
    """
    if threshold < 0 or (reset is not None and not (threshold > 0 and reset > 0)):
        raise ValueError(f"threshold is {threshold} and reset is {reset}; wanted both above 0, or 0 and no reset")
    moved = move(part.book, stats.own, decay)
    here, ranks = over.place
    dead = moved.counts < threshold
    place = torch.arange(ranks, device=dead.device) == here
    mine = torch.where(place.reshape(-1, *[1] * (dead.ndim - 1)), dead.sum(-1), 0)  # [ranks] or [ranks h]
    total, each = over.sum((moved.counts.sum(-1, keepdim=True), mine.to(moved.counts.dtype)))
    book = moved if moved.learnable else refresh(moved, eps, (total, part.num_codes))
    if threshold:
        book = _expired(book, stats, dead, each[:here].sum(0).long()[..., None], threshold if reset is None else reset)
    return replace(part, book=book)


def _expired(book: Book, stats: ShardedStats, dead: Tensor, before: Tensor, count: float) -> Book:
    """``book`` with the dead codes, of which there are ``before`` [1] or [h 1] in the parts before, at rows drawn."""
    if stats.pool is None or stats.at is None:
        raise ValueError(
            "stats: got none drawn, wanted rows to start dead codes at; use apply with a key and draw=True"
        )
    if not len(stats.pool):
        return book
    hit = stats.at >= 0
    order = torch.argsort(torch.where(hit, 0, 1), stable=True, dim=-1)  # first what was drawn
    turn = before + dead.cumsum(-1) - 1
    fresh = dead & (turn < hit.sum(-1, keepdim=True))
    at = stats.at.gather(-1, order.gather(-1, torch.where(fresh, turn, 0))).clamp(min=0)
    pool = rows.lay(book, stats.pool, 1)  # [h N D]
    row = pool.gather(1, at.reshape(len(pool), -1, 1).expand(-1, -1, pool.shape[-1])).reshape(book.codes.shape)
    row = row.to(book.codes.dtype)
    row = unit(row) if book.metric == "cosine" else row
    return replace(
        book,
        codes=torch.where(fresh[..., None], row, book.codes),
        counts=torch.where(fresh, count, book.counts),
        sums=torch.where(fresh[..., None], row * count, book.sums),
    )


def _flat(part: ShardedBook, t: Tensor, dims: int = 0) -> Tensor:
    """``t`` [... (h) *rest] as [n (h) *rest], ``rest`` having so many dims."""
    lead = t.ndim - dims - (part.book.codes.ndim - 2)
    return t.reshape(math.prod(t.shape[:lead]), *t.shape[lead:])


def _search(part: ShardedBook, x: Tensor, over: RowExchange) -> Tensor:
    """The nearest code i64[N] or [N h] of rows x f32[N D] or [N h D], of all parts."""
    codes = tables(part.book).detach()
    half = codes.square().sum(-1) / 2 if part.book.metric == "euclidean" else torch.zeros_like(codes[..., 0])
    found = nearest(rows.lay(part.book, x, 1), codes, half)
    which, score = (rows.back(part.book, t[..., 0], x) for t in found)
    bits = (score + 0.0).view(torch.int32).long()  # -0.0 is 0.0
    ordered = torch.where(bits >= 0, bits, bits ^ 0x7FFFFFFF)  # as the scores are
    key = torch.where(which < 0, NOTHING, (ordered << 32) + (LOW - which - part.first))
    key = over.largest(key)
    return torch.where(key == NOTHING, -1, LOW - (key & LOW))


def _lookup(part: ShardedBook, codes: Tensor) -> Tensor:
    """f32[N D] of codes i64[N], or [N h D] of [N h]: those of this part, and zeros."""
    return books.decode(part.book, _own(part, codes))


def _own(part: ShardedBook, codes: Tensor) -> Tensor:
    """``codes`` as this part numbers them, -1 for those of others."""
    own = codes - part.first
    return torch.where((own >= 0) & (own < part.book.codes.shape[-2]), own, -1)


def _drawn(part: ShardedBook, key: Tensor, x: Tensor, there: Tensor, live: Tensor) -> Tensor:
    """Where in x [N D] or [N h D] the rows are that a Book of all codes would draw, i64[K] or [h K]; -1 for none."""
    there, live = rows.lay(part.book, there), rows.lay(part.book, live)  # [h N]
    index = torch.arange(len(x), dtype=torch.float64, device=x.device)  # rows that are their own place
    at, hits = rows.draw(key, part.num_codes, index[:, None].expand(*there.shape, 1), there, live, None)
    return torch.where(hits > 0, at[..., 0].long(), -1).reshape(*part.book.codes.shape[:-2], part.num_codes)


def _check(part: ShardedBook, x: Tensor) -> None:
    rows.check(part.book, x)
    check_wide(part.book)
    if x.dtype is torch.float64:
        raise TypeError("x: got torch.float64; wanted float32 or narrower, whose scores are compared whole")
