"""The state of a residual quantiser: its layers, and what is around them (``residual.py``).

:func:`init` takes layers of any kind that ``layer.py`` knows. The others make layers of one kind, the way the papers
do: of FSQ and LFQ each finer than the one before, of books as they come, since what is left finds its own codes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from ... import random, tree
from ..codebook import book as books
from ..codebook import implicit, simvq
from ..scalar import fsq, lfq, projection_layers
from ..scalar.projection_layers import Projections
from .layer import VERBS


@tree.node
class Residual:
    """Layers that are quantisers of one size without projections, and those of x to and from it."""

    layers: list[Any]  # all of them, or the one that is shared
    params: Projections | None  # what trains, beside the layers' own
    dim: int = tree.static()
    clamp: tuple[float, ...] | None = tree.static(default=None)
    dropout: bool = tree.static(default=False)
    cutoff: int = tree.static(default=0)
    multiple: int = tree.static(default=1)
    shared: int | None = tree.static(default=None)  # how many layers the one is


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
    """A state for x f[... dim], which by default is that of the layers and is projected otherwise.

    clamp      bounds the scalars softly, by tanh, to ± so much, before the first layer
    dropout    leave out layers by key: of n layers the first d stay, d being uniform in cutoff + 1 ... n, and
    multiple   then rounded up to a multiple of this
    shared     the one layer, a Book, is so many of them

    Raises TypeError for layers of another kind, and of kinds of which some learn from statistics and some do not;
    ValueError for layers of more than one size, projected ones and those of several codebooks, options out of range,
    and options of what is left out.
    """
    layers, name = list(layers), "residual.init"
    for i, layer in enumerate(layers):
        if type(layer) not in VERBS:
            known = ", ".join(kind.__name__ for kind in VERBS)
            raise TypeError(f"{name}: layers.{i} is a {type(layer).__name__}; wanted one of {known}")
        verbs = VERBS[type(layer)]
        width, codebooks, projected = verbs.size(layer)
        if projected or codebooks != 1 or width != VERBS[type(layers[0])].size(layers[0])[0]:
            got = f"dim {width}, {codebooks} codebooks, projections {projected}"
            first = VERBS[type(layers[0])].size(layers[0])[0]
            wanted = f"the dim of the first, {first}, 1 codebook and none: the residual itself takes dim"
            raise ValueError(f"{name}: layers.{i} has {got}; wanted {wanted}")
        if (verbs.update is None) != (VERBS[type(layers[0])].update is None):
            kinds = f"a {type(layer).__name__} beside a {type(layers[0]).__name__}"
            raise TypeError(f"{name}: layers.{i} is {kinds}; wanted all to learn from statistics, or none")
    if not layers:
        raise ValueError(f"{name}: there are no layers; wanted at least 1")
    if shared is not None and (shared < 1 or len(layers) != 1 or not isinstance(layers[0], books.Book)):
        raise ValueError(f"{name}: shared is {shared} with {len(layers)} layers; wanted at least 1 of one Book")
    num_layers = shared or len(layers)
    if not 0 <= cutoff < num_layers or multiple < 1:
        raise ValueError(f"{name}: cutoff is {cutoff}, multiple {multiple}; wanted a layer of {num_layers}, at least 1")
    if not dropout and (cutoff, multiple) != (0, 1):
        raise ValueError(f"{name}: cutoff and multiple are about dropout; use dropout=True")
    width = VERBS[type(layers[0])].size(layers[0])[0]
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
    """Layers that are Books of ``width`` dims, of ``num_codes`` each, or of a number for each; or all one, ``shared``.

    ``options`` are those of :func:`init`. Raises what it and ``init`` of a Book do, and ValueError where num_layers is
    wanting or another than that of num_codes, or a shared book has several sizes.
    """
    key, sizes = random.key(key), _sizes("residual.init_books", num_codes, num_layers)
    if shared and len(set(sizes)) > 1:
        raise ValueError(f"residual.init_books: num_codes is {sizes} of a shared book; wanted one number")
    each = sizes[:1] if shared else sizes
    layers = [
        books.init(random.fold(key, i), size, width, metric=metric, learnable=learnable) for i, size in enumerate(each)
    ]
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
    """A learnable Book and behind it implicit layers (``implicit.py``), sizes as in :func:`init_books`.

    ``options`` are those of :func:`init`. Raises what it, ``implicit.init`` and :func:`init_books` do.
    """
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
    """Layers of SimVQ, sizes as in :func:`init_books`; ``options`` are those of :func:`init`.

    Raises what it, ``simvq.init`` and :func:`init_books` do.
    """
    key, sizes = random.key(key), _sizes("residual.init_simvq", num_codes, num_layers)
    each = [
        simvq.init(random.fold(key, i), size, width, frozen_dim=frozen_dim, hidden=hidden)
        for i, size in enumerate(sizes)
    ]
    return init(key, each, dim, **options)


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
    """Layers of symmetric FSQ, of which layer i quantises in steps of L^-i; ``options`` are those of :func:`init`.

    With ``hard_clamp`` x is clamped softly to ±(1 + 1 / (L - 1)), and layers are clamped hard; without, x is clamped
    to ``clamp`` if to anything, and layers are by tanh. Raises what :func:`init` and ``fsq.init`` do, and ValueError
    for ``clamp`` beside ``hard_clamp``.
    """
    if hard_clamp and clamp is not None:
        raise ValueError("residual.init_fsq: clamp beside hard_clamp, which has one of its own; use hard_clamp=False")
    key, levels = random.key(key), tuple(levels)
    layers = [
        replace(
            fsq.init(
                random.fold(key, i), levels, symmetric=True, hard_clamp=hard_clamp, noise_dropout=noise_dropout,
                rotation=rotation,
            ),
            scale=tuple(float(n) ** -i for n in levels),
        )
        for i in range(num_layers)
    ]  # fmt: skip
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
    """Layers of LFQ, of which layer i has the scale 2^-i and clamps to ``clamp`` · 2^-i.

    ``options`` are those of ``lfq.init``, the others of :func:`init`. Raises what :func:`init` and ``lfq.init`` do.
    """
    key = random.key(key)
    layers = [
        lfq.init(random.fold(key, i), bits, scale=2.0**-i, clamp=None if clamp is None else clamp * 2.0**-i, **options)
        for i in range(num_layers)
    ]
    return init(key, layers, dim, bias=bias, dropout=dropout, cutoff=cutoff, multiple=multiple)


def _sizes(name: str, num_codes: int | Sequence[int], num_layers: int | None) -> tuple[int, ...]:
    if isinstance(num_codes, int) and num_layers is not None and num_layers > 0:
        return (num_codes,) * num_layers
    if isinstance(num_codes, int) or not num_codes or num_layers not in (None, len(num_codes)):
        raise ValueError(
            f"{name}: num_codes is {num_codes} and num_layers {num_layers}; wanted a number for each layer"
        )
    return tuple(num_codes)
