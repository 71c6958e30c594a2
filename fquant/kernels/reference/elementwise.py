"""Elementwise programs in plain torch, step by step."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from ..ops.pointwise_program import parse


def silu(x: Tensor) -> Tensor:
    """Return torch's ``x · sigmoid(x)``, contiguous."""
    return F.silu(x).contiguous()


def silu_derivative(x: Tensor) -> Tensor:
    """Return torch's derivative of ``x · sigmoid(x)``, contiguous."""
    return torch.ops.aten.silu_backward(x.new_ones(()).expand_as(x), x).contiguous()


def turn(x: Tensor, forth: bool) -> Tensor:
    """Rotate the halves of x [... 2h]: [-second, first] if ``forth``, else [second, -first]."""
    first, second = x.chunk(2, -1)
    return torch.cat([-second, first] if forth else [second, -first], -1)


_OWN = {"silu": silu, "silu_derivative": silu_derivative}


def pointwise(read: Sequence[Tensor], write: Sequence[Tensor], text: str) -> list[Tensor]:
    """See ``fquant.kernels.ops.pointwise.pointwise``."""
    program = parse(text)
    values, shape = list(read), torch.broadcast_shapes(*(t.shape for t in read))
    for op, dtype, args in program.steps:
        given = [values[a] if isinstance(a, int) else a for a in args]
        if op == "to":
            values.append(given[0].to(dtype))  # type: ignore[union-attr]
            continue
        if op == "turn":
            values.append(turn(given[0].to(dtype).expand(shape), given[1] > 0))  # type: ignore[union-attr]
            continue
        cast = [a.to(dtype) if isinstance(a, Tensor) and a.dtype is not torch.bool else a for a in given]
        values.append(_OWN[op](*cast) if op in _OWN else getattr(torch, op)(*cast))  # type: ignore[arg-type]
    copies = [values[i].expand(shape).clone(memory_format=torch.contiguous_format) for i in program.new + program.over]
    for t, value in zip(write, copies[len(program.new) :], strict=True):
        t.copy_(value)
    return copies[: len(program.new)]
