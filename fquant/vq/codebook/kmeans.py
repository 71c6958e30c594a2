"""k-means: a book whose codes are the means of clusters of rows.

    book = kmeans(book, x, key, row_offset=shard.rows(len(x), mesh, axes), psum=psum)      # or without the last two

Lloyd's iterations start at rows drawn by number (``rows.py``). A mesh runs iterations + 1 collectives of fixed shapes,
and for any split of the rows the result is that of one process. A cluster without rows would never move. It is put
beside a large one: both become copies of its mean, each slightly larger than the other in every second dim (faiss).
"""

from dataclasses import replace

import torch
from torch import Tensor

from ... import random, tree
from ...communication import identity
from ...kernels import dispatch
from ..quantized import Mask, Psum
from . import rows
from .book import Book
from .encode import encode
from .update import Stats, as_summed, check_float32, drawn_rows, stats_of_summed

SPLIT_DISTANCE = 1 / 1024  # of the two copies of a mean, relative to it


def kmeans(
    book: Book,
    x: Tensor,
    key: Tensor,
    iterations: int = 10,
    *,
    mask: Mask = None,
    split: bool = True,
    row_offset: rows.RowOffset | None = None,
    psum: Psum = identity,
) -> Book:
    """Set codes, counts and sums of ``book`` to clusters of the finite rows ``x`` f[... D] (with heads [... h D]).

    ``split`` puts empty clusters beside large ones; without it they keep their mean. A code with an empty cluster after
    the last iteration has a count of one. Raises ValueError for rows of two ranks with the same numbers, and fewer rows
    than codes on all ranks; where values cannot be seen, the missing codes start at the book's.
    """
    if iterations < 1:
        raise ValueError(f"iterations is {iterations}; wanted at least 1")
    rows.check(book, x)
    kept, num_codes = rows.flat_mask(book, mask, x), book.codes.shape[-2]
    total = rows.flatten_heads(book, x, 1).shape[1] if kept is None else kept.sum(1).min()
    total = total if row_offset is None else row_offset[1]
    if (not isinstance(total, Tensor) or dispatch.is_direct(total)) and int(total) < num_codes:
        wanted = "wanted at least as many, of all ranks together: use more rows, fewer codes, or the codes of init"
        raise ValueError(f"kmeans: got {int(total)} rows for {num_codes} codes; {wanted}")
    check_float32(book)
    summed = as_summed(book, x, kept)
    no_codes = torch.zeros_like(summed[1], dtype=torch.int64)
    start = psum(stats_of_summed(book, summed, no_codes, kept, random.fold(key, "start"), row_offset))
    drawn, hit = drawn_rows(start)
    book = replace(book, codes=torch.where(hit[..., None], drawn, book.codes))
    for step in range(iterations):
        found = psum(stats_of_summed(book, summed, rows.flatten_heads(book, encode(book, x))))
        book = replace(book, codes=_means(book, found, split and step < iterations - 1))
    counts = found.counts.clamp(min=1)
    book = replace(book, counts=counts, sums=book.codes * counts[..., None])
    return tree.map(torch.Tensor.detach, book)


def _means(book: Book, found: Stats, split: bool) -> Tensor:
    """Return the means of ``found``, the codes of ``book`` for empty clusters unless they are ``split``."""
    empty = found.counts == 0
    means = found.sums / found.counts.clamp(min=1)[..., None]
    means = rows.unit(means) if book.metric == "cosine" else means
    codes = torch.where(empty[..., None], book.codes, means)
    if split:
        if not dispatch.is_direct(empty) or empty.any():  # without empty ones it changes nothing
            codes = _split(codes, found.counts, empty)
        codes = rows.unit(codes) if book.metric == "cosine" else codes
    return codes


def _split(codes: Tensor, counts: Tensor, empty: Tensor) -> Tensor:
    """Put each empty one of ``codes`` beside a large one, the next largest for the next empty one."""
    order = torch.sort(counts, dim=-1, descending=True, stable=True).indices
    source = torch.where(empty, order.gather(-1, (empty.cumsum(-1) - 1).clamp(min=0)), 0)
    moves = empty & (counts.gather(-1, source) > 1)  # a single row cannot be shared
    shares = ~empty & (order.argsort(-1) < empty.sum(-1, keepdim=True)) & (counts > 1)  # the largest
    even = torch.arange(codes.shape[-1], device=codes.device) % 2 == 0
    factor = torch.where(even, 1 + SPLIT_DISTANCE, 1 - SPLIT_DISTANCE)
    copies = codes.gather(-2, source[..., None].expand(codes.shape)) * factor
    moved = torch.where(moves[..., None], copies, codes)
    return torch.where(shares[..., None], codes * (2 - factor), moved)
