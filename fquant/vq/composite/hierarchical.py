"""Hierarchical quantisation: a map of rows as codes of several scales, coarse to fine (Tian et al. 2024).

    state = hierarchical.init(key, num_codes=4096, dim=32, scales=(1, 2, 4, 8, 16), spatial=2)
    codes = hierarchical.encode(state, x)              # x f[... 16 16 32]  ->  [i64[... 1 1], i64[... 2 2], ...]
    x     = hierarchical.decode(state, codes)

Each scale quantises the means of the remainder of x over its cells, and subtracts them:

    down = pool(rest)      q = book(down)      full = blend(upsample(q))      rest = rest - full      x' = sum of full

``upsample`` is linear. ``blend`` is (1 - p) · full + p · conv(full), with a trained convolution over 3 places: one for
all scales, or several, each for consecutive scales. As in vector-quantize-pytorch the remainder carries gradients, too.

A cell's mean covers its live rows, which the mask keeps and which are finite; a cell without any has code -1. With a
key, *nested dropout* keeps only the first scales with probability ``dropout``: at least ``least``, and not all. The
others have code -1 and add nothing to the output, losses or statistics.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ... import random, tree
from ..codebook import book as books
from ..codebook import update as updates
from ..codebook.apply import apply as apply_book
from ..codebook.book import Book, Metric
from ..codebook.gradient_estimators import Estimator, straight_through
from ..codebook.rows import RowOffset
from ..precision import no_autocast
from ..quantized import Key, Mask, Quantized, Seed, stack_trees
from ..scalar import projection_layers

CONV = (F.conv1d, F.conv2d, F.conv3d)
POOL: tuple[Any, ...] = (F.adaptive_avg_pool1d, F.adaptive_avg_pool2d, F.adaptive_avg_pool3d)
LINEAR = ("linear", "bilinear", "trilinear")
SMALL = 1e-6  # divisor for a cell without rows


@tree.node
class Conv:
    """A convolution over 3 places in each direction: weight f32[dim dim 3 ...], bias f32[dim]."""

    weight: Tensor
    bias: Tensor


@tree.node
class Hierarchical:
    """The scales (places in each direction), a book for each or one for all, and the convolutions."""

    books: list[Book]
    params: list[Conv]  # the trained leaves
    scales: tuple[tuple[int, ...], ...] = tree.static()
    blend: float = tree.static(default=0.5)
    dropout: float = tree.static(default=0.0)
    least: int = tree.static(default=1)


@tree.node
class Levels:
    """The statistics of each scale's book, or of the shared one, and the number f32[] of ``lost`` rows, not finite."""

    books: list[updates.Stats]
    lost: Tensor


