"""Elementwise programs in Triton: one kernel, specialised by the program, that keeps every value in registers.

Triton unrolls the steps while it compiles. A program is compile-time tuples of integers, so no source is generated. A
constant is the bits of a float32, because as numbers 0.0 and -0.0 would be the same key of Triton's cache.

* A thread has the same elements of every tensor, 16 bytes of the widest result. Nothing crosses threads, so a program
  needs no shared memory, and may overwrite what it reads.
* A tensor that is broadcast or has gaps is read by its strides. Only the dims in which it varies are computed, and only
  for the first of the elements that one access reads.
* ``turn`` needs a value at another element of the row, its partner. If a program has one, each value is computed at an
  element and at its partner. Those reads are in the nearest cache, as a row belongs to one block of threads.
* silu has the polynomial of csrc/exp.h, with fused multiply-adds where the device has them. So its bits are those of
  the C kernels on all such instruction sets. Triton's interpreter has none, and has the bits of plain C.

A step computes in float32 and is rounded to its dtype. No other operations are fused, and denormals are kept.
"""

# pyright: reportInvalidTypeForm=false
import math
from collections.abc import Sequence
from functools import lru_cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..arguments import Kinds, kinds_of, merged
from ..ops.pointwise_program import ARITY, OWN, Program, dtypes, parse
from .codes import DTYPES, EXACT, narrow, on, tl, triton, widen

WARPS, WIDEST = 4, 16  # of a program, and bytes of an access
LONG = 2**31  # elements that 32-bit integers count
OPS = tuple(ARITY)
ADD, SUB, MUL, DIV, NEG, RECIPROCAL, TO, WHERE, TURN, ROOT, SILU, SLOPE = (
    tl.constexpr(OPS.index(op))
    for op in ("add", "sub", "mul", "div", "neg", "reciprocal", "to", "where", "turn", "root", *OWN)
)  # fmt: skip


def pointwise(read: Sequence[Tensor], write: Sequence[Tensor], text: str) -> list[Tensor]:
    plan = _describe(text, kinds_of(read))
    new = [read[0].new_empty(plan.shape, dtype=dtype) for dtype in plan.new]
    if plan.grid and (new or write):
        plain = lambda some: tuple(t.view(torch.uint8) if t.dtype is torch.bool else t for t in some)
        with on(read[0]):
            tensors = plain(read), plain((*new, *write))
            _run[(plan.grid,)](*tensors, *plan.sizes, *plan.constants, num_warps=WARPS, **EXACT)
    return new


def _alone(op: str, x: Tensor, half: int | None = None) -> Tensor:
    """Run the program of one step."""
    step = f"{op}.{str(x.dtype).removeprefix('torch.')} 0" + ("" if half is None else f" {float(half).hex()}")
    return pointwise([x], [], f"{step}; new 1; over")[0]


silu, silu_derivative, turn, root = (partial(_alone, op) for op in (*OWN, "turn", "root"))


class _Plan(NamedTuple):
    """The results to allocate, and the arguments of the kernel besides tensors; ``grid`` is 0 without elements."""

    shape: torch.Size
    new: tuple[torch.dtype, ...]
    grid: int = 0
    sizes: tuple[Any, ...] = ()  # elements, merged dims, and the strides of each tensor that is read in turn
    constants: tuple[Any, ...] = ()


