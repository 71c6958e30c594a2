"""Statistics of rows and the update of a book by them, split at the sum over ranks.

    s    = stats(book, x, codes)                      # counts and sums of the rows of each code: local
    s    = shard.psum(s, mesh, axes)                  # on a mesh: one all-reduce of K·(D + 1)·4 bytes a head, and 8
    book = ema(book, s)                               # the same on every rank, local

The result of one process on the whole batch is the definition of right. With a ``key``, stats carry as many drawn rows
as there are codes (``rows.py``), at which ``expire`` restarts codes with small counts. They do so even if no code is
dead, because no rank knows that before the collective. The average is that of van den Oord et al. 2017 (appendix A.1)
with the Laplace smoothing of vector-quantize-pytorch.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from ... import tree
from ...kernels import dispatch
from ...kernels.ops.sums_by_code import sums_by_code
from ..quantized import Key, Mask
from . import rows
from .book import Book, as_codes, check_row_codes

T = TypeVar("T")

DECAY, EPS = 0.8, 1e-5  # of vector-quantize-pytorch


@tree.node
class Stats:
    """Sums over rows; the sum of two is that of all their rows."""

    counts: Tensor  # f32[K] or [h K], number of rows of each code
    sums: Tensor  # f32[K D] or [h K D], sum of the rows of each code
    kept: Tensor  # f32[], number of rows that the mask selects, over all heads
    lost: Tensor  # f32[], number of kept rows that are not finite or have no code; they count for no code
    drawn: Tensor | None = None  # f32[K D] or [h K D], rows at which dead codes restart
    hits: Tensor | None = None  # f32[K] or [h K], one where a row was drawn


def stats(
    book: Book,
    x: Tensor,
    codes: Tensor,
    mask: Mask = None,
    *,
    key: Key = None,
    row_offset: rows.RowOffset | None = None,
) -> Stats:
    """Return the stats of rows ``x`` f[... D] with ``codes`` i64[...].

    With a ``key``, the same on every rank, rows are drawn for dead codes; ``row_offset`` numbers this rank's rows among
    all. Raises IndexError for codes beyond the book where values can be seen, TypeError for another dtype, else
    ValueError.
    """
    rows.check(book, x)
    check_float32(book)
    check_row_codes(book, codes, x)
    if row_offset is not None and key is None:
        raise ValueError("row_offset: got numbers of rows, which only drawing needs, and no key; give both or none")
    kept = rows.flat_mask(book, mask, x)
    return stats_of_summed(book, as_summed(book, x, kept), rows.flatten_heads(book, codes), kept, key, row_offset)


def as_summed(book: Book, x: Tensor, kept: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Return rows ``x`` f[... D] as they are summed: [h n D], bool[h n] of finite ones, and their number.

    The number f32[] is that of the rows that ``kept`` bool[h n] selects, finite or not. Other rows are zeros. Nothing
    carries a gradient, also not of what an affine book averages.
    """
    flat = rows.at_least_float32(rows.flatten_heads(book, x.detach(), 1)).to(book.codes.dtype)
    flat, valid = rows.zero_invalid(flat, kept)
    num_kept = flat.new_full((), valid.numel()) if kept is None else kept.to(flat.dtype).sum()
    mapped = as_codes(book, flat)
    return flat if mapped is flat else torch.where(valid[..., None], mapped.detach(), 0), valid, num_kept


def stats_of_summed(
    book: Book,
    summed: tuple[Tensor, Tensor, Tensor],
    codes: Tensor,
    kept: Tensor | None = None,
    key: Key = None,
    row_offset: rows.RowOffset | None = None,
) -> Stats:
    """Return the stats of the rows of :func:`as_summed` with ``codes`` i64[h n], negative for none; as :func:`stats`.

    ``kept`` bool[h n] is needed for drawing alone.
    """
    flat, valid, num_kept = summed
    counted = torch.where(valid, codes, -1)
    counts, sums = sums_by_code(flat, counted, book.codes.shape[-2])
    shaped = counts.reshape(book.counts.shape), sums.reshape(book.codes.shape)
    found = Stats(*shaped, num_kept, num_kept - counts.sum())
    if key is None:
        return found
    drawn, hits = rows.draw(key, book.codes.shape[-2], flat, kept, counted >= 0, row_offset)
    return replace(found, drawn=drawn.reshape(book.codes.shape), hits=hits.reshape(book.counts.shape))


