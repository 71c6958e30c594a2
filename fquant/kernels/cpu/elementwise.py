"""Elementwise programs on the CPU, by csrc/pointwise.h: register allocation, and strides of the tensors that are read.

A tensor is read where it is first needed. A value stays in a register until its last use, and is written as soon as it
is computed. A tensor whose strides are not those of the result is read by its strides. Dims that are one dim in memory,
in all tensors, are merged.
"""

import ctypes
import math
from collections.abc import Sequence
from functools import lru_cache, partial
from typing import NamedTuple

import torch
from torch import Tensor

from ..ops.pointwise_program import OWN, Program, dtypes, parse
from .library import DIMS, DTYPES, OPS, Pointwise, Read, Step, call, empty, result

_KINDS = {**DTYPES, torch.bool: 3}


def pointwise(read: Sequence[Tensor], write: Sequence[Tensor], text: str) -> list[Tensor]:
    """See ``fquant.kernels.ops.pointwise.pointwise``."""
    plan = _plan(text, _kinds(read))
    if plan is None:
        shape = torch.broadcast_shapes(*(t.shape for t in read))
        read = [t.expand(shape).contiguous() for t in read]
        plan = _plan(text, _kinds(read))
        assert plan is not None, "contiguous tensors have one dim"
    new = [empty(*plan.shape, dtype=dtype) for dtype in plan.new]
    if plan.program is not None:
        tensors = (*read, *new, *write)
        call("pointwise", plan.program, (ctypes.c_void_p * len(tensors))(*(t.data_ptr() for t in tensors)))
    return new


def _alone(op: str, x: Tensor, out: Tensor | None = None) -> Tensor:
    """Run the program of one step on contiguous memory, which merges to one dim."""
    step, read = f"{op}.{str(x.dtype).removeprefix('torch.')} 0", [x.contiguous()]
    if out is None:
        return pointwise(read, [], f"{step}; new 1; over")[0]
    pointwise(read, [result(out, *x.shape, dtype=x.dtype)], f"{step}; new; over 1")
    return out


silu, silu_derivative = partial(_alone, "silu"), partial(_alone, "silu_derivative")


class _Plan(NamedTuple):
    """The arguments of C, and the results to allocate; ``program`` is None if there are no elements."""

    shape: torch.Size
    new: tuple[torch.dtype, ...]
    program: Pointwise | None
    keep: tuple[object, ...]  # memory that the program points to


_Kinds = tuple[tuple[torch.dtype, torch.Size, tuple[int, ...]], ...]


def _kinds(read: Sequence[Tensor]) -> _Kinds:
    return tuple((t.dtype, t.shape, t.stride()) for t in read)


@lru_cache(maxsize=4096)
def _plan(text: str, reads: _Kinds) -> _Plan | None:
    """Return the plan, or None for more dims than C takes; its key is text, because 0.0 and -0.0 are equal numbers."""
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
    addresses = ctypes.addressof(listed), ctypes.addressof(accesses), None
    c_program = Pointwise(*addresses, len(steps), total, len(sizes), registers, (ctypes.c_int64 * DIMS)(*sizes))
    return _Plan(shape, new, c_program, (listed, accesses))


def _expanded(shape: torch.Size, own: torch.Size, strides: tuple[int, ...]) -> tuple[int, ...]:
    """Return the strides of a tensor that is broadcast to ``shape``."""
    front = len(shape) - len(own)
    return (0,) * front + tuple(
        0 if small == 1 < size else stride for small, size, stride in zip(own, shape[front:], strides, strict=True)
    )


def _collapsed(shape: tuple[int, ...], strides: list[tuple[int, ...]]) -> tuple[list[int], list[tuple[int, ...]]]:
    """Return the shape and the strides after adjacent dims are merged that are one dim in the memory of each tensor."""
    sizes, merged = list[int](), list[list[int]]([] for _ in strides)
    for d, size in enumerate(shape):
        if size == 1:
            continue
        if sizes and all(own[-1] == stride[d] * size for own, stride in zip(merged, strides, strict=True)):
            size *= sizes.pop()
            for own in merged:
                own.pop()
        sizes.append(size)
        for own, stride in zip(merged, strides, strict=True):
            own.append(stride[d])
    return (sizes, [tuple(own) for own in merged]) if sizes else ([1], [(1,) for _ in strides])


def _steps(program: Program, reads: list[torch.dtype]) -> tuple[list[Step], int]:
    """Return the steps for C, with reads and writes, and the number of registers."""
    first, kinds = len(reads), reads + [step.dtype for step in program.steps]
    places: dict[int, list[int]] = {}  # of the new tensors that a value is written to
    for place, value in enumerate(program.new):
        places.setdefault(value, []).append(first + place)
    last = {value: i for i, step in enumerate(program.steps) for value in step.args if isinstance(value, int)}
    last |= dict.fromkeys(program.over, len(program.steps))  # the tensors that they overwrite are read before
    steps, held, free = list[Step](), dict[int, int](), list[int]()
    decays = dict[str, int]()
    most = 0

    def take() -> int:
        nonlocal most
        if free:
            return free.pop()
        most += 1
        return most - 1

    def add(value: int, step: Step) -> None:
        held[value] = step.to = take()
        steps.append(step)
        for place in places.get(value, ()):
            steps.append(_write(held[value], kinds[value], place))
        if value not in last:
            free.append(held.pop(value))

    for value in (*program.new, *program.over):
        if value < first and value not in held and (value not in last or value in program.over):
            add(value, Step(OPS.index("read"), _KINDS[kinds[value]], 0, value))
    for i, (op, dtype, args) in enumerate(program.steps):
        registers, spent = list[int](), list[int]()
        half = args[1] if op == "turn" else 0.0
        for value in args[: 1 if half else None]:
            if isinstance(value, float):
                spent.append(take())
                narrow = dtype if op in ("add", "sub") else torch.float32  # as torch rounds a number in such an op
                rounded = float(torch.tensor(value, dtype=narrow, device="cpu"))
                steps.append(Step(OPS.index("constant"), 0, spent[-1], value=rounded))
            elif value not in held:
                add(value, Step(OPS.index("read"), _KINDS[kinds[value]], 0, value))
            registers.append(spent[-1] if isinstance(value, float) else held[value])
        if op in OWN:  # both of one value share its exponential
            if repr(args) not in decays:
                decays[repr(args)] = take()
                steps.append(Step(OPS.index("decay"), 0, decays[repr(args)], *registers))
            registers.append(decays[repr(args)])
            if all(later.op not in OWN or later.args != args for later in program.steps[i + 1 :]):
                spent.append(decays.pop(repr(args)))
        gone = spent + [held.pop(value) for value in {*args} if isinstance(value, int) and last[value] == i]
        free += () if half else gone  # turn does not read in the order in which it writes
        add(first + i, Step(OPS.index(op), _KINDS[dtype], 0, *registers, value=half))
        free += gone if half else ()
    for place, value in enumerate(program.over):
        steps.append(_write(held[value], kinds[value], first + len(program.new) + place))
    return steps, most


def _write(register: int, dtype: torch.dtype, place: int) -> Step:
    return Step(OPS.index("write"), _KINDS[dtype], 0, register, place)
