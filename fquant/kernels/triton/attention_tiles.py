"""Tiles of attention in Triton: their sizes, the tiles that documents leave, and the parts of all its kernels.

A program multiplies a tile of queries with one tile of keys after another. Three facts bound the keys of a tile of
queries: the last query (causal), the window of the first, and documents. ``spans`` finds the
first and the last token that share a document with a tile. It runs on the device, because nothing may wait for the
host. Documents need not be sorted. The numbers of a tile are compared as an interval, so unsorted ones only skip less.

Within these bounds, tiles that every query sees whole are multiplied without a mask. They come first, and then those at
both ends in one loop. So the machine code has two loops of products, and the order of all sums is fixed.

A GPU has an instruction for ``exp2``. ``log2(e)`` multiplies the difference of a score and the maximum, or the
log-sum-exp. As part of the scale it would round scores of 1e8 by more than an exponent may be off. A fused product and
sum would do so as well (hence ``EXACT``).
"""

# pyright: reportInvalidTypeForm=false
import math
from importlib import import_module
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from .codes import EXACT, INTERPRETED, generation, narrow, on, tl, triton, widen

TensorDescriptor: Any = import_module("triton.tools.tensor_descriptor").TensorDescriptor
LOG2E = tl.constexpr(1 / math.log(2))
LN2 = tl.constexpr(math.log(2))
MOST_APART = 1 << 22  # elements from a token to the next; 256 times that is an offset in a tile
SCAN = 1024  # numbers of documents that are compared at a time


class Tiles(NamedTuple):
    """The sizes of a kernel."""

    queries: int  # tokens of a tile
    keys: int  # likewise
    warps: int
    stages: int  # of the pipeline of loads
    registers: int | None = None  # of a thread at most; by default the assembler's guess, which may spill a few


class Plan(NamedTuple):
    """The sizes of the kernels of an attention and its gradients."""

    forward: Tiles
    of_keys: Tiles
    of_queries: Tiles
    tma: bool = True  # loads by the tensor memory accelerator, where the strides of tensors permit
    of_capped_keys: Tiles | None = None  # if they are others: the derivative of a cap takes registers


Table: TypeAlias = dict[int, Plan]  # by the largest head
FLOAT32 = Plan(  # without the accelerator, beside whose loads registers spill
    Tiles(32, 32, 8, 2), Tiles(16, 32, 8, 2), Tiles(32, 32, 8, 2), False
)
PLANS: dict[int, Table] = {
    80: {
        64: Plan(Tiles(128, 64, 8, 2), Tiles(16, 64, 4, 2), Tiles(64, 32, 4, 2), False),
        128: Plan(Tiles(128, 64, 8, 2), Tiles(32, 64, 8, 2), Tiles(64, 64, 8, 2), False),
        256: Plan(Tiles(64, 32, 8, 2), Tiles(32, 32, 8, 2), Tiles(32, 32, 8, 2), False),
    },
    90: {
        64: Plan(Tiles(128, 128, 8, 2), Tiles(64, 128, 8, 2), Tiles(128, 64, 8, 2)),
        128: Plan(  # the fastest on an H200
            Tiles(64, 64, 4, 3), Tiles(64, 64, 4, 2), Tiles(64, 64, 4, 2), of_capped_keys=Tiles(32, 64, 4, 2)
        ),
        256: Plan(Tiles(128, 64, 8, 2), Tiles(32, 32, 8, 2), Tiles(64, 32, 8, 2)),
    },
    100: {
        64: Plan(Tiles(128, 64, 8, 3), Tiles(32, 128, 8, 2), Tiles(128, 64, 8, 2)),
        128: Plan(Tiles(128, 64, 8, 3, 168), Tiles(32, 64, 8, 2), Tiles(128, 32, 8, 2)),
        256: Plan(Tiles(128, 64, 8, 2), Tiles(32, 32, 8, 2), Tiles(64, 64, 8, 2)),
    },
}


def plan_of(q: Tensor) -> Plan | None:
    """Return the plan for ``q``, bf16, f16 or f32 [b h t e]; None if its heads are too large for these kernels."""
    e, table = q.shape[3], {64: FLOAT32} if q.dtype is torch.float32 else PLANS[generation(q.device)]
    return next((plan for most, plan in table.items() if e <= most), None)


def reads_by_tma(plan: Plan, *tensors: Tensor) -> bool:
    """Return True if the tensor memory accelerator is to load tiles of all ``tensors`` [b h t e]."""
    aligned = (n * t.itemsize % 16 == 0 and n > 0 for t in tensors for n in t.stride()[:3])
    return plan.tma and all(t.data_ptr() % 16 == 0 and t.stride(3) == 1 for t in tensors) and all(aligned)


