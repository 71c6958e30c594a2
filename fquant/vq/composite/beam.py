"""beam: codes of a residual that are chosen together, several candidates being kept from layer to layer.

    codes = beam.encode(state, x, beam=8)
    out   = residual.apply(state, x, key, codes=codes)        # to train with them

The nearest code of a layer need not leave what the next one can say. Here each of ``beam`` partial choices goes on with
its ``beam`` nearest codes, and of all these the best stay. A choice is worth what vector-quantize-pytorch takes: minus
the sum of the layers' commitment losses, each the mean square of what the layer leaves, times the layer's weight. With
all weight on the last layer that is the error of the sum, which is what to ask for where only the sum matters.

One candidate is the plain ``encode``; as many as there are choices is exhaustive search. Of equal choices the one that
came of the better beginning, and of its nearer code, stays.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from ..codebook.book import Book
from ..codebook.implicit import Implicit
from ..codebook.rows import map_tiles, unit
from ..scalar import mixed_radix
from . import residual
from .layer import VERBS
from .residual import Residual


def encode(state: Residual, x: Tensor, beam: int, weights: Sequence[float] | None = None) -> Tensor:
    """x f[... dim] -> codes i64[... layers], the best of a search with ``beam`` candidates; -1 for rows not finite.

    ``weights`` are those of the layers' losses, by default one each. For fewer layers search a state that has fewer.
    In memory are beam² rows for each row, of some rows at a time.

    Raises TypeError for layers without a list of nearest codes, those of scalars; ValueError for a beam below 1 and
    weights of another number of layers.
    """
    layers = residual.layers_of(state)
    for i, layer in enumerate(layers):
        if VERBS[type(layer)].best is None:
            raise TypeError(f"beam.encode: layers.{i} is a {type(layer).__name__}; wanted Book, Implicit or SimVQ")
    if beam < 1:
        raise ValueError(f"beam.encode: beam is {beam}; wanted at least 1")
    weights = [1.0] * len(layers) if weights is None else list(weights)
    if len(weights) != len(layers):
        raise ValueError(f"beam.encode: {len(weights)} weights for {len(layers)} layers; wanted one for each")
    with torch.no_grad():
        left, kept, _ = residual.enter("beam.encode", state, x.detach(), None)
        flat = left.reshape(-1, left.shape[-1])
        codes = map_tiles(partial(_search, layers, weights, beam), beam * beam * left.shape[-1], flat)
    return torch.where(kept[..., None], codes.reshape(*kept.shape, len(layers)), mixed_radix.NONE)


def _search(layers: list, weights: list[float], beam: int, x: Tensor) -> Tensor:
    """The codes i64[m layers] of rows x [m d]."""
    left, before = x[:, None], torch.zeros_like(x[:, None])  # [m j d], of j candidates
    score = torch.zeros_like(left[..., 0])
    paths = torch.zeros((*score.shape, 0), dtype=torch.int64, device=x.device)  # [m j layers so far]
    for i, (layer, weight) in enumerate(zip(layers, weights, strict=True)):
        verbs = VERBS[type(layer)]
        assert verbs.best is not None
        codes = verbs.best(layer, left, before, min(beam, _num_codes(layer)))  # [m j t]
        wide = (*codes.shape, x.shape[-1])
        q = verbs.decode(layer, codes, before[..., None, :].expand(wide))
        start = unit(left) if _metric(layer) == "cosine" else left
        worth = score[..., None] - weight * (start[..., None, :] - q).square().mean(-1)
        paths = torch.cat([paths[..., None, :].expand(*codes.shape, -1), codes[..., None]], -1).flatten(1, 2)
        number = 1 if i == len(layers) - 1 else beam
        score, best = worth.flatten(1).sort(dim=-1, descending=True, stable=True)
        score, best = score[:, :number], best[:, :number, None]
        paths = paths.gather(1, best.expand(-1, -1, i + 1))
        q = q.flatten(1, 2).gather(1, best.expand(-1, -1, x.shape[-1]))
        beginning = best.div(codes.shape[-1], rounding_mode="floor").expand(-1, -1, x.shape[-1])
        left, before = left.gather(1, beginning) - q, before.gather(1, beginning) + q
    return paths[:, 0]


def _num_codes(layer: object) -> int:
    if isinstance(layer, Book | Implicit):
        return (layer.book if isinstance(layer, Implicit) else layer).codes.shape[-2]
    return layer.frozen.shape[0]  # type: ignore[attr-defined]


def _metric(layer: object) -> str:
    if isinstance(layer, Book | Implicit):
        return (layer.book if isinstance(layer, Implicit) else layer).metric
    return "euclidean"
