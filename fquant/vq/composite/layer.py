"""What a layer of a residual may be, and its verbs in one shape.

    VERBS[type(layer)].encode(layer, left, before)

``left`` [... d] are the rows that the layers before have left, ``before`` [... d] is the sum of what these have made.
Scalar quantisers and SimVQ have nothing that a step of statistics moves, and count rows; books and implicit ones learn
from their Stats, which are told which rows a mask keeps, and that the others of ``used`` are lost: rows that are not
finite, or that a layer is dropped for. So rows are numbered as the mask says, wherever they lie.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..codebook import book, implicit, simvq, update
from ..codebook.apply import apply
from ..codebook.book import Book
from ..codebook.encode import encode
from ..codebook.implicit import Implicit
from ..codebook.simvq import SimVQ
from ..quantized import Quantized
from ..scalar import fsq, lfq


class Verbs(NamedTuple):
    """The verbs of one kind of layer."""

    size: Callable[[Any], tuple[int, int, bool]]  # last dim of its rows, codes of a row, whether it has projections
    encode: Callable[[Any, Tensor, Tensor], Tensor]  # of left and before
    best: Callable[[Any, Tensor, Tensor, int], Tensor] | None  # so many of the nearest codes, i64[... top]
    decode: Callable[[Any, Tensor, Tensor], Tensor]  # of codes and before, in before's dtype
    apply: Callable[..., Quantized]  # of left, before, key, used and mask, and options
    update: Callable[..., Any] | None  # None where there is nothing to update


def _scalar(verbs: Any) -> Verbs:
    return Verbs(
        lambda layer: (layer.dim, layer.num_codebooks, layer.params is not None),
        lambda layer, left, before: verbs.encode(layer, left),
        None,
        lambda layer, codes, before: verbs.decode(layer, codes, before.dtype),
        lambda layer, left, before, key, used, mask, **options: verbs.apply(layer, left, key, used, **options),
        None,
    )


def _lost(left: Tensor, used: Tensor) -> Tensor:
    """``left`` with rows that are not used as those that are not finite."""
    return torch.where(used[..., None], left, torch.nan)


def _size(layer: Book) -> tuple[int, int, bool]:
    return layer.codes.shape[-1], layer.codes.shape[0] if layer.codes.ndim == 3 else 1, False


def _apply(layer: Book, left: Tensor, before: Tensor, key: Any, used: Tensor, mask: Any, **options: Any) -> Quantized:
    return apply(layer, _lost(left, used), key, mask=mask, **options)


def _apply_implicit(
    layer: Implicit, left: Tensor, before: Tensor, key: Any, used: Tensor, mask: Any, **options: Any
) -> Quantized:
    return implicit.apply(layer, _lost(left, used), before, key, mask=mask, **options)


VERBS: dict[type, Verbs] = {
    fsq.FSQ: _scalar(fsq),
    lfq.LFQ: _scalar(lfq),
    Book: Verbs(
        _size,
        lambda layer, left, before: encode(layer, left),
        lambda layer, left, before, top: encode(layer, left, top),
        lambda layer, codes, before: book.decode(layer, codes, before.dtype),
        _apply,
        update.update,
    ),
    Implicit: Verbs(
        lambda layer: _size(layer.book),
        implicit.encode,
        implicit.encode,
        implicit.decode,
        _apply_implicit,
        implicit.update,
    ),
    SimVQ: Verbs(
        lambda layer: (layer.dim, 1, False),
        lambda layer, left, before: simvq.encode(layer, left),
        lambda layer, left, before, top: simvq.encode(layer, left, top),
        lambda layer, codes, before: simvq.decode(layer, codes, before.dtype),
        lambda layer, left, before, key, used, mask, **options: simvq.apply(layer, left, key, used, **options),
        None,
    ),
}
