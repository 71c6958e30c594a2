"""learn: the vectors that codes of an array will stand for, and which of them each group of elements gets.

    codes, vectors = learn(rows, scale, AQ_2X8)

An array is divided by its scales, the root mean squares of its blocks, and what is left is cut into groups of ``dim``
elements along a row. A group becomes the sum of one vector of each stage:

1. *Stages by k-means.* Lloyd's iterations for the groups, then for what the first stage has left, and so on.
2. *Search.* The vector that is nearest at its stage is not always the best beside those of later stages. So ``BEAM``
   candidates are kept from stage to stage, and the best sum is taken at the end.
3. *Together.* A few rounds of searching for all groups and of moving each stage's vectors to the means of what the
   other stages leave, by which the error falls.
4. Codes of all groups, by the same search.

Steps 1 to 3 see up to ``SAMPLE`` groups, one of each stratum of the array. What is minimised is the squared error of
the array: groups of large rows weigh more in means. *Importance*, one number an element or a column, multiplies an
element's squared error, in the search as well as in the means: the mean square of a column's inputs is the diagonal of
the Hessian of the squared error of outputs, up to a factor.

Nothing here is random but by a key that the format's text gives: on CPUs the same array gives the same codes. On GPUs
sums are made in any order, in float64.

Source: additive quantisation by k-means and beam search, Babenko & Lempitsky 2014; of weights, Egiazarian et al. 2024
(AQLM), whose 2x8 codes those of AQ_2X8 are, but for scales.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from . import random
from .format import CODES, FORMER_NAMES, Format, num_blocks, num_bytes
from .kernels.ops.nearest import nearest

ITERATIONS = 10  # of k-means
ROUNDS = 3  # of all stages together
BEAM = 4  # candidates kept from stage to stage
SAMPLE = 1 << 17  # groups that are learned from: 512 a vector
LEAST = 2.0**-149  # float32's least: keeps what is divided by a scale of zero finite
CHUNK = 1 << 16  # groups that are searched at a time


class _Groups(NamedTuple):
    """Groups of elements, and what their errors count."""

    x: Tensor  # f32[n D], in units of the scale
    near: Tensor | None  # f32[n D], what elements of a group count among themselves; None: the same
    mass: Tensor  # f32[n D] or [n 1], what they count among all


def scales(rows: Tensor, format: Format) -> Tensor:
    """The root mean square of every block of ``rows`` f[r width], f32[r blocks]; not finite where a value is not."""
    width = rows.shape[-1]
    block = format.block or width
    out = rows.new_empty(len(rows), num_blocks(format, width), dtype=torch.float32)
    step = max(1, CHUNK * 16 // width)
    for start in range(0, len(rows), step):
        for column, part in enumerate(rows[start : start + step].split(block, -1)):
            wide = part.float().contiguous()  # so that the order of sums does not depend on strides
            top = wide.abs().amax(-1, keepdim=True).clamp(min=LEAST)  # so that squares neither overflow nor vanish
            mean = (wide / top).square().mean(-1)
            out[start : start + step, column] = top[:, 0] * mean.sqrt()
    return out


def learn(rows: Tensor, scale: Tensor, format: Format, importance: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """(codes u8[r groups·stages], vectors f32[stages·256·dim]) of finite ``rows`` f[r width] with such :func:`scales`.

    ``importance`` f[width] or f[r width] is not below zero. Where groups are fewer than 256, each is a vector.
    """
    sizes = format.vectors
    assert sizes is not None
    groups = -(-rows.shape[-1] // sizes.dim)
    total = len(rows) * groups
    if rows.is_meta:
        codes = rows.new_empty(len(rows), num_bytes(format, rows.shape[-1]), dtype=torch.uint8)
        return codes, rows.new_empty(sizes.stages * CODES * sizes.dim, dtype=torch.float32)
    text = format.text
    for former, name in FORMER_NAMES.items():  # so that an array keeps the codes it had before the renaming
        text = text.replace(name, former)
    key = random.fold(torch.zeros((), dtype=torch.int64, device=rows.device), text)
    pick = lambda number: _pick(number, rows, scale, format, importance)
    vectors = _vectors(pick(_sample(key, total)), sizes.stages, key)
    codes = torch.empty(total, sizes.stages, dtype=torch.uint8, device=rows.device)
    for start in range(0, total, CHUNK):
        some = pick(torch.arange(start, min(start + CHUNK, total), device=rows.device))
        codes[start : start + CHUNK] = _search(some, vectors)
    return codes.view(len(rows), -1), vectors.flatten()


def _sample(key: Tensor, total: int) -> Tensor:
    """The numbers of up to ``SAMPLE`` groups of ``total``, one of each stratum."""
    if total <= SAMPLE:
        return torch.arange(total, device=key.device)
    edges = torch.arange(SAMPLE + 1, device=key.device) * total // SAMPLE
    words = random.bits(random.fold(key, "sample"), (SAMPLE,))
    return edges[:-1] + words % (edges[1:] - edges[:-1])


def _pick(number: Tensor, rows: Tensor, scale: Tensor, format: Format, importance: Tensor | None) -> _Groups:
    """The groups of these numbers i64[n], counted along rows; beyond the end of a row they are zero and weigh none."""
    assert format.vectors is not None
    width, dim = rows.shape[-1], format.vectors.dim
    groups = -(-width // dim)
    row, first = number[:, None] // groups, number[:, None] % groups * dim  # [n 1]
    column = first + torch.arange(dim, device=rows.device)
    inside, column = column < width, column.clamp(max=width - 1)
    size = scale[row, first // (format.block or width)]  # [n 1]
    x = torch.where(inside, rows[row, column].float() / size.clamp(min=LEAST), 0)
    mass = (size / scale.amax().clamp(min=LEAST)).square()
    if importance is None and width % dim == 0:
        return _Groups(x, None, mass)
    near = torch.ones_like(x) if importance is None else importance.expand(rows.shape)[row, column].float()
    near = torch.where(inside, near, 0)
    mass = mass * near
    return _Groups(x, near / near.amax(-1, keepdim=True).clamp(min=LEAST), mass)


def _vectors(groups: _Groups, stages: int, key: Tensor) -> Tensor:
    """Vectors f32[stages 256 D] for these groups."""
    left, tables = groups, []
    for stage in range(stages):
        tables.append(_cluster(left, random.fold(key, stage)))
        left = left._replace(x=left.x - tables[-1][_nearest(left.x[:, None], left.near, tables[-1], 1)[:, 0, 0]])
    vectors = torch.stack(tables)
    for _ in range(ROUNDS if stages > 1 else 0):
        vectors = _together(groups, _search(groups, vectors), vectors)
    return vectors


def _cluster(groups: _Groups, key: Tensor) -> Tensor:
    """The means f32[256 D] of clusters, by Lloyd's iterations from groups that are drawn."""
    drawn = groups.x[random.permutation(key, len(groups.x))[:CODES]]
    table = groups.x.new_zeros(CODES, groups.x.shape[-1])
    table[: len(drawn)] = drawn
    for _ in range(ITERATIONS):
        which = _nearest(groups.x[:, None], groups.near, table, 1)[:, 0, 0]
        far = ((groups.x - table[which]).square() * groups.mass).sum(-1)
        table, empty = _means(which, groups.x, groups.mass, table)
        far = far.topk(min(CODES, len(far))).indices  # an empty cluster starts again where the error is largest
        turn = (empty.cumsum(0) - 1).clamp(min=0, max=len(far) - 1)
        table = torch.where(empty[:, None], groups.x[far[turn]], table)
    return table


