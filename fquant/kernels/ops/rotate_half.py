"""The rotation of the halves of a rotary embedding as one op.

    turn(x, h)     f[... 2h] to f[... 2h]: [-second, first], where second and first are halves of the last dim
    turn(x, -h)    f[... 2h] to f[... 2h]: [second, -first], its transpose and its inverse

In torch this is two views, a negation and a concatenation: three times the memory traffic of the result, and the end of
every chain of elementwise operations. A step of a program (``pointwise.py``) costs next to nothing. Models write it in
torch, and ``fquant/compile/passes/canonicalize.py`` puts this op into captured graphs. The bits are the same.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .. import reference
from ..arguments import COMPUTED, check_out
from ..registry import register
from .pointwise import OP as POINTWISE
from .pointwise_program import PIECE, is_turned


def turn(x: Tensor, half: int) -> Tensor:
    """Rotate the halves of x f[... 2|half|], or rotate back if half < 0; contiguous, x's dtype.

    Raises TypeError for another dtype than f32, bf16, f16 and f64. Raises ValueError if 2|half| is not the last dim, or
    does not divide ``pointwise_program.PIECE``.
    """
    return OP(x, half)


def _real(x: Tensor, half: int, out: Tensor | None = None) -> Tensor:
    _check(x, half)
    if x.dtype is torch.float64:
        return reference.turn(x, half > 0)
    step = f"turn.{str(x.dtype).removeprefix('torch.')} 0 {float(half).hex()}"
    if out is None:
        return POINTWISE([x], [], f"{step}; new 1; over")[0]
    POINTWISE([x], [check_out(out, tuple(x.shape), x.dtype)], f"{step}; new; over 1")
    return out


def _fake(x: Tensor, half: int) -> Tensor:
    _check(x, half)
    return x.new_empty(x.shape)


def _check(x: Tensor, half: int) -> None:
    if x.dtype not in COMPUTED:
        raise TypeError(f"turn got {x.dtype} {tuple(x.shape)}; wanted f32, bf16, f16 or f64")
    if not is_turned(x.shape, half):
        raise ValueError(
            f"turn got x {tuple(x.shape)} and a half of {half}; wanted half of its last dim, "
            f"by which {PIECE} can be divided"
        )


def _vmap(info: Any, in_dims: Any, x: Tensor, half: int) -> tuple[Tensor, int]:
    return OP(x.movedim(in_dims[0], 0), half), 0


_FIX = "it is what a captured graph runs; differentiate the function, and capture its gradient"
OP = register("turn", "(Tensor x, int half) -> Tensor", _real, _fake, _vmap, _FIX)
