"""Searches in codebooks: the codes of largest ``x·c - half``, sums of vectors by a beam, and sums of rows by code.

Scores are those of the device's matrix product, a tile at a time, in the dtype of the codes. A tile of ``TILE`` bytes
stays in a core's cache, or keeps all multiprocessors of a GPU busy. The tiles depend on shapes alone. A beam makes
tensors of all candidates of ``CHUNK`` groups.
"""

import math

import torch
from torch import Tensor

TILE = {"cpu": 2 << 20, "cuda": 128 << 20}  # bytes of scores
WIDEST = 2048  # codes of a tile: more of them leave fewer rows, whose product is slower
BLOCK = 64  # scores whose largest is found first
CHUNK = 1 << 16  # groups to search at a time


def nearest(x: Tensor, codes: Tensor, half: Tensor, top: int = 1) -> tuple[Tensor, Tensor]:
    (s, n, _), k = x.shape, codes.shape[1]
    index = torch.zeros(s, n, top, dtype=torch.int64, device=x.device)
    score = codes.new_empty(s, n, top)
    # One tile for all rows: to allocate it each time takes as long as the search.
    tile = codes.new_empty(_tile(n, k, codes))
    for i in range(s):
        for start in range(0, n, len(tile)):
            at = slice(start, start + len(tile))
            _search(x[i, at].to(codes.dtype), codes[i], half[i], tile[: len(x[i, at])], index[i, at], score[i, at])
    lost = ~score[..., :1].isfinite()
    return index.masked_fill_(lost, -1), score.masked_fill_(lost, -math.inf)


def _search(x: Tensor, codes: Tensor, half: Tensor, tile: Tensor, index: Tensor, score: Tensor) -> None:
    """Write the best codes of rows x [m d] to index and score [m top], a ``tile`` [m wide] of scores at a time."""
    top, wide = index.shape[1], tile.shape[1]
    score.fill_(-math.inf)
    for first in range(0, len(codes), wide):
        part, bias = codes[first : first + wide], half[first : first + wide]
        torch.addmm(bias, x, part.mT, beta=-1, out=tile[:, : len(part)])
        tile[:, len(part) :] = -math.inf
        if top == 1:
            best, at = _largest(tile)
            better = (best > score) | best.isnan()  # not where equal: of these the first is kept
            index.copy_(torch.where(better, at + first, index))
            score.copy_(torch.where(better, best, score))
            continue
        both = torch.cat([score, tile], 1)
        names = torch.cat([index, torch.arange(first, first + wide, device=x.device).expand(len(x), -1)], 1)
        for place in range(top):
            best, at = both.max(1, keepdim=True)  # the first of equal ones, which has the lowest index
            score[:, place : place + 1] = best
            index[:, place : place + 1] = names.gather(1, at)
            both.scatter_(1, at, -math.inf)


def _largest(tile: Tensor) -> tuple[Tensor, Tensor]:
    """Return ``tile.max(1, keepdim=True)``: the largest of each row [m 1] and its first index.

    The search for a value alone is several times faster than for value and index, so it comes first, over blocks.
    """
    if tile.shape[1] < 8 * BLOCK or tile.shape[1] % BLOCK:
        return tile.max(1, keepdim=True)
    blocks = tile.unflatten(1, (-1, BLOCK))  # [m wide/block block]
    best, block = blocks.amax(-1).max(1, keepdim=True)
    rows = torch.arange(len(tile), device=tile.device)[:, None]
    return best, block * BLOCK + blocks[rows, block].argmax(-1)


def _tile(n: int, k: int, codes: Tensor) -> tuple[int, int]:
    """Return the rows and the codes of a tile."""
    size = TILE.get(codes.device.type, TILE["cpu"]) // codes.element_size()
    wide = min(-(-k // BLOCK) * BLOCK, WIDEST if codes.device.type == "cpu" else max(BLOCK, size // 1024))
    return max(1, min(n, size // wide)), wide


def beam_search(x: Tensor, near: Tensor | None, vectors: Tensor, width: int) -> Tensor:
    xs = x.split(CHUNK)
    nears = [None] * len(xs) if near is None else near.split(CHUNK)
    return torch.cat([_beam(*part, vectors, width) for part in zip(xs, nears, strict=True)]).to(torch.uint8)


def _beam(x: Tensor, near: Tensor | None, vectors: Tensor, most: int) -> Tensor:
    left = x[:, None]  # [n b D], the residual of each of b candidates
    codes = torch.empty(len(x), 1, 0, dtype=torch.int64, device=x.device)  # [n b stage]
    for stage, table in enumerate(vectors):
        width = 1 if stage == len(vectors) - 1 else most
        found = _nearest(left, near, table, width)  # [n b width]
        after = left[:, :, None] - table[found]
        error = after.square() if near is None else after.square() * near[:, None, None]
        best = error.sum(-1).flatten(1).topk(width, largest=False).indices  # [n width]
        longer = torch.cat([codes[:, :, None].expand(*found.shape, stage), found[..., None]], -1)
        codes = longer.flatten(1, 2).gather(1, best[..., None].expand(*best.shape, stage + 1))
        left = after.flatten(1, 2).gather(1, best[..., None].expand(*best.shape, x.shape[-1]))
    return codes[:, 0]


def _nearest(x: Tensor, near: Tensor | None, table: Tensor, top: int) -> Tensor:
    """Return the codes i64[n b top] of the nearest in ``table`` [256 D] to x [n b D] by ``near`` [n D], best first."""
    rows = x if near is None else torch.cat([x * near[:, None], near[:, None].expand(x.shape)], -1)
    table, half = compared(table, near is not None)
    codes, _ = nearest(rows.flatten(0, 1)[None], table[None], half[None], top)
    return codes[0].unflatten(0, x.shape[:2])


def compared(table: Tensor, weighted: bool) -> tuple[Tensor, Tensor]:
    """Return what rows are compared with, and ``half``: of vectors f32[... 256 D], f32[... 256 D or 2D] and [... 256].

    The sum of near · (x·c - c²/2) is a product of rows (near · x, near) and of vectors (c, -c²/2) of twice the size.
    """
    half = table.square() / 2
    if not weighted:
        return table, half.sum(-1)
    return torch.cat([table, -half], -1), torch.zeros_like(half[..., 0])


def sums_by_code(x: Tensor, codes: Tensor, num_codes: int) -> tuple[Tensor, Tensor]:
    (s, _, d), size = x.shape, len(x) * num_codes
    first = torch.arange(s, device=x.device)[:, None] * num_codes
    # A row without a code is added to a sum behind the last. A code beyond all must fail.
    index = torch.where(codes < 0, size, torch.where(codes < num_codes, codes + first, size + 1)).flatten()
    counts = codes.new_zeros(size + 1).index_add(0, index, torch.ones_like(index))[:size]
    sums = x.new_zeros(size + 1, d).index_add(0, index, x.flatten(0, 1))[:size]
    return counts.unflatten(0, (s, num_codes)).to(x.dtype), sums.unflatten(0, (s, num_codes))


def stage_sums(x: Tensor, mass: Tensor, codes: Tensor, vectors: Tensor, stage: int) -> tuple[Tensor, Tensor]:
    at, wide = codes.long(), mass.double()
    for i, table in enumerate(vectors):
        x = x if i == stage else x - table[at[:, i]]
    zeros = lambda width: wide.new_zeros(vectors.shape[1], width)
    sums, total = zeros(x.shape[1]), zeros(mass.shape[1])
    return sums.index_add(0, at[:, stage], x * wide), total.index_add(0, at[:, stage], wide)