def add(*each: Stats) -> Stats:
    """Sum the stats of batches; those with drawn rows number the rows of all by ``row_offset``, or there is one."""
    total, *rest = each
    for other in rest:
        drawn = [s for s in (total, other) if s.drawn is not None]
        if len(drawn) == 1:
            bare = (replace(s, drawn=None, hits=None) for s in (total, other))
            total = replace(tree.map(torch.add, *bare), drawn=drawn[0].drawn, hits=drawn[0].hits)
        else:
            total = tree.map(torch.add, total, other)
    return total


def move(book: Book, stats: Stats, decay: float = DECAY, weight: Tensor | None = None) -> Book:
    """Move counts and sums of ``book`` towards those of ``stats`` by (1 - decay)·weight; codes stay.

    ``weight`` f32[K] or [h K] is from 0 to 1. Raises TypeError for a book not of float32, ValueError for other shapes.
    """
    if not 0 <= decay < 1:
        raise ValueError(f"decay is {decay}; wanted 0 <= decay < 1")
    _check_stats(book, stats)
    if weight is None:
        step = sums_step = 1 - decay
    elif weight.shape not in (book.counts.shape, book.counts.shape[-1:]):
        wanted = f"{tuple(book.counts.shape)}, one for each code"
        raise ValueError(f"weight: got shape {tuple(weight.shape)}; wanted {wanted}")
    else:
        step = ((1 - decay) * weight.to(book.counts.dtype)).expand(book.counts.shape)
        sums_step = step[..., None].expand_as(book.sums)
    return replace(book, counts=book.counts.lerp(stats.counts, step), sums=book.sums.lerp(stats.sums, sums_step))


def refresh(book: Book, eps: float = EPS, whole: tuple[Tensor, int] | None = None) -> Book:
    """Set the codes of ``book`` to its sums over its counts, with Laplace smoothing; of unit length for cosine.

    ``whole`` is the total count and the number of codes of the book of which this is a shard (``sharded.py``). A book
    of zero counts keeps its codes. Raises ValueError for a learnable book.
    """
    if book.learnable:
        raise ValueError("the book is learnable, its codes move by gradients; use move for its counts, or update")
    if not eps > 0:
        raise ValueError(f"eps is {eps}; wanted one above 0")
    total, num_codes = whole or (book.counts.sum(-1, keepdim=True), book.counts.shape[-1])
    smooth = (book.counts + eps) / (total + num_codes * eps) * total
    codes = book.sums / torch.where(smooth > 0, smooth, 1)[..., None]
    codes = rows.unit(codes) if book.metric == "cosine" else codes
    return replace(book, codes=torch.where((smooth > 0)[..., None], codes, book.codes))


def ema(book: Book, stats: Stats, decay: float = DECAY, eps: float = EPS, weight: Tensor | None = None) -> Book:
    """Update the running averages and the codes: :func:`move`, then :func:`refresh`. Raises their errors."""
    return refresh(move(book, stats, decay, weight), eps)


def expire(book: Book, stats: Stats, threshold: float = 2.0, reset: float | None = None) -> Book:
    """Restart codes of ``book`` with a count below ``threshold``, at drawn rows of ``stats``, while there are any.

    Their count becomes ``reset``, by default the threshold. Raises ValueError for a threshold or a reset that is not
    positive, and stats without drawn rows. Raises it, where values can be seen, for a row drawn twice.
    """
    if not threshold > 0 or (reset is not None and not reset > 0):
        raise ValueError(f"threshold is {threshold} and reset is {reset}; wanted both above 0")
    _check_stats(book, stats)
    drawn, hit = drawn_rows(stats)
    restarts, index = assign_drawn(book.counts < threshold, hit)
    row = drawn.gather(-2, index[..., None].expand(drawn.shape))
    return restart_at(book, restarts, row, threshold if reset is None else reset)


