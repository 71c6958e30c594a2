"""apply: quantise rows as training does: codes, what they stand for with a gradient, losses, and stats for the update.

Nothing here communicates, whatever the rows are; what ranks have to sum is returned (``quantized.py``, ``update.py``).
Evaluation has no function of its own: it is ``decode(book, encode(book, x))``.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ... import random
from ..quantized import Mean, Quantized
from . import rows
from .book import Book, decode
from .encode import encode, sample
from .gradient_estimators import GradientEstimator, rotation
from .losses import commitment, cross_entropy, diversity, orthogonal
from .rows import RowOffset, unit
from .update import stats as stats_of

LOSSES = ("commitment", "cross_entropy", "diversity", "orthogonal")


def apply(
    book: Book,
    x: Tensor,
    key: Tensor | None = None,
    mask: Tensor | None = None,
    *,
    gradient: GradientEstimator = rotation,
    temperature: float = 0.0,
    losses: Sequence[str] = ("commitment",),
    codes: Tensor | None = None,
    draw: bool = False,
    row_offset: RowOffset | None = None,
) -> Quantized:
    """``x`` f[... D] (with heads [... h D]) quantised: a Quantized of x's dtype, with Stats for ``update``.

    key          i64[], the same on every rank; what needs it raises without
    mask         bool[...], whose dims are the first of x: rows that count. The others have code -1 and come out as
                 zeros, as do rows that are not finite; neither has a gradient
    gradient     how derivatives reach x (``gradient.py``)
    temperature  0 takes the nearest code, above it codes are drawn (``sample``)
    losses       some of commitment, cross_entropy (of the codes), diversity, orthogonal; weights are the caller's
    codes        i64[...] that rows have got already, by another search; -1 is none
    draw         stats carry rows to start dead codes at, for ``expire``
    where        (first, total) number of this rank's rows among all, see ``rows.py``; alone, None

    Codes are a constant unless the book is learnable, and then the commitment moves rows and codes alike. For cosine,
    rows are of unit length throughout: in losses, stats and gradients too.

    Raises TypeError for another dtype, ValueError for another shape, a loss that is not known, a negative temperature,
    one beside codes, and for want of a key.
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
    point, live, number, each = rows.prepare(book, x, key, mask, row_offset)
    if codes is None and temperature > 0 and key is not None:
        codes = sample(book, point, random.fold(key, "sample"), temperature, rows.unflatten_heads(number, x))
    elif codes is None:
        codes = encode(book, point)
    codes = torch.where(live, codes, -1)
    live = codes >= 0  # not of rows so large that no distance is finite
    point = torch.where(live[..., None], point, 0)
    found: dict[str, Mean] = {}
    start = unit(point) if book.metric == "cosine" else point
    q = decode(book, codes, point.dtype)
    for name in losses:
        match name:
            case "commitment":
                found[name] = commitment(start, q, live)
            case "cross_entropy":
                found[name] = cross_entropy(book, point, codes, live)
            case "diversity":
                found[name] = diversity(book, point, mask=live)
            case _:
                found[name] = orthogonal(book)
    out = torch.where(live[..., None], gradient(start, q, book, each), 0).to(x.dtype)
    drawing = {"key": random.fold(key, "draw"), "row_offset": row_offset} if draw and key is not None else {}
    return Quantized(out, codes, found, stats_of(book, x, codes, mask, **drawing))
