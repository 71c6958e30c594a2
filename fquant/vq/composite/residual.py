"""Residual quantisation: each layer quantises what the layers before leave (Zeghidour et al. 2021, algorithm 1).

    r0 = x        q_i = layer_i(r_i)        r_{i+1} = r_i - q_i        output: q_0 + q_1 + ...

    state = residual.init_books(key, num_codes=1024, width=64, num_layers=8)
    x, codes, losses, stats = residual.apply(state, x, key)
    state = residual.update(state, shard.psum(stats, mesh, axes))          # a Stats for each layer that learns

The layers are states of other modules (``residual_state.py``). The next layer gets r_i minus a constant, so the
gradient of the output is the sum of the layers'. The stats of a ``shared`` book cover all layers' rows, so it is
updated once. (vector-quantize-pytorch moves its averages once a layer, so the last layer counts most.)

*Dropout* trains any number of layers. Each key draws a depth, and later layers are omitted: code -1, nothing added, no
loss, no stats. All layers are computed and ``where`` selects, so the computation does not depend on the draw. The
papers use one key for all rows; a ``depth`` for each example can be given instead.
"""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ... import random
from ..codebook import book as books
from ..codebook import losses, rows
from ..codebook.gradient_estimators import Estimator
from ..codebook.update import Stats, add, unless_empty, update_each
from ..quantized import Key, Mask, Mean, Quantized, stack_trees
from ..scalar import projection_layers
from ..scalar.projection_layers import RowCounts
from .residual_state import Residual, init, init_books, init_fsq, init_implicit, init_lfq, init_simvq, verbs_of

__all__ = [
    "Residual", "apply", "cross_entropy", "decode", "decode_layers", "draw_depth", "encode", "init", "init_books",
    "init_fsq", "init_implicit", "init_lfq", "init_simvq", "layers_of", "project_in", "update",
]  # fmt: skip


def encode(state: Residual, x: Tensor) -> Tensor:
    """Return codes i64[... layers] of x f[... dim]; -1 for a row that is not finite."""
    rest, live = project_in("residual.encode", state, x, None)
    so_far, codes = torch.zeros_like(rest), []
    for layer in layers_of(state):
        codes.append(verbs_of(layer).encode(layer, rest, so_far))
        q = verbs_of(layer).decode(layer, codes[-1], so_far)
        rest, so_far = rest - q, so_far + q
    return torch.where(live[..., None], torch.stack(codes, -1), -1)


