"""Steps of optimisers, in Triton: one pass over gradient, parameter and moments.

A program holds whole blocks of a flattened parameter. A code is found by a binary search among the thresholds of
``moment_codes.py``, which stay in the nearest cache, as the values of codes do. Nothing is fused, denormals are kept,
and roots and quotients are rounded to nearest. So the bits are the reference's.
"""

# pyright: reportInvalidTypeForm=false
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from ...format import Format, read
from .. import moment_codes
from ..reference.moments import FLOAT32
from .codes import DTYPES, EXACT, lookup, narrow, on, tl, triton, widen
from .random_bits import low_word

SIZE = 1024  # elements of a program, or one block of each moment
LONG = 2**31
FLOATS = 32  # in place of the bits of a code, of a moment in float32
ADAMW, ADAM, LION, SGD, NESTEROV, MEAN, NESTEROV_MEAN = (tl.constexpr(i) for i in range(7))
RULES = ("adamw", "adam", "lion", "sgd", "nesterov", "mean", "nesterov_mean")


def adam_update(
    grad: Tensor, param: Tensor, mean: Tensor, mean_scale: Tensor, square: Tensor, square_scale: Tensor, rates: Tensor,
    mean_format: str, square_format: str, rounding: str, b1: float, b2: float, eps: float, decay: float,
    coupled: bool, apply: bool, key: Tensor | None, start: int, active: Tensor | None,
) -> tuple[Tensor, ...]:  # fmt: skip
    states, formats = ((mean, mean_scale), (square, square_scale)), (_read(mean_format), _read(square_format))
    return _run(
        "adam" if coupled else "adamw", grad, param, states, formats, rates, rounding, b1, b2, eps, decay, apply, key,
        start, active,
    )  # fmt: skip


def momentum_update(
    grad: Tensor, param: Tensor, moment: Tensor, scale: Tensor, rates: Tensor, format: str, rounding: str, rule: str,
    b1: float, b2: float, decay: float, apply: bool, key: Tensor | None, start: int, active: Tensor | None,
) -> tuple[Tensor, ...]:  # fmt: skip
    return _run(
        rule, grad, param, ((moment, scale),), (_read(format),), rates, rounding, b1, b2, 0.0, decay, apply, key, start,
        active,
    )  # fmt: skip


def _read(text: str) -> Format | None:
    return None if text == FLOAT32 else read(text)


