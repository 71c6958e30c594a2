"""Residual quantisation: each layer quantises what the layers before have left (Zeghidour et al. 2021, algorithm 1).

    r0 = x        q_i = layer_i(r_i)        r_{i+1} = r_i - q_i        what comes out: q_0 + q_1 + ...

The layers are states of another module here, whose own verbs do the work, layer by layer; what makes a layer finer than
the one before, its ``scale``, is part of it. Codes are those of the layers side by side, [... layers], and what the
first few make is a coarser x, so :func:`decode` takes fewer, too.

    state = residual.init_fsq(key, levels=(8, 5, 5, 5), num_layers=4)      # scales L^-i of L levels
    state = residual.init_lfq(key, bits=8, num_layers=4)                   # scales 2^-i

What is left for the next layer is r_i minus a constant, so the gradient of what comes out is the sum of the layers'.

``dropout`` trains any number of layers: for each key a depth is drawn, and layers from there on are left out (code -1,
nothing added, no loss). All layers are computed and those left out are put aside with ``where``, so what is computed
does not depend on the draw. One key for all rows is what the papers do, a key for each example a depth for each.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from .. import random, tree
from . import frame, fsq, lfq, radix
from .frame import Projections, RowCounts
from .quantized import Mean, Quantized

VERBS: dict[type, Any] = {fsq.FSQ: fsq, lfq.LFQ: lfq}  # what a layer may be, and the module of its verbs


@tree.node
class Residual:
    """Layers that are quantisers of one size without projections, and those of x to and from it."""

    layers: list[Any]
    params: Projections | None  # what trains
    dim: int = tree.static()
    clamp: tuple[float, ...] | None = tree.static(default=None)
    dropout: bool = tree.static(default=False)
    cutoff: int = tree.static(default=0)
    multiple: int = tree.static(default=1)


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
) -> Residual:
    """A state for x f[... dim], which by default is that of the layers and is projected otherwise.

    clamp      bounds the scalars softly, by tanh, to ± so much, before the first layer
    dropout    leave out layers by key: of n layers the first d stay, d being uniform in cutoff + 1 ... n, and
    multiple   then rounded up to a multiple of this

    Raises TypeError for layers of another kind, ValueError for layers of more than one size, projected ones and those
    of several codebooks, options out of range, and options of what is left out.
    """
    layers, name = list(layers), "residual.init"
    for i, layer in enumerate(layers):
        if type(layer) not in VERBS:
            known = ", ".join(kind.__name__ for kind in VERBS)
            raise TypeError(f"{name}: layers.{i} is a {type(layer).__name__}; wanted one of {known}")
        if layer.params is not None or layer.num_codebooks != 1 or layer.dim != layers[0].dim:
            got = f"dim {layer.dim}, {layer.num_codebooks} codebooks, projections {layer.params is not None}"
            wanted = f"the dim of the first, {layers[0].dim}, 1 codebook and none: the residual itself takes dim"
            raise ValueError(f"{name}: layers.{i} has {got}; wanted {wanted}")
    if not layers:
        raise ValueError(f"{name}: there are no layers; wanted at least 1")
    if not 0 <= cutoff < len(layers) or multiple < 1:
        raise ValueError(
            f"{name}: cutoff is {cutoff}, multiple {multiple}; wanted a layer of {len(layers)}, at least 1"
        )
    if not dropout and (cutoff, multiple) != (0, 1):
        raise ValueError(f"{name}: cutoff and multiple are about dropout; use dropout=True")
    width = layers[0].dim
    bounds = None if clamp is None else tuple(clamp) if isinstance(clamp, Sequence) else (clamp,) * width
    if bounds is not None and (len(bounds) != width or not min(bounds) > 0):
        raise ValueError(f"{name}: clamp is {clamp}; wanted a positive number, or {width} of them")
    dim, params = frame.init(name, frame.keyed(key), dim, 1, width, bias)
    return Residual(layers, params, dim, bounds, dropout, cutoff, multiple)


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
    key, levels = frame.keyed(key), tuple(levels)
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
    key = frame.keyed(key)
    layers = [
        lfq.init(random.fold(key, i), bits, scale=2.0**-i, clamp=None if clamp is None else clamp * 2.0**-i, **options)
        for i in range(num_layers)
    ]
    return init(key, layers, dim, bias=bias, dropout=dropout, cutoff=cutoff, multiple=multiple)


def encode(state: Residual, x: Tensor) -> Tensor:
    """x f[... dim] -> codes i64[... layers]; -1 for a row that is not finite."""
    left, kept, _ = _enter("residual.encode", state, x, None)
    codes = []
    for layer in state.layers:
        verbs = VERBS[type(layer)]
        codes.append(verbs.encode(layer, left))
        left = left - verbs.decode(layer, codes[-1], left.dtype)
    return torch.where(kept[..., None], torch.stack(codes, -1), radix.NONE)


def decode(state: Residual, codes: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """codes i[... layers], or of the first layers alone -> x [... dim] in ``dtype``; -1 adds nothing.

    Raises ValueError for more codes than layers, IndexError for a code that there is not.
    """
    first, *others = decode_layers(state, codes, dtype).unbind(-2)
    return _leave(state, sum(others, first), (codes != radix.NONE).any(-1))  # added in the order of apply, to the bit


def decode_layers(state: Residual, codes: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """What each layer adds, before the projection: codes i[... layers], or of the first -> [... layers d]."""
    if not codes.ndim or not 1 <= codes.shape[-1] <= len(state.layers):
        raise ValueError(
            f"residual.decode: codes are {tuple(codes.shape)}; wanted 1 to {len(state.layers)} in the last dim"
        )
    each = zip(state.layers, codes.unbind(-1), strict=False)
    return torch.stack([VERBS[type(layer)].decode(layer, some, dtype) for layer, some in each], -2)


def apply(
    state: Residual, x: Tensor, key: Tensor | None = None, mask: Tensor | None = None, **options: Any
) -> Quantized:
    """x f[... dim] quantised; the losses of the layers as Means of [layers] numbers; a RowCounts as statistics.

    ``key``, whose shape leads x's, turns on dropout and what of the layers is random; ``mask`` bool[...] is True for
    the rows that count; ``options`` go to the layers.
    """
    left, kept, counts = _enter("residual.apply", state, x, mask)
    depth = None if key is None or not state.dropout else _depth(state, key, kept.ndim)
    out, codes, losses = torch.zeros_like(left), [], []
    for i, layer in enumerate(state.layers):
        used = kept if depth is None else kept & (i < depth)
        mine = None if key is None else random.fold(key, i)
        q, some, loss, _ = VERBS[type(layer)].apply(layer, left, mine, used, **options)
        left, out = left - q.detach(), out + q
        codes.append(some)
        losses.append(loss)
    stacked = {
        name: Mean(torch.stack([loss[name].sum for loss in losses]), torch.stack([loss[name].count for loss in losses]))
        for name in losses[0]
    }
    return Quantized(_leave(state, out, kept).to(x.dtype), torch.stack(codes, -1), stacked, counts)


def update(state: Residual, stats: RowCounts) -> Residual:
    """The state itself: nothing of it is a statistic."""
    return state


def _enter(name: str, state: Residual, x: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor, RowCounts]:
    """What is left for the first layer [... d], which rows count, and their counts."""
    x, kept = frame.rows(name, x, state.dim, mask)
    z, kept = frame.enter(x, kept, state.params, 1)  # [... 1 d]
    if state.clamp is not None:
        bound = torch.tensor(state.clamp, dtype=z.dtype, device=z.device)
        z = torch.tanh(z / bound) * bound
    return z.squeeze(-2), kept, frame.counted(kept, mask)


def _leave(state: Residual, out: Tensor, known: Tensor) -> Tensor:
    return frame.leave(out[..., None, :], state.params, known)


def _depth(state: Residual, key: Tensor, ndim: int) -> Tensor:
    """How many layers the rows of each key have: i64, of ``ndim`` dims."""
    choices = len(state.layers) - state.cutoff
    last = (random.bits(random.fold(key, "depth"), key.shape) * choices >> 32) + state.cutoff
    depth = last.div(state.multiple, rounding_mode="floor") * state.multiple + state.multiple
    return depth.reshape((*key.shape, *[1] * (ndim - key.ndim)))