def operand(t: Tensor, size: int, tma: bool) -> Any:
    """Return ``t`` [b h t e] for :func:`load_tile`: as it is, or the descriptor of its tiles of ``size`` tokens."""
    if not tma:
        return t
    return TensorDescriptor(t, list(t.shape), list(t.stride()), [1, 1, size, padded(t.shape[3])])


def rows_apart(t: Tensor) -> Tensor:
    """Return ``t`` [b h t e] with contiguous heads, and tokens whose distance fits the kernels' offsets."""
    return t if t.stride(3) == 1 and 0 <= t.stride(2) < MOST_APART else t.contiguous()


def by_tokens(t: Tensor) -> Tensor:
    """Allocate like ``t`` [b h t e], with the memory layout [b t h e]."""
    b, h, n, e = t.shape
    return t.new_empty(b, n, h, e).transpose(1, 2)


def padded(e: int) -> int:
    """Return the size of a head in registers: a power of two that tensor cores multiply."""
    return max(16, triton.next_power_of_2(e))


def sees_all(window: int | None, t: int) -> int | None:
    """Return the window, or None if it is as long as the sequence."""
    return window if window is not None and window < t else None


def spans(runs: Tensor | None, size: int) -> Tensor | None:
    """Return bounds of tokens for each tile of ``size`` tokens: i32 [b tiles 4], or None without documents.

    The first two bound the tokens that may share a document with the tile. The others bound tokens that surely share
    all of its documents, and there are none for a tile of several documents.
    """
    if runs is None:
        return None
    b, t = runs.shape
    out = runs.new_empty(b, triton.cdiv(t, size), 4, dtype=torch.int32)
    with on(runs):
        _spans[(b * out.shape[1],)](runs, out, t, size, SCAN, num_warps=4, **EXACT)
    return out


