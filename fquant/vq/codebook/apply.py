"""Quantisation for training: codes, code vectors with a gradient, losses, and stats for the update.

Nothing here communicates; the sums over ranks are of the results. Evaluation is ``decode(book, encode(book, x))``.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from ... import random
from ..quantized import Codes, Key, Mask, Quantized
from . import rows
from .book import Book, decode
from .encode import encode, sample
from .gradient_estimators import Estimator, rotation
from .losses import commitment, cross_entropy, diversity, orthogonal
from .update import stats as stats_of

LOSSES = ("commitment", "cross_entropy", "diversity", "orthogonal")


def apply(
    book: Book,
    x: Tensor,
    key: Key = None,
    mask: Mask = None,
    *,
    gradient: Estimator = rotation,
    temperature: float = 0.0,
    losses: Sequence[str] = ("commitment",),
    codes: Codes = None,
    draw: bool = False,
    row_offset: rows.RowOffset | None = None,
) -> Quantized:
    """Quantise ``x`` f[... D] (with heads [... h D]): a Quantized in x's dtype, with Stats for ``update``.

    * key: i64[], the same on every rank; an option that needs it raises without.
    * mask: rows that do not count, or are not finite, have code -1, come out as zeros, and have no gradient.
    * gradient: the gradient estimator for x (``gradient_estimators.py``).
    * temperature: 0 takes the nearest code; above 0 codes are drawn (``sample``).
    * losses: any of commitment, cross_entropy (of the codes), diversity, orthogonal, without weights.
    * codes: i64[...] that another search found, -1 for none.
    * draw: draw rows for dead codes into the stats, for ``expire``.
    * row_offset: (first, total) number of this rank's rows among all, see ``rows.py``; None in one process.

    Codes are a constant unless the book is learnable; then the commitment moves rows and codes alike. For cosine, rows
    have unit length in losses, stats and gradients too. Raises TypeError for another dtype, else ValueError.
    """
    if unknown := [name for name in losses if name not in LOSSES]:
        raise ValueError(f"losses: got {', '.join(map(repr, unknown))}; wanted some of {', '.join(LOSSES)}")
    if temperature < 0:
        raise ValueError(f"temperature is {temperature}; wanted 0 for the nearest code, or above")
    if key is None and (draw or temperature > 0):
        raise ValueError(f"key is None with draw={draw} and temperature={temperature}, which need one")
    if codes is not None and (temperature or codes.shape != x.shape[:-1]):
        got = f"codes {tuple(codes.shape)} at temperature {temperature}"
        raise ValueError(f"x: got {got} for rows {tuple(x.shape)}; wanted a code for each, and temperature 0")
    point, valid, numbers, keys = rows.prepare(book, x, key, mask, row_offset)
    if codes is None and temperature > 0 and key is not None:
        codes = sample(book, point, random.fold(key, "sample"), temperature, rows.unflatten_heads(numbers, x))
    elif codes is None:
        codes = encode(book, point)
    codes = torch.where(valid, codes, -1)
    valid = codes >= 0  # a row too large for a finite distance has no code
    point = torch.where(valid[..., None], point, 0)
    start = rows.unit(point) if book.metric == "cosine" else point
    q = decode(book, codes, point.dtype)
    compute = {
        "commitment": lambda: commitment(start, q, valid),
        "cross_entropy": lambda: cross_entropy(book, point, codes, valid),
        "diversity": lambda: diversity(book, point, mask=valid),
        "orthogonal": lambda: orthogonal(book),
    }
    # Before ``out``, because the order of the gradients' sum is part of the numerics.
    found = {name: compute[name]() for name in losses}
    out = torch.where(valid[..., None], gradient(start, q, book, keys), 0).to(x.dtype)
    drawing = {"key": random.fold(key, "draw"), "row_offset": row_offset} if draw and key is not None else {}
    return Quantized(out, codes, found, stats_of(book, x, codes, mask, **drawing))