def decode(state: Residual, codes: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return x [... dim] of codes i[... layers], or of the first layers alone; -1 adds nothing.

    Raises what ``decode`` of a layer does, and ValueError for more codes than layers.
    """
    first, *others = decode_layers(state, codes, dtype).unbind(-2)
    out = sum(others, first)  # in the order of apply, so that the bits are equal
    return projection_layers.project_out(out[..., None, :], state.params, (codes != -1).any(-1, keepdim=True))


def decode_layers(state: Residual, codes: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return the output [... layers d] of each layer before the projection; codes i[... layers], or of the first."""
    layers = layers_of(state)
    if not codes.ndim or not 1 <= codes.shape[-1] <= len(layers):
        raise ValueError(f"residual.decode: codes are {tuple(codes.shape)}; wanted 1 to {len(layers)} in the last dim")
    width = verbs_of(layers[0]).size(layers[0])[0]
    so_far, each = torch.zeros((*codes.shape[:-1], width), dtype=dtype, device=codes.device), []
    for layer, layer_codes in zip(layers, codes.unbind(-1), strict=False):
        each.append(verbs_of(layer).decode(layer, layer_codes, so_far))
        so_far = so_far + each[-1]
    return torch.stack(each, -2)


def apply(
    state: Residual,
    x: Tensor,
    key: Key = None,
    mask: Mask = None,
    *,
    codes: Tensor | None = None,
    depth: Tensor | None = None,
    grad_frac: float = 0.0,
    outer: Estimator | None = None,
    **options: Any,
) -> Quantized:
    """Quantise x f[... dim]; losses are those of the layers, as Means of [layers] numbers.

    * key: i64[], equal on every rank, or for scalar layers of a shape that leads x's; turns on dropout and randomness.
    * codes: i64[... layers], given codes (``beam.py``), for books, implicit layers and SimVQ.
    * depth: i64 with leading dims of x, the number of layers of each row, instead of a draw.
    * grad_frac: the share of the gradient of a layer's output that flows into its remainder.
    * outer: the gradient estimator of the sum, instead of the layers'. DiVeQ's is ``directional``, with
      ``gradient=direct`` and ``grad_frac=1.0`` (Vali et al. 2025).

    ``options`` go to the layers. Statistics are a list of Stats, or a RowCounts if layers do not learn from them.
    Raises what ``apply`` of a layer does, and TypeError for codes of scalar layers.
    """
    if not 0 <= grad_frac <= 1:
        raise ValueError(f"residual.apply: grad_frac is {grad_frac}; wanted one in [0, 1]")
    layers, name = layers_of(state), "residual.apply"
    verbs, kind = verbs_of(layers[-1]), type(layers[-1]).__name__
    if codes is not None and verbs.table is None:
        raise TypeError(f"{name}: got codes for layers of {kind}; wanted Book, Implicit or SimVQ")
    if codes is not None and codes.shape != (*x.shape[:-1], len(layers)):
        wanted = f"{len(layers)} for each row of {tuple(x.shape)}"
        raise ValueError(f"{name}: codes are {tuple(codes.shape)}; wanted {wanted}")
    if depth is not None and (depth.dtype is not torch.int64 or depth.shape != x.shape[:-1][: depth.ndim]):
        got = f"{depth.dtype} {tuple(depth.shape)}"
        raise ValueError(f"{name}: depth is {got}; wanted int64, of the first dims of x {tuple(x.shape)}")
    if key is not None and key.ndim and verbs.update is not None:
        raise ValueError(f"{name}: key is {tuple(key.shape)} for layers of {kind}; wanted one for all rows, and depth=")
    start, live = project_in("residual.apply", state, x, mask)
    mask = None if mask is None else rows.expand_mask(mask, live)
    if depth is None and key is not None and state.dropout:
        depth = draw_depth(state, key)
    if depth is not None:
        depth = depth.reshape((*depth.shape, *[1] * (live.ndim - depth.ndim)))
    row_offset, learns = options.get("row_offset"), verbs.update is not None
    rest, out, each = start, torch.zeros_like(start), []
    for i, layer in enumerate(layers):
        used = live if depth is None else live & (i < depth)
        given = dict(options) if codes is None else {**options, "codes": codes[..., i]}
        layer_key = None if key is None else key if state.shared else random.fold(key, i)
        if state.shared:
            first, total = row_offset or (0, live.numel() if mask is None else mask.sum())
            given["row_offset"] = first + i * total, len(layers) * total  # rows follow those of the layers before
        seen = torch.where(used[..., None], rest, torch.nan) if learns else rest
        got = verbs_of(layer).apply(layer, seen, out, layer_key, mask if learns else used, **given)
        q = got.x.detach()
        rest, out = rest - (q + grad_frac * (got.x - q) if grad_frac else q), out + got.x
        each.append(got)
    if outer is not None:
        numbers = rows.number_rows(None if mask is None else mask.reshape(1, -1), live.reshape(1, -1), row_offset)
        row_keys = None if key is None else rows.row_keys(random.fold(key, "outer"), numbers).reshape(live.shape)
        out = outer(start, out, None, row_keys)
    stats: Any = [got.stats for got in each]
    if not learns:
        stats = projection_layers.count_rows(live, mask)
    elif state.shared:
        stats = [add(*stats)]
    codes, loss = torch.stack([got.codes for got in each], -1), stack_trees([got.losses for got in each])
    out = projection_layers.project_out(out[..., None, :], state.params, live[..., None])
    return Quantized(out.to(x.dtype), codes, loss, stats)


def cross_entropy(state: Residual, x: Tensor, codes: Tensor, mask: Mask = None) -> Mean:
    """Return the cross-entropy between rows x f[... dim] and target ``codes`` i64[... layers], a Mean of [layers].

    Each layer gets what the earlier targets leave of x (Shen et al. 2023), in vector-quantize-pytorch x itself; a
    target of -1 has no term and subtracts nothing. Raises TypeError for layers other than Books.
    """
    layers = layers_of(state)
    if codes.shape != (*x.shape[:-1], len(layers)):
        raise ValueError(f"residual.cross_entropy: codes are {tuple(codes.shape)}; wanted {len(layers)} for each row")
    rest, live = project_in("residual.cross_entropy", state, x, mask)
    each = []
    for i, (layer, layer_codes) in enumerate(zip(layers, codes.unbind(-1), strict=True)):
        if not isinstance(layer, books.Book):
            raise TypeError(f"residual.cross_entropy: layers.{i} is a {type(layer).__name__}; wanted a Book")
        each.append(losses.cross_entropy(layer, rest, layer_codes, live))
        rest = rest - books.decode(layer, layer_codes).to(rest.dtype).detach()
    return stack_trees(each)


def update(state: Residual, stats: RowCounts | list[Stats], **options: Any) -> Residual:
    """Return ``state`` with each layer updated from its stats; ``options`` are those of the layers' ``update``.

    A layer that dropout kept from all rows stays, so that its codes do not expire. Raises what ``update`` of a layer
    does, and TypeError for stats or options of another kind of layers.
    """
    learns, kind = verbs_of(state.layers[0]).update is not None, type(state.layers[0]).__name__
    if isinstance(stats, RowCounts) == learns or (options and not learns):
        got = f"{type(stats).__name__} and options {sorted(options)}"
        wanted = "a list of Stats" if learns else "RowCounts and no options"
        raise TypeError(f"residual.update: got {got} for layers of {kind}; wanted {wanted}")
    if isinstance(stats, RowCounts):
        return state
    update_layer = lambda layer, stats: unless_empty(verbs_of(layer).update, layer, stats, **options)  # type: ignore[arg-type]
    return replace(state, layers=update_each("residual.update", "layers", state.layers, stats, update_layer))


def draw_depth(state: Residual, key: Tensor) -> Tensor:
    """Draw the number of layers for the rows of each key: i64 of the shape of ``key``, which may exceed the layers."""
    choices = len(layers_of(state)) - state.cutoff
    last = (random.bits(random.fold(key, "depth"), key.shape) * choices >> 32) + state.cutoff
    return last.div(state.multiple, rounding_mode="floor") * state.multiple + state.multiple


def layers_of(state: Residual) -> list[Any]:
    """Return its layers, a shared one repeated."""
    return state.layers * state.shared if state.shared else state.layers


def project_in(name: str, state: Residual, x: Tensor, mask: Mask) -> tuple[Tensor, Tensor]:
    """Return the input [... d] of the first layer for x f[... dim], and the live rows bool[...]."""
    z, live = projection_layers.project_in(name, x, state.dim, mask, state.params)  # [... 1 d]
    if state.clamp is not None:
        bound = projection_layers.per_scalar(state.clamp, z)
        z = torch.tanh(z / bound) * bound
    return z.squeeze(-2), live