@lru_cache(maxsize=4096)
def _describe(text: str, reads: Kinds) -> _Plan:
    program, shape = parse(text), torch.broadcast_shapes(*(shape for _, shape, _ in reads))
    kinds = dtypes([dtype for dtype, *_ in reads], program)
    new = tuple(kinds[i] for i in program.new)
    if not (total := math.prod(shape)):
        return _Plan(shape, new)
    sizes, *strides = merged(shape, reads)
    whole = tuple(math.prod(sizes[d + 1 :]) for d in range(len(sizes)))
    written = (*program.new, *program.over)
    widest = max((kinds[i].itemsize for i in written), default=4)
    tile = 32 * WARPS * WIDEST // widest
    reach = [sum((size - 1) * stride for size, stride in zip(sizes, own, strict=True)) for own in strides]
    half = next((abs(int(step.args[1])) for step in program.steps if step.op == "turn"), 0)
    access = tuple(1 if own == whole else 0 if any(own) else 2 for own in strides)
    if 0 not in access:  # for which sizes do not matter, so neither does the kernel depend on them
        sizes, strides = (1,), []
    varies = tuple(int(stride != 0) for own in strides for stride in own)
    layout = access, varies, max(total + tile, *reach) >= LONG
    constants = *_encoded(program), written, len(program.over) > 0, *layout, half, tile, total % tile == 0
    apart = tuple(stride for own in strides for stride in own) or (1,)
    return _Plan(shape, new, -(-total // tile), (total, sizes, apart), constants)


def _encoded(program: Program) -> tuple[tuple[Any, ...], ...]:
    """Return the steps as tuples: operations, dtypes, three arguments each, and the bits of their constants.

    An argument below 0 is a constant: the last is -1, and so on. The second argument of ``turn`` is the sign of half.
    """
    bits, rows = list[int](), []
    for op, dtype, args in program.steps:
        row = []
        for arg in args:
            if op == "turn" and row:
                row.append(1 if arg > 0 else -1)
            elif isinstance(arg, int):
                row.append(arg)
            else:
                bits.insert(0, int(torch.tensor(arg, dtype=torch.float32, device="cpu").view(torch.int32)))
                row.append(-len(bits))
        rows.append((OPS.index(op), DTYPES[dtype], *row, *[0] * (3 - len(row))))
    return (*(zip(*rows, strict=True) if rows else ((),) * 5), tuple(bits))


@triton.jit
def _read(x, at, mask, sizes, strides, VARIES: tl.constexpr, FIRST: tl.constexpr, ACCESS: tl.constexpr):
    """Read the elements ``at`` of the result from x, whose strides are from FIRST on in ``strides``.

    ACCESS is 0 for strides, 1 for those of the result, 2 for one element.
    """
    if ACCESS == 1:
        x += at
    elif ACCESS == 0:
        for d in tl.static_range(len(sizes) - 1, -1, -1):
            if VARIES[FIRST + d]:
                x += (at if d == 0 else at % sizes[d]) * strides[FIRST + d]
            if d > 0:
                at = at // sizes[d]
    return tl.load(x) if mask is None or ACCESS == 2 else tl.load(x, mask=mask, other=0)


@triton.jit
def _argument(values, BITS: tl.constexpr, A: tl.constexpr):
    """Return a value, or a constant, in float32."""
    if A >= 0:
        return widen(values[A])
    else:
        return tl.cast(BITS[len(BITS) + A], tl.int32).to(tl.float32, bitcast=True)


@triton.jit
def _negative(x):
    return (x.to(tl.int32, bitcast=True) ^ -0x80000000).to(tl.float32, bitcast=True)


@triton.jit
def _decay(x):
    """Compute exp(-|x|) as csrc/exp.h does."""
    x = (x.to(tl.int32, bitcast=True) | -0x80000000).to(tl.float32, bitcast=True)
    x = tl.where(x < -104.0, -104.0, x)
    shifted = tl.fma(x, 1.44269502162933349609375, 12582912.0)
    k = shifted - 12582912.0
    r = tl.fma(k, 2.12194440e-4, tl.fma(k, -0.693359375, x))
    p = tl.fma(r, 1.9875691500e-4, 1.3981999507e-3)
    p = tl.fma(p, r, 8.3334519073e-3)
    p = tl.fma(p, r, 4.1665795894e-2)
    p = tl.fma(p, r, 1.6666665459e-1)
    p = tl.fma(p, r, 5.0000001201e-1)
    p = tl.fma(p, r * r, r) + 1.0
    power = ((shifted.to(tl.int32, bitcast=True) + (127 + 32)) << 23).to(tl.float32, bitcast=True)
    return p * power * 2.3283064365386963e-10


@triton.jit
def _silu(x):
    e = _decay(x)
    return tl.div_rn(tl.where(x.to(tl.int32, bitcast=True) < 0, x * e, x), 1.0 + e)


@triton.jit
def _slope(x):
    e, below = _decay(x), x.to(tl.int32, bitcast=True) < 0
    large = tl.div_rn(1.0, 1.0 + e)
    small = e * large
    return tl.where(below, small, large) * (1.0 + x * tl.where(below, large, small))


@triton.jit
def _step(values, BITS, OP: tl.constexpr, DTYPE: tl.constexpr, A: tl.constexpr, B: tl.constexpr, C: tl.constexpr):
    """Compute a step that needs no other element than its own."""
    a = _argument(values, BITS, A)
    if OP == ADD:
        value = a + _argument(values, BITS, B)
    elif OP == SUB:
        value = a - _argument(values, BITS, B)
    elif OP == MUL:
        value = a * _argument(values, BITS, B)
    elif OP == DIV:
        value = tl.div_rn(a, _argument(values, BITS, B))
    elif OP == NEG:
        value = _negative(a)
    elif OP == RECIPROCAL:
        value = tl.div_rn(1.0, a)
    elif OP == TO:
        value = a
    elif OP == WHERE:
        value = tl.where(a != 0, _argument(values, BITS, B), _argument(values, BITS, C))
    elif OP == ROOT:
        value = tl.sqrt_rn(a)
    elif OP == SILU:
        value = _silu(a)
    else:
        tl.static_assert(OP == SLOPE)
        value = _slope(a)
    return narrow(value, DTYPE)


@triton.jit
def _run(
    reads, writes, total, sizes, strides, OPS: tl.constexpr, KINDS: tl.constexpr, A: tl.constexpr, B: tl.constexpr,
    C: tl.constexpr, BITS: tl.constexpr, WRITTEN: tl.constexpr, OVER: tl.constexpr, ACCESS: tl.constexpr,
    VARIES: tl.constexpr, LONG: tl.constexpr, HALF: tl.constexpr, TILE: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """Run a program on TILE elements; if HALF, ``there`` has the values at the partners of the elements."""
    block = tl.program_id(0).to(tl.int64) if LONG else tl.program_id(0)
    if HALF:
        row = block * (TILE // 2 // HALF) + tl.arange(0, TILE // 2 // HALF)[:, None, None]
        side, column = tl.arange(0, 2)[None, :, None], tl.arange(0, HALF)[None, None, :]
        at = row * (2 * HALF) + side * HALF + column
        partner = row * (2 * HALF) + (1 - side) * HALF + column
    else:
        at = block * TILE + tl.arange(0, TILE)
    mask = None if EVEN else at < total
    here, there = (), ()
    for i in tl.static_range(len(reads)):
        here = here + (_read(reads[i], at, mask, sizes, strides, VARIES, i * len(sizes), ACCESS[i]),)
        if HALF:
            there = there + (_read(reads[i], partner, mask, sizes, strides, VARIES, i * len(sizes), ACCESS[i]),)
    for i in tl.static_range(len(OPS)):
        if OPS[i] == TURN:
            first, second = widen(there[A[i]]), widen(here[A[i]])  # of an element, and of its partner
            minus = side == (0 if B[i] > 0 else 1)
            first, second = tl.where(minus, _negative(first), first), tl.where(minus, second, _negative(second))
            here, there = here + (narrow(first, KINDS[i]),), there + (narrow(second, KINDS[i]),)
        else:
            here = here + (_step(here, BITS, OPS[i], KINDS[i], A[i], B[i], C[i]),)
            if HALF:
                there = there + (_step(there, BITS, OPS[i], KINDS[i], A[i], B[i], C[i]),)
    if OVER:
        tl.debug_barrier()  # nothing is overwritten before it was read
    for i in tl.static_range(len(WRITTEN)):
        tl.store(writes[i] + at, here[WRITTEN[i]], mask=mask)