def _run(
    rule: str,
    grad: Tensor,
    param: Tensor,
    states: Sequence[tuple[Tensor, Tensor]],
    formats: Sequence[Format | None],
    rates: Tensor,
    rounding: str,
    b1: float,
    b2: float,
    eps: float,
    decay: float,
    apply: bool,
    key: Tensor | None,
    first: int,
    active: Tensor | None,
) -> tuple[Tensor, ...]:
    size = max([SIZE, *(format.block or 0 for format in formats if format is not None)])
    fresh = lambda t, dtype: torch.empty(t.shape, dtype=dtype, device=param.device)
    results = [fresh(param, param.dtype if apply else torch.float32)]
    results += [fresh(t, t.dtype) for pair in states for t in pair]
    moments, dense = list[Any](), formats[0] is None
    for i, (pair, format) in enumerate(zip(states, formats, strict=True)):
        if format is None:
            tables: tuple[Any, ...] = None, None, None
        else:
            tables = lookup(format, param.device), *_codes(format, rounding, param.device)
        moments += [*(t.contiguous() for t in pair), *results[1 + 2 * i : 3 + 2 * i], *tables]
    moments += [None] * (14 - len(moments))
    constants = [part for f in formats for part in (_constants(f) if f is not None else (FLOATS, SIZE, 1.0))]
    constants += [8, SIZE, 1.0] * (2 - len(formats))
    if n := param.numel():
        many = rates.ndim > 1
        n, count = (n // len(rates), len(rates)) if many else (n, 1)
        kept = active.contiguous().view(torch.uint8) if active is not None and dense else None
        inputs = grad.contiguous(), param.contiguous(), results[0], rates.contiguous()
        inputs = *inputs, key if key is None else key.contiguous(), kept
        pieces = triton.cdiv(n, size)
        numbers = n, pieces, first, b1, 1 - b1, b2, 1 - b2, eps, decay, moment_codes.LEAST[rounding], moment_codes.TINY
        square = formats[1] if len(formats) > 1 else None
        numbers = *numbers, 0.0 if square is None else moment_codes.floor(square, rounding)
        flags = RULES.index(rule), apply, rounding == "grid", DTYPES[results[0].dtype], (n + size) * count >= LONG
        flags = *flags, key is not None and apply and param.dtype is not torch.float32, many, kept is not None
        with on(param):
            _update[(pieces * count,)](*inputs, *moments, *numbers, *constants, *flags, size, **EXACT)
    if active is None or dense:
        return tuple(results)
    old = param if apply else torch.zeros_like(results[0]), *(t for pair in states for t in pair)
    shown = lambda t: active.view(*active.shape, *[1] * (t.ndim - active.ndim))
    return tuple(torch.where(shown(new), new, t) for new, t in zip(results, old, strict=True))


def _constants(format: Format) -> tuple[Any, ...]:
    return format.bits, format.block, moment_codes.largest(format)


@lru_cache(maxsize=64)
def _codes(format: Format, rounding: str, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the thresholds, filled up with infinity to 15 or 255, and the codes in the order of their values."""
    order, thresholds = moment_codes.codes(format, rounding)
    full = torch.full((2**format.bits - 1,), float("inf"), dtype=torch.float32, device=device)
    full[: len(thresholds)] = thresholds.to(device)
    return full, torch.tensor(order, dtype=torch.int32, device=device)


@triton.jit
def _bytes(n, BITS: tl.constexpr):
    """Return the codes of n elements: bytes, or floats of a moment in float32."""
    return (n + 1) // 2 if BITS == 4 else n


@triton.jit
def _decoded(codes, scale, table, at, n, BITS: tl.constexpr, BLOCK: tl.constexpr):
    """Return the values f32 of the elements ``at``."""
    if BITS == 32:
        value = tl.load(codes + at, mask=at < n, other=0)
    else:
        if BITS == 8:
            code = tl.load(codes + at, mask=at < n, other=0).to(tl.int32)
        else:
            byte = tl.load(codes + at // 2, mask=at < n, other=0).to(tl.int32)
            code = tl.where(at % 2 == 0, byte >> 4, byte & 15)
        value = tl.load(table + code) * tl.load(scale + at // BLOCK, mask=at < n, other=0)
    return value


@triton.jit
def _encode(
    x, codes, scale, thresholds, order, at, n, least, tiny, floor,
    BITS: tl.constexpr, BLOCK: tl.constexpr, TOP: tl.constexpr, GRID: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """Store the codes and scales of the values x at ``at``, the SIZE elements of a program.

    Numbers above zero are raised to ``floor``, in units of their scale.
    """
    bits = tl.where(at < n, x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 0)
    top = tl.max(tl.reshape(bits, [SIZE // BLOCK, BLOCK]), 1).to(tl.float32, bitcast=True)[:, None]
    block = at - at % BLOCK
    if GRID:
        short = tl.reshape(block + BLOCK > n, [SIZE // BLOCK, BLOCK])
        last = tl.max(short.to(tl.int32), 1)[:, None] > 0
    top = tl.where(top < least, least, top)
    stored = tl.div_rn(top, tl.full([SIZE // BLOCK, 1], TOP, tl.float32))
    first = tl.reshape(at // BLOCK, [SIZE // BLOCK, BLOCK])
    first = tl.min(first, 1)[:, None]
    tl.store(scale + first, stored, mask=first * BLOCK < n)
    divisor = tl.where(stored < tiny, tiny, stored)
    y = tl.reshape(x, [SIZE // BLOCK, BLOCK])
    part = y * tl.div_rn(tl.full([SIZE // BLOCK, 1], 1.0, tl.float32), divisor)
    if GRID:
        part = tl.where(last, tl.div_rn(y, tl.broadcast_to(divisor, y.shape)), part)
    part = tl.where((y > 0) & (part < floor), floor, part)
    part = tl.reshape(part, [SIZE])
    index = tl.zeros([SIZE], tl.int32)
    for level in tl.static_range(BITS):
        upper = index + (1 << (BITS - 1 - level))
        index = tl.where(part >= tl.load(thresholds + upper - 1), upper, index)
    code = tl.where(at < n, tl.load(order + index), 0)
    if BITS == 8:
        tl.store(codes + at, code.to(tl.uint8), mask=at < n)
    else:
        high, low = tl.split(tl.reshape(code, [SIZE // 2, 2]))
        byte, _ = tl.split(tl.reshape(at // 2, [SIZE // 2, 2]))
        tl.store(codes + byte, (high << 4 | low).to(tl.uint8), mask=byte * 2 < n)


@triton.jit
def _drawn(x, word, OUT: tl.constexpr):
    """Round x f32 to OUT, bf16 or f16, by random words u32, as ``reference/stochastic_rounding.py`` does."""
    bits = x.to(tl.uint32, bitcast=True)
    is_finite = (bits & 0x7F800000) != 0x7F800000
    if OUT == tl.bfloat16:
        raised = ((bits + (word & 0xFFFF)) & 0xFFFF0000).to(tl.float32, bitcast=True)
        rounded = narrow(tl.where(is_finite, raised, x), OUT)
    else:
        size = (bits & 0x7FFFFFFF).to(tl.float32, bitcast=True)
        near = narrow(size, OUT)
        low = near.to(tl.int16, bitcast=True)
        low = tl.where(widen(near) > size, low - 1, low).to(tl.int16)
        above = widen((low + 1).to(tl.int16).to(tl.float16, bitcast=True))
        below = widen(low.to(tl.float16, bitcast=True))
        up = (word & 0xFFFFFF).to(tl.float32) * 5.9604644775390625e-08
        found = tl.where(up < tl.div_rn(size - below, above - below), low + 1, low).to(tl.int16)
        signed = found | ((bits >> 16) & 0x8000).to(tl.int16)
        rounded = tl.where(is_finite, signed.to(tl.float16, bitcast=True), narrow(x, OUT))
    return rounded


@triton.jit
def _update(
    grad, param, out, rates, key, active, codes, scale, new_codes, new_scale, table, thresholds, order,
    codes2, scale2, new_codes2, new_scale2, table2, thresholds2, order2,
    n, pieces, first, b1, rest1, b2, rest2, eps, decay, least, tiny, floor,
    BITS: tl.constexpr, BLOCK: tl.constexpr, TOP: tl.constexpr, BITS2: tl.constexpr, BLOCK2: tl.constexpr,
    TOP2: tl.constexpr, RULE: tl.constexpr, APPLY: tl.constexpr, GRID: tl.constexpr, OUT: tl.constexpr,
    LONG: tl.constexpr, DRAWN: tl.constexpr, MANY: tl.constexpr, GATED: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """Update SIZE elements, whole blocks of both moments."""
    unit = tl.program_id(0).to(tl.int64) if LONG else tl.program_id(0)
    number = unit // pieces if MANY else 0
    if MANY:
        unit = unit % pieces
        grad, param, out, rates = grad + number * n, param + number * n, out + number * n, rates + number * 3
        codes, new_codes = codes + number * _bytes(n, BITS), new_codes + number * _bytes(n, BITS)
        scale, new_scale = scale + number * tl.cdiv(n, BLOCK), new_scale + number * tl.cdiv(n, BLOCK)
        if RULE == ADAMW or RULE == ADAM:
            codes2, new_codes2 = codes2 + number * _bytes(n, BITS2), new_codes2 + number * _bytes(n, BITS2)
            scale2, new_scale2 = scale2 + number * tl.cdiv(n, BLOCK2), new_scale2 + number * tl.cdiv(n, BLOCK2)
    at = unit * SIZE + tl.arange(0, SIZE)
    g = widen(tl.load(grad + at, mask=at < n, other=0))
    p = widen(tl.load(param + at, mask=at < n, other=0))
    m = _decoded(codes, scale, table, at, n, BITS, BLOCK)
    old = m
    if RULE != ADAMW and RULE != LION:
        g = g + decay * p
    if RULE == ADAMW or RULE == ADAM:
        v = _decoded(codes2, scale2, table2, at, n, BITS2, BLOCK2)
        old2 = v
        m = b1 * m + rest1 * g
        v = b2 * v + rest2 * (g * g)
        if BITS == 32:
            root = tl.sqrt_rn(tl.div_rn(v, tl.zeros_like(v) + tl.load(rates + 2)))
            change = tl.div_rn(tl.div_rn(m, tl.zeros_like(m) + tl.load(rates + 1)), root + eps)
        else:
            change = tl.div_rn(m * tl.load(rates + 1), tl.sqrt_rn(v) * tl.load(rates + 2) + eps)
        if RULE == ADAMW:
            change = change + decay * p
        if BITS2 == 32:
            if GATED:
                v = tl.where(tl.load(active + number) != 0, v, old2)
            tl.store(new_codes2 + at, v, mask=at < n)
        else:
            _encode(
                v, new_codes2, new_scale2, thresholds2, order2, at, n, least, tiny, floor, BITS2, BLOCK2, TOP2, GRID,
                SIZE,
            )  # fmt: skip
    elif RULE == LION:
        lean = b1 * m + rest1 * g
        sign = tl.where(lean > 0, 1.0, tl.where(lean < 0, -1.0, tl.where(lean == 0, 0.0, lean)))
        change = sign + decay * p
        m = b2 * m + rest2 * g
    elif RULE == MEAN or RULE == NESTEROV_MEAN:
        m = b1 * m + rest1 * g
        change = m
        if RULE == NESTEROV_MEAN:
            change = rest1 * g + b1 * m
    else:
        m = b1 * m + g
        change = m
        if RULE == NESTEROV:
            change = g + b1 * m
    change = tl.load(rates) * change
    if APPLY:
        change = p + change
    if GATED:
        change = tl.where(tl.load(active + number) != 0, change, p if APPLY else 0.0)
        m = tl.where(tl.load(active + number) != 0, m, old)
    if DRAWN:
        word = low_word(tl.load(key + number), at.to(tl.int64) + first)
        tl.store(out + at, _drawn(change, word, OUT), mask=at < n)
    else:
        tl.store(out + at, narrow(change, OUT), mask=at < n)
    if BITS == 32:
        tl.store(new_codes + at, m, mask=at < n)
    else:
        _encode(m, new_codes, new_scale, thresholds, order, at, n, least, tiny, 0.0, BITS, BLOCK, TOP, GRID, SIZE)
