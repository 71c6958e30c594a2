"""losses: what is added to a loss so that rows come near their codes, and codes get used; each a Mean.

A Mean is a sum and how many terms it has, so that ranks can add both (``quantized.py``). Rows that a mask leaves out,
that are not finite or that have no code have no term. Everything is computed in float32 (float64 of float64), a tile of
rows at a time where it takes distances to all codes, which are made again in the backward. (The backward of
torch.func.grad keeps what it makes, unless it is captured.)

    commitment      mean square difference of rows and their codes
    cross_entropy   of softmax(logits) and codes: of those they got, or of codes that are given (Shen et al. 2023)
    diversity       minus the entropy of how likely each code is at a position, on average over the batch
    orthogonal      mean squared cosine of two codes, less what it is at best (Shin et al. 2021, equation 2)
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..precision import matmul
from ..quantized import Mean, Psum, one_process
from . import rows
from .book import Book, check_codes, tables
from .encode import logits
from .rows import at_least_float32, unit

RARE = 1e-5  # probability below which a logarithm is not taken


def commitment(x: Tensor, q: Tensor, mask: Tensor | None = None) -> Mean:
    """The mean of (q - x)² over the numbers of rows x and q [... D] that ``mask`` bool[...] keeps (its dims are the
    first).

    Gradients reach both; detach what is to stay where it is.
    """
    square = (at_least_float32(q) - at_least_float32(x)).square()
    if mask is None:
        return Mean(square.sum(), square.new_full((), square.numel()))
    mask = rows.expand_mask(mask, x)
    return Mean(torch.where(mask, square, 0).sum(), mask.sum(dtype=square.dtype))


def cross_entropy(book: Book, x: Tensor, codes: Tensor, mask: Tensor | None = None) -> Mean:
    """The mean of -log softmax(logits)[code] over rows ``x`` [... D] with ``codes`` i64[...], -1 being no term.

    Logits are minus the distances to all codes, or for cosine the inner products. Raises ValueError for codes that are
    not one int64 for each row, IndexError for those that the book does not have, where values can be seen.
    """
    laid, table, live = _laid(book, x, mask)
    if codes.dtype is not torch.int64 or codes.shape != x.shape[:-1]:
        got = f"{codes.dtype} {tuple(codes.shape)} for x {tuple(x.shape)}"
        raise ValueError(f"codes: got {got}; wanted int64, one for each row")
    check_codes(book.codes.shape[-2], codes)
    which, metric = rows.flatten_heads(book, codes), book.metric
    live = live & (which >= 0)

    def one(x: Tensor, target: Tensor, codes: Tensor) -> Tensor:
        near = logits(x, codes, metric)
        return near.logsumexp(-1) - near.gather(-1, target[:, None])[:, 0]

    heads = zip(laid, torch.where(live, which, 0), table, strict=True)
    each = torch.stack([rows.map_tiles(one, len(c), x, target, shared=(c,)) for x, target, c in heads])
    return Mean(torch.where(live, each, 0).sum(), live.sum(dtype=each.dtype))


def diversity(
    book: Book,
    x: Tensor,
    temperature: float = 100.0,
    mask: Tensor | None = None,
    psum: Psum = one_process,
) -> Mean:
    """The mean over positions n of minus the entropy of softmax(temperature · logits), itself the mean over a batch.

    ``x`` f[... n D] (with heads [... n h D], which count as more of the batch). ``psum`` sums a tree over the ranks
    that have parts of the batch: the entropy of a mean is not a sum, so these have to talk before. A position without
    rows has no term.
    """
    laid, table, live = _laid(book, x, mask)
    size = x.shape[-3] if book.codes.ndim == 3 else x.shape[-2]
    metric, batch = book.metric, laid.shape[1] // max(1, size)

    def one(x: Tensor, live: Tensor, codes: Tensor) -> Tensor:  # [m b D], [m b] -> [m K]
        likely = (temperature * logits(x, codes, metric)).softmax(-1)
        return (likely * live[..., None]).sum(1)

    by_position = lambda t: t.unflatten(0, (batch, size)).transpose(0, 1)
    there = live.to(laid.dtype)
    each = [
        rows.map_tiles(one, max(1, batch) * len(c), by_position(x), by_position(n), shared=(c,))
        for x, n, c in zip(laid, there, table, strict=True)
    ]
    likely, number = psum((sum(each[1:], each[0]), sum(by_position(n).sum(1) for n in there)))
    likely = likely / number.clamp(min=1)[:, None]
    negative = (likely * likely.clamp(min=RARE).log()).sum(-1)
    return Mean(torch.where(number > 0, negative, 0).sum(), (number > 0).sum(dtype=negative.dtype))


def orthogonal(book: Book, among: Tensor | None = None) -> Mean:
    """The mean of squared cosines between two codes, itself included, less one over the number of codes.

    ``among`` bool[K] or [h K] takes some codes only: ``stats.counts > 0`` those in use, and
    ``random.permutation(key, K) < n`` any n.
    """
    codes = unit(at_least_float32(tables(book)))
    if among is None:
        number = codes.new_full((len(codes),), codes.shape[1])
    else:
        if among.dtype is not torch.bool or among.shape not in (book.counts.shape, book.counts.shape[-1:]):
            raise ValueError(f"among: got {among.dtype} {tuple(among.shape)}; wanted bool {tuple(book.counts.shape)}")
        among = among.expand(codes.shape[:2])
        codes, number = torch.where(among[..., None], codes, 0), among.sum(-1, dtype=codes.dtype)
    # The squares of C·Cᵀ sum to those of Cᵀ·C, which is [D D] and not [K K].
    return Mean(matmul(codes.mT, codes).square().sum() - number.sum(), number.square().sum())


def _laid(book: Book, x: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Rows [h n D] with zeros for those that have no term, the codes [h K D] and which rows have one, bool[h n]."""
    rows.check(book, x)
    laid, live = rows.zero_invalid(rows.flatten_heads(book, at_least_float32(x), 1), rows.flat_mask(book, mask, x))
    return unit(laid) if book.metric == "cosine" else laid, tables(book).to(laid.dtype), live
