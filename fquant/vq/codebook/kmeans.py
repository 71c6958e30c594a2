"""kmeans: a book whose codes are the means of clusters of rows.

    book = kmeans(book, x, key)
    book = kmeans(book, x, key, row_offset=shard.rows(len(x), mesh, axes), psum=psum)

Lloyd's iterations from rows that are drawn by number (``rows.py``), each the stats of a book and one ``psum``: so on a
mesh it is iterations + 1 collectives of fixed shapes, on every rank, and the result is that of one process on all rows,
whichever way they are split.

A cluster that has got no rows would stay where it is for ever. It is put beside a large one instead, which it then
shares: both are copies of its mean, each a little larger than the other in every second dim, as in faiss.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from ... import random
from ...kernels import dispatch
from ...tree import map as tree_map
from ..quantized import Psum, one_process
from . import rows
from .book import Book
from .encode import encode
from .rows import RowOffset, unit
from .update import Stats, drawn_rows, stats

APART = 1 / 1024  # of a mean that is split, relative to it


def kmeans(
    book: Book,
    x: Tensor,
    key: Tensor,
    iterations: int = 10,
    *,
    mask: Tensor | None = None,
    split: bool = True,
    row_offset: RowOffset | None = None,
    psum: Psum = one_process,
) -> Book:
    """``book`` at the means of clusters of rows ``x`` f[... D] (with heads [... h D]): codes, counts and sums.

    Rows are those that ``mask`` keeps and that are finite. ``split`` puts empty clusters beside large ones; without it
    they keep their mean. A code whose cluster is empty in the end has a count of one, as if it were new.

    Raises ValueError for fewer rows than codes, on all ranks together, where values can be seen; elsewhere the codes
    too many start where the book has them. Raises it too for ranks whose rows have the same numbers, and less than 1
    iteration.
    """
    if iterations < 1:
        raise ValueError(f"iterations is {iterations}; wanted at least 1")
    rows.check(book, x)
    num_codes = book.codes.shape[-2]
    kept = rows.flat_mask(book, mask, x)
    size = x.numel() // x.shape[-1] // (len(book.codes) if book.codes.ndim == 3 else 1)
    _check_enough(num_codes, row_offset, kept, size)
    none = torch.zeros(x.shape[:-1], dtype=torch.int64, device=x.device)
    drawn, hit = drawn_rows(psum(stats(book, x, none, mask, key=random.fold(key, "start"), row_offset=row_offset)))
    book = replace(book, codes=torch.where(hit[..., None], drawn, book.codes))
    for step in range(iterations):
        found = psum(stats(book, x, encode(book, x), mask))
        book = _moved(book, found, split and step < iterations - 1)
    return tree_map(torch.Tensor.detach, book)


def _moved(book: Book, found: Stats, split: bool) -> Book:
    """``book`` with its codes at the means that ``found`` tells, and their counts and sums."""
    empty = found.counts == 0
    means = found.sums / found.counts.clamp(min=1)[..., None]
    means = unit(means) if book.metric == "cosine" else means
    codes = torch.where(empty[..., None], book.codes, means)
    if split:
        codes = _split(codes, found.counts, empty)
        codes = unit(codes) if book.metric == "cosine" else codes
    counts = found.counts.clamp(min=1)
    return replace(book, codes=codes, counts=counts, sums=codes * counts[..., None])


def _split(codes: Tensor, counts: Tensor, empty: Tensor) -> Tensor:
    """``codes`` with each empty one beside a large one, the next largest for the next empty one."""
    order = torch.sort(counts, dim=-1, descending=True, stable=True).indices
    turn = empty.cumsum(-1) - 1
    number = empty.sum(-1, keepdim=True)
    source = torch.where(empty, order.gather(-1, turn.clamp(min=0)), 0)
    taken = empty & (counts.gather(-1, source) > 1)  # one row alone cannot be shared
    rank = order.argsort(-1)  # the place of each code among the largest
    given = ~empty & (rank < number) & (counts > 1)
    up = torch.where(torch.arange(codes.shape[-1], device=codes.device) % 2 == 0, 1 + APART, 1 - APART)
    beside = codes.gather(-2, source[..., None].expand(codes.shape)) * up
    moved = torch.where(taken[..., None], beside, codes)
    return torch.where(given[..., None], codes * (2 - up), moved)


def _check_enough(num_codes: int, row_offset: RowOffset | None, kept: Tensor | None, size: int) -> None:
    if row_offset is not None:
        total = row_offset[1]
    else:
        total = size if kept is None else kept.sum(1).min()
    if isinstance(total, Tensor) and not dispatch.is_direct(total):
        return
    if int(total) < num_codes:
        raise ValueError(
            f"kmeans: got {int(total)} rows for {num_codes} codes; wanted at least as many, of all ranks together: "
            "use more rows, fewer codes, or the codes of init"
        )
