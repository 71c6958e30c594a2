"""Additive quantisation: learn the vectors of an array, and the codes that pick them.

    codes, vectors = learn(rows, scale, AQ_2X8)

An array is divided by its scales, the root mean squares of its blocks. The quotient is cut into groups of ``dim``
elements along a row. A group becomes the sum of one vector of each stage:

1. *Stages by k-means.* Lloyd's iterations for the groups, then for the residuals of the first stage, and so on.
2. *Beam search* keeps ``BEAM`` candidates, because the best vector beside those of later stages may not be the nearest.
3. *Joint refinement.* Rounds of search move each stage's vectors to the means of the other stages' residuals.
4. The same search gives the codes of all groups.

Steps 1 to 3 see up to ``SAMPLE`` groups. They minimise the squared error of the array, so groups of large rows weigh
more in means. *Importance* weighs the squared error of an element or a column. The mean square of a column's inputs is,
up to a factor, the diagonal of the Hessian of the squared error of outputs.

The format's text gives the random key: on CPUs the same array gives the same codes. GPUs sum in any order, in float64.

Source: additive quantisation by k-means and beam search, Babenko & Lempitsky 2014; of weights, Egiazarian et al. 2024
(AQLM), whose 2x8 codes equal those of AQ_2X8 but for scales.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import embedding, pad

from .. import random
from ..format import CODES, FORMER_NAMES, Format, num_blocks, num_bytes
from ..kernels.dispatch import has_no_values, is_direct
from ..kernels.ops.beam_search import beam_search, stage_sums

ITERATIONS = 10  # of k-means
ROUNDS = 3  # of all stages together
BEAM = 4  # candidates kept from stage to stage
SAMPLE = 1 << 17  # groups to learn from: 512 a vector
LEAST = 2.0**-149  # float32's smallest: keeps quotients by a scale of zero finite
CHUNK = 1 << 16  # groups to search at a time


class _Groups(NamedTuple):
    """Groups of elements and the weights of their errors."""

    x: Tensor  # f32[n D], in units of the scale
    near: Tensor | None  # f32[n D], the weight of an element within its group; None: equal weights
    mass: Tensor  # f32[n D] or [n 1], the weight of an element among all


def scales(rows: Tensor, format: Format) -> Tensor:
    """Return the root mean square of every block of ``rows`` f[r width], f32[r blocks]; NaN and infinity propagate."""
    width = rows.shape[-1]
    out = rows.new_empty(len(rows), num_blocks(format, width), dtype=torch.float32)
    step = max(1, CHUNK * 16 // width)
    for start in range(0, len(rows), step):
        for column, part in enumerate(rows[start : start + step].split(format.block or width, -1)):
            wide = part.float().contiguous()  # because the order of sums depends on strides
            top = wide.abs().amax(-1, keepdim=True).clamp(min=LEAST)  # because squares overflow and vanish
            out[start : start + step, column] = top[:, 0] * (wide / top).square().mean(-1).sqrt()
    return out


def learn(rows: Tensor, scale: Tensor, format: Format, importance: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return codes u8[r groups·stages] and vectors f32[stages·256·dim] of finite ``rows`` f[r width] with ``scale``.

    ``importance`` f[1 width] or f[r width] is at least zero. Fewer than 256 groups become a vector each.
    """
    sizes = format.vectors
    assert sizes is not None
    total = len(rows) * -(-rows.shape[-1] // sizes.dim)
    if has_no_values(rows):
        codes = rows.new_empty(len(rows), num_bytes(format, rows.shape[-1]), dtype=torch.uint8)
        return codes, rows.new_empty(sizes.stages * CODES * sizes.dim, dtype=torch.float32)
    text = format.text
    for former, name in FORMER_NAMES.items():  # because the codes of an array depend on it
        text = text.replace(name, former)
    key = random.fold(torch.zeros((), dtype=torch.int64, device=rows.device), text)
    pick = lambda number: _pick(number, rows, scale, format, importance)
    vectors = _vectors(pick(_sample(key, total)), sizes.stages, key)
    codes = [_search(pick(number), vectors) for number in torch.arange(total, device=rows.device).split(CHUNK)]
    return torch.cat(codes).view(len(rows), -1), vectors.flatten()


def _sample(key: Tensor, total: int) -> Tensor:
    """Return the numbers of up to ``SAMPLE`` groups of ``total``, one of each stratum."""
    count = min(total, SAMPLE)
    edges = torch.arange(count + 1, device=key.device) * total // count
    words = random.bits(random.fold(key, "sample"), (count,))
    return edges[:-1] + words % (edges[1:] - edges[:-1])


def _pick(number: Tensor, rows: Tensor, scale: Tensor, format: Format, importance: Tensor | None) -> _Groups:
    """Return the groups of these numbers i64[n], counted along rows; padding is zero and has no weight."""
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
    return _Groups(x, near / near.amax(-1, keepdim=True).clamp(min=LEAST), mass * near)


def _vectors(groups: _Groups, stages: int, key: Tensor) -> Tensor:
    """Learn vectors f32[stages 256 D] for these groups."""
    left, tables = groups, []
    for stage in range(stages):
        tables.append(_cluster(left, random.fold(key, stage)))
        if stage < stages - 1:
            left = left._replace(x=left.x - _of(tables[-1], _search(left, tables[-1][None])))
    vectors = torch.stack(tables)
    for _ in range(ROUNDS if stages > 1 else 0):
        vectors = _refined(groups, _search(groups, vectors), vectors)
    return vectors


def _cluster(groups: _Groups, key: Tensor) -> Tensor:
    """Return the means f32[256 D] of clusters by Lloyd's iterations from random groups."""
    drawn = groups.x[random.permutation(key, len(groups.x))[:CODES]]
    table = pad(drawn, (0, 0, 0, CODES - len(drawn)))
    for _ in range(ITERATIONS):
        former, codes = table, _search(groups, table[None])
        table, empty = _means(groups, codes, former[None], 0)
        if is_direct(empty) and not empty.any():
            continue  # the errors, of which there is no use, take as long as the means
        error = ((groups.x - _of(former, codes)).square() * groups.mass).sum(-1)
        worst = error.topk(min(CODES, len(error))).indices  # empty clusters restart where the error is largest
        turn = (empty.cumsum(0) - 1).clamp(min=0, max=len(worst) - 1)
        table = torch.where(empty[:, None], groups.x[worst[turn]], table)
    return table


def _refined(groups: _Groups, codes: Tensor, vectors: Tensor) -> Tensor:
    """Move each stage's vectors in turn to the means of the other stages' residuals; ``codes`` u8[n S]."""
    vectors = vectors.clone()
    for stage in range(len(vectors)):
        vectors[stage], _ = _means(groups, codes, vectors, stage)
    return vectors


def _means(groups: _Groups, codes: Tensor, vectors: Tensor, stage: int) -> tuple[Tensor, Tensor]:
    """Return the means f32[256 D] of the other stages' residuals by code, and a mask [256] of codes without mass.

    A code without mass keeps its vector.
    """
    sums, total = stage_sums(groups.x, groups.mass, codes, vectors, stage)
    means = (sums / torch.where(total > 0, total, 1)).float()
    return torch.where(total > 0, means, vectors[stage]), (total == 0).all(-1)


def _search(groups: _Groups, vectors: Tensor) -> Tensor:
    """Return the codes u8[n S] of the best sums of vectors f32[S 256 D] that a beam finds for groups."""
    return beam_search(groups.x, groups.near, vectors, BEAM)


def _of(table: Tensor, codes: Tensor) -> Tensor:
    """Return the vectors f32[n D] of ``table`` f32[256 D] at codes u8[n 1]."""
    return embedding(codes[:, 0].int(), table)
