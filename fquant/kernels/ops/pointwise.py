"""Chains of elementwise operations as one op, which walks memory once.

    pointwise(read, write, program)    f[*shape] for every result that is new; others are written over ``write``

A norm, an activation or an optimiser is a chain of additions, products and casts of large tensors: each by itself reads
and writes memory, and does next to nothing with it. A *program* (``program.py``) is such a chain as a value.

Every step is rounded to its dtype, so that a chain gives the same bits as its steps one by one. There are two kinds:

* Those named as operations of torch give the bits of these. They are what IEEE 754 defines to the last bit: no
  exponentials, and no square roots either, which torch leaves to libraries that need not round as IEEE 754 wants.
  (``turn`` is a ``neg`` and a ``cat``.)
* ``silu`` and ``silu_derivative`` are ours, the ops of ``silu.py``, which says how near to the exact value they are. Alone
  such an op is the program of that one step, so its bits are those of the step in any other program on the machine. No
  operation of torch is ever replaced by one of these.

On CPUs with the kernels of csrc/kernels.c a piece of each value stays in the nearest cache from the first step to the last.
Elsewhere the steps are those of torch, or of ``reference.py``, one after another, which also defines the op.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor

from .. import dispatch_bypass
from ..dispatch import backend
from ..registry import constant
from .pointwise_program import DTYPES, PIECE, Program, dtypes, is_turned, parse

SCHEMA = "pointwise(Tensor[] read, Tensor(a!)[] write, str program) -> Tensor[]"


def pointwise(read: Sequence[Tensor], write: Sequence[Tensor], program: Program) -> list[Tensor]:
    """The new tensors of ``program``, contiguous [*shape], of the tensors ``read``, whose shapes broadcast to it.

    What is read is float32, bfloat16, float16, or bool; ``write`` are contiguous tensors [*shape] that are written
    over, and what shares their memory among ``read`` has to be they themselves. Raises TypeError or ValueError for
    anything else.
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
    for into in write:
        memory, place = into.untyped_storage()._cdata, _place(into)
        if any(_place(t) != place for t in read if t.untyped_storage()._cdata == memory):
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


_FIX = "it is what a captured graph runs; differentiate the function, and capture its gradient"


def _register() -> Callable[..., Any]:
    _LIBRARY.define(SCHEMA, tags=(torch.Tag.pt2_compliant_tag,))
    _LIBRARY.impl("pointwise", _pointwise, "CompositeExplicitAutograd")
    dispatch_bypass.add("fquant::pointwise", _compute)
    _LIBRARY.impl("pointwise", partial(constant, "pointwise", _FIX), "Autograd", with_keyset=True)
    torch.library.register_fake("fquant::pointwise", _fake, lib=_LIBRARY)
    return torch.ops.fquant.pointwise.default


_LIBRARY = torch.library.Library("fquant", "FRAGMENT")
OP = _register()
