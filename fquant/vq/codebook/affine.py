"""Affine codebooks: codes that follow the mean and variance of rows, for an encoder that moves fast.

    m    = shard.psum(moments(book, x), mesh, axes)   # in one process without the psum
    book = shift(book, m)

An affine book (``init(..., affine=True)``) compares rows with its codes mapped to the mean and variance of rows: (c -
mean of codes) · sd of rows / sd of codes + mean of rows (Huh et al. 2023, "Straightening out the straight-through
estimator"). ``shift`` moves the averages in training only: before the step, as in vector-quantize-pytorch, or after it,
when the moments can share the sum of the stats over ranks.
"""

from dataclasses import replace

import torch
from torch import Tensor

from ...tree import node
from . import rows
from .book import Affine, Book


@node
class Moments:
    """Sums over rows, in float64, so that a mean far from zero leaves digits to the variance."""

    number: Tensor  # f64[] or [h 1]
    sum: Tensor  # f64[D] or [h D]
    square: Tensor  # f64[D] or [h D]


def moments(book: Book, x: Tensor, mask: Tensor | None = None) -> Moments:
    """Return the moments of rows ``x`` f[... D]: the finite ones that ``mask`` selects."""
    rows.check(book, x)
    flat = rows.flatten_heads(book, x.detach().double(), 1)
    flat, valid = rows.zero_invalid(flat, rows.flat_mask(book, mask, x))
    number, total, square = valid.sum(1, dtype=flat.dtype)[:, None], flat.sum(1), flat.square().sum(1)
    return Moments(*((number, total, square) if book.codes.ndim == 3 else (number[0, 0], total[0], square[0])))


def shift(book: Book, moments: Moments, row_decay: float = 0.99, code_decay: float = 0.9) -> Book:
    """Move the averages of ``book`` towards the moments of rows and of its codes; the first call sets them.

    Without any rows the book stays. Raises ValueError for a book that is not affine, or decays outside of [0, 1).
    """
    if book.affine is None:
        raise ValueError("the book is not affine; make one with init(..., affine=True)")
    for name, decay in (("row_decay", row_decay), ("code_decay", code_decay)):
        if not 0 <= decay < 1:
            raise ValueError(f"{name} is {decay}; wanted 0 <= {name} < 1")
    old, codes = book.affine, book.codes.detach()
    number = moments.number.clamp(min=1)
    mean = moments.sum / number
    var = (moments.square / number - mean.square()).clamp(min=0)
    any_rows = (moments.number > 0).any()

    def average(old_value: Tensor, value: Tensor, decay: float) -> Tensor:
        value = value.to(old_value.dtype)
        moved = torch.where(old.seen > 0, old_value * decay + value * (1 - decay), value)
        return torch.where(any_rows, moved, old_value)

    new = Affine(
        average(old.row_mean, mean, row_decay),
        average(old.row_var, var, row_decay),
        average(old.code_mean, codes.mean(-2), code_decay),
        average(old.code_var, codes.var(-2, correction=0), code_decay),
        torch.where(any_rows, torch.ones_like(old.seen), old.seen),
    )
    return replace(book, affine=new)
