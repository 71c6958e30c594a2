"""The nearest of many rows as one op, without a tensor of all scores.

    nearest(x, codes, half, top)     x [s n d], codes [s k d], half [s k] to indices i64[s n top], scores [s n top]

The score of row x and code c is ``x·c - half``. With half the square of a code's length, the best score is the smallest
euclidean distance; with zeros it is the largest inner product. The best come first; of equal scores, the lowest index
comes first. A row without a finite score has the indices -1 and the scores -inf.

Scores are computed a tile at a time by the matrix product of the device, in float32 (float64 for float64). A tile of
``TILE`` bytes stays in a core's cache, or keeps all multiprocessors of a GPU busy. The tiles depend on shapes alone.

The op has no derivatives. Under vmap, mapped rows are more rows of the same codes; mapped codes are merged into ``s``.
"""

import math
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from ..arguments import COMPUTED
from ..registry import map_rows, register

TILE = {"cpu": 2 << 20, "cuda": 128 << 20}  # bytes of scores
WIDEST = 2048  # codes of a tile: more of them leave fewer rows, whose product is slower
BLOCK = 64  # scores whose largest is found first


def nearest(x: Tensor, codes: Tensor, half: Tensor, top: int = 1) -> tuple[Tensor, Tensor]:
    """Return indices i64[s n top] and scores [s n top] of the ``top`` codes of largest ``x·c - half``, best first.

    x [s n d] in f32, bf16, f16 or f64; codes [s k d] and half [s k] in f32 or f64, the dtype of the scores.
    Raises TypeError for other dtypes, ValueError for other shapes or devices, or for ``top`` above k.
    """
    return _OP(x, codes, half, top)


def _nearest(x: Tensor, codes: Tensor, half: Tensor, top: int = 1) -> tuple[Tensor, Tensor]:
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


def _check(op: str, x: Tensor, codes: Tensor, half: Tensor, top: int = 1) -> None:
    if x.dtype not in COMPUTED or codes.dtype not in (torch.float32, torch.float64):
        raise TypeError(f"nearest got x {x.dtype} and codes {codes.dtype}; wanted floats, and codes in f32 or f64")
    if half.dtype != codes.dtype:
        raise TypeError(f"nearest got half {half.dtype} beside codes {codes.dtype}; wanted one dtype")
    if x.ndim != 3 or codes.ndim != 3 or x.shape[::2] != codes.shape[::2] or half.shape != codes.shape[:2]:
        shapes = ", ".join(f"{name} {tuple(t.shape)}" for name, t in (("x", x), ("codes", codes), ("half", half)))
        raise ValueError(f"nearest got {shapes}; wanted [s n d], [s k d] and [s k]")
    if not 1 <= top <= codes.shape[1]:
        raise ValueError(f"nearest got top {top} of {codes.shape[1]} codes; wanted 1 to {codes.shape[1]}")
    if not x.device == codes.device == half.device:
        raise ValueError(f"nearest got x on {x.device}, codes on {codes.device}, half on {half.device}; move some")


def _vmap(op: Any, info: Any, in_dims: Any, x: Tensor, codes: Tensor, half: Tensor, *top: int) -> Any:
    if in_dims[1] is None and in_dims[2] is None:
        rows = x.movedim(in_dims[0], 1)  # [s b n d]
        return tuple(t.unflatten(1, rows.shape[1:3]) for t in op(rows.flatten(1, 2), codes, half, *top)), (1, 1)
    return map_rows(op, info, in_dims, x, codes, half, *top)


_FIX = "it computes values only, and an index has no derivative; detach its arguments, as fquant.vq.encode does"
_empty = lambda x, codes, half, top=1: tuple(codes.new_empty(*x.shape[:2], top, dtype=t) for t in (torch.int64, None))
_OP = register(nearest, _check, _empty, _vmap, _FIX, real=_nearest, out=False)
# one product of rows and codes; torch's counter gives shapes for tensors
register_flop_formula(torch.ops.fquant.nearest)(lambda x, codes, *_, **__: 2 * math.prod(x) * codes[1])
