"""Auxiliary losses of a codebook: rows near their codes, and codes in use; each a Mean, in float32 or float64.

Rows that a mask excludes, that are not finite, or that have no code, have no term. Distances to all codes are computed
in tiles of rows, again in the backward. (That of torch.func.grad keeps them, unless it is captured.)
"""

import torch
from torch import Tensor

from ...communication import identity
from ..precision import matmul
from ..quantized import Mask, Mean, Psum
from . import rows
from .book import Book, check_row_codes, vectors_by_head
from .encode import logits

MIN_PROBABILITY = 1e-5  # in a logarithm


def commitment(x: Tensor, q: Tensor, mask: Mask = None) -> Mean:
    """Return the mean of (q - x)² over the numbers of rows x and q [... D] that ``mask`` bool[...] selects."""
    square = (rows.at_least_float32(q) - rows.at_least_float32(x)).square()
    if mask is None:
        return Mean(square.sum(), square.new_full((), square.numel()))
    mask = rows.expand_mask(mask, x)
    return Mean(torch.where(mask, square, 0).sum(), mask.sum(dtype=square.dtype))


def cross_entropy(book: Book, x: Tensor, codes: Tensor, mask: Mask = None) -> Mean:
    """Return the mean of -log softmax(logits)[code] over rows ``x`` [... D] with ``codes`` i64[...]; -1 has no term.

    Codes may be targets (Shen et al. 2023). Raises ValueError unless they are one int64 for each row, IndexError for
    codes beyond the book, where values can be seen.
    """
    flat, table, valid = _flatten(book, x, mask)
    check_row_codes(book, codes, x)
    targets, metric = rows.flatten_heads(book, codes), book.metric
    valid = valid & (targets >= 0)

    def tile_losses(x: Tensor, target: Tensor, codes: Tensor) -> Tensor:
        score = logits(x, codes, metric)
        return score.logsumexp(-1) - score.gather(-1, target[:, None])[:, 0]

    heads = zip(flat, torch.where(valid, targets, 0), table, strict=True)
    terms = torch.stack([rows.map_tiles(tile_losses, len(c), x, target, shared=(c,)) for x, target, c in heads])
    return Mean(torch.where(valid, terms, 0).sum(), valid.sum(dtype=terms.dtype))


def diversity(book: Book, x: Tensor, temperature: float = 100.0, mask: Mask = None, psum: Psum = identity) -> Mean:
    """Return the mean over positions n of minus the entropy of the batch mean of softmax(temperature · logits).

    ``x`` is f[... n D], with heads [... n h D], where heads count as more of the batch. ``psum`` sums a tree over the
    ranks that share the batch. A position without rows has no term.
    """
    flat, table, valid = _flatten(book, x, mask)
    size = x.shape[-3] if book.codes.ndim == 3 else x.shape[-2]
    metric, batch = book.metric, flat.shape[1] // max(1, size)

    def tile_sums(x: Tensor, weight: Tensor, codes: Tensor) -> Tensor:  # [m b D], [m b] -> [m K]
        return ((temperature * logits(x, codes, metric)).softmax(-1) * weight[..., None]).sum(1)

    by_position = lambda t: t.unflatten(0, (batch, size)).transpose(0, 1)
    weights = valid.to(flat.dtype)
    sums = [
        rows.map_tiles(tile_sums, max(1, batch) * len(c), by_position(x), by_position(w), shared=(c,))
        for x, w, c in zip(flat, weights, table, strict=True)
    ]
    total, count = psum((sum(sums[1:], sums[0]), sum(by_position(w).sum(1) for w in weights)))
    mean = total / count.clamp(min=1)[:, None]
    negative = (mean * mean.clamp(min=MIN_PROBABILITY).log()).sum(-1)
    return Mean(torch.where(count > 0, negative, 0).sum(), (count > 0).sum(dtype=negative.dtype))


def orthogonal(book: Book, among: Tensor | None = None) -> Mean:
    """Return the mean of squared cosines between two codes, less its minimum 1/K (Shin et al. 2021, equation 2).

    ``among`` bool[K] or [h K] selects codes, as ``stats.counts > 0`` or ``random.permutation(key, K) < n``.
    """
    codes = rows.unit(rows.at_least_float32(vectors_by_head(book)))
    among = torch.ones_like(book.counts, dtype=torch.bool) if among is None else among
    if among.dtype is not torch.bool or among.shape not in (book.counts.shape, book.counts.shape[-1:]):
        raise ValueError(f"among: got {among.dtype} {tuple(among.shape)}; wanted bool {tuple(book.counts.shape)}")
    among = among.expand(codes.shape[:2])
    codes, number = torch.where(among[..., None], codes, 0), among.sum(-1, dtype=codes.dtype)
    # The squares of C·Cᵀ [K K] and of Cᵀ·C [D D] have the same sum.
    return Mean(matmul(codes.mT, codes).square().sum() - number.sum(), number.square().sum())


def _flatten(book: Book, x: Tensor, mask: Mask) -> tuple[Tensor, Tensor, Tensor]:
    """Return rows [h n D], zeros where invalid, the code vectors [h K D], and which rows are valid, bool[h n]."""
    rows.check(book, x)
    flat = rows.flatten_heads(book, rows.at_least_float32(x), 1)
    flat, valid = rows.zero_invalid(flat, rows.flat_mask(book, mask, x))
    return rows.unit(flat) if book.metric == "cosine" else flat, vectors_by_head(book).to(flat.dtype), valid
