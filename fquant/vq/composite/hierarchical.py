"""Hierarchical quantisation: a map of rows as codes of one scale after another, coarse ones first (Tian et al. 2024).

    state = hierarchical.init(key, num_codes=4096, dim=32, scales=(1, 2, 4, 8, 16), spatial=2)
    codes = hierarchical.encode(state, x)              # x f[... 16 16 32]  ->  [i64[... 1 1], i64[... 2 2], ...]
    x     = hierarchical.decode(state, codes)

Of what is left of x each scale takes the means over its cells, quantises these, and takes them off again:

    down = pool(left)      q = book(down)      full = blend(upsample(q))      left = left - full      x' = sum of full

``upsample`` is linear, and ``blend`` (1 - p) · full + p · conv(full), a convolution over 3 places that trains: of all
scales one, or several, each for some of them that follow each other. Gradients pass through all of it, as in
vector-quantize-pytorch, what is left included.

*Masks.* A cell's mean is that of its rows that count, those that a mask keeps and that are finite; a cell without any
has code -1. What is masked out is zero in what comes out.

*Learning.* Statistics are a list, a Stats of each scale's cells; of a shared book the one of all cells, so that it is
updated once, as if they had been one batch. Cells are numbered example by example, so ``row_offset`` is the number of
the first example among those of all ranks, and how many these are.

*Nested dropout.* With a key, and with probability ``dropout``, only the first scales stay, at least ``least`` and not
all: the others have code -1, and add nothing, neither to losses nor to statistics.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ... import random, tree
from ..codebook import book as books
from ..codebook.apply import apply as apply_book
from ..codebook.book import Book, Metric
from ..codebook.gradient_estimators import GradientEstimator, straight_through
from ..codebook.rows import RowOffset
from ..codebook.update import Stats, add, unless_empty
from ..codebook.update import update as update_book
from ..precision import no_autocast
from ..quantized import Quantized, stack_trees
from ..scalar import projection_layers

CONV = (F.conv1d, F.conv2d, F.conv3d)
POOL: tuple[Any, ...] = (F.adaptive_avg_pool1d, F.adaptive_avg_pool2d, F.adaptive_avg_pool3d)
LINEAR = ("linear", "bilinear", "trilinear")
SMALL = 1e-6  # of a cell that has no rows


@tree.node
class Conv:
    """A convolution over 3 places in each direction: weight f32[dim dim 3 ...], bias f32[dim]."""

    weight: Tensor
    bias: Tensor


@tree.node
class Hierarchical:
    """Scales (places in each direction), the books of each of them, or one of all, and the convolutions."""

    books: list[Book]
    params: list[Conv]  # what trains
    scales: tuple[tuple[int, ...], ...] = tree.static()
    blend: float = tree.static(default=0.5)
    dropout: float = tree.static(default=0.0)
    least: int = tree.static(default=1)


@tree.node
class Levels:
    """What the books learn from, and how many rows of x were ``lost``, f32[]: kept by the mask, and not finite."""

    books: list[Stats]
    lost: Tensor


def init(
    key: int | Tensor,
    num_codes: int | Sequence[int],
    dim: int,
    scales: Sequence[int | Sequence[int]],
    *,
    spatial: int = 1,
    shared: bool = True,
    blend: float = 0.5,
    convs: int = 1,
    dropout: float = 0.0,
    least: int = 1,
    metric: Metric = "euclidean",
    learnable: bool = False,
) -> Hierarchical:
    """A state for x f[... *places dim], of ``spatial`` dims of places: 1, 2 or 3.

    scales   coarse to fine: for each its size in every direction, or one number for all
    shared   one book for all scales; otherwise one for each, of ``num_codes`` or a number for each
    blend    p; of 0 there are no convolutions
    convs    how many there are, at most one for each scale

    Raises ValueError for sizes below 1, scales that become smaller, and options out of range.
    """
    name, key = "hierarchical.init", random.key(key)
    if spatial not in (1, 2, 3):
        raise ValueError(f"{name}: spatial is {spatial}; wanted 1, 2 or 3")
    each = tuple((s,) * spatial if isinstance(s, int) else tuple(s) for s in scales)
    if not each or any(len(s) != spatial or min(s) < 1 for s in each):
        raise ValueError(f"{name}: scales are {tuple(scales)}; wanted at least one, of {spatial} sizes from 1 on")
    for one, other in zip(each, each[1:], strict=False):
        if any(a > b for a, b in zip(one, other, strict=True)):
            raise ValueError(f"{name}: scale {other} follows {one}; wanted none smaller than the one before")
    sizes = (num_codes,) * len(each) if isinstance(num_codes, int) else tuple(num_codes)
    if len(sizes) != len(each) or (shared and len(set(sizes)) > 1):
        kind = "one number for a shared book" if shared else f"{len(each)}, one for each scale"
        raise ValueError(f"{name}: num_codes is {num_codes}; wanted {kind}")
    if not 0 <= blend <= 1 or not 0 <= dropout <= 1 or not 1 <= convs <= len(each) or least < 1:
        got = f"blend is {blend}, dropout {dropout}, convs {convs}, least {least}"
        raise ValueError(f"{name}: {got}; wanted two in [0, 1], 1 to {len(each)}, at least 1")
    made = [
        books.init(random.fold(key, i), size, dim, metric=metric, learnable=learnable)
        for i, size in enumerate(sizes[:1] if shared else sizes)
    ]
    fan, params = dim * 3**spatial, []
    for i in range(convs if blend else 0):
        draw = lambda part, shape, i=i: random.kaiming_uniform(random.fold(random.fold(key, part), i), shape, fan)
        params.append(Conv(draw("weight", (dim, dim, *[3] * spatial)), draw("bias", (dim,))))
    return Hierarchical(made, params, each, blend, dropout, least)


def encode(state: Hierarchical, x: Tensor, mask: Tensor | None = None) -> list[Tensor]:
    """x f[... *places dim] -> codes i64[... *scale] of each scale; -1 of a cell without rows that count."""
    with torch.no_grad():
        return apply(state, x.detach(), mask=mask, losses=()).codes  # type: ignore[return-value]


def decode(
    state: Hierarchical, codes: Sequence[Tensor], places: Sequence[int] | None = None, dtype: torch.dtype | None = None
) -> Tensor:
    """codes i64[... *scale] of each scale, or of the first -> x [... *places dim], by default those of the finest.

    It is of ``dtype``, by default that of the books. A cell of -1 is zero, and a scale of nothing else adds nothing.
    Raises ValueError for more codes than scales, or of another shape, and what ``decode`` of a Book raises.
    """
    size, spatial = state.scales[-1] if places is None else tuple(places), len(state.scales[0])
    if not 1 <= len(codes) <= len(state.scales) or len(size) != spatial or min(size) < 1:
        got = f"codes of {len(codes)} scales for places {size}"
        raise ValueError(f"hierarchical.decode: got {got}; wanted 1 to {len(state.scales)}, and {spatial} sizes")
    lead, out = codes[0].shape[:-spatial], state.books[0].codes.new_zeros(())
    for i, (some, scale) in enumerate(zip(codes, state.scales, strict=False)):
        if some.shape != (*lead, *scale):
            raise ValueError(f"hierarchical.decode: codes.{i} are {tuple(some.shape)}; wanted {(*lead, *scale)}")
        flat = some.reshape(-1, *scale)
        full = _full(state, i, books.decode(_book(state, i), flat).movedim(-1, 1), size)
        out = out + torch.where(_over(flat >= 0, full), full, 0.0)
    out = out.movedim(1, -1).reshape(*lead, *size, state.books[0].codes.shape[-1])
    return out if dtype is None else out.to(dtype)


def apply(
    state: Hierarchical,
    x: Tensor,
    key: Tensor | None = None,
    mask: Tensor | None = None,
    *,
    depth: Tensor | None = None,
    gradient: GradientEstimator = straight_through,
    row_offset: RowOffset | None = None,
    **options: Any,
) -> Quantized:
    """x f[... *places dim] quantised: codes a list, losses as Means of [scales] numbers, and Levels as statistics.

    key    i64[], the same on every rank: turns on dropout, and what of the books is random
    mask   bool[... *places], rows that count; ``vq.mask`` makes one of lengths
    depth  i64[] or [...], how many scales an example has, instead of a draw
    row_offset  (first, total) numbers of this rank's examples, see ``rows.py``

    ``options`` are those of ``apply`` of a Book. Raises what that does, and ValueError for other shapes.
    """
    spatial, name = len(state.scales[0]), "hierarchical.apply"
    if x.ndim < spatial + 1:
        raise ValueError(f"{name}: x is {tuple(x.shape)}; wanted [... {'places ' * spatial}dim]")
    point, kept = projection_layers.start(name, x, state.books[0].codes.shape[-1], mask)
    lead, size = x.shape[: x.ndim - spatial - 1], x.shape[-spatial - 1 : -1]
    left = point.reshape(-1, *size, point.shape[-1]).movedim(-1, 1)  # [b dim *places]
    live = kept.reshape(-1, *size)[:, None].to(left.dtype)
    if key is not None and key.ndim:
        raise ValueError(f"{name}: key is {tuple(key.shape)}; wanted one for all rows, and depth= for examples")
    if depth is None and key is not None and state.dropout:
        depth = draw_depth(state, key)
    if depth is not None and (depth.dtype is not torch.int64 or depth.shape not in ((), lead)):
        got = f"{depth.dtype} {tuple(depth.shape)}"
        raise ValueError(f"{name}: depth is {got}; wanted int64 (), or one for each example {tuple(lead)}")
    deep = None if depth is None else depth.expand(lead).reshape(-1)
    whole, shared, cells = left.shape[0], len(state.books) == 1, [math.prod(scale) for scale in state.scales]
    first, total = row_offset or (0, whole)
    out, codes, each, stats = torch.zeros_like(left), [], [], []
    for i, scale in enumerate(state.scales):
        pooled, counted = (_pooled(t, scale) for t in (left * live, live))
        used = counted[:, 0] > 0  # [b *scale]
        if deep is not None:
            used = used & (i < deep).reshape(-1, *[1] * spatial)
        down = (pooled / counted.clamp(min=SMALL)).movedim(1, -1)
        before = total * sum(cells[:i]) if shared else 0
        got = apply_book(
            _book(state, i),
            torch.where(used[..., None], down, torch.nan),
            None if key is None else key if shared else random.fold(key, i),
            gradient=gradient,
            row_offset=(before + first * cells[i], total * (sum(cells) if shared else cells[i])),
            **options,
        )
        full = _full(state, i, got.x.movedim(-1, 1), size)
        full = torch.where(_over(got.codes >= 0, full), full, 0.0)
        left, out = left - full, out + full
        unused = (~used).sum().to(got.stats.kept.dtype)
        codes.append(got.codes.reshape(*lead, *scale))
        stats.append(replace(got.stats, kept=got.stats.kept - unused, lost=got.stats.lost - unused))
        each.append(got.losses)
    result = torch.where(kept[..., None], out.movedim(1, -1).reshape(x.shape), 0.0).to(x.dtype)
    lost = projection_layers.counted(kept, mask).bad.to(torch.float32)
    return Quantized(result, codes, stack_trees(each), Levels([add(*stats)] if shared else stats, lost))  # type: ignore[arg-type]


def update(state: Hierarchical, stats: Levels, **options: Any) -> Hierarchical:
    """``state`` with its books updated, ``options`` being those of ``update`` of a Book; raises what that does.

    A book that no row has reached stays as it is. Raises ValueError for stats of another number of books.
    """
    if len(stats.books) != len(state.books):
        raise ValueError(f"hierarchical.update: got stats of {len(stats.books)} books; wanted {len(state.books)}")
    new = []
    for i, (book, some) in enumerate(zip(state.books, stats.books, strict=True)):
        with tree.at(f"books.{i}"):
            new.append(unless_empty(some, update_book(book, some, **options), book))
    return replace(state, books=new)


def draw_depth(state: Hierarchical, key: Tensor) -> Tensor:
    """How many scales stay, i64 of the shape of ``key``: all, or with probability ``dropout`` ``least`` to one less."""
    most = len(state.scales)
    choices = most - state.least
    if choices < 1:
        return torch.full_like(key, most)
    drops = random.bernoulli(random.fold(key, "dropout"), state.dropout, key.shape)
    fewer = state.least + (random.bits(random.fold(key, "depth"), key.shape) * choices >> 32)
    return torch.where(drops, fewer, most)


def _book(state: Hierarchical, i: int) -> Book:
    return state.books[i if len(state.books) > 1 else 0]


def _pooled(t: Tensor, scale: tuple[int, ...]) -> Tensor:
    """The means of t [b dim *places] over the cells of ``scale``."""
    if max(scale) == 1:  # what torch does then is not mapped by vmap
        return t.mean(tuple(range(2, t.ndim)), keepdim=True)
    return POOL[len(scale) - 1](t, scale)


def _full(state: Hierarchical, i: int, q: Tensor, size: tuple[int, ...]) -> Tensor:
    """q [b dim *scale] at all places, blended."""
    if q.shape[2:] != size:
        q = F.interpolate(q, size=size, mode=LINEAR[len(size) - 1], align_corners=False)
    if not state.params:
        return q
    of = state.params[round(i / max(len(state.scales) - 1, 1) * (len(state.params) - 1))]
    weight, bias = of.weight.to(q.dtype), of.bias.to(q.dtype)
    with no_autocast(q):
        return torch.lerp(q, CONV[len(size) - 1](q, weight, bias, padding=1), state.blend)


def _over(live: Tensor, like: Tensor) -> Tensor:
    """Of which examples any cell of live [b *scale] is, for all places of ``like``."""
    return live.flatten(1).any(1).reshape(-1, *[1] * (like.ndim - 1))