def init(
    key: Seed,
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
    """Return a state for x f[... *places dim] with 1, 2 or 3 dims of places (``spatial``).

    * scales: coarse to fine, the size of each in every direction, or one number for all directions.
    * shared: one book for all scales; otherwise one each, of ``num_codes`` or of one number a scale.
    * blend: p; without convolutions if 0.
    * convs: the number of convolutions, at most one a scale.
    """
    name, key = "hierarchical.init", random.key(key)
    if spatial not in (1, 2, 3):
        raise ValueError(f"{name}: spatial is {spatial}; wanted 1, 2 or 3")
    each = tuple((s,) * spatial if isinstance(s, int) else tuple(s) for s in scales)
    if not each or any(len(s) != spatial or min(s) < 1 for s in each):
        raise ValueError(f"{name}: scales are {tuple(scales)}; wanted at least one, each of {spatial} sizes from 1 on")
    for before, after in zip(each, each[1:], strict=False):
        if any(a > b for a, b in zip(before, after, strict=True)):
            raise ValueError(f"{name}: scale {after} follows {before}; wanted none smaller than the one before")
    sizes = (num_codes,) * len(each) if isinstance(num_codes, int) else tuple(num_codes)
    if len(sizes) != len(each) or (shared and len(set(sizes)) > 1):
        kind = "one number for a shared book" if shared else f"{len(each)}, one for each scale"
        raise ValueError(f"{name}: num_codes is {num_codes}; wanted {kind}")
    if not 0 <= blend <= 1 or not 0 <= dropout <= 1 or not 1 <= convs <= len(each) or least < 1:
        got = f"blend is {blend}, dropout {dropout}, convs {convs}, least {least}"
        raise ValueError(f"{name}: {got}; wanted [0, 1], [0, 1], 1 to {len(each)} and at least 1")
    numbered = enumerate(sizes[:1] if shared else sizes)
    new = [books.init(random.fold(key, i), size, dim, metric=metric, learnable=learnable) for i, size in numbered]
    shape, fan = (dim, dim, *[3] * spatial), dim * 3**spatial
    draw = lambda part, i, shape: random.kaiming_uniform(random.fold(random.fold(key, part), i), shape, fan)
    params = [Conv(draw("weight", i, shape), draw("bias", i, (dim,))) for i in range(convs if blend else 0)]
    return Hierarchical(new, params, each, blend, dropout, least)


def encode(state: Hierarchical, x: Tensor, mask: Mask = None) -> list[Tensor]:
    """Return codes i64[... *scale] of each scale for x f[... *places dim]; -1 for a cell without live rows."""
    with torch.no_grad():
        return apply(state, x.detach(), mask=mask, losses=()).codes  # type: ignore[return-value]


def decode(
    state: Hierarchical, codes: Sequence[Tensor], places: Sequence[int] | None = None, dtype: torch.dtype | None = None
) -> Tensor:
    """Return x [... *places dim] of codes i64[... *scale] of each scale, or of the first scales.

    Defaults are the places of the finest scale and the dtype of the books. A cell of -1 is zero, and a scale without
    codes adds nothing. Raises what ``vq.decode`` does, and ValueError for other shapes.
    """
    size, spatial = state.scales[-1] if places is None else tuple(places), len(state.scales[0])
    if not 1 <= len(codes) <= len(state.scales) or len(size) != spatial or min(size) < 1:
        got = f"codes of {len(codes)} scales for places {size}"
        raise ValueError(f"hierarchical.decode: got {got}; wanted 1 to {len(state.scales)}, and {spatial} sizes")
    lead, out = codes[0].shape[:-spatial], state.books[0].codes.new_zeros(())
    for i, (cells, scale) in enumerate(zip(codes, state.scales, strict=False)):
        if cells.shape != (*lead, *scale):
            raise ValueError(f"hierarchical.decode: codes.{i} are {tuple(cells.shape)}; wanted {(*lead, *scale)}")
        cells, book = cells.reshape(-1, *scale), state.books[min(i, len(state.books) - 1)]
        out = out + _upsample(state, i, books.decode(book, cells), cells, size)
    out = out.movedim(1, -1).reshape(*lead, *size, state.books[0].codes.shape[-1])
    return out if dtype is None else out.to(dtype)


def apply(
    state: Hierarchical,
    x: Tensor,
    key: Key = None,
    mask: Mask = None,
    *,
    depth: Tensor | None = None,
    gradient: Estimator = straight_through,
    row_offset: RowOffset | None = None,
    **options: Any,
) -> Quantized:
    """Quantise x f[... *places dim]: codes are a list, losses Means of [scales] numbers, and statistics Levels.

    * key: i64[], equal on every rank; turns on dropout and the books' randomness.
    * mask: bool[... *places]; ``vq.mask`` makes one from lengths.
    * depth: i64[] or [...], the number of scales of an example, instead of a draw.
    * row_offset: (first, total) numbers of this rank's examples, see ``rows.py``.
    * options: those of ``vq.apply``, whose errors it raises.
    """
    spatial, name = len(state.scales[0]), "hierarchical.apply"
    if x.ndim < spatial + 1:
        raise ValueError(f"{name}: x is {tuple(x.shape)}; wanted [... {'places ' * spatial}dim]")
    point, live = projection_layers.prepare_rows(name, x, state.books[0].codes.shape[-1], mask)
    lead, size = x.shape[: x.ndim - spatial - 1], x.shape[-spatial - 1 : -1]
    rest = point.reshape(-1, *size, point.shape[-1]).movedim(-1, 1)  # [b dim *places]
    weight = live.reshape(-1, *size)[:, None].to(rest.dtype)
    if key is not None and key.ndim:
        raise ValueError(f"{name}: key is {tuple(key.shape)}; wanted one for all rows, and depth= for examples")
    if depth is None and key is not None and state.dropout:
        depth = draw_depth(state, key)
    if depth is not None and (depth.dtype is not torch.int64 or depth.shape not in ((), lead)):
        got = f"{depth.dtype} {tuple(depth.shape)}"
        raise ValueError(f"{name}: depth is {got}; wanted int64 (), or one for each example {tuple(lead)}")
    depth = None if depth is None else depth.expand(lead).reshape(-1)
    shared, cells = len(state.books) == 1, [math.prod(scale) for scale in state.scales]
    first, total = row_offset or (0, rest.shape[0])
    out, codes, losses, stats = torch.zeros_like(rest), [], [], []
    for i, scale in enumerate(state.scales):
        pooled, count = (_pool(t, scale) for t in (rest * weight, weight))
        used = count[:, 0] > 0  # [b *scale]
        if depth is not None:
            used = used & (i < depth).reshape(-1, *[1] * spatial)
        before = total * sum(cells[:i]) if shared else 0
        got = apply_book(
            state.books[0 if shared else i],
            torch.where(used[..., None], (pooled / count.clamp(min=SMALL)).movedim(1, -1), torch.nan),
            None if key is None else key if shared else random.fold(key, i),
            gradient=gradient,
            row_offset=(before + first * cells[i], total * (sum(cells) if shared else cells[i])),
            **options,
        )
        full = _upsample(state, i, got.x, got.codes, size)
        rest, out = rest - full, out + full
        unused = (~used).sum().to(got.stats.kept.dtype)
        codes.append(got.codes.reshape(*lead, *scale))
        stats.append(replace(got.stats, kept=got.stats.kept - unused, lost=got.stats.lost - unused))
        losses.append(got.losses)
    result = torch.where(live[..., None], out.movedim(1, -1).reshape(x.shape), 0.0).to(x.dtype)
    stats = Levels([updates.add(*stats)] if shared else stats, projection_layers.count_rows(live, mask).bad.float())
    return Quantized(result, codes, stack_trees(losses), stats)  # type: ignore[arg-type]


def update(state: Hierarchical, stats: Levels, **options: Any) -> Hierarchical:
    """Return ``state`` with each book that a row reached updated as by ``vq.update`` with ``options``."""
    update = partial(updates.unless_empty, updates.update, **options)
    return replace(state, books=updates.update_each("hierarchical.update", "books", state.books, stats.books, update))


def draw_depth(state: Hierarchical, key: Tensor) -> Tensor:
    """Draw the number of scales, i64 of the shape of ``key``: all, or with probability ``dropout`` fewer."""
    most = len(state.scales)
    choices = most - state.least
    if choices < 1:
        return torch.full_like(key, most)
    fewer = state.least + (random.bits(random.fold(key, "depth"), key.shape) * choices >> 32)
    return torch.where(random.bernoulli(random.fold(key, "dropout"), state.dropout, key.shape), fewer, most)


def _pool(t: Tensor, scale: tuple[int, ...]) -> Tensor:
    """Return the means of t [b dim *places] over the cells of ``scale``."""
    if max(scale) == 1:  # because vmap has no rule for torch's pooling to one cell
        return t.mean(tuple(range(2, t.ndim)), keepdim=True)
    return POOL[len(scale) - 1](t, scale)


def _upsample(state: Hierarchical, i: int, q: Tensor, codes: Tensor, size: tuple[int, ...]) -> Tensor:
    """Return q [b *scale dim] at all places [b dim *places], blended; zero for examples without any code."""
    q = q.movedim(-1, 1)
    if q.shape[2:] != size:
        q = F.interpolate(q, size=size, mode=LINEAR[len(size) - 1], align_corners=False)
    if state.params:
        conv = state.params[round(i / max(len(state.scales) - 1, 1) * (len(state.params) - 1))]
        weight, bias = conv.weight.to(q.dtype), conv.bias.to(q.dtype)
        with no_autocast(q):
            q = torch.lerp(q, CONV[len(size) - 1](q, weight, bias, padding=1), state.blend)
    return torch.where((codes >= 0).flatten(1).any(1).reshape(-1, *[1] * (q.ndim - 1)), q, 0.0)
