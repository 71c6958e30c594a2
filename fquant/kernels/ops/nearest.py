"""The nearest of many rows as one op, without a tensor of all scores.

    nearest(x, codes, half, top)     x [s n d], codes [s k d], half [s k] to indices i64[s n top], scores [s n top]

The score of row x and code c is ``x·c - half``. With half the square of a code's length, the best score is the smallest
euclidean distance; with zeros it is the largest inner product. The best come first; of equal scores, the lowest index
comes first. A row without a finite score has the indices -1 and the scores -inf.

Scores are float32, or float64 for codes of float64. A score that is NaN makes its row one without a finite score. No
backend has all scores in memory: C keeps the best of a row in registers, the reference computes a tile at a time.

The op has no derivatives. Under vmap, mapped rows are more rows of the same codes; mapped codes are merged into ``s``.
"""

import math
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from ..arguments import COMPUTED
from ..dispatch import is_direct
from ..registry import by_backend, map_rows, register


def nearest(x: Tensor, codes: Tensor, half: Tensor, top: int = 1) -> tuple[Tensor, Tensor]:
    """Return indices i64[s n top] and scores [s n top] of the ``top`` codes of largest ``x·c - half``, best first.

    x [s n d] in f32, bf16, f16 or f64; codes [s k d] and half [s k] in f32 or f64, the dtype of the scores.
    Raises TypeError for other dtypes, ValueError for other shapes or devices, or for ``top`` above k.
    """
    if x.is_meta or not is_direct(x, codes, half):
        return _OP(x, codes, half, top)
    _check("nearest", x, codes, half, top)
    return by_backend("nearest", x, codes, half, top)


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
_OP = register(nearest, _check, _empty, _vmap, _FIX, out=False)
# one product of rows and codes; torch's counter gives shapes for tensors
register_flop_formula(torch.ops.fquant.nearest)(lambda x, codes, *_, **__: 2 * math.prod(x) * codes[1])
