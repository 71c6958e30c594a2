"""gradient: how the derivative of what was quantised reaches the rows, as values that ``apply`` is given.

    x, codes, losses, stats = apply(book, x, key, gradient=rotation)
    ... gradient=partial(directional, variance=1e-3)

Each is a function ``(x, q, book, key)`` of rows x [... D] and the codes q [... D] that they got; book and key are there
for those that need them, and None will do for the others. The value of all but ``directional`` is q, to the bit: what
carries the derivative is added as a difference with itself. What is said to be constant is constant to derivatives of
every order.

    direct             q alone: codes of a learnable book have a gradient, rows have none
    straight_through   the identity (Bengio et al. 2013)
    rotation           the rotation and scaling that take x to q, held constant (Fifty et al. 2024, section 4.2)
    directional        x moved by its distance from q in a constant, a little noisy direction (Vali et al. 2025)
    gumbel             that of the mean of codes under softmax(logits / temperature) (Jang et al. 2017)
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ... import random
from ..precision import matmul
from . import rows
from .book import Book, tables
from .encode import logits
from .rows import MIN_LENGTH, unit

GradientEstimator = Callable[[Tensor, Tensor, Book | None, Tensor | None], Tensor]


def direct(x: Tensor, q: Tensor, book: Book | None = None, key: Tensor | None = None) -> Tensor:
    """``q``, and nothing of ``x``."""
    del x, book, key
    return q


def straight_through(x: Tensor, q: Tensor, book: Book | None = None, key: Tensor | None = None) -> Tensor:
    """``q``, with the derivative of ``x``."""
    del book, key
    return q.detach() + _change(x)


def rotation(x: Tensor, q: Tensor, book: Book | None = None, key: Tensor | None = None) -> Tensor:
    """``q``, with the derivative of R·x for the constant R, a rotation times |q| / |x|, that takes x to q.

    A row shorter than 1e-6 has no direction to turn: there it is that of :func:`straight_through`.
    """
    del book, key
    start, q, change = x.detach(), q.detach(), _change(x)
    length, wanted = (t.norm(dim=-1, keepdim=True) for t in (start, q))
    turns = length > MIN_LENGTH
    length = torch.where(turns, length, 1)
    u, v = start / length, q / wanted.clamp(min=MIN_LENGTH)
    w = unit(u + v)
    along = lambda t: (change * t).sum(-1, keepdim=True)
    turned = change - 2 * along(w) * w + 2 * along(u) * v
    return q + torch.where(turns, wanted / length * turned, change)


def directional(
    x: Tensor, q: Tensor, book: Book | None = None, key: Tensor | None = None, variance: float = 5e-3
) -> Tensor:
    """``x + |q - x|·u``, u a constant unit vector towards q with normal noise of ``variance`` a number added before.

    ``key`` i64[] or i64 of x's first dims, a stream for each row; its value is q up to the noise.

    Raises ValueError without a key, unless the variance is zero, and for a negative one.
    """
    del book
    if variance < 0:
        raise ValueError(f"variance is {variance}; wanted at least 0")
    way = q - x
    towards = way.detach()
    if variance:
        if key is None:
            raise ValueError(f"directional: got no key for a variance of {variance}; give one, or variance=0.0")
        towards = towards + variance**0.5 * random.normal(key, tuple(x.shape), x.dtype)
    square = way.square().sum(-1, keepdim=True)
    there = square > 0  # the length of nothing has no derivative
    return x + unit(towards) * torch.where(there, torch.where(there, square, 1).sqrt(), 0)


def gumbel(
    x: Tensor, q: Tensor, book: Book | None = None, key: Tensor | None = None, temperature: float = 1.0
) -> Tensor:
    """``q``, with the derivative of softmax(logits / temperature) · codes, in which the codes outside are constant.

    Raises ValueError without a book, and for a temperature that is not positive.
    """
    del key
    if book is None:
        raise ValueError("gumbel: got no book; wanted that of q")
    if not temperature > 0:
        raise ValueError(f"temperature is {temperature}; wanted one above 0")
    metric = book.metric

    def mean(x: Tensor, codes: Tensor) -> Tensor:
        likely = (logits(x, codes, metric) / temperature).softmax(-1)
        return matmul(likely, codes.detach())

    pairs = zip(rows.flatten_heads(book, x, 1), tables(book).to(x.dtype), strict=True)
    soft = rows.unflatten_heads(torch.stack([rows.map_tiles(mean, len(c), x, shared=(c,)) for x, c in pairs]), x)
    return q + _change(soft)


def _change(x: Tensor) -> Tensor:
    """Zero, with the derivative of ``x``."""
    return x - x.detach()
