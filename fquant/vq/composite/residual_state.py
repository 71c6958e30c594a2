"""The state of a residual quantiser (``residual.py``): its layers, projections and options.

:func:`init` takes layers of any kind in ``layer.py``. The other functions make layers of one kind, as the papers do:
each FSQ or LFQ layer is finer than the one before, while books are alike and learn the scale of their residual. Their
``options`` are those of :func:`init`, their errors those of it and of the layer's own ``init``.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from ... import random, tree
from ..codebook import book as books
from ..codebook import implicit, simvq
from ..scalar import fsq, lfq, projection_layers
from ..scalar.projection_layers import Projections
from .layer import VERBS, verbs_of


@tree.node
class Residual:
    """Layers of one dim without projections, and the projections of x to and from it."""

    layers: list[Any]  # all layers, or the shared one
    params: Projections | None  # trained, beside the layers' own parameters
    dim: int = tree.static()
    clamp: tuple[float, ...] | None = tree.static(default=None)
    dropout: bool = tree.static(default=False)
    cutoff: int = tree.static(default=0)
    multiple: int = tree.static(default=1)
    shared: int | None = tree.static(default=None)  # the number of layers that the shared one stands for


def init(
    key: int | Tensor,
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

    * clamp: bound the scalars to ± this, softly, by tanh, before the first layer.
    * dropout: omit layers by key: the first d of n stay, with d uniform in cutoff + 1 ... n.
    * multiple: round d up to a multiple of this.
    * shared: the number of layers that the one layer, a Book, stands for.

    Raises TypeError for layers of an unknown kind, and if only some learn from statistics. Raises ValueError for layers
    of different dims, with projections or several codebooks, and for options out of range.
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
    key: int | Tensor,
    num_codes: int | Sequence[int],
    width: int,
    num_layers: int | None = None,
    dim: int | None = None,
    *,
    shared: bool = False,
    metric: books.Metric = "euclidean",
    learnable: bool = False,
    **options: Any,
) -> Residual:
    """Make layers of Books with ``width`` dims; ``num_codes`` is one number or one a layer. ``shared`` is one Book."""
    key, sizes = random.key(key), _sizes("residual.init_books", num_codes, num_layers)
    if shared and len(set(sizes)) > 1:
        raise ValueError(f"residual.init_books: num_codes is {sizes} of a shared book; wanted one number")
    each = enumerate(sizes[:1] if shared else sizes)
    layers = [books.init(random.fold(key, i), size, width, metric=metric, learnable=learnable) for i, size in each]
    return init(key, layers, dim, shared=len(sizes) if shared else None, **options)


def init_implicit(
    key: int | Tensor,
    num_codes: int | Sequence[int],
    width: int,
    num_layers: int | None = None,
    dim: int | None = None,
    *,
    depth: int = 4,
    hidden: int | None = None,
    metric: books.Metric = "euclidean",
    **options: Any,
) -> Residual:
    """Make a learnable Book and implicit layers (``implicit.py``), with sizes as in :func:`init_books`."""
    key, sizes = random.key(key), _sizes("residual.init_implicit", num_codes, num_layers)
    net = {"depth": depth, "hidden": hidden, "metric": metric}
    first = books.init(random.fold(key, 0), sizes[0], width, metric=metric, learnable=True)
    later = [implicit.init(random.fold(key, i), size, width, **net) for i, size in enumerate(sizes) if i]
    return init(key, [first, *later], dim, **options)


def init_simvq(
    key: int | Tensor,
    num_codes: int | Sequence[int],
    width: int,
    num_layers: int | None = None,
    dim: int | None = None,
    *,
    frozen_dim: int | None = None,
    hidden: tuple[int, ...] = (),
    **options: Any,
) -> Residual:
    """Make layers of SimVQ, with sizes as in :func:`init_books`."""
    key, sizes = random.key(key), _sizes("residual.init_simvq", num_codes, num_layers)
    net = {"frozen_dim": frozen_dim, "hidden": hidden}
    return init(key, [simvq.init(random.fold(key, i), n, width, **net) for i, n in enumerate(sizes)], dim, **options)


def init_fsq(
    key: int | Tensor,
    levels: tuple[int, ...],
    num_layers: int,
    dim: int | None = None,
    *,
    hard_clamp: bool = True,
    clamp: float | tuple[float, ...] | None = None,
    noise_dropout: float = 0.0,
    rotation: bool = False,
    **options: Any,
) -> Residual:
    """Make layers of symmetric FSQ, where layer i quantises in steps of L^-i for L levels.

    ``hard_clamp`` clamps x softly to ±(1 + 1 / (L - 1)) and the layers hard. Without it x is clamped to ``clamp``, if
    any, and the layers use tanh.
    """
    if hard_clamp and clamp is not None:
        raise ValueError("residual.init_fsq: clamp beside hard_clamp, which has one of its own; use hard_clamp=False")
    key, levels = random.key(key), tuple(levels)
    kind: Any = {"hard_clamp": hard_clamp, "noise_dropout": noise_dropout, "rotation": rotation}
    each = [fsq.init(random.fold(key, i), levels, symmetric=True, **kind) for i in range(num_layers)]
    layers = [replace(layer, scale=tuple(float(n) ** -i for n in levels)) for i, layer in enumerate(each)]
    return init(key, layers, dim, clamp=tuple(1 + 1 / (n - 1) for n in levels) if hard_clamp else clamp, **options)


def init_lfq(
    key: int | Tensor,
    bits: int,
    num_layers: int,
    dim: int | None = None,
    *,
    clamp: float | None = None,
    bias: bool | None = None,
    dropout: bool = False,
    cutoff: int = 0,
    multiple: int = 1,
    **options: Any,
) -> Residual:
    """Make layers of LFQ with ``options`` of ``lfq.init``; layer i has scale 2^-i and clamps to ``clamp`` · 2^-i."""
    key = random.key(key)
    layers = []
    for i in range(num_layers):
        bound = None if clamp is None else clamp * 2.0**-i
        layers.append(lfq.init(random.fold(key, i), bits, scale=2.0**-i, clamp=bound, **options))
    return init(key, layers, dim, bias=bias, dropout=dropout, cutoff=cutoff, multiple=multiple)


def _sizes(name: str, num_codes: int | Sequence[int], num_layers: int | None) -> tuple[int, ...]:
    if isinstance(num_codes, int) and num_layers is not None and num_layers > 0:
        return (num_codes,) * num_layers
    if isinstance(num_codes, int) or not num_codes or num_layers not in (None, len(num_codes)):
        got = f"num_codes is {num_codes} and num_layers {num_layers}"
        raise ValueError(f"{name}: {got}; wanted a number for each layer")
    return tuple(num_codes)
