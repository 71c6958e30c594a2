"""affine: codes that follow the mean and variance of rows, so that a book whose encoder moves fast is not left behind.

    m    = moments(book, x)                           # local
    m    = shard.psum(m, mesh, axes)                  # on a mesh
    book = shift(book, m)
    x, codes, losses, stats = apply(book, x, key)

An affine book (``init(..., affine=True)``) compares rows with its codes after these were given the mean and the
variance of rows: (c - mean of codes) · sd of rows / sd of codes + mean of rows (Huh et al. 2023, "Straightening out the
straight-through estimator"). The averages are part of the book and move where ``shift`` is called, in training only:
before the step, as vector-quantize-pytorch has it, or after it together with the stats, whose sum over ranks theirs can
share.
"""

from __future__ import annotations

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
    """What rows ``x`` f[... D] tell of their mean and variance, of those that are finite and that ``mask`` keeps."""
    rows.check(book, x)
    laid, live = rows.zero_invalid(rows.flatten_heads(book, x.detach().double(), 1), rows.flat_mask(book, mask, x))
    number, total, square = live.sum(1, dtype=laid.dtype)[:, None], laid.sum(1), laid.square().sum(1)
    return Moments(*((number, total, square) if book.codes.ndim == 3 else (number[0, 0], total[0], square[0])))


def shift(book: Book, moments: Moments, row_decay: float = 0.99, code_decay: float = 0.9) -> Book:
    """``book`` with its averages moved towards the moments of rows and of its codes; the first call sets them.

    Of no rows at all, it is left as it is. Raises ValueError for a book that is not affine, or decays
    outside of [0, 1).
    """
    if book.affine is None:
        raise ValueError("the book is not affine; make one with init(..., affine=True)")
    for name, decay in (("row_decay", row_decay), ("code_decay", code_decay)):
        if not 0 <= decay < 1:
            raise ValueError(f"{name} is {decay}; wanted 0 <= {name} < 1")
    of, codes = book.affine, book.codes.detach()
    number = moments.number.clamp(min=1)
    mean = moments.sum / number
    var = (moments.square / number - mean.square()).clamp(min=0)
    any = (moments.number > 0).any()

    def moved(old: Tensor, new: Tensor, decay: float) -> Tensor:
        new = new.to(old.dtype)
        return torch.where(any, torch.where(of.seen > 0, old * decay + new * (1 - decay), new), old)

    seen = torch.where(any, torch.ones_like(of.seen), of.seen)
    new = Affine(
        moved(of.row_mean, mean, row_decay),
        moved(of.row_var, var, row_decay),
        moved(of.code_mean, codes.mean(-2), code_decay),
        moved(of.code_var, codes.var(-2, correction=0), code_decay),
        seen,
    )
    return replace(book, affine=new)
