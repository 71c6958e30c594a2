"""Random bits in Triton: Threefry-2x32-20 in uint32, equal to ``reference/random_bits.py``."""

# pyright: reportInvalidTypeForm=false
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from .. import reference
from .codes import EXACT, MOST, on, tl, triton

SIZE = 512  # counters, or keys, that a program takes
PARITY, FOLDED = tl.constexpr(reference.PARITY), tl.constexpr(reference.FOLDED)


def fold(key: Tensor, data: Tensor) -> Tensor:
    key, data = (t.contiguous() for t in torch.broadcast_tensors(key, data))
    out = torch.empty_like(key)
    if n := out.numel():
        with on(key):
            _fold[(triton.cdiv(n, SIZE),)](key, data, out, n, SIZE, **EXACT)
    return out


def bits(key: Tensor, shape: Sequence[int]) -> Tensor:
    return _words(key, 0, key.new_empty((*key.shape, *shape)), math.prod(shape))


def bernoulli(key: Tensor, threshold: int, shape: Sequence[int]) -> Tensor:
    out = key.new_empty((*key.shape, *shape), dtype=torch.bool)
    _words(key, threshold, out.view(torch.uint8), math.prod(shape))
    return out


def _words(key: Tensor, threshold: int, out: Tensor, n: int) -> Tensor:
    """Write ``n`` words of each key to ``out``; if that has bytes, 1 for words below the threshold."""
    if out.numel():
        key, counters = key.contiguous(), (n + 1) // 2
        size = min(SIZE, triton.next_power_of_2(counters))
        with on(key):
            grid = triton.cdiv(counters, size), min(key.numel(), MOST)
            _draw[grid](key, out, key.numel(), n, threshold, size, **EXACT)
    return out


@triton.jit
def _four(x0, x1, A: tl.constexpr, B: tl.constexpr, C: tl.constexpr, D: tl.constexpr):
    """Compute four rounds with the given rotations."""
    x0 += x1
    x1 = ((x1 << A) | (x1 >> (32 - A))) ^ x0
    x0 += x1
    x1 = ((x1 << B) | (x1 >> (32 - B))) ^ x0
    x0 += x1
    x1 = ((x1 << C) | (x1 >> (32 - C))) ^ x0
    x0 += x1
    x1 = ((x1 << D) | (x1 >> (32 - D))) ^ x0
    return x0, x1


@triton.jit
def _threefry(key, counter):
    """Return the two words u32 of keys and counters i64 that broadcast."""
    k0, k1 = key.to(tl.uint32), (key >> 32).to(tl.uint32)
    k2 = k0 ^ k1 ^ PARITY
    x0, x1 = counter.to(tl.uint32) + k0, (counter >> 32).to(tl.uint32) + k1
    x0, x1 = _four(x0, x1, 13, 15, 26, 6)
    x0, x1 = _four(x0 + k1, x1 + k2 + 1, 17, 29, 16, 24)
    x0, x1 = _four(x0 + k2, x1 + k0 + 2, 13, 15, 26, 6)
    x0, x1 = _four(x0 + k0, x1 + k1 + 3, 17, 29, 16, 24)
    x0, x1 = _four(x0 + k1, x1 + k2 + 4, 13, 15, 26, 6)
    return x0 + k2, x1 + k0 + 5


@triton.jit
def low_word(key, number):
    """Return the lower words u32 of the keys i64 that are folded from ``key`` i64 and numbers i64."""
    _, low = _threefry(key ^ FOLDED, number)
    return low


@triton.jit
def _draw(keys, out, num, n, threshold, COUNTERS: tl.constexpr):
    """Draw the words of COUNTERS counters of each key of ``program_id(1)``."""
    counter = tl.program_id(0).to(tl.int64) * COUNTERS + tl.arange(0, COUNTERS)
    at = counter[:, None] * 2 + tl.arange(0, 2)[None, :]
    for i in range(tl.program_id(1), num, tl.num_programs(1)):
        x0, x1 = _threefry(tl.load(keys + i), counter)
        words = tl.join(x0, x1).to(tl.int64)
        if out.dtype.element_ty == tl.uint8:
            words = words < threshold
        tl.store(out + tl.cast(i, tl.int64) * n + at, words.to(out.dtype.element_ty), mask=at < n)


@triton.jit
def _fold(keys, data, out, n, SIZE: tl.constexpr):
    """Compute SIZE new keys."""
    at = tl.program_id(0).to(tl.int64) * SIZE + tl.arange(0, SIZE)
    key, number = tl.load(keys + at, mask=at < n, other=0), tl.load(data + at, mask=at < n, other=0)
    high, low = _threefry(key ^ FOLDED, number)
    tl.store(out + at, (high.to(tl.int64) << 32) | low.to(tl.int64), mask=at < n)
