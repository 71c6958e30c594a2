"""Elementwise programs in plain torch, step by step, each in float32 and rounded to its dtype."""

from collections.abc import Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from ..ops.pointwise_program import parse


def silu(x: Tensor) -> Tensor:
    return F.silu(x).contiguous()


def silu_derivative(x: Tensor) -> Tensor:
    return torch.ops.aten.silu_backward(x.new_ones(()).expand_as(x), x).contiguous()


def turn(x: Tensor, half: float) -> Tensor:
    first, second = x.chunk(2, -1)
    return torch.cat([-second, first] if half > 0 else [second, -first], -1)


def root(x: Tensor) -> Tensor:
    return x.double().sqrt().float().contiguous()


_OWN = {"silu": silu, "silu_derivative": silu_derivative}


def pointwise(read: Sequence[Tensor], write: Sequence[Tensor], text: str) -> list[Tensor]:
    program = parse(text)
    values, shape = list(read), torch.broadcast_shapes(*(t.shape for t in read))
    for op, dtype, args in program.steps:
        if op == "turn":
            values.append(turn(values[int(args[0])].to(dtype).expand(shape), args[1]))
            continue
        number = partial(torch.full, (), dtype=torch.float32, device=read[0].device)
        given = [values[a] if isinstance(a, int) else number(a) for a in args]
        if op in _OWN:
            values.append(_OWN[op](given[0].to(dtype)))
        elif op == "root":
            values.append(root(given[0].float()).to(dtype))
        elif op == "to":
            values.append(given[0].to(dtype))
        else:
            wide = [a if a.dtype is torch.bool else a.float() for a in given]
            values.append(getattr(torch, op)(*wide).to(dtype))
    copies = [values[i].expand(shape).clone(memory_format=torch.contiguous_format) for i in program.new + program.over]
    for t, value in zip(write, copies[len(program.new) :], strict=True):
        t.copy_(value)
    return copies[: len(program.new)]
