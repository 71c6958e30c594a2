"""Chains of elementwise operations as one op, which reads and writes memory once.

    pointwise(read, write, program)    new tensors f[*shape]; other results are written over ``write``

A norm, an activation or an optimiser is a chain of additions, products and casts of large tensors. One by one, each
reads and writes memory and computes next to nothing. A *program* (``pointwise_program.py``) is such a chain as a value.

Every step is rounded to its dtype, so a chain gives the same bits as its steps one by one. There are two kinds:

* Steps named like operations of torch have their bits. IEEE 754 defines these operations to the last bit. It does not
  define exponentials, and torch's square roots come from libraries that need not round correctly. (``turn`` is a
  ``neg`` and a ``cat``.)
* ``silu`` and ``silu_derivative`` are the ops of ``silu.py``, which states their error. Such an op is the program of
  that one step, so its bits are those of the step in any program on the machine. They never replace an operation of
  torch.

On CPUs with the C kernels, a piece of each value stays in the nearest cache from the first step to the last. Elsewhere
the reference, which defines the op, runs the steps one after another in torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

from .. import dispatch_bypass
from ..dispatch import backend
from ..registry import define, refuse_derivatives
from .pointwise_program import DTYPES, PIECE, Program, dtypes, is_turned, parse

SCHEMA = "(Tensor[] read, Tensor(a!)[] write, str program) -> Tensor[]"


def pointwise(read: Sequence[Tensor], write: Sequence[Tensor], program: Program) -> list[Tensor]:
    """Run ``program`` on the tensors ``read``, which broadcast to ``shape``, and return its new tensors, contiguous.

    ``read`` are float32, bfloat16, float16 or bool. ``write`` are contiguous tensors [*shape] that are overwritten; a
    tensor in ``read`` may share memory with one of them only if it is the same tensor. Raises TypeError or ValueError
    for anything else.
    """
    return OP(list(read), list(write), program.text)


def _pointwise(read: list[Tensor], write: list[Tensor], text: str) -> list[Tensor]:
    _check(read, write, text)
    return _compute(read, write, text)


def _compute(read: list[Tensor], write: list[Tensor], text: str) -> list[Tensor]:
    return backend(read[0].device.type)[1].pointwise(read, write, text)


def _fake(read: list[Tensor], write: list[Tensor], text: str) -> list[Tensor]:
    _check(read, write, text)
    program, shape = parse(text), torch.broadcast_shapes(*(t.shape for t in read))
    kinds = dtypes([t.dtype for t in read], program)
    return [read[0].new_empty(shape, dtype=kinds[i]) for i in program.new]


def _check(read: list[Tensor], write: list[Tensor], text: str) -> None:
    if len({t.device for t in (*read, *write)}) > 1:
        raise ValueError(
            f"pointwise got tensors on {' and '.join({str(t.device) for t in (*read, *write)})}; move some"
        )
    given = tuple((t.dtype, t.shape) for t in read)
    _check_kinds(text, given, tuple((t.dtype, t.shape, t.is_contiguous()) for t in write))
    for t in write:
        memory, place = t.untyped_storage()._cdata, _place(t)
        if any(_place(other) != place for other in read if other.untyped_storage()._cdata == memory):
            raise ValueError("pointwise: what is written over shares its memory with another tensor that is read")


@lru_cache(maxsize=4096)
def _check_kinds(
    text: str,
    read: tuple[tuple[torch.dtype, torch.Size], ...],
    write: tuple[tuple[torch.dtype, torch.Size, bool], ...],
) -> None:
    if not read:
        raise ValueError("pointwise got nothing to read")
    for dtype, shape, *_ in (*read, *write):
        if dtype not in (*DTYPES.values(), torch.bool):
            raise TypeError(f"pointwise got {dtype} {tuple(shape)}; wanted f32, bf16, f16 or bool")
    program, shape = parse(text), torch.broadcast_shapes(*(shape for _, shape in read))
    kinds = dtypes([dtype for dtype, _ in read], program)
    for i, (op, dtype, args) in enumerate(program.steps):
        name = f"step {i} of {text!r}"
        _check_step(name, op, dtype, args, kinds[: len(read) + i])
        if op == "turn" and not (isinstance(args[0], int) and isinstance(args[1], float) and is_turned(shape, args[1])):
            raise ValueError(
                f"pointwise: {name} turns what is {tuple(shape)}; wanted a value, and half of a last dim by which "
                f"{PIECE} can be divided"
            )
    if not all(0 <= i < len(kinds) for i in (*program.new, *program.over)):
        raise ValueError(f"pointwise: {text!r} wants a value that is not there")
    if write != (wanted := tuple((kinds[i], shape, True) for i in program.over)):
        raise ValueError(
            f"pointwise got {[(kind, tuple(shape)) for kind, shape, _ in write]} to write over; "
            f"wanted contiguous {[(kind, tuple(shape)) for kind, shape, _ in wanted]}"
        )


def _check_step(name: str, op: str, dtype: torch.dtype, args: Sequence[float], kinds: Sequence[torch.dtype]) -> None:
    if not all(0 <= a < len(kinds) for a in args if isinstance(a, int)):
        raise ValueError(f"pointwise: {name} takes a value that is not there yet")
    if op == "where" and (not isinstance(args[0], int) or kinds[args[0]] != torch.bool):
        raise TypeError(f"pointwise: {name} chooses by a value that is no bool")
    given = {kinds[a] for a in (args[1:] if op == "where" else args) if isinstance(a, int)}
    if op != "to" and not given <= ({*DTYPES.values()} if dtype == torch.float32 else {dtype}):
        raise TypeError(f"pointwise: {name} takes {given}; wanted {dtype}, or cast before")


def _place(t: Tensor) -> object:
    return t.storage_offset(), t.shape, t.stride(), t.dtype


OP = define("pointwise", SCHEMA, _pointwise, _fake, None)
refuse_derivatives(
    "pointwise", "it is what a captured graph runs; differentiate the function, and capture its gradient"
)
dispatch_bypass.add("fquant::pointwise", _compute)
