"""encode: the code of a row is that of the nearest of the book, or one that is drawn by how near it is.

    codes = encode(book, x)                      # i64[...], of x [... D]
    codes = encode(book, x, top=4)               # i64[... 4], the nearest first
    codes = sample(book, x, key, temperature=0.5)

Distances between all rows and all codes are never in memory at a time: ``fquant.kernels.ops.nearest`` makes a tile of them,
keeps the best and forgets it, and what needs all distances of a row takes some rows at a time (``rows.map_tiles``). Which
are taken together follows from shapes alone. Codes carry no gradient.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from ... import random
from ...kernels.ops.nearest import nearest
from ..precision import matmul
from . import rows
from .book import Book, code_vectors, tables
from .rows import at_least_float32, unit

LEAST = 1e-8  # of a squared distance whose root is taken


def encode(book: Book, x: Tensor, top: int | None = None) -> Tensor:
    """The nearest code of every row of ``x`` f[... D] (with heads [... h D]), i64[...].

    With ``top`` so many of them, i64[... top], the nearest first. Of codes that are equally near the one with the
    lowest index comes first; a row that is not finite has code -1.

    Raises TypeError for an ``x`` that is not of floats, ValueError for another last dim, or a ``top`` beyond the codes.
    """
    rows.check(book, x)
    _check_top(book, top)
    codes = _table(book, x).detach()
    half = codes.square().sum(-1) / 2 if book.metric == "euclidean" else torch.zeros_like(codes[..., 0])
    which, _ = nearest(rows.flatten_heads(book, x.detach(), 1), codes, half, top or 1)
    return rows.unflatten_heads(which if top else which[..., 0], x)


def encode_among(
    book: Book, x: Tensor, f: Callable[[Tensor, Tensor], Tensor], given: Tensor, top: int | None = None
) -> Tensor:
    """The nearest code where each row has a codebook of its own, ``f(codes, given)``: i64[...], of x f[... D].

    ``given`` [... c] is what a row's codes depend on, and ``f`` of codes [... D] and of it, which broadcast, gives
    [... D], as the network of an implicit neural codebook does (Huijben et al. 2024). What is chosen is then
    ``f(decode(book, codes), given)``. With ``top`` so many, i64[... top], as :func:`encode` gives them.

    Raises what :func:`encode` does, and ValueError for a book with heads, or a ``given`` of other first dims than x.
    """
    rows.check(book, x)
    if book.codes.ndim == 3:
        raise ValueError(f"a book of {len(book.codes)} heads; wanted one without, use vmap over the heads")
    _check_top(book, top)
    if given.shape[:-1] != x.shape[:-1]:
        raise ValueError(f"given: got shape {tuple(given.shape)} for x {tuple(x.shape)}; wanted its first dims")
    codes, size = code_vectors(book).detach(), book.codes.numel()

    def some(x: Tensor, given: Tensor) -> Tensor:
        each = f(codes, given[:, None])  # [m K D]
        if book.metric == "cosine":
            near = (x[:, None] * unit(each)).sum(-1)
        else:
            near = -(x[:, None] - each).square().sum(-1)
        if top is None:
            return torch.where(rows.finite(x), near.argmax(-1), -1)
        best = near.sort(dim=-1, descending=True, stable=True).indices[..., :top]
        return torch.where(rows.finite(x)[..., None], best, -1)

    with torch.no_grad():
        flat = (at_least_float32(x.detach()).reshape(-1, x.shape[-1]), given.detach().reshape(-1, given.shape[-1]))
        return rows.map_tiles(some, size, *flat).reshape(*x.shape[:-1], *([] if top is None else [top]))


def sample(book: Book, x: Tensor, key: Tensor, temperature: float = 1.0, number: Tensor | None = None) -> Tensor:
    """A code of every row of ``x`` f[... D], drawn with probability softmax(logits / temperature): i64[...].

    By the largest of logits with Gumbel noise (Jang et al. 2017). ``number`` i64[...] are the numbers of rows, each of
    which has noise of its own; by default they are counted.

    Raises what :func:`encode` does, and ValueError for a temperature that is not positive.
    """
    rows.check(book, x)
    if not temperature > 0:
        raise ValueError(f"temperature is {temperature}; wanted one above 0, use encode for the nearest code")
    laid = rows.flatten_heads(book, x.detach(), 1)
    of = rows.number_rows(None, laid, None) if number is None else rows.flatten_heads(book, number)
    codes = _table(book, x).detach()

    def some(codes: Tensor, x: Tensor, each: Tensor) -> Tensor:
        noise = -torch.log(-torch.log(random.uniform(each, (*each.shape, len(codes)))))
        drawn = (logits(x, codes, book.metric) / temperature + noise).argmax(-1)
        return torch.where(rows.finite(x), drawn, -1)

    heads = zip(codes, at_least_float32(laid), rows.row_keys(key, of), strict=True)
    return rows.unflatten_heads(torch.stack([rows.map_tiles(partial(some, c), len(c), t, k) for c, t, k in heads]), x)


def logits(x: Tensor, codes: Tensor, metric: str) -> Tensor:
    """How near rows [... n D] are to codes [... K D], [... n K]: minus the distance, for cosine the inner product."""
    inner = matmul(x, codes.mT)
    if metric == "cosine":
        return inner
    squares = x.square().sum(-1)[..., None] + codes.square().sum(-1)[..., None, :]
    return -(squares - 2 * inner).clamp(min=LEAST).sqrt()


def _check_top(book: Book, top: int | None) -> None:
    num_codes = book.codes.shape[-2]
    if top is not None and not 1 <= top <= num_codes:
        raise ValueError(f"top is {top} for a book of {num_codes} codes; wanted 1 to {num_codes}")


def _table(book: Book, x: Tensor) -> Tensor:
    """The codes [h K D], in what they are compared in."""
    codes = tables(book)
    return codes.to(torch.promote_types(codes.dtype, x.dtype))
