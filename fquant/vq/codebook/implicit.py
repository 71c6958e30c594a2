"""Implicit neural codebooks: what a code stands for depends on what the layers before have made (Huijben et al. 2024).

    layer = implicit.init(key, num_codes=256, dim=64)
    made  = implicit.decode(layer, codes, before)

A layer of a residual (QINCo): its codes are the input of a small network, together with ``before``, the sum of what the
layers before have made of the row, so that each row has a codebook of its own.

    x = enter([before, code])                   2D to D
    x = x + down(silu(up(x)))                   so many blocks, D to H to D

Book and network train by gradients; of the stats only counts are used, to start dead codes again. To find the nearest
code the network runs for every row and every code: rows · K · D numbers, some rows at a time. A residual has such
layers behind a first one that is a plain book (``residual.init_implicit``).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import silu

from ... import random, tree
from ..precision import linear
from ..quantized import Quantized
from ..scalar import projection_layers
from ..scalar.projection_layers import Dense
from . import book as books
from . import rows
from .book import Book, Metric
from .encode import encode_among
from .gradient_estimators import GradientEstimator, rotation
from .losses import commitment
from .rows import RowOffset, unit
from .update import Stats
from .update import stats as stats_of
from .update import update as update_book


@tree.node
class Block:
    """x + down(silu(up(x)))."""

    up: Dense
    down: Dense


@tree.node
class Net:
    """From [before, code] to what the code stands for."""

    enter: Dense
    blocks: list[Block]


@tree.node
class Implicit:
    """A learnable book, and the network that its codes go through."""

    book: Book
    net: Net


def init(
    key: int | Tensor,
    num_codes: int,
    dim: int,
    *,
    depth: int = 4,
    hidden: int | None = None,
    metric: Metric = "euclidean",
) -> Implicit:
    """``depth`` blocks of width ``hidden``, by default dim, which begin as torch's nn.Linear does.

    Raises what ``init`` of a Book does, and ValueError for a negative depth or a width below 1.
    """
    hidden = dim if hidden is None else hidden
    if depth < 0 or hidden < 1:
        raise ValueError(f"implicit.init: depth is {depth} and hidden {hidden}; wanted at least 0 and 1")
    key = random.key(key)
    book = books.init(random.fold(key, "book"), num_codes, dim, metric=metric, learnable=True)
    blocks = [
        Block(
            projection_layers.dense(random.fold(random.fold(key, i), "up"), hidden, dim, True),
            projection_layers.dense(random.fold(random.fold(key, i), "down"), dim, hidden, True),
        )
        for i in range(depth)
    ]
    return Implicit(book, Net(projection_layers.dense(random.fold(key, "enter"), dim, 2 * dim, True), blocks))


def through(layer: Implicit, codes: Tensor, before: Tensor) -> Tensor:
    """What ``codes`` f[... D] of the book become beside ``before`` f[... D], both of which broadcast: f[... D]."""
    net = layer.net
    x = torch.cat(torch.broadcast_tensors(before, codes), -1)
    x = linear(x, net.enter.weight, net.enter.bias)
    for block in net.blocks:
        x = x + linear(silu(linear(x, block.up.weight, block.up.bias)), block.down.weight, block.down.bias)
    return unit(x) if layer.book.metric == "cosine" else x


def encode(layer: Implicit, x: Tensor, before: Tensor, top: int | None = None) -> Tensor:
    """The nearest code of rows ``x`` f[... D], i64[...], or so many, i64[... top]. Raises what encode_among does."""
    return encode_among(layer.book, x, lambda codes, given: through(layer, codes, given), before, top)


def decode(layer: Implicit, codes: Tensor, before: Tensor) -> Tensor:
    """What ``codes`` i64[...] stand for beside ``before`` f[... D], f[... D]; zeros for -1."""
    made = through(layer, books.decode(layer.book, codes).to(before.dtype), before)
    return torch.where((codes == -1)[..., None], 0.0, made)


def apply(
    layer: Implicit,
    x: Tensor,
    before: Tensor,
    key: Tensor | None = None,
    mask: Tensor | None = None,
    *,
    gradient: GradientEstimator = rotation,
    codes: Tensor | None = None,
    draw: bool = False,
    row_offset: RowOffset | None = None,
) -> Quantized:
    """x f[... D] quantised beside ``before`` f[... D]: what ``apply`` of a learnable Book does, with its arguments.

    Its one loss is the commitment, which moves the row, the code and the network. The gradient of ``before`` is that of
    what the network makes of it. Raises what ``apply`` of a Book does.
    """
    if key is None and draw:
        raise ValueError("key is None with draw=True, which needs one")
    point, live, _, each = rows.prepare(layer.book, x, key, mask, row_offset)
    codes = torch.where(live, encode(layer, point, before) if codes is None else codes, -1)
    live = codes >= 0
    start = unit(point) if layer.book.metric == "cosine" else point
    q = decode(layer, codes, before)
    # Without the book: a path that compares rows with its codes would do so with those that no row has.
    out = torch.where(live[..., None], gradient(start, q, None, each), 0).to(x.dtype)
    drawing = {"key": random.fold(key, "draw"), "row_offset": row_offset} if draw and key is not None else {}
    found = stats_of(layer.book, x, codes, mask, **drawing)
    return Quantized(out, codes, {"commitment": commitment(start, q, live)}, found)


def update(layer: Implicit, stats: Stats, **options: Any) -> Implicit:
    """``layer`` with its book updated, ``options`` being those of ``update`` of a Book; raises what that does."""
    return replace(layer, book=update_book(layer.book, stats, **options))
