"""A chain of elementwise operations as a value; ``pointwise.py`` runs it.

    mul.bfloat16 0 1; to.float32 2; add.float32 3 0x1.4f8b580000000p-17; new 4; over

Values are numbered: first the tensors that are read, then the result of each step. A step is an operation, the dtype
that its result is rounded to, and its arguments: numbers of values, or constants in hexadecimal. The last two items
list the values that become new tensors, and those that overwrite given tensors.

A step computes in float32, where IEEE 754 defines its result, and rounds once. Its constants are numbers of float32.
Where torch takes another number, or another operation for a number, depends on the device, and is known to the
lowering alone (``compile/passes/pointwise_lowering.py``).

All operations are elementwise except ``turn x h``, which is ``pointwise.turn`` in a last dim of 2|h|.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import torch

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
OWN = ("silu", "silu_derivative")  # operations with bits of their own; all others have torch's
PIECE = 512  # elements of a value in registers at a time (TILE of csrc/work.h), a multiple of every 2|h|
ARITY = {
    "add": 2, "sub": 2, "mul": 2, "div": 2, "neg": 1, "reciprocal": 1, "to": 1, "where": 3, "turn": 2, "root": 1,
    **dict.fromkeys(OWN, 1),
}  # fmt: skip


class Step(NamedTuple):
    """An operation on values, by their numbers, or on constants, rounded to ``dtype``."""

    op: str
    dtype: torch.dtype
    args: tuple[int | float, ...]


class Program(NamedTuple):
    """Steps, the values that become new tensors, and the values that overwrite given tensors."""

    steps: tuple[Step, ...]
    new: tuple[int, ...]
    over: tuple[int, ...]

    @property
    def text(self) -> str:
        """Return the program as a string, which :func:`parse` reads."""
        lines = [
            f"{op}.{str(dtype).removeprefix('torch.')} {' '.join(map(_text, args))}" for op, dtype, args in self.steps
        ]
        return "; ".join([*lines, " ".join(["new", *map(str, self.new)]), " ".join(["over", *map(str, self.over)])])


@lru_cache(maxsize=4096)
def parse(text: str) -> Program:
    """Return the program of a string; raise a ValueError that names the line for anything else."""
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
    """Return the dtype of every value, from the dtypes of the tensors that are read."""
    return [*read, *(step.dtype for step in program.steps)]


def is_turned(shape: Sequence[int], half: int | float) -> bool:
    """Return True if ``turn`` by ``half`` applies to ``shape``: its last dim is 2|half|, which divides PIECE."""
    return bool(shape) and shape[-1] == 2 * abs(half) != 0 and PIECE % shape[-1] == 0


def _text(argument: float) -> str:
    return argument.hex() if isinstance(argument, float) else str(argument)


def _read(text: str) -> int | float:
    return int(text) if text.isdigit() else float.fromhex(text)
