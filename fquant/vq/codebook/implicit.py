"""Implicit neural codebooks (QINCo): codes that a network adapts to the layers before (Huijben et al. 2024).

    layer = implicit.init(key, num_codes=256, dim=64)
    x     = implicit.decode(layer, codes, before)      # before: the sum of the layers before, in a residual

Each row has a codebook of its own, because ``before`` and a code are mapped to the vector of the code:

    x = enter([before, code])                   2D to D
    x = x + down(silu(up(x)))                   ``depth`` blocks, D to H to D

Book and network train by gradients; stats only restart dead codes. The search runs the network for every row and every
code, in tiles. The first layer of the residual is a plain book (``residual.init_implicit``).
"""

from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import silu

from ... import random, tree
from ..precision import linear
from ..quantized import Codes, Key, Mask, Quantized, Seed
from ..scalar.projection_layers import Dense, dense
from . import book as books
from . import rows
from . import update as updates
from .book import Book, Metric
from .encode import encode_among
from .gradient_estimators import Estimator, rotation
from .losses import commitment


@tree.node
class Block:
    """A residual block, x + down(silu(up(x)))."""

    up: Dense
    down: Dense


@tree.node
class Net:
    """The network from [before, code] to the vector of the code."""

    enter: Dense
    blocks: list[Block]


@tree.node
class Implicit:
    """A learnable book, and the network that adapts its codes."""

    book: Book
    net: Net


def init(
    key: Seed, num_codes: int, dim: int, *, depth: int = 4, hidden: int | None = None, metric: Metric = "euclidean"
) -> Implicit:
    """Create a layer with ``depth`` blocks of width ``hidden``, by default dim, initialised as torch's nn.Linear."""
    hidden = dim if hidden is None else hidden
    if depth < 0 or hidden < 1:
        raise ValueError(f"implicit.init: depth is {depth} and hidden {hidden}; wanted at least 0 and 1")
    key = random.key(key)
    book = books.init(random.fold(key, "book"), num_codes, dim, metric=metric, learnable=True)
    blocks = [
        Block(dense(random.fold(k, "up"), hidden, dim, True), dense(random.fold(k, "down"), dim, hidden, True))
        for k in (random.fold(key, i) for i in range(depth))
    ]
    return Implicit(book, Net(dense(random.fold(key, "enter"), dim, 2 * dim, True), blocks))


def adapt(layer: Implicit, codes: Tensor, before: Tensor) -> Tensor:
    """Apply the network to ``codes`` f[... D] of the book and ``before`` f[... D], which broadcast: f[... D]."""
    net = layer.net
    x = torch.cat(torch.broadcast_tensors(before, codes), -1)
    x = linear(x, net.enter.weight, net.enter.bias)
    for block in net.blocks:
        x = x + linear(silu(linear(x, block.up.weight, block.up.bias)), block.down.weight, block.down.bias)
    return rows.unit(x) if layer.book.metric == "cosine" else x


def encode(layer: Implicit, x: Tensor, before: Tensor, top: int | None = None) -> Tensor:
    """Return the nearest codes of rows ``x`` f[... D], i64[...] or i64[... top], with the errors of encode_among."""
    return encode_among(layer.book, x, partial(adapt, layer), before, top)


def decode(layer: Implicit, codes: Tensor, before: Tensor) -> Tensor:
    """Look up ``codes`` i64[...] and adapt them to ``before`` f[... D], f[... D]; zeros for -1."""
    vectors = adapt(layer, books.decode(layer.book, codes).to(before.dtype), before)
    return torch.where((codes == -1)[..., None], 0.0, vectors)


def apply(
    layer: Implicit,
    x: Tensor,
    before: Tensor,
    key: Key = None,
    mask: Mask = None,
    *,
    gradient: Estimator = rotation,
    codes: Codes = None,
    draw: bool = False,
    row_offset: rows.RowOffset | None = None,
) -> Quantized:
    """Quantise x f[... D] given ``before`` f[... D], with the arguments and errors of ``vq.apply`` of a learnable Book.

    The one loss is the commitment, which moves row, code and network. Gradients reach ``before`` through the network.
    """
    if key is None and draw:
        raise ValueError("key is None with draw=True, which needs one")
    point, valid, _, keys = rows.prepare(layer.book, x, key, mask, row_offset)
    codes = torch.where(valid, encode(layer, point, before) if codes is None else codes, -1)
    valid = codes >= 0
    start = rows.unit(point) if layer.book.metric == "cosine" else point
    q = decode(layer, codes, before)
    # Without the book: an estimator that compares rows with its codes would use codes that are not adapted.
    out = torch.where(valid[..., None], gradient(start, q, None, keys), 0).to(x.dtype)
    drawing = {"key": random.fold(key, "draw"), "row_offset": row_offset} if draw and key is not None else {}
    found = updates.stats(layer.book, x, codes, mask, **drawing)
    return Quantized(out, codes, {"commitment": commitment(start, q, valid)}, found)


def update(layer: Implicit, stats: updates.Stats, **options: Any) -> Implicit:
    """Update the book of ``layer`` as ``vq.update`` does."""
    return replace(layer, book=updates.update(layer.book, stats, **options))
