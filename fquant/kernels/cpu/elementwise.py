"""Elementwise programs on the CPU, by csrc/pointwise.h: register allocation, and strides of the tensors that are read.

A tensor is read where it is first needed. A value stays in a register until its last use, and is written as soon as it
is computed. A tensor whose strides are not those of the result is read by its strides. Dims that are one dim in memory,
in all tensors, are merged.
"""

import ctypes
import itertools
import math
from collections.abc import Sequence
from functools import lru_cache, partial
from typing import NamedTuple

import torch
from torch import Tensor

from ..arguments import Kinds, kinds_of, merged
from ..ops.pointwise_program import OWN, Program, dtypes, parse
from .library import DIMS, DTYPES, OPS, Long, Pointer, Pointwise, Read, Step, call, empty, result

_KINDS = {**DTYPES, torch.bool: 3}


def pointwise(read: Sequence[Tensor], write: Sequence[Tensor], text: str) -> list[Tensor]:
    plan = describe(text, kinds_of(read))
    if plan is None:
        read = [t.contiguous() for t in torch.broadcast_tensors(*read)]
        plan = describe(text, kinds_of(read))
        assert plan is not None, "contiguous tensors have one dim"
    new = [empty(*plan.shape, dtype=dtype) for dtype in plan.new]
    if plan.program is not None:
        tensors = (*read, *new, *write)
        call("pointwise", plan.program, (Pointer * len(tensors))(*(t.data_ptr() for t in tensors)))
    return new


def _alone(op: str, x: Tensor, half: int | None = None, out: Tensor | None = None) -> Tensor:
    """Run the program of one step. Without ``half`` it runs on contiguous memory, which merges to one dim."""
    step = f"{op}.{str(x.dtype).removeprefix('torch.')} 0" + ("" if half is None else f" {float(half).hex()}")
    read = [x.contiguous() if half is None else x]
    if out is None:
        return pointwise(read, [], f"{step}; new 1; over")[0]
    pointwise(read, [result(out, *x.shape, dtype=x.dtype)], f"{step}; new; over 1")
    return out


silu, silu_derivative, turn, root = (partial(_alone, op) for op in (*OWN, "turn", "root"))


class _Plan(NamedTuple):
    """The arguments of C, and the results to allocate; ``program`` is None if there are no elements."""

    shape: torch.Size
    new: tuple[torch.dtype, ...]
    program: Pointwise | None


@lru_cache(maxsize=4096)
def describe(text: str, reads: Kinds) -> _Plan | None:
    """Return the plan, or None for more dims than C takes; its key is text, because 0.0 and -0.0 are equal numbers."""
    program, shape = parse(text), torch.broadcast_shapes(*(shape for _, shape, _ in reads))
    kinds = dtypes([dtype for dtype, *_ in reads], program)
    new = tuple(kinds[i] for i in program.new)
    if not (total := math.prod(shape)):
        return _Plan(shape, new, None)
    sizes, *strides = merged(shape, reads)
    if len(sizes) > DIMS:
        return None
    whole = tuple(math.prod(sizes[d + 1 :]) for d in range(len(sizes)))
    listed, registers = _steps(program, [dtype for dtype, *_ in reads])
    steps = (Step * len(listed))(*listed)
    accesses = (Read * len(reads))(
        *(Read((Long * DIMS)(*s), _KINDS[dtype], s == whole) for (dtype, *_), s in zip(reads, strides, strict=True))
    )
    addresses = ctypes.addressof(steps), ctypes.addressof(accesses), None
    c_program = Pointwise(*addresses, len(steps), total, len(sizes), registers, (Long * DIMS)(*sizes))
    c_program.keep = steps, accesses
    return _Plan(shape, new, c_program)


def _steps(program: Program, reads: list[torch.dtype]) -> tuple[list[Step], int]:
    """Return the steps for C, with reads and writes, and the number of registers."""
    first, kinds = len(reads), reads + [step.dtype for step in program.steps]
    places: dict[int, list[int]] = {}  # of the new tensors that a value is written to
    for place, value in enumerate(program.new):
        places.setdefault(value, []).append(first + place)
    last = {value: i for i, step in enumerate(program.steps) for value in step.args if isinstance(value, int)}
    last |= dict.fromkeys(program.over, len(program.steps))  # the tensors that they overwrite are read before
    steps, held, free, fresh = list[Step](), dict[int, int](), list[int](), itertools.count()
    decays = dict[str, int]()
    take = lambda: free.pop() if free else next(fresh)

    def emit(op: str, dtype: torch.dtype, to: int, *registers: int, value: float = 0.0) -> None:
        steps.append(Step(OPS.index(op), _KINDS[dtype], to, *registers, value=value))

    def add(value: int, op: str, *registers: int, half: float = 0.0) -> None:
        held[value] = take()
        emit(op, kinds[value], held[value], *registers, value=half)
        for place in places.get(value, ()):
            emit("write", kinds[value], 0, held[value], place)
        if value not in last:
            free.append(held.pop(value))

    for value in (*program.new, *program.over):
        if value < first and value not in held and (value not in last or value in program.over):
            add(value, "read", value)
    for i, (op, _, args) in enumerate(program.steps):
        registers, spent = list[int](), list[int]()
        half = args[1] if op == "turn" else 0.0
        for value in args[: 1 if half else None]:
            if isinstance(value, float):
                spent.append(take())
                emit("constant", torch.float32, spent[-1], value=value)
            elif value not in held:
                add(value, "read", value)
            registers.append(spent[-1] if isinstance(value, float) else held[value])
        if op in OWN:  # both of one value share its exponential
            if repr(args) not in decays:
                decays[repr(args)] = take()
                emit("decay", torch.float32, decays[repr(args)], *registers)
            registers.append(decays[repr(args)])
            if all(later.op not in OWN or later.args != args for later in program.steps[i + 1 :]):
                spent.append(decays.pop(repr(args)))
        gone = spent + [held.pop(value) for value in {*args} if isinstance(value, int) and last[value] == i]
        free += () if half else gone  # turn does not read in the order in which it writes
        add(first + i, op, *registers, half=half)
        free += gone if half else ()
    for place, value in enumerate(program.over):
        emit("write", kinds[value], 0, held[value], first + len(program.new) + place)
    return steps, next(fresh)
