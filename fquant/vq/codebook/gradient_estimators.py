"""Gradient estimators: the derivative of quantised rows with respect to the rows, as arguments of ``apply``.

    x, codes, losses, stats = apply(book, x, key, gradient=partial(directional, variance=1e-3))

Each is a function of rows x [... D], their codes q [... D], and a book and a key, or None. The value of all but
:func:`directional` is q, to the bit, because the derivative enters as a difference of zero.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from ... import random
from ..precision import matmul
from ..quantized import Key
from . import rows
from .book import Book, vectors_by_head
from .encode import logits

Estimator = Callable[[Tensor, Tensor, Book | None, Tensor | None], Tensor]


def direct(x: Tensor, q: Tensor, book: Book | None = None, key: Key = None) -> Tensor:
    """Return ``q`` with its own derivative, that of the codes of a learnable book, and none of ``x``."""
    return q


def straight_through(x: Tensor, q: Tensor, book: Book | None = None, key: Key = None) -> Tensor:
    """Return ``q`` with the derivative of ``x`` (Bengio et al. 2013)."""
    return q.detach() + (x - x.detach())


def rotation(x: Tensor, q: Tensor, book: Book | None = None, key: Key = None) -> Tensor:
    """Return ``q`` with the derivative of R·x, for the constant rotation and scaling R by |q| / |x| from x to q.

    (Fifty et al. 2024, section 4.2.) A row shorter than 1e-6 gets the derivative of :func:`straight_through`.
    """
    start, q, change = x.detach(), q.detach(), x - x.detach()
    length, q_length = (t.norm(dim=-1, keepdim=True) for t in (start, q))
    turns = length > rows.MIN_LENGTH
    length = torch.where(turns, length, 1)
    u, v = start / length, q / q_length.clamp(min=rows.MIN_LENGTH)
    w = rows.unit(u + v)
    along = lambda t: (change * t).sum(-1, keepdim=True)
    turned = change - 2 * along(w) * w + 2 * along(u) * v
    return q + torch.where(turns, q_length / length * turned, change)


def directional(x: Tensor, q: Tensor, book: Book | None = None, key: Key = None, variance: float = 5e-3) -> Tensor:
    """Return ``x + |q - x|·u``, u the constant unit vector of q - x plus normal noise of ``variance`` a number.

    (Vali et al. 2025.) ``key`` is i64[], or i64 of x's first dims, a stream for each row; noise needs one.
    """
    if variance < 0:
        raise ValueError(f"variance is {variance}; wanted at least 0")
    difference = q - x
    towards = difference.detach()
    if variance:
        if key is None:
            raise ValueError(f"directional: got no key for a variance of {variance}; give one, or variance=0.0")
        towards = towards + variance**0.5 * random.normal(key, tuple(x.shape), x.dtype)
    square = difference.square().sum(-1, keepdim=True)
    nonzero = square > 0  # the root has no derivative at zero
    return x + rows.unit(towards) * torch.where(nonzero, torch.where(nonzero, square, 1).sqrt(), 0)


def gumbel(x: Tensor, q: Tensor, book: Book | None = None, key: Key = None, temperature: float = 1.0) -> Tensor:
    """Return ``q`` with the derivative of softmax(logits / temperature) · constant codes (Jang et al. 2017)."""
    if book is None:
        raise ValueError("gumbel: got no book; wanted that of q")
    if not temperature > 0:
        raise ValueError(f"temperature is {temperature}; wanted one above 0")
    metric = book.metric

    def mean_code(x: Tensor, codes: Tensor) -> Tensor:
        return matmul((logits(x, codes, metric) / temperature).softmax(-1), codes.detach())

    heads = zip(rows.flatten_heads(book, x, 1), vectors_by_head(book).to(x.dtype), strict=True)
    soft = torch.stack([rows.map_tiles(mean_code, len(c), x, shared=(c,)) for x, c in heads])
    soft = rows.unflatten_heads(soft, x)
    return q + (soft - soft.detach())