@triton.jit
def _spans(runs, out, t, SIZE: tl.constexpr, SCAN: tl.constexpr):
    tiles = tl.cdiv(t, SIZE)
    first = tl.program_id(0) % tiles * SIZE
    runs += (tl.program_id(0) // tiles).to(tl.int64) * t
    own = tl.minimum(first + tl.arange(0, SIZE), t - 1)
    numbers = tl.load(runs + own)
    low, high = tl.min(numbers, 0), tl.max(numbers, 0)
    begin, end, inner, outer = t + 0 * first, 0 * first, 0 * first, t + 0 * first
    for start in range(0, t, SCAN):
        at = start + tl.arange(0, SCAN)
        there = at < t
        number = tl.load(runs + at, mask=there, other=0)
        shared, foreign = there & (number >= low) & (number <= high), there & (number != low)
        begin = tl.minimum(begin, tl.min(tl.where(shared, at, t), 0))
        end = tl.maximum(end, tl.max(tl.where(shared, at + 1, 0), 0))
        inner = tl.maximum(inner, tl.max(tl.where(foreign & (at < first), at + 1, 0), 0))
        outer = tl.minimum(outer, tl.min(tl.where(foreign & (at >= first), at, t), 0))
    alone = low == high
    out += tl.program_id(0).to(tl.int64) * 4
    tl.store(out, begin)
    tl.store(out + 1, end)
    tl.store(out + 2, tl.where(alone, inner, t))
    tl.store(out + 3, tl.where(alone, outer, 0))


@triton.jit
def bounds_of_keys(spans, tile, t, window, SIZE: tl.constexpr, N: tl.constexpr, CAUSAL: tl.constexpr):
    """Return bounds of the keys of a tile of SIZE queries: all that are seen, and those that all of it see.

    All but the second are multiples of N. ``spans`` points to the four bounds of the tile, or is None.
    """
    first = tile * SIZE
    last = tl.minimum(first + SIZE, t)
    begin, end, inner, outer = 0 * first, t + 0 * first, 0 * first, t + 0 * first
    if CAUSAL:
        end, outer = last, tl.minimum(first + 1, t)
    if window is not None:
        begin, inner = tl.maximum(first - window + 1, 0), tl.maximum(last - window, 0)
    return _bounds(spans, begin, end, inner, outer, N)


@triton.jit
def bounds_of_queries(spans, tile, t, window, SIZE: tl.constexpr, M: tl.constexpr, CAUSAL: tl.constexpr):
    """Return bounds of the queries of a tile of SIZE keys, as :func:`bounds_of_keys` does."""
    first = tile * SIZE
    last = tl.minimum(first + SIZE, t)
    begin, end, inner, outer = 0 * first, t + 0 * first, 0 * first, t + 0 * first
    if CAUSAL:
        begin, inner = first, last - 1
    if window is not None:
        end, outer = tl.minimum(last - 1 + window, t), tl.minimum(first + window, t)
    return _bounds(spans, begin, end, inner, outer, M)


@triton.jit
def _bounds(spans, begin, end, inner, outer, STEP: tl.constexpr):
    if spans is not None:
        begin, end = tl.maximum(begin, tl.load(spans)), tl.minimum(end, tl.load(spans + 1))
        inner, outer = tl.maximum(inner, tl.load(spans + 2)), tl.minimum(outer, tl.load(spans + 3))
    begin = begin // STEP * STEP
    end = tl.maximum(begin, end)
    inner = tl.minimum(tl.maximum(begin, tl.cdiv(inner, STEP) * STEP), tl.cdiv(end, STEP) * STEP)
    return begin, end, inner, tl.maximum(inner, tl.minimum(outer, end) // STEP * STEP)


@triton.jit
def head_of(x, b, h, x_b, x_h, TMA: tl.constexpr):
    """Return a pointer to a head of x [b h t e], or the descriptor ``x`` itself."""
    if TMA:
        return x
    else:
        return x + (tl.cast(b, tl.int64) * x_b + tl.cast(h, tl.int64) * x_h)


@triton.jit
def load_tile(x, b, h, first, apart, t, SIZE: tl.constexpr, HEAD: tl.constexpr, E: tl.constexpr, TMA: tl.constexpr):
    """Load SIZE rows of :func:`head_of` from ``first`` on: [SIZE E], with zeros behind HEAD elements and row t."""
    if TMA:
        return tl.reshape(x.load([b, h, first, 0]), [SIZE, E])
    else:
        i, c = tl.arange(0, SIZE)[:, None], tl.arange(0, E)[None, :]
        mask = first + i < t if HEAD == E else (first + i < t) & (c < HEAD)
        return tl.load(x + tl.cast(first, tl.int64) * apart + (i * apart + c), mask=mask, other=0.0)


@triton.jit
def store_rows(x, values, first, apart, t, SIZE: tl.constexpr, HEAD: tl.constexpr, E: tl.constexpr):
    """Round values f32 [SIZE E] to rows of x [t HEAD] from ``first`` on."""
    i, c = tl.arange(0, SIZE)[:, None], tl.arange(0, E)[None, :]
    at = x + tl.cast(first, tl.int64) * apart + (i * apart + c)
    tl.store(at, narrow(values, x.dtype.element_ty), mask=(first + i < t) & (c < HEAD))


@triton.jit
def product(a, b, acc):
    """Return acc + a · b in f32."""
    if INTERPRETED:
        a, b = widen(a), widen(b)  # the interpreter multiplies the bits of bfloat16
    return tl.dot(a, b, acc, input_precision="tf32x3")


@triton.jit
def scores(products, factor, limit):
    """Return scores, and tanh of capped ones; ``factor`` and ``limit`` are of :func:`factors`."""
    scaled = products * factor
    if limit is None:
        return scaled, scaled
    else:
        bend = tanh(scaled)
        return bend * limit, bend


@triton.jit
def weights(scores, level):
    """Return exp(scores - level); ``level`` is their maximum or the log-sum-exp, finite or inf."""
    return tl.exp2((scores - level) * LOG2E)


@triton.jit
def softmax(scores, lse):
    """Return :func:`weights`, which are at most 1 however ``lse`` was rounded."""
    return tl.exp2(tl.minimum(scores - lse, 0.0, propagate_nan=tl.PropagateNan.ALL) * LOG2E)


def factors(scale: float | None, cap: float | None, e: int) -> tuple[float, float, float | None]:
    """Return the scale of scores, the factor of products that :func:`scores` take, and the limit after tanh."""
    factor = e**-0.5 if scale is None else scale
    return (factor, factor, None) if cap is None else (factor, factor / cap, cap)


@triton.jit
def tanh(x):
    """Return tanh, with a relative error below 4e-7 (compared with float64 over all of float16's values)."""
    s = x * x
    near = ((0.01645876 * s - 0.05268415) * s + 0.13320942) * s - 0.33332957
    size = tl.abs(x)
    far = 1.0 - 2.0 / (tl.exp2(size * 2.8853900817779268) + 1.0)
    return tl.where(size < 0.55, x + near * s * x, tl.where(x < 0, -far, far))


@triton.jit
def visible(i, j, t, window, runs, run_i, run_j, CAUSAL: tl.constexpr):
    """Return a mask of keys j that queries i see, of numbers that broadcast; without ``runs`` they are all alike."""
    if CAUSAL:
        seen = j <= i
    else:
        seen = (j < t) & (i >= 0)
    if window is not None:
        seen = seen & (j > i - window)
    if runs is not None:
        seen = seen & (run_i == run_j)
    return seen


@triton.jit
def load_runs(runs, at, t):
    """Load the document numbers of tokens ``at``, or return zeros without documents."""
    if runs is None:
        return at * 0
    else:
        return tl.load(runs + at, mask=at < t, other=0)
