"""Chains of elementwise operations as one op, which reads and writes memory once; rotations of halves, and roots.

    pointwise(read, write, program)    new tensors f[*shape]; other results are written over ``write``
    turn(x, h)                         f[... 2h] to [-second, first], where these are halves of the last dim
    turn(x, -h)                        f[... 2h] to [second, -first], its transpose and its inverse
    root(x)                            square roots f32, rounded correctly: x.double().sqrt().float()

One by one, the additions, products and casts of a norm or an optimiser each read and write memory and compute next to
nothing. A *program* (``pointwise_program.py``) is such a chain as a value.

Every step is rounded to its dtype, so a chain gives the same bits as its steps one by one. There are two kinds:

* Steps named like operations of torch have their bits, which IEEE 754 defines. It does not define exponentials, and
  torch's square roots come from libraries that need not round correctly. (``turn`` is a ``neg`` and a ``cat``. ``root``
  is a root in float64 between two casts, which optimisers have.)
* ``silu`` and ``silu_derivative`` are the ops of ``silu.py``, which states their error. They never replace an operation
  of torch.

Rotary embeddings in torch end every chain in two views, a negation and a concatenation, so
``compile/passes/canonicalize.py`` puts ``turn`` into captured graphs: a step of a program, with the same bits. So it
does with ``root``.

On CPUs with the C kernels, a piece of each value stays in the nearest cache from the first step to the last; in Triton,
in registers. Elsewhere the reference, which defines the op, runs the steps one after another in torch.
"""

from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

from ..arguments import check_floats
from ..dispatch import DIRECT, backend
from ..registry import register
from .pointwise_program import DTYPES, PIECE, Program, dtypes, is_turned, parse


def pointwise(read: Sequence[Tensor], write: Sequence[Tensor], program: Program) -> list[Tensor]:
    """Run ``program`` on the tensors ``read``, which broadcast to ``shape``, and return its new tensors, contiguous.

    ``read`` are float32, bfloat16, float16 or bool. ``write`` are contiguous tensors [*shape] that are overwritten; a
    tensor in ``read`` may share memory with one of them only if it is the same tensor. Raises TypeError or ValueError
    for anything else.
    """
    return OP(list(read), list(write), program.text)


def turn(x: Tensor, half: int) -> Tensor:
    """Rotate the halves of x f[... 2|half|], or rotate back if half < 0; contiguous, x's dtype.
    Raises TypeError for another dtype than f32, bf16, f16 and f64. Raises ValueError if 2|half| is not the last dim, or
    does not divide ``pointwise_program.PIECE``.
    """
    return ROTATE_HALF(x, half)


def root(x: Tensor) -> Tensor:
    """Return the square roots of x f32, rounded correctly; contiguous. Raises TypeError for another dtype."""
    return ROOT(x)


def _compute(read: list[Tensor], write: list[Tensor], text: str) -> list[Tensor]:
    return backend(read[0].device.type)[1].pointwise(read, write, text)


def _empty(read: list[Tensor], write: list[Tensor], text: str) -> list[Tensor]:
    program, shape = parse(text), torch.broadcast_shapes(*(t.shape for t in read))
    kinds = dtypes([t.dtype for t in read], program)
    return [read[0].new_empty(shape, dtype=kinds[i]) for i in program.new]


def _check(op: str, read: list[Tensor], write: list[Tensor], text: str) -> None:
    if len(devices := {str(t.device) for t in (*read, *write)}) > 1:
        raise ValueError(f"pointwise got tensors on {' and '.join(devices)}; move some")
    given = tuple((t.dtype, t.shape) for t in read)
    _check_kinds(text, given, tuple((t.dtype, t.shape, t.is_contiguous()) for t in write))
    for t in write:
        memory, place = t.untyped_storage()._cdata, lambda t: (t.storage_offset(), t.shape, t.stride(), t.dtype)
        if any(place(other) != place(t) for other in read if other.untyped_storage()._cdata == memory):
            raise ValueError("pointwise: what is written over shares its memory with another tensor that is read")


@lru_cache(maxsize=4096)
def _check_kinds(
    text: str, read: tuple[tuple[torch.dtype, torch.Size], ...], write: tuple[tuple[torch.dtype, torch.Size, bool], ...]
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
            wanted = f"a value, and half of a last dim by which {PIECE} can be divided"
            raise ValueError(f"pointwise: {name} turns what is {tuple(shape)}; wanted {wanted}")
    if not all(0 <= i < len(kinds) for i in (*program.new, *program.over)):
        raise ValueError(f"pointwise: {text!r} wants a value that is not there")
    if write != (wanted := tuple((kinds[i], shape, True) for i in program.over)):
        got, want = ([(kind, tuple(shape)) for kind, shape, _ in kinds] for kinds in (write, wanted))
        raise ValueError(f"pointwise got {got} to write over; wanted contiguous {want}")


def _check_step(name: str, op: str, dtype: torch.dtype, args: Sequence[float], kinds: Sequence[torch.dtype]) -> None:
    if not all(0 <= a < len(kinds) for a in args if isinstance(a, int)):
        raise ValueError(f"pointwise: {name} takes a value that is not there yet")
    if op == "where" and (not isinstance(args[0], int) or kinds[args[0]] != torch.bool):
        raise TypeError(f"pointwise: {name} chooses by a value that is no bool")
    given = {kinds[a] for a in (args[1:] if op == "where" else args) if isinstance(a, int)}
    if op != "to" and not given <= ({*DTYPES.values()} if dtype == torch.float32 else {dtype}):
        raise TypeError(f"pointwise: {name} takes {given}; wanted {dtype}, or cast before")


def _check_turn(op: str, x: Tensor, half: int) -> None:
    check_floats(op, x)
    if not is_turned(x.shape, half):
        wanted = f"half of its last dim, by which {PIECE} can be divided"
        raise ValueError(f"turn got x {tuple(x.shape)} and a half of {half}; wanted {wanted}")


def _check_root(op: str, x: Tensor) -> None:
    if x.dtype is not torch.float32:
        raise TypeError(f"root got x {x.dtype} {tuple(x.shape)}; wanted float32")


_FIX = "it is what a captured graph runs; differentiate the function, and capture its gradient"
_SCHEMA = "pointwise(Tensor[] read, Tensor(a!)[] write, str program) -> Tensor[]"
OP = register(_SCHEMA, _check, _empty, None, _FIX, real=_compute, out=False)
DIRECT["fquant::pointwise"] = _compute
_turn_vmap = lambda op, info, in_dims, x, half: (op(x.movedim(in_dims[0], 0), half), 0)
ROTATE_HALF = register(turn, _check_turn, lambda x, half: x.new_empty(x.shape), _turn_vmap, _FIX)
ROOT = register(
    root, _check_root, lambda x: x.new_empty(x.shape), lambda op, info, in_dims, x: (op(x.movedim(in_dims[0], 0)), 0),
    _FIX,
)  # fmt: skip
