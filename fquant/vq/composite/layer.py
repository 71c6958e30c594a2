"""The kinds of layers that a residual may have, and a uniform interface to their verbs.

    verbs_of(layer).encode(layer, rest, so_far)

``rest`` [... d] are the residual rows of the earlier layers, ``so_far`` [... d] the sum of their outputs, which only
implicit layers read. Unused rows (not finite, or left to earlier layers by dropout) are masked. Books and implicit
layers learn from Stats: the mask numbers their rows, and unused rows are NaN, which count as lost.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

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

    size: Callable[[Any], tuple[int, int, bool]]  # dim of a row, number of codebooks, whether it has projections
    encode: Callable[..., Tensor]  # (layer, rest, so_far), and top if searchable: so many nearest codes, i64[... top]
    decode: Callable[[Any, Tensor, Tensor], Tensor]  # (layer, codes, so_far), in the dtype of so_far
    apply: Callable[..., Quantized]  # (layer, rest, so_far, key, mask, **options)
    update: Callable[..., Any] | None = None  # None if gradients alone train it
    searchable: bool = True  # whether rows can be given codes, and list their nearest ones


def verbs_of(layer: Any) -> Verbs:
    """Return the verbs of the kind of ``layer``."""
    return VERBS[type(layer)]


def _scalar(verbs: Any) -> Verbs:
    return Verbs(
        lambda layer: (layer.dim, layer.num_codebooks, layer.params is not None),
        lambda layer, rest, so_far: verbs.encode(layer, rest),
        lambda layer, codes, so_far: verbs.decode(layer, codes, so_far.dtype),
        lambda layer, rest, so_far, key, mask, **options: verbs.apply(layer, rest, key, mask, **options),
        searchable=False,
    )


def _book_size(layer: Book) -> tuple[int, int, bool]:
    return layer.codes.shape[-1], layer.codes.shape[0] if layer.codes.ndim == 3 else 1, False


VERBS: dict[type, Verbs] = {
    fsq.FSQ: _scalar(fsq),
    lfq.LFQ: _scalar(lfq),
    Book: Verbs(
        _book_size,
        lambda layer, rest, so_far, top=None: encode(layer, rest, top),
        lambda layer, codes, so_far: book.decode(layer, codes, so_far.dtype),
        lambda layer, rest, so_far, key, mask, **options: apply(layer, rest, key, mask, **options),
        update.update,
    ),
    Implicit: Verbs(
        lambda layer: _book_size(layer.book),
        implicit.encode,
        implicit.decode,
        implicit.apply,
        implicit.update,
    ),
    SimVQ: Verbs(
        lambda layer: (layer.dim, 1, False),
        lambda layer, rest, so_far, top=None: simvq.encode(layer, rest, top),
        lambda layer, codes, so_far: simvq.decode(layer, codes, so_far.dtype),
        lambda layer, rest, so_far, key, mask, **options: simvq.apply(layer, rest, key, mask, **options),
    ),
}
