"""Residual quantisation: each layer quantises what the layers before have left (Zeghidour et al. 2021, algorithm 1).

    r0 = x        q_i = layer_i(r_i)        r_{i+1} = r_i - q_i        what comes out: q_0 + q_1 + ...

The layers are states of other modules here, whose own verbs do the work, layer by layer (``layer.py``); how they are
made is in ``stacked.py``. Codes are those of the layers side by side, [... layers], and what the first few make is a
coarser x, so :func:`decode` takes fewer, too.

    state = residual.init_books(key, num_codes=1024, width=64, num_layers=8)
    state = residual.init_fsq(key, levels=(8, 5, 5, 5), num_layers=4)      # scales L^-i of L levels
    state = residual.init_lfq(key, bits=8, num_layers=4)                   # scales 2^-i

What is left for the next layer is r_i minus a constant, so the gradient of what comes out is the sum of the layers'.
``grad_frac`` of the gradient of q_i goes into what is left, too.

*What is learnt.* Of layers that learn from statistics, these are a list, a Stats for each, all of float32: one sum over
ranks serves all layers.

    x, codes, losses, stats = apply(state, x, key)
    state = update(state, shard.psum(stats, mesh, axes))

A ``shared`` book is every layer's. Its stats are those of all layers' rows together, so it is updated once, as if they
had been one batch. (vector-quantize-pytorch moves its averages once a layer, the last of which then counts most.)

``dropout`` trains any number of layers: for each key a depth is drawn, and layers from there on are left out (code -1,
nothing added, no loss, no stats). All layers are computed and those left out are put aside with ``where``, so what is
computed does not depend on the draw. One key for all rows is what the papers do; a ``depth`` for each example can be
given instead.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ... import random, tree
from ..codebook import rows
from ..codebook.book import Book
from ..codebook.book import decode as decode_book
from ..codebook.gradient_estimators import GradientEstimator
from ..codebook.losses import cross_entropy as cross_entropy_of
from ..codebook.rows import RowOffset
from ..codebook.update import Stats, add, unless_empty
from ..quantized import Mean, Quantized, stack_trees
from ..scalar import mixed_radix, projection_layers
from ..scalar.projection_layers import RowCounts
from .layer import VERBS
from .residual_state import Residual, init, init_books, init_fsq, init_implicit, init_lfq, init_simvq

__all__ = [
    "Residual", "apply", "cross_entropy", "decode", "decode_layers", "draw_depth", "encode", "enter", "init",
    "init_books", "init_fsq", "init_implicit", "init_lfq", "init_simvq", "layers_of", "update",
]  # fmt: skip


def encode(state: Residual, x: Tensor) -> Tensor:
    """x f[... dim] -> codes i64[... layers]; -1 for a row that is not finite."""
    left, kept, _ = enter("residual.encode", state, x, None)
    before, codes = torch.zeros_like(left), []
    for layer in layers_of(state):
        verbs = VERBS[type(layer)]
        codes.append(verbs.encode(layer, left, before))
        q = verbs.decode(layer, codes[-1], before)
        left, before = left - q, before + q
    return torch.where(kept[..., None], torch.stack(codes, -1), mixed_radix.NONE)


def decode(state: Residual, codes: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """codes i[... layers], or of the first layers alone -> x [... dim] in ``dtype``; -1 adds nothing.

    Raises ValueError for more codes than layers, and what ``decode`` of a layer raises for a code that there is not.
    """
    first, *others = decode_layers(state, codes, dtype).unbind(-2)
    return _leave(
        state, sum(others, first), (codes != mixed_radix.NONE).any(-1)
    )  # added in the order of apply, to the bit


def decode_layers(state: Residual, codes: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """What each layer adds, before the projection: codes i[... layers], or of the first -> [... layers d]."""
    layers = layers_of(state)
    if not codes.ndim or not 1 <= codes.shape[-1] <= len(layers):
        raise ValueError(f"residual.decode: codes are {tuple(codes.shape)}; wanted 1 to {len(layers)} in the last dim")
    width = VERBS[type(layers[0])].size(layers[0])[0]
    before, each = torch.zeros((*codes.shape[:-1], width), dtype=dtype, device=codes.device), []
    for layer, some in zip(layers, codes.unbind(-1), strict=False):
        each.append(VERBS[type(layer)].decode(layer, some, before))
        before = before + each[-1]
    return torch.stack(each, -2)


def apply(
    state: Residual,
    x: Tensor,
    key: Tensor | None = None,
    mask: Tensor | None = None,
    *,
    codes: Tensor | None = None,
    depth: Tensor | None = None,
    grad_frac: float = 0.0,
    outer: GradientEstimator | None = None,
    **options: Any,
) -> Quantized:
    """x f[... dim] quantised; the losses of the layers as Means of [layers] numbers.

    key        turns on dropout and what of the layers is random. Of scalar layers its shape leads x's; books want [],
               the same on every rank
    mask       bool[...] is True for the rows that count
    codes      i64[... layers] that rows have got already (``beam.py``), for books, implicit layers and SimVQ
    depth      i64, whose dims are the first of x: how many layers rows have, instead of a draw
    grad_frac  of the gradient of what a layer makes goes into what it leaves
    outer      how the derivative of the sum reaches x, instead of layer by layer: with ``gradient=direct`` and
               ``grad_frac=1.0`` ``directional`` here is DiVeQ's (Vali et al. 2025)

    ``options`` go to the layers. The statistics are a list of Stats, or a RowCounts of layers that do not learn.
    Raises what ``apply`` of a layer does, ValueError for a grad_frac outside of [0, 1] and other shapes, and TypeError
    for codes of layers that cannot be given any.
    """
    if not 0 <= grad_frac <= 1:
        raise ValueError(f"residual.apply: grad_frac is {grad_frac}; wanted one in [0, 1]")
    _check(state, x, key, codes, depth)
    start, kept, counts = enter("residual.apply", state, x, mask)
    mask = None if mask is None else rows.expand_mask(mask, kept)
    if depth is None and key is not None and state.dropout:
        depth = draw_depth(state, key)
    deep = None if depth is None else depth.reshape((*depth.shape, *[1] * (kept.ndim - depth.ndim)))
    left, out, each = start, torch.zeros_like(start), []
    for i, layer in enumerate(layers := layers_of(state)):
        used = kept if deep is None else kept & (i < deep)
        more = dict(options) if codes is None else {**options, "codes": codes[..., i]}
        mine = None if key is None else key if state.shared else random.fold(key, i)
        if state.shared:
            row_offset = options.get("row_offset")
            more["row_offset"] = _numbers(i, len(layers), kept if mask is None else mask, mask, row_offset)
        found = VERBS[type(layer)].apply(layer, left, out, mine, used, mask, **more)
        left, out = left - _partly(found.x, grad_frac), out + found.x
        each.append(found)
    if outer is not None:
        out = outer(start, out, None, None if key is None else _row_keys(key, kept, mask, options.get("row_offset")))
    losses = stack_trees([found.losses for found in each])
    stats: Any = counts if VERBS[type(layers[0])].update is None else [found.stats for found in each]
    stats = [add(*stats)] if state.shared else stats
    return Quantized(_leave(state, out, kept).to(x.dtype), torch.stack([f.codes for f in each], -1), losses, stats)


def cross_entropy(state: Residual, x: Tensor, codes: Tensor, mask: Tensor | None = None) -> Mean:
    """Of rows x f[... dim] and ``codes`` i64[... layers] that they are to have, a Mean of [layers] numbers.

    Each layer is given what the codes before leave of x (Shen et al. 2023); -1 is no term, and leaves what
    it finds. (vector-quantize-pytorch gives x itself to every layer.) Raises TypeError for layers that are no Books,
    ValueError for another number of codes.
    """
    layers = layers_of(state)
    if codes.shape != (*x.shape[:-1], len(layers)):
        raise ValueError(f"residual.cross_entropy: codes are {tuple(codes.shape)}; wanted {len(layers)} for each row")
    left, kept, _ = enter("residual.cross_entropy", state, x, mask)
    each = []
    for i, (layer, some) in enumerate(zip(layers, codes.unbind(-1), strict=True)):
        if not isinstance(layer, Book):
            raise TypeError(f"residual.cross_entropy: layers.{i} is a {type(layer).__name__}; wanted a Book")
        each.append(cross_entropy_of(layer, left, some, kept))
        left = left - decode_book(layer, some).to(left.dtype).detach()
    return stack_trees(each)


def update(state: Residual, stats: RowCounts | list[Stats], **options: Any) -> Residual:
    """``state`` with each layer updated by its stats; ``options`` are those of the layers' ``update``.

    A layer that no row has reached, since it was dropped, stays as it is, so that its codes do not die of it; so do
    layers that do not learn from statistics. Raises what ``update`` of a layer does, TypeError for stats or options of
    another kind of layers, and ValueError for stats of another number of layers.
    """
    learns = VERBS[type(state.layers[0])].update is not None
    if isinstance(stats, RowCounts) == learns or (options and not learns):
        kind = type(state.layers[0]).__name__
        raise TypeError(
            f"residual.update: got {type(stats).__name__} and options {sorted(options)} for layers of {kind}"
        )
    if isinstance(stats, RowCounts):
        return state
    if len(stats) != len(state.layers):
        raise ValueError(f"residual.update: got stats of {len(stats)} layers; wanted {len(state.layers)}")
    layers = []
    for i, (layer, some) in enumerate(zip(state.layers, stats, strict=True)):
        with tree.at(f"layers.{i}"):
            new = VERBS[type(layer)].update(layer, some, **options)  # type: ignore[misc]
        layers.append(unless_empty(some, new, layer))
    return replace(state, layers=layers)


def draw_depth(state: Residual, key: Tensor) -> Tensor:
    """How many layers the rows of each key have, of the shape of ``key``: i64. It may be more than there are."""
    choices = len(layers_of(state)) - state.cutoff
    last = (random.bits(random.fold(key, "depth"), key.shape) * choices >> 32) + state.cutoff
    return last.div(state.multiple, rounding_mode="floor") * state.multiple + state.multiple


def layers_of(state: Residual) -> list[Any]:
    """Its layers, the shared one as often as it is one."""
    return state.layers * state.shared if state.shared else state.layers


def enter(name: str, state: Residual, x: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor, RowCounts]:
    """What is left for the first layer [... d], which rows count, and their counts."""
    x, kept = projection_layers.start(name, x, state.dim, mask)
    z, kept = projection_layers.enter(x, kept, state.params, 1)  # [... 1 d]
    if state.clamp is not None:
        bound = projection_layers.row(state.clamp, z)
        z = torch.tanh(z / bound) * bound
    return z.squeeze(-2), kept, projection_layers.counted(kept, mask)


def _check(state: Residual, x: Tensor, key: Tensor | None, codes: Tensor | None, depth: Tensor | None) -> None:
    layers, name = layers_of(state), "residual.apply"
    verbs, kind = VERBS[type(layers[-1])], type(layers[-1]).__name__
    if codes is not None and verbs.best is None:
        raise TypeError(f"{name}: got codes for layers of {kind}; wanted Book, Implicit or SimVQ")
    if codes is not None and codes.shape != (*x.shape[:-1], len(layers)):
        raise ValueError(
            f"{name}: codes are {tuple(codes.shape)}; wanted {len(layers)} for each row of {tuple(x.shape)}"
        )
    if depth is not None and (depth.dtype is not torch.int64 or depth.shape != x.shape[:-1][: depth.ndim]):
        got = f"{depth.dtype} {tuple(depth.shape)}"
        raise ValueError(f"{name}: depth is {got}; wanted int64, of the first dims of x {tuple(x.shape)}")
    if key is not None and key.ndim and verbs.update is not None:
        raise ValueError(f"{name}: key is {tuple(key.shape)} for layers of {kind}; wanted one for all rows, and depth=")


def _leave(state: Residual, out: Tensor, known: Tensor) -> Tensor:
    return projection_layers.leave(out[..., None, :], state.params, known[..., None])


def _partly(q: Tensor, frac: float) -> Tensor:
    return q.detach() if frac == 0 else q.detach() + frac * (q - q.detach())


def _numbers(i: int, layers: int, kept: Tensor, mask: Tensor | None, row_offset: RowOffset | None) -> RowOffset:
    """The numbers of a shared book's rows: those of layer i come after those of all ranks of the layers before."""
    first, total = row_offset or (0, kept.numel() if mask is None else mask.sum())
    return first + i * total, layers * total


def _row_keys(key: Tensor, kept: Tensor, mask: Tensor | None, row_offset: RowOffset | None) -> Tensor:
    """A key i64[...] for each row, of its number."""
    flat = None if mask is None else mask.reshape(1, -1)
    number = rows.number_rows(flat, kept.reshape(1, -1), row_offset)
    return rows.row_keys(random.fold(key, "outer"), number).reshape(kept.shape)