def drawn_rows(stats: Stats) -> tuple[Tensor, Tensor]:
    """Return the drawn rows, [K D] or [h K D], and a mask of those that there are; ValueError for one drawn twice."""
    if stats.drawn is None or stats.hits is None:
        raise ValueError("stats: got none drawn, wanted rows to start dead codes at; give stats a key")
    if dispatch.is_direct(stats.hits.detach()) and bool((stats.hits > 1).any()):
        wanted = "wanted every number once, give stats row_offset=shard.rows(len(x), mesh, axes)"
        raise ValueError(f"stats: got {int(stats.hits.max())} rows of one number; {wanted}")
    return stats.drawn, stats.hits == 1


def assign_drawn(dead: Tensor, hit: Tensor, before: Tensor | int = 0) -> tuple[Tensor, Tensor]:
    """Return which ``dead`` bool[... k] codes get a drawn row that ``hit`` bool[... K] marks, and its index in K."""
    order = torch.argsort(torch.where(hit, 0, 1), dim=-1, stable=True)
    turn = before + dead.cumsum(-1) - 1
    restarts = dead & (turn < hit.sum(-1, keepdim=True))
    return restarts, order.gather(-1, torch.where(restarts, turn, 0))


def restart_at(book: Book, restarts: Tensor, row: Tensor, count: float) -> Book:
    """Set the codes of ``book`` that ``restarts`` marks to ``row`` [K D] or [h K D], with that ``count``."""
    codes, sums = (torch.where(restarts[..., None], *t) for t in ((row, book.codes), (row * count, book.sums)))
    return replace(book, codes=codes, counts=torch.where(restarts, count, book.counts), sums=sums)


def update(
    book: Book,
    stats: Stats,
    decay: float = DECAY,
    eps: float = EPS,
    weight: Tensor | None = None,
    threshold: float = 0.0,
    reset: float | None = None,
) -> Book:
    """Update ``book``: :func:`ema`, or :func:`move` if learnable, then :func:`expire` unless ``threshold`` is 0."""
    check_threshold(threshold, reset)
    book = move(book, stats, decay, weight) if book.learnable else ema(book, stats, decay, eps, weight)
    return expire(book, stats, threshold, reset) if threshold else book


def update_each(name: str, kind: str, states: Sequence[T], stats: Sequence[Any], update: Callable[..., T]) -> list[T]:
    """Update each of ``states`` by its stats; errors give the path ``kind.i``. Raises ValueError for another number."""
    if len(stats) != len(states):
        raise ValueError(f"{name}: got stats of {len(stats)} {kind}; wanted {len(states)}")
    new = []
    for i, both in enumerate(zip(states, stats, strict=True)):
        with tree.at(f"{kind}.{i}"):
            new.append(update(*both))
    return new


def unless_empty(update: Callable[..., T], state: T, stats: Stats, **options: Any) -> T:
    """Update ``state`` if ``stats`` count any row; else it stays."""
    new, reached = update(state, stats, **options), stats.counts.sum() > 0
    return tree.map(lambda a, b: torch.where(reached, a, b), new, state)


def perplexity(counts: Tensor) -> Tensor:
    """Return the perplexity f32[...] of ``counts`` f32[... K], exp of the entropy; 1 if all are zero."""
    share = counts / counts.sum(-1, keepdim=True).clamp(min=1)
    return torch.exp(-torch.xlogy(share, share).sum(-1))


def check_threshold(threshold: float, reset: float | None) -> None:
    """Check that threshold and reset are above 0, or 0 and None: ValueError."""
    if threshold < 0 or (reset is not None and not (threshold > 0 and reset > 0)):
        raise ValueError(f"threshold is {threshold} and reset is {reset}; wanted both above 0, or 0 and no reset")


def check_float32(book: Book) -> None:
    """Raise TypeError for a book that is not of float32, or float64."""
    for name, t in (("codes", book.codes), ("counts", book.counts), ("sums", book.sums)):
        if t.dtype not in (torch.float32, torch.float64):  # in bfloat16, 256 plus one is 256
            raise TypeError(f"book: {name} are {t.dtype}; wanted float32, leave a Book out where a model is cast")


def _check_stats(book: Book, stats: Stats) -> None:
    check_float32(book)
    if stats.sums.shape != book.sums.shape:
        raise ValueError(f"stats: got sums {tuple(stats.sums.shape)}; wanted {tuple(book.sums.shape)}, as the book's")
