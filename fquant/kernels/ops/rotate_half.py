"""The rotation of the halves of a rotary embedding as one op.

    turn(x, h)     f[... 2h] to f[... 2h]: [-second, first], where second and first are halves of the last dim
    turn(x, -h)    f[... 2h] to f[... 2h]: [second, -first], its transpose and its inverse

In torch this is two views, a negation and a concatenation, which end every chain of elementwise operations. A step of a
program (``pointwise.py``) costs next to nothing. Models write it in torch, and ``compile/passes/canonicalize.py`` puts
this op into captured graphs. The bits are the same.
"""

import torch
from torch import Tensor

from .. import reference
from ..arguments import check_floats, check_out
from ..registry import register
from .pointwise import FIX
from .pointwise import OP as POINTWISE
from .pointwise_program import PIECE, is_turned


def turn(x: Tensor, half: int) -> Tensor:
    """Rotate the halves of x f[... 2|half|], or rotate back if half < 0; contiguous, x's dtype.
    Raises TypeError for another dtype than f32, bf16, f16 and f64. Raises ValueError if 2|half| is not the last dim, or
    does not divide ``pointwise_program.PIECE``.
    """
    return OP(x, half)


def _real(x: Tensor, half: int, out: Tensor | None = None) -> Tensor:
    if x.dtype is torch.float64:
        return reference.turn(x, half > 0)
    step = f"turn.{str(x.dtype).removeprefix('torch.')} 0 {float(half).hex()}"
    if out is None:
        return POINTWISE([x], [], f"{step}; new 1; over")[0]
    POINTWISE([x], [check_out(out, tuple(x.shape), x.dtype)], f"{step}; new; over 1")
    return out


def _check(op: str, x: Tensor, half: int) -> None:
    check_floats(op, x)
    if not is_turned(x.shape, half):
        wanted = f"half of its last dim, by which {PIECE} can be divided"
        raise ValueError(f"turn got x {tuple(x.shape)} and a half of {half}; wanted {wanted}")


_vmap = lambda op, info, in_dims, x, half: (op(x.movedim(in_dims[0], 0), half), 0)
_empty = lambda x, half: x.new_empty(x.shape)
OP = register("turn", "(Tensor x, int half) -> Tensor", _check, _empty, _vmap, FIX, real=_real)
