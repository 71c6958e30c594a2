"""update: what a book learns from rows, split where ranks have to talk.

    s    = stats(book, x, codes)                      # how many rows a code got, and their sum: local
    s    = shard.psum(s, mesh, axes)                  # on a mesh, this line
    book = ema(book, s)                               # the same on every rank, local

All of ``Stats`` is float32 and of shapes that depend on the book alone, so its sum is one all-reduce of K·(D + 1)·4
bytes a head and two numbers, whatever the rows are, and of a rank without rows it is zeros. Stats of several batches
add up the same way (``add``), and a tree of Stats (of the layers of a residual quantiser, say) is still one all-reduce.
The sum of stats is that of all rows, so what one process gets from the whole batch is the definition of right.

*Dead codes.* With a ``key``, stats carry as many rows as there are codes, drawn from the rows of all ranks
(``rows.py``), and ``expire`` puts them where a code has got few. They are drawn whether or not a code is dead, for no
rank can know; so that the number of collectives is one too.

The average is that of van den Oord et al. 2017 (appendix A.1) with Laplace smoothing, computed as by
vector-quantize-pytorch.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TypeVar

import torch
from torch import Tensor

from ... import tree
from ...kernels import dispatch
from ...tree import node
from . import rows
from .book import Book, check_codes, unmapped
from .rows import RowOffset, at_least_float32, unit

T = TypeVar("T")

DECAY, EPS = 0.8, 1e-5  # of vector-quantize-pytorch


@node
class Stats:
    """Sums over rows; the sum of two is that of all their rows."""

    counts: Tensor  # f32[K] or [h K], rows of each code
    sums: Tensor  # f32[K D] or [h K D], and their sum
    kept: Tensor  # f32[], rows that the mask keeps; of each head
    lost: Tensor  # f32[], those of them that are not finite or have no code, and count for no code
    drawn: Tensor | None = None  # f32[K D] or [h K D], rows to start at again
    hits: Tensor | None = None  # f32[K] or [h K], one where a row was drawn


def stats(
    book: Book,
    x: Tensor,
    codes: Tensor,
    mask: Tensor | None = None,
    *,
    key: Tensor | None = None,
    row_offset: RowOffset | None = None,
) -> Stats:
    """What rows ``x`` f[... D] with ``codes`` i64[...] tell, of those that ``mask`` bool[...] keeps (its dims are the
    first).

    With a ``key``, the same on every rank, rows to start dead codes at are drawn; ``where`` says which numbers this
    rank's rows have among all (``rows.py``).

    Raises TypeError for other dtypes, of the book too, ValueError for other shapes, ``where`` without a key or not
    within its total, IndexError for codes that the book does not have, where values can be seen.
    """
    rows.check(book, x)
    check_wide(book)
    if codes.dtype is not torch.int64 or codes.shape != x.shape[:-1]:
        raise ValueError(
            f"codes: got {codes.dtype} {tuple(codes.shape)} for x {tuple(x.shape)}; wanted one for each row"
        )
    if row_offset is not None and key is None:
        raise ValueError("row_offset: got numbers of rows, which only drawing needs, and no key; give both or none")
    check_codes(book.codes.shape[-2], codes)
    laid = at_least_float32(rows.flatten_heads(book, x.detach(), 1)).to(book.codes.dtype)  # [h n D]
    which, kept = rows.flatten_heads(book, codes), rows.flat_mask(book, mask, x)
    laid, live = rows.zero_invalid(laid, which >= 0 if kept is None else (which >= 0) & kept)
    if book.metric == "cosine":
        laid = unit(laid)
    elif book.affine is not None:
        laid = torch.where(live[..., None], unmapped(book, laid), 0)
    heads, num_codes, dim = len(laid), *book.codes.shape[-2:]
    # What is beyond the book is left to fail in the sum, and must not be added to a code of the next head.
    of_head = torch.arange(heads, device=which.device)[:, None] * num_codes
    at = torch.where(live, torch.where(which < num_codes, which + of_head, heads * num_codes), 0).reshape(live.numel())
    ones = live.to(laid.dtype)
    counts = ones.new_zeros(heads * num_codes).index_add(0, at, ones.reshape(live.numel()))
    sums = laid.new_zeros(heads * num_codes, dim).index_add(0, at, laid.reshape(live.numel(), dim))
    number = ones.new_full((), live.numel()) if kept is None else kept.to(ones.dtype).sum()
    drawn = hits = None
    if key is not None:
        drawn, hits = rows.draw(key, num_codes, laid, kept, live, row_offset)
        drawn, hits = drawn.reshape(book.codes.shape), hits.reshape(book.counts.shape)
    lost = number - ones.sum()
    return Stats(counts.reshape(book.counts.shape), sums.reshape(book.codes.shape), number, lost, drawn, hits)


def add(*each: Stats) -> Stats:
    """The stats of all rows of several batches, for one update of what they were gathered for.

    Rows are drawn in one of the batches, or in several whose ``where`` number the rows of all.
    """
    first = each[0]
    for one in each[1:]:
        if one.drawn is None or first.drawn is None:
            drawn, hits = (one.drawn, one.hits) if first.drawn is None else (first.drawn, first.hits)
            bare = tree.map(torch.add, *(replace(s, drawn=None, hits=None) for s in (first, one)))
            first = replace(bare, drawn=drawn, hits=hits)
        else:
            first = tree.map(torch.add, first, one)
    return first


def move(book: Book, stats: Stats, decay: float = DECAY, weight: Tensor | None = None) -> Book:
    """``book`` with counts and sums moved towards those of ``stats`` by (1 - decay)·weight; codes stay.

    ``weight`` f32[K] or [h K] says how much each code follows: 0 not at all, 1 as without it. Raises ValueError for a
    decay outside of [0, 1), or stats or weights of another shape, TypeError for a book that is not of float32.
    """
    if not 0 <= decay < 1:
        raise ValueError(f"decay is {decay}; wanted 0 <= decay < 1")
    _check_stats(book, stats)
    if weight is None:
        counts, sums = book.counts.lerp(stats.counts, 1 - decay), book.sums.lerp(stats.sums, 1 - decay)
        return replace(book, counts=counts, sums=sums)
    if weight.shape not in (book.counts.shape, book.counts.shape[-1:]):
        raise ValueError(
            f"weight: got shape {tuple(weight.shape)}; wanted {tuple(book.counts.shape)}, one for each code"
        )
    way = ((1 - decay) * weight.to(book.counts.dtype)).expand(book.counts.shape)
    counts, sums = book.counts.lerp(stats.counts, way), book.sums.lerp(stats.sums, way[..., None].expand_as(book.sums))
    return replace(book, counts=counts, sums=sums)


def refresh(book: Book, eps: float = EPS, of: tuple[Tensor, int] | None = None) -> Book:
    """``book`` with its codes made of its sums and counts, smoothed (Laplace); of unit length for cosine.

    ``of`` is the count of all codes and their number, where the book is a part of one (``parted.py``). A book whose
    counts are all zero keeps its codes. Raises ValueError for a learnable book, whose codes gradients move, and an
    ``eps`` that is not positive.
    """
    if book.learnable:
        raise ValueError("the book is learnable, its codes move by gradients; use move for its counts, or update")
    if not eps > 0:
        raise ValueError(f"eps is {eps}; wanted one above 0")
    total, number = of or (book.counts.sum(-1, keepdim=True), book.counts.shape[-1])
    smooth = (book.counts + eps) / (total + number * eps) * total
    codes = book.sums / torch.where(smooth > 0, smooth, 1)[..., None]
    codes = unit(codes) if book.metric == "cosine" else codes
    return replace(book, codes=torch.where((smooth > 0)[..., None], codes, book.codes))


def ema(book: Book, stats: Stats, decay: float = DECAY, eps: float = EPS, weight: Tensor | None = None) -> Book:
    """``book`` after the rows that ``stats`` tell of: :func:`move`, then :func:`refresh`. Raises what they do."""
    if book.learnable:
        raise ValueError("the book is learnable, its codes move by gradients; use move for its counts, or update")
    return refresh(move(book, stats, decay, weight), eps)


def expire(book: Book, stats: Stats, threshold: float = 2.0, reset: float | None = None) -> Book:
    """``book`` with codes whose count is below ``threshold`` started again, each at a row that ``stats`` have drawn.

    Their count is then ``reset``, by default the threshold. Where more codes are dead than rows were drawn, of few rows
    say, the rest wait, and no row is used twice.

    Raises ValueError for stats without drawn rows, or in which rows were drawn twice (ranks whose rows have the same
    numbers, where values can be seen), and for a threshold or a reset that is not positive.
    """
    if not threshold > 0 or (reset is not None and not reset > 0):
        raise ValueError(f"threshold is {threshold} and reset is {reset}; wanted both above 0")
    _check_stats(book, stats)
    drawn, hit = drawn_rows(stats)
    dead = book.counts < threshold
    places = torch.arange(dead.shape[-1], device=dead.device)
    order = torch.argsort(torch.where(hit, places, places + dead.shape[-1]), -1)  # first what was drawn
    turn = dead.cumsum(-1) - 1
    fresh = dead & (turn < hit.sum(-1, keepdim=True))
    at = order.gather(-1, turn.clamp(min=0))
    row = drawn.gather(-2, at[..., None].expand(drawn.shape))
    count = threshold if reset is None else reset
    return replace(
        book,
        codes=torch.where(fresh[..., None], row, book.codes),
        counts=torch.where(fresh, count, book.counts),
        sums=torch.where(fresh[..., None], row * count, book.sums),
    )


def drawn_rows(stats: Stats) -> tuple[Tensor, Tensor]:
    """The rows that stats have drawn, [K D] or [h K D], and where there is one, bool; ValueError if some came twice."""
    if stats.drawn is None or stats.hits is None:
        raise ValueError("stats: got none drawn, wanted rows to start dead codes at; give stats a key")
    if dispatch.is_direct(stats.hits.detach()) and bool((stats.hits > 1).any()):
        raise ValueError(
            f"stats: got {int(stats.hits.max())} rows of one number; wanted every number once, "
            "give stats row_offset=shard.rows(len(x), mesh, axes)"
        )
    return stats.drawn, stats.hits == 1


def update(
    book: Book,
    stats: Stats,
    decay: float = DECAY,
    eps: float = EPS,
    weight: Tensor | None = None,
    threshold: float = 0.0,
    reset: float | None = None,
) -> Book:
    """``book`` after a step: :func:`ema`, of a learnable book :func:`move`, then :func:`expire` if threshold is above
    0.

    Raises what they do, and ValueError for a negative threshold, or a reset without one.
    """
    if threshold < 0 or (reset is not None and threshold == 0):
        raise ValueError(f"threshold is {threshold} and reset is {reset}; wanted one above 0, or 0 and no reset")
    book = move(book, stats, decay, weight) if book.learnable else ema(book, stats, decay, eps, weight)
    return expire(book, stats, threshold, reset) if threshold else book


def unless_empty(stats: Stats, new: T, old: T) -> T:
    """The tree ``new``, or ``old`` where ``stats`` are of no rows at all."""
    reached = stats.counts.sum() > 0
    return tree.map(lambda a, b: torch.where(reached, a, b), new, old)


def perplexity(counts: Tensor) -> Tensor:
    """How many codes are in use, f32[...], of their ``counts`` f32[... K]: exp of the entropy; 1 where all are zero."""
    share = counts / counts.sum(-1, keepdim=True).clamp(min=1)
    return torch.exp(-torch.xlogy(share, share).sum(-1))


def check_wide(book: Book) -> None:
    """Raise TypeError for a book that is not of float32, or float64."""
    wanted = (torch.float32, torch.float64)
    for name, t in (("codes", book.codes), ("counts", book.counts), ("sums", book.sums)):
        if t.dtype not in wanted:  # of bfloat16, 256 and one are 256
            raise TypeError(f"book: {name} are {t.dtype}; wanted float32, leave a Book out where a model is cast")


def _check_stats(book: Book, stats: Stats) -> None:
    check_wide(book)
    if stats.sums.shape != book.sums.shape:
        raise ValueError(f"stats: got sums {tuple(stats.sums.shape)}; wanted {tuple(book.sums.shape)}, as the book's")
