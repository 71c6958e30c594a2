"""Elementwise programs for csrc/pointwise.h: which step has which register, and how what is read lies in memory.

A tensor is read where it is needed first, a value lives in a register until its last use, and is written as soon as it
is there. Tensors that broadcast, or whose strides are not those of the result, are read by their strides; dims that lie
behind each other as one are counted as one.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from .. import reference
from ..ops.pointwise_program import OWN, Program, dtypes, parse
from .library import DIMS, DTYPES, OPS, Pointwise, Read, Step, call, empty, result

_KINDS = {**DTYPES, torch.bool: 3}


def pointwise(read: Sequence[Tensor], write: Sequence[Tensor], text: str) -> list[Tensor]:
    """See ``fquant.kernels.ops.pointwise``."""
    plan = _plan(text, _kinds(read))
    if plan is None:
        shape = torch.broadcast_shapes(*(t.shape for t in read))
        read = [t.expand(shape).contiguous() for t in read]
        plan = _plan(text, _kinds(read))
        assert plan is not None, "what is contiguous lies in one dim"
    new = [empty(*plan.shape, dtype=dtype) for dtype in plan.new]
    if plan.program is not None:
        tensors = (*read, *new, *write)
        call("pointwise", plan.program, (ctypes.c_void_p * len(tensors))(*(t.data_ptr() for t in tensors)))
    return new


def silu(x: Tensor, out: Tensor | None = None) -> Tensor:
    """See ``fquant.kernels.ops.silu``."""
    return _alone("silu", x, out) if x.dtype in DTYPES else reference.silu(x)


def silu_derivative(x: Tensor, out: Tensor | None = None) -> Tensor:
    """See ``fquant.kernels.ops.silu``."""
    return _alone("silu_derivative", x, out) if x.dtype in DTYPES else reference.silu_derivative(x)


def _alone(op: str, x: Tensor, out: Tensor | None) -> Tensor:
    """The program of one step; of contiguous memory, which lies in one dim however many ``x`` has."""
    step, read = f"{op}.{str(x.dtype).removeprefix('torch.')} 0", [x.contiguous()]
    if out is None:
        return pointwise(read, [], f"{step}; new 1; over")[0]
    pointwise(read, [result(out, *x.shape, dtype=x.dtype)], f"{step}; new; over 1")
    return out


class _Plan(NamedTuple):
    """What C is told; no program where there are no elements."""

    shape: torch.Size
    new: tuple[torch.dtype, ...]
    program: Pointwise | None
    keep: tuple[object, ...]  # what the program points to


_Kinds = tuple[tuple[torch.dtype, torch.Size, tuple[int, ...]], ...]


def _kinds(read: Sequence[Tensor]) -> _Kinds:
    return tuple((t.dtype, t.shape, t.stride()) for t in read)


@lru_cache(maxsize=4096)
def _plan(text: str, reads: _Kinds) -> _Plan | None:
    """The plan for a program, kept by its text, as numbers 0.0 and -0.0 are equal; None for more dims than C takes."""
    program, shape = parse(text), torch.broadcast_shapes(*(shape for _, shape, _ in reads))
    kinds = dtypes([dtype for dtype, *_ in reads], program)
    new = tuple(kinds[i] for i in program.new)
    if not (total := math.prod(shape)):
        return _Plan(shape, new, None, ())
    sizes, strides = _collapsed(tuple(shape), [_expanded(shape, own, stride) for _, own, stride in reads])
    if len(sizes) > DIMS:
        return None
    whole = tuple(math.prod(sizes[d + 1 :]) for d in range(len(sizes)))
    accesses = (Read * len(reads))(
        *(
            Read((ctypes.c_int64 * DIMS)(*stride), _KINDS[dtype], stride == whole)
            for (dtype, *_), stride in zip(reads, strides, strict=True)
        )
    )
    steps, registers = _steps(program, [dtype for dtype, *_ in reads])
    listed = (Step * len(steps))(*steps)
    told = Pointwise(
        ctypes.addressof(listed), ctypes.addressof(accesses), None, len(steps), total, len(sizes), registers,
        (ctypes.c_int64 * DIMS)(*sizes),
    )  # fmt: skip
    return _Plan(shape, new, told, (listed, accesses))


def _expanded(shape: torch.Size, own: torch.Size, strides: tuple[int, ...]) -> tuple[int, ...]:
    """The strides of a tensor that is broadcast to ``shape``."""
    front = len(shape) - len(own)
    return (0,) * front + tuple(
        0 if small == 1 < size else stride for small, size, stride in zip(own, shape[front:], strides, strict=True)
    )


def _collapsed(shape: tuple[int, ...], strides: list[tuple[int, ...]]) -> tuple[list[int], list[tuple[int, ...]]]:
    """The shape and the strides with dims made one where they lie so in all tensors, of the result as well."""
    sizes, kept = list[int](), list[list[int]]([] for _ in strides)
    for d, size in enumerate(shape):
        if size == 1:
            continue
        if sizes and all(own[-1] == stride[d] * size for own, stride in zip(kept, strides, strict=True)):
            sizes[-1] *= size
            for own, stride in zip(kept, strides, strict=True):
                own[-1] = stride[d]
        else:
            sizes.append(size)
            for own, stride in zip(kept, strides, strict=True):
                own.append(stride[d])
    if not sizes:
        return [1], [(1,) for _ in strides]
    return sizes, [tuple(own) for own in kept]


def _steps(program: Program, reads: list[torch.dtype]) -> tuple[list[Step], int]:
    """The steps for C and the number of registers."""
    first, kinds = len(reads), reads + [step.dtype for step in program.steps]
    wanted: dict[int, list[int]] = {}
    for place, value in enumerate(program.new):
        wanted.setdefault(value, []).append(first + place)
    last = {value: i for i, step in enumerate(program.steps) for value in step.args if isinstance(value, int)}
    last |= dict.fromkeys(program.over, len(program.steps))  # what they are written over may be read before
    steps, held, free = list[Step](), dict[int, int](), list[int]()
    decays = dict[str, int]()
    most = 0

    def take() -> int:
        nonlocal most
        if free:
            return free.pop()
        most += 1
        return most - 1

    def made(value: int, step: Step) -> None:
        held[value] = step.to = take()
        steps.append(step)
        for place in wanted.get(value, ()):
            steps.append(_write(held[value], kinds[value], place))
        if value not in last:
            free.append(held.pop(value))

    for value in (*program.new, *program.over):
        if value < first and value not in held and (value not in last or value in program.over):
            made(value, Step(OPS.index("read"), _KINDS[kinds[value]], 0, value))
    for i, (op, dtype, args) in enumerate(program.steps):
        registers, spent = list[int](), list[int]()
        half = args[1] if op == "turn" else 0.0
        for value in args[: 1 if half else None]:
            if isinstance(value, float):
                spent.append(take())
                narrow = dtype if op in ("add", "sub") else torch.float32  # as torch takes a number in such an op
                rounded = float(torch.tensor(value, dtype=narrow, device="cpu"))
                steps.append(Step(OPS.index("constant"), 0, spent[-1], value=rounded))
            elif value not in held:
                made(value, Step(OPS.index("read"), _KINDS[kinds[value]], 0, value))
            registers.append(spent[-1] if isinstance(value, float) else held[value])
        if op in OWN:  # those of one value share their exponential
            if repr(args) not in decays:
                decays[repr(args)] = take()
                steps.append(Step(OPS.index("decay"), 0, decays[repr(args)], *registers))
            registers.append(decays[repr(args)])
            if all(later.op not in OWN or later.args != args for later in program.steps[i + 1 :]):
                spent.append(decays.pop(repr(args)))
        gone = spent + [held.pop(value) for value in {*args} if isinstance(value, int) and last[value] == i]
        free += () if half else gone  # what is turned is not read in the order in which it is written
        made(first + i, Step(OPS.index(op), _KINDS[dtype], 0, *registers, value=half))
        free += gone if half else ()
    for place, value in enumerate(program.over):
        steps.append(_write(held[value], kinds[value], first + len(program.new) + place))
    return steps, most


def _write(register: int, dtype: torch.dtype, place: int) -> Step:
    return Step(OPS.index("write"), _KINDS[dtype], 0, register, place)