def _together(groups: _Groups, codes: Tensor, vectors: Tensor) -> Tensor:
    """``vectors`` with those of each stage in turn at the means of what the other stages leave; ``codes`` u8[n S]."""
    vectors, which = vectors.clone(), codes.long()
    for stage, table in enumerate(vectors):
        others = sum(vectors[i][which[:, i]] for i in range(len(vectors)) if i != stage)
        vectors[stage], _ = _means(which[:, stage], groups.x - others, groups.mass, table)
    return vectors


def _means(which: Tensor, x: Tensor, mass: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
    """(means f32[256 D] of x of each code, those of ``table`` where nothing weighs; whether a code has none, [256])."""
    wide = mass.double()
    sums = torch.zeros_like(table, dtype=torch.float64).index_add(0, which, x * wide)
    total = wide.new_zeros(len(table), wide.shape[-1]).index_add(0, which, wide)
    means = (sums / torch.where(total > 0, total, 1)).float()
    return torch.where(total > 0, means, table), (total == 0).all(-1)


def _search(groups: _Groups, vectors: Tensor) -> Tensor:
    """The best sums of vectors f32[S 256 D] that a beam finds for groups, codes u8[n S]."""
    out = torch.empty(len(groups.x), len(vectors), dtype=torch.uint8, device=groups.x.device)
    for start in range(0, len(out), CHUNK):
        some = slice(start, start + CHUNK)
        out[some] = _beam(groups.x[some], None if groups.near is None else groups.near[some], vectors)
    return out


def _beam(x: Tensor, near: Tensor | None, vectors: Tensor) -> Tensor:
    left = x[:, None]  # [n b D]: what each of b candidates leaves
    codes = torch.empty(len(x), 1, 0, dtype=torch.int64, device=x.device)  # [n b stage]
    for stage, table in enumerate(vectors):
        width = 1 if stage == len(vectors) - 1 else BEAM
        which = _nearest(left, near, table, width)  # [n b width]
        after = left[:, :, None] - table[which]
        error = after.square() if near is None else after.square() * near[:, None, None]
        best = error.sum(-1).flatten(1).topk(width, largest=False).indices  # [n width]
        longer = torch.cat([codes[:, :, None].expand(*which.shape, stage), which[..., None]], -1)
        codes = longer.flatten(1, 2).gather(1, best[..., None].expand(*best.shape, stage + 1))
        left = after.flatten(1, 2).gather(1, best[..., None].expand(*best.shape, x.shape[-1]))
    return codes[:, 0]


def _nearest(x: Tensor, near: Tensor | None, table: Tensor, top: int) -> Tensor:
    """Which of ``table`` [256 D] are nearest to x [n b D], weighed by ``near`` [n D]: i64[n b top], the best first."""
    half, rows = table.square() / 2, x
    if near is not None:  # near · (x·c - c²/2) summed is the product of twice as many numbers
        rows = torch.cat([x * near[:, None], near[:, None].expand(x.shape)], -1)
        table, half = torch.cat([table, -half], -1), torch.zeros_like(half)
    which, _ = nearest(rows.flatten(0, 1)[None], table[None], half.sum(-1)[None], top)
    return which[0].unflatten(0, x.shape[:2])
