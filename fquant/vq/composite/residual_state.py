"""The state of a residual quantiser (``residual.py``): its layers, their verbs, projections and options.

    verbs_of(layer).encode(layer, rest, so_far)

``rest`` [... d] are the residual rows of the earlier layers, ``so_far`` [... d] the sum of their outputs, which only
implicit layers read. Unused rows (not finite, or left to earlier layers by dropout) are masked. Books and implicit
layers learn from Stats: the mask numbers their rows, and unused rows are NaN, which count as lost.

Functions for one kind of layer follow the papers: each FSQ or LFQ layer is finer than the one before, while books learn
the scale of their residual. Their ``options`` are those of :func:`init` and of the layer's own ``init``.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from torch import Tensor

from ... import random, tree
from ..codebook import book as books
from ..codebook import implicit, simvq, update
from ..codebook.apply import apply
from ..codebook.encode import encode
from ..quantized import Quantized, Seed
from ..scalar import fsq, lfq, projection_layers
from ..scalar.projection_layers import Projections

OPTIONS = ("bias", "clamp", "dropout", "cutoff", "multiple", "shared")  # of init; others are those of layers
Sizes = int | Sequence[int]  # the codes of all layers, or of each


class Verbs(NamedTuple):
    """The verbs of one kind of layer."""

    size: Callable[[Any], tuple[int, int, bool]]  # dim of a row, number of codebooks, whether it has projections
    encode: Callable[..., Tensor]  # (layer, rest, so_far), and top if it has a table: the nearest codes, i64[... top]
    decode: Callable[[Any, Tensor, Tensor], Tensor]  # (layer, codes, so_far), in the dtype of so_far
    apply: Callable[..., Quantized]  # (layer, rest, so_far, key, mask, **options)
    update: Callable[..., Any] | None = None  # None if gradients alone train it
    table: Callable[[Any], tuple[int, str]] | None = None  # number of codes, metric; None if rows cannot be given codes


def verbs_of(layer: Any) -> Verbs:
    """Return the verbs of the kind of ``layer``."""
    return VERBS[type(layer)]


def _independent(size: Any, encode: Any, decode: Any, apply: Any, **more: Any) -> Verbs:
    """Make verbs of those of a layer that does not read ``so_far``."""
    return Verbs(
        size,
        lambda layer, rest, so_far, *top: encode(layer, rest, *top),
        lambda layer, codes, so_far: decode(layer, codes, so_far.dtype),
        lambda layer, rest, so_far, *given, **options: apply(layer, rest, *given, **options),
        **more,
    )


def _size(layer: Any) -> tuple[int, int, bool]:
    return layer.dim, layer.num_codebooks, layer.params is not None


def _book_size(layer: books.Book) -> tuple[int, int, bool]:
    return layer.codes.shape[-1], layer.codes.shape[0] if layer.codes.ndim == 3 else 1, False


def _book_table(layer: books.Book) -> tuple[int, str]:
    return layer.codes.shape[-2], layer.metric


VERBS: dict[type, Verbs] = {
    fsq.FSQ: _independent(_size, fsq.encode, fsq.decode, fsq.apply),
    lfq.LFQ: _independent(_size, lfq.encode, lfq.decode, lfq.apply),
    books.Book: _independent(_book_size, encode, books.decode, apply, update=update.update, table=_book_table),
    implicit.Implicit: Verbs(
        lambda layer: _book_size(layer.book), implicit.encode, implicit.decode, implicit.apply, implicit.update,
        lambda layer: _book_table(layer.book),
    ),
    simvq.SimVQ: _independent(
        lambda layer: (layer.dim, 1, False), simvq.encode, simvq.decode, simvq.apply,
        table=lambda layer: (layer.frozen.shape[0], "euclidean"),
    ),
}  # fmt: skip


@tree.node
class Residual:
    """Layers of one dim without projections, and the projections of x to and from it."""

    layers: list[Any]  # all layers, or the shared one
    params: Projections | None  # trained, beside the layers' own parameters
    dim: int = tree.static()
    clamp: tuple[float, ...] | None = tree.static(default=None)  # bounds scalars softly, by tanh, before the layers
    dropout: bool = tree.static(default=False)  # keeps, by key, the first d of n layers, d uniform in cutoff + 1 ... n
    cutoff: int = tree.static(default=0)
    multiple: int = tree.static(default=1)  # of which d is one, rounded up
    shared: int | None = tree.static(default=None)  # the number of layers that the one layer, a Book, stands for


def init(
    key: Seed,
    layers: Sequence[Any],
    dim: int | None = None,
    *,
    bias: bool | None = None,
    clamp: float | tuple[float, ...] | None = None,
    dropout: bool = False,
    cutoff: int = 0,
    multiple: int = 1,
    shared: int | None = None,
) -> Residual:
    """Return a state for x f[... dim], by default the dim of the layers; another dim is projected.

    The options are those of :class:`Residual`; ``clamp`` may be one number for all scalars. Raises TypeError for layers
    of an unknown kind, and if only some learn from statistics. Raises ValueError for layers of different dims, with
    projections or several codebooks, and for options out of range.
    """
    layers, name = list(layers), "residual.init"
    if not layers:
        raise ValueError(f"{name}: there are no layers; wanted at least 1")
    for i, layer in enumerate(layers):
        if type(layer) not in VERBS:
            known = ", ".join(kind.__name__ for kind in VERBS)
            raise TypeError(f"{name}: layers.{i} is a {type(layer).__name__}; wanted one of {known}")
    first = verbs_of(layers[0])
    width = first.size(layers[0])[0]
    for i, layer in enumerate(layers):
        size, codebooks, projected = verbs_of(layer).size(layer)
        if projected or codebooks != 1 or size != width:
            got = f"dim {size}, {codebooks} codebooks, projections {projected}"
            wanted = f"the dim of the first, {width}, 1 codebook and no projections: the residual itself takes dim"
            raise ValueError(f"{name}: layers.{i} has {got}; wanted {wanted}")
        if (verbs_of(layer).update is None) != (first.update is None):
            kinds = f"a {type(layer).__name__} beside a {type(layers[0]).__name__}"
            raise TypeError(f"{name}: layers.{i} is {kinds}; wanted all to learn from statistics, or none")
    if shared is not None and (shared < 1 or len(layers) != 1 or not isinstance(layers[0], books.Book)):
        raise ValueError(f"{name}: shared is {shared} with {len(layers)} layers; wanted at least 1 of one Book")
    num_layers = shared or len(layers)
    if not 0 <= cutoff < num_layers or multiple < 1:
        wanted = f"a cutoff in [0, {num_layers}) and a multiple of at least 1"
        raise ValueError(f"{name}: cutoff is {cutoff}, multiple {multiple}; wanted {wanted}")
    if not dropout and (cutoff, multiple) != (0, 1):
        raise ValueError(f"{name}: cutoff and multiple are options of dropout; use dropout=True")
    bounds = None if clamp is None else tuple(clamp) if isinstance(clamp, Sequence) else (clamp,) * width
    if bounds is not None and (len(bounds) != width or not min(bounds) > 0):
        raise ValueError(f"{name}: clamp is {clamp}; wanted a positive number, or {width} of them")
    dim, params = projection_layers.init(name, random.key(key), dim, 1, width, bias)
    return Residual(layers, params, dim, bounds, dropout, cutoff, multiple, shared)


def init_books(
    key: Seed, num_codes: Sizes, width: int, num_layers: int | None = None, dim: int | None = None, **options: Any
) -> Residual:
    """Make layers of Books with ``width`` dims; ``num_codes`` is one number or one a layer. ``shared`` is one Book."""
    key, sizes = random.key(key), _sizes("residual.init_books", num_codes, num_layers)
    own, new = _split(options)
    shared = own.pop("shared", False)
    if shared and len(set(sizes)) > 1:
        raise ValueError(f"residual.init_books: num_codes is {sizes} of a shared book; wanted one number")
    each = enumerate(sizes[:1] if shared else sizes)
    layers = [books.init(random.fold(key, i), size, width, **new) for i, size in each]
    return init(key, layers, dim, shared=len(sizes) if shared else None, **own)


def init_implicit(
    key: Seed, num_codes: Sizes, width: int, num_layers: int | None = None, dim: int | None = None, **options: Any
) -> Residual:
    """Make a learnable Book and implicit layers (``implicit.py``), with sizes as in :func:`init_books`."""
    key, sizes = random.key(key), _sizes("residual.init_implicit", num_codes, num_layers)
    own, net = _split(options)
    first = books.init(random.fold(key, 0), sizes[0], width, metric=net.get("metric", "euclidean"), learnable=True)
    later = [implicit.init(random.fold(key, i), size, width, **net) for i, size in enumerate(sizes) if i]
    return init(key, [first, *later], dim, **own)


def init_simvq(
    key: Seed, num_codes: Sizes, width: int, num_layers: int | None = None, dim: int | None = None, **options: Any
) -> Residual:
    """Make layers of SimVQ, with sizes as in :func:`init_books`."""
    key, sizes = random.key(key), _sizes("residual.init_simvq", num_codes, num_layers)
    own, net = _split(options)
    return init(key, [simvq.init(random.fold(key, i), n, width, **net) for i, n in enumerate(sizes)], dim, **own)


def init_fsq(key: Seed, levels: tuple[int, ...], num_layers: int, dim: int | None = None, **options: Any) -> Residual:
    """Make layers of symmetric FSQ, where layer i quantises in steps of L^-i for L levels.

    ``hard_clamp``, the default, clamps x softly to ±(1 + 1 / (L - 1)) and the layers hard; False uses ``clamp`` and
    tanh.
    """
    key, (own, new) = random.key(key), _split(options)
    new = {"symmetric": True, "hard_clamp": True, **new}
    if new["hard_clamp"] and own.get("clamp") is not None:
        raise ValueError("residual.init_fsq: clamp beside hard_clamp, which has one of its own; use hard_clamp=False")
    scales = [tuple(float(n) ** -i for n in levels) for i in range(num_layers)]
    each = [fsq.init(random.fold(key, i), tuple(levels), **new) for i in range(num_layers)]
    layers = [replace(layer, scale=scale) for layer, scale in zip(each, scales, strict=True)]
    if new["hard_clamp"]:
        own["clamp"] = tuple(1 + 1 / (n - 1) for n in levels)
    return init(key, layers, dim, **own)


def init_lfq(
    key: Seed, bits: int, num_layers: int, dim: int | None = None, *, clamp: float | None = None, **options: Any
) -> Residual:
    """Make layers of LFQ with ``options`` of ``lfq.init``; layer i has scale 2^-i and clamps to ``clamp`` · 2^-i."""
    key, (own, new) = random.key(key), _split(options)
    each = enumerate(2.0**-i for i in range(num_layers))
    layers = [lfq.init(random.fold(key, i), bits, scale=s, clamp=clamp and clamp * s, **new) for i, s in each]
    return init(key, layers, dim, **own)


def _split(options: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Split ``options`` into those of :func:`init` and those of the layers."""
    own = {name: value for name, value in options.items() if name in OPTIONS}
    return own, {name: value for name, value in options.items() if name not in own}


def _sizes(name: str, num_codes: Sizes, num_layers: int | None) -> tuple[int, ...]:
    if isinstance(num_codes, int) and num_layers is not None and num_layers > 0:
        return (num_codes,) * num_layers
    if isinstance(num_codes, int) or not num_codes or num_layers not in (None, len(num_codes)):
        got = f"num_codes is {num_codes} and num_layers {num_layers}"
        raise ValueError(f"{name}: {got}; wanted a number for each layer")
    return tuple(num_codes)
