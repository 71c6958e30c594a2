"""Nearest codes of rows, and codes drawn by their distance; they carry no gradient.

Distances are computed tile by tile, so those of all rows to all codes are never in memory together.
"""

import math
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from ... import random
from ...kernels.ops.nearest import nearest
from ..precision import matmul
from . import rows
from .book import Book, code_vectors, vectors_by_head

MIN_SQUARE = 1e-8  # of a distance, under the root


def encode(book: Book, x: Tensor, top: int | None = None) -> Tensor:
    """Return the nearest code i64[...] of every row of ``x`` f[... D] (with heads [... h D]); -1 if it is not finite.

    With ``top``, the ``top`` nearest i64[... top]; of equally near codes the lowest comes first. Raises TypeError for
    an ``x`` without floats, ValueError for another last dim or a ``top`` out of range.
    """
    rows.check(book, x, top)
    codes, _ = search(book, x, top or 1)
    return rows.unflatten_heads(codes if top else codes[..., 0], x)


def search(book: Book, x: Tensor, top: int = 1) -> tuple[Tensor, Tensor]:
    """Return the ``top`` nearest codes of rows ``x`` f[... D] and their scores, i64 and f[h n top]."""
    codes = _table(book, x)
    half = codes.square().sum(-1) / 2 if book.metric == "euclidean" else torch.zeros_like(codes[..., 0])
    return nearest(rows.flatten_heads(book, x.detach(), 1), codes, half, top)


def encode_among(
    book: Book, x: Tensor, f: Callable[[Tensor, Tensor], Tensor], given: Tensor, top: int | None = None
) -> Tensor:
    """Return the nearest code of every row of x f[... D] in a codebook of its own, ``f(codes, given)``: i64[...].

    ``f`` maps codes [... D] and ``given`` [... c], which broadcast, to [... D]. With ``top``, i64[... top]. Raises the
    errors of :func:`encode`, and ValueError for a book with heads, or a ``given`` of other first dims.
    """
    rows.check(book, x, top)
    if book.codes.ndim == 3:
        raise ValueError(f"a book of {len(book.codes)} heads; wanted one without, use vmap over the heads")
    if given.shape[:-1] != x.shape[:-1]:
        raise ValueError(f"given: got shape {tuple(given.shape)} for x {tuple(x.shape)}; wanted its first dims")
    codes, cosine, size = code_vectors(book).detach(), book.metric == "cosine", book.codes.numel()

    def encode_tile(x: Tensor, given: Tensor) -> Tensor:
        vectors, each = f(codes, given[:, None]), x[:, None]  # [m K D], [m 1 D]
        score = (each * rows.unit(vectors)).sum(-1) if cosine else -(each - vectors).square().sum(-1)
        if top is None:
            return torch.where(rows.finite(x), score.argmax(-1), -1)
        best = score.sort(dim=-1, descending=True, stable=True).indices[..., :top]
        return torch.where(rows.finite(x)[..., None], best, -1)

    with torch.no_grad():
        flat = lambda t: t.detach().reshape(math.prod(t.shape[:-1]), t.shape[-1])
        x_flat, given_flat = flat(rows.at_least_float32(x)), flat(given)
        found = rows.map_tiles(encode_tile, size, x_flat, given_flat)
    return found.reshape(*x.shape[:-1], *([] if top is None else [top]))


def sample(book: Book, x: Tensor, key: Tensor, temperature: float = 1.0, number: Tensor | None = None) -> Tensor:
    """Draw a code for every row of ``x`` f[... D] with probability softmax(logits / temperature): i64[...].

    The code has the largest logit after Gumbel noise (Jang et al. 2017), a function of key and ``number`` i64[...], by
    default the row's position. Raises what :func:`encode` does, and ValueError unless the temperature is above 0.
    """
    rows.check(book, x)
    if not temperature > 0:
        raise ValueError(f"temperature is {temperature}; wanted one above 0, use encode for the nearest code")
    flat = rows.flatten_heads(book, x.detach(), 1)
    numbers = rows.number_rows(None, flat, None) if number is None else rows.flatten_heads(book, number)

    def sample_tile(codes: Tensor, x: Tensor, keys: Tensor) -> Tensor:
        noise = -torch.log(-torch.log(random.uniform(keys, (*keys.shape, len(codes)))))
        return torch.where(rows.finite(x), (logits(x, codes, book.metric) / temperature + noise).argmax(-1), -1)

    heads = zip(_table(book, x), rows.at_least_float32(flat), rows.row_keys(key, numbers), strict=True)
    drawn = torch.stack([rows.map_tiles(partial(sample_tile, c), len(c), t, k) for c, t, k in heads])
    return rows.unflatten_heads(drawn, x)


def logits(x: Tensor, codes: Tensor, metric: str) -> Tensor:
    """Score rows [... n D] against codes [... K D], [... n K]: minus the distance, for cosine the inner product."""
    inner = matmul(x, codes.mT)
    if metric == "cosine":
        return inner
    squares = x.square().sum(-1)[..., None] + codes.square().sum(-1)[..., None, :]
    return -(squares - 2 * inner).clamp(min=MIN_SQUARE).sqrt()


def _table(book: Book, x: Tensor) -> Tensor:
    """Return the code vectors [h K D] in the dtype of the comparison."""
    codes = vectors_by_head(book).detach()
    return codes.to(torch.promote_types(codes.dtype, x.dtype))
