"""A chain of elementwise operations as a value; what it means is in ``pointwise.py``.

    mul.bfloat16 0 1; to.float32 2; add.float32 3 0x1.4f8b580000000p-17; new 4; over

Values are numbered: first what is read, then what each step makes. A step is an operation, the dtype that its result is
rounded to, and its arguments: numbers of values, or constants, in hexadecimal. At the end it is told which values are
wanted in new tensors, and which are written over tensors that are given.

All operations are elementwise but ``turn x h``, which is what rotary embeddings do to the halves of a last dim of 2|h|:
[-second, first] for h > 0, and its transpose [second, -first] for h < 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import torch

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
OWN = ("silu", "silu_derivative")  # operations that are no other's to the last bit; all others are torch's
PIECE = 512  # elements of a value that are there at a time (TILE of csrc/kernels.c); what is turned divides it
ARITY = {
    "add": 2, "sub": 2, "mul": 2, "div": 2, "neg": 1, "reciprocal": 1, "to": 1, "where": 3, "turn": 2,
    **dict.fromkeys(OWN, 1),
}  # fmt: skip


class Step(NamedTuple):
    """One operation: on values by their numbers, or on constants, rounded to ``dtype``."""

    op: str
    dtype: torch.dtype
    args: tuple[int | float, ...]


class Program(NamedTuple):
    """Steps, the values that are wanted as new tensors, and those that are written over tensors given for it."""

    steps: tuple[Step, ...]
    new: tuple[int, ...]
    over: tuple[int, ...]

    @property
    def text(self) -> str:
        """The program as a string, which :func:`parse` reads."""
        lines = [f"{op}.{_name(dtype)} {' '.join(map(_told, args))}" for op, dtype, args in self.steps]
        return "; ".join([*lines, " ".join(["new", *map(str, self.new)]), " ".join(["over", *map(str, self.over)])])


@lru_cache(maxsize=4096)
def parse(text: str) -> Program:
    """The program that a string tells; ValueError, naming the line, for what is none."""
    *lines, new, over = [line.split() for line in text.split(";")] if ";" in text else [[], []]
    if new[:1] != ["new"] or over[:1] != ["over"]:
        raise ValueError(f"pointwise: {text!r} does not end with what is new and what is written over")
    steps = []
    for line in lines:
        op, _, dtype = "".join(line[:1]).partition(".")
        if op not in ARITY or dtype not in DTYPES or len(line) != 1 + ARITY[op]:
            raise ValueError(f"pointwise: {' '.join(line)!r} is no step; wanted one of {', '.join(ARITY)}")
        steps.append(Step(op, DTYPES[dtype], tuple(map(_read, line[1:]))))
    return Program(tuple(steps), tuple(map(int, new[1:])), tuple(map(int, over[1:])))


def dtypes(read: Sequence[torch.dtype], program: Program) -> list[torch.dtype]:
    """The dtype of every value, given those of what is read."""
    return [*read, *(step.dtype for step in program.steps)]


def is_turned(shape: Sequence[int], half: int | float) -> bool:
    """Whether the last dim of ``shape`` can be turned, forth or back, by ``half``: 2|half| is it, and divides PIECE."""
    return bool(shape) and shape[-1] == 2 * abs(half) != 0 and PIECE % shape[-1] == 0


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _told(argument: float) -> str:
    return argument.hex() if isinstance(argument, float) else str(argument)


def _read(text: str) -> int | float:
    return int(text) if text.isdigit() else float.fromhex(text)
