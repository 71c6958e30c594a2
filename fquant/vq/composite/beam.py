"""Beam search over the layers of a residual: several candidates are kept from layer to layer.

    codes = beam.encode(state, x, beam=8)
    out   = residual.apply(state, x, key, codes=codes)        # to train with them

Each of ``beam`` candidates is extended by its ``beam`` nearest codes, and the best extensions are kept. The score is
that of vector-quantize-pytorch: minus the weighted sum of the layers' commitment losses, each the mean square of what
the layer leaves. With all weight on the last layer it is the error of the sum. ``beam=1`` is the plain ``encode``. Ties
keep the candidate with the better start, then the nearer code.
"""

import math
from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from ..codebook.rows import map_tiles, unit
from . import residual
from .residual import Residual, verbs_of


def encode(state: Residual, x: Tensor, beam: int, weights: Sequence[float] | None = None) -> Tensor:
    """Return codes i64[... layers] of x f[... dim] by a search with ``beam`` candidates; -1 for rows not finite.

    ``weights`` are those of the layers' losses, 1 by default. Memory holds beam² rows for each row of a tile.
    """
    layers = residual.layers_of(state)
    for i, layer in enumerate(layers):
        if verbs_of(layer).table is None:
            raise TypeError(f"beam.encode: layers.{i} is a {type(layer).__name__}; wanted Book, Implicit or SimVQ")
    if beam < 1:
        raise ValueError(f"beam.encode: beam is {beam}; wanted at least 1")
    weights = [1.0] * len(layers) if weights is None else list(weights)
    if len(weights) != len(layers):
        raise ValueError(f"beam.encode: {len(weights)} weights for {len(layers)} layers; wanted one for each")
    with torch.no_grad():
        rest, live = residual.project_in("beam.encode", state, x.detach(), None)
        flat = rest.reshape(math.prod(rest.shape[:-1]), rest.shape[-1])
        codes = map_tiles(partial(_search, layers, weights, beam), beam * beam * rest.shape[-1], flat)
    return torch.where(live[..., None], codes.reshape(*live.shape, len(layers)), -1)


def _search(layers: list, weights: list[float], beam: int, x: Tensor) -> Tensor:
    """Return the codes i64[m layers] of rows x [m d]."""
    rest, so_far = x[:, None], torch.zeros_like(x[:, None])  # [m j d], of j candidates
    score = torch.zeros_like(rest[..., 0])
    paths = torch.zeros((*score.shape, 0), dtype=torch.int64, device=x.device)  # [m j layers so far]
    for i, (layer, weight) in enumerate(zip(layers, weights, strict=True)):
        verbs = verbs_of(layer)
        num_codes, metric = verbs.table(layer)  # type: ignore[misc]
        codes = verbs.encode(layer, rest, so_far, min(beam, num_codes))  # [m j t]
        q = verbs.decode(layer, codes, so_far[..., None, :].expand(*codes.shape, x.shape[-1]))
        start = unit(rest) if metric == "cosine" else rest
        scores = score[..., None] - weight * (start[..., None, :] - q).square().mean(-1)
        paths = torch.cat([paths[..., None, :].expand(*codes.shape, -1), codes[..., None]], -1).flatten(1, 2)
        num_kept = 1 if i == len(layers) - 1 else beam
        score, best = scores.flatten(1).sort(dim=-1, descending=True, stable=True)
        score, best = score[:, :num_kept], best[:, :num_kept, None]
        paths = paths.gather(1, best.expand(-1, -1, i + 1))
        q = q.flatten(1, 2).gather(1, best.expand(-1, -1, x.shape[-1]))
        parent = best.div(codes.shape[-1], rounding_mode="floor").expand(-1, -1, x.shape[-1])
        rest, so_far = rest.gather(1, parent) - q, so_far.gather(1, parent) + q
    return paths[:, 0]
