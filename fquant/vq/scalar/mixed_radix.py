"""Conversion between a code and its digits in a mixed radix; a digit is the level that one scalar takes.

    levels (8, 5, 5)     digits [... 3], the first below 8, the others below 5     code = d0 + 8·d1 + 40·d2

The first digit is the least significant. Arithmetic is exact in int64, because the product of the levels stays below
2^63. The code -1 stands for "no code"; its digits are meaningless.
"""

import itertools
import math
import operator

import torch
from torch import Tensor

from ...kernels.dispatch import is_direct

NONE = -1  # the code of a row without a code


def check(name: str, levels: tuple[int, ...], most: int) -> tuple[int, ...]:
    """Return ``levels`` as ints; ValueError for none, one outside [2, ``most``], or a product of 2^63 or more."""
    levels = tuple(int(n) for n in levels)
    if not levels or min(levels) < 2 or max(levels) > most:
        raise ValueError(f"{name}: levels are {levels}; wanted one number a scalar, each from 2 to {most}")
    if math.prod(levels) >= 2**63:
        raise ValueError(f"{name}: levels {levels} make 2^{math.log2(math.prod(levels)):.0f} codes; use codebooks")
    return levels


def encode(digits: Tensor, levels: tuple[int, ...]) -> Tensor:
    """Return codes i64[...] of digits i64[... d]."""
    return (digits * _place_values(levels, digits)).sum(-1)


def decode(codes: Tensor, levels: tuple[int, ...]) -> Tensor:
    """Return digits i64[... d] of codes i64[...]."""
    sizes = torch.tensor(levels, dtype=torch.int64, device=codes.device)
    return codes[..., None].div(_place_values(levels, codes), rounding_mode="floor") % sizes


def checked(name: str, codes: Tensor, size: int) -> Tensor:
    """Return ``codes`` as int64; TypeError unless integers, IndexError unless each is in [0, size) or -1.

    On CUDA a device assertion replaces the IndexError; in a transform or a trace the check runs with the computation.
    """
    if not isinstance(codes, Tensor) or codes.dtype is torch.bool or codes.is_floating_point() or codes.is_complex():
        got = codes.dtype if isinstance(codes, Tensor) else type(codes).__name__
        raise TypeError(f"{name}: codes are {got}; wanted a tensor of integers, as encode returns them")
    if not is_direct(codes) or codes.is_meta:
        return within(codes.long(), size)
    wrong = (codes < NONE) | (codes >= size)
    wanted = f"wanted one in [0, {size}), or {NONE} for none"
    if codes.is_cuda:
        torch._assert_async(~wrong.any(), f"{name} got another code; {wanted}")  # does not synchronise with the device
    elif wrong.any():
        at = tuple(wrong.nonzero()[0].tolist())
        raise IndexError(f"{name}: the code at {at} is {int(codes[at])}; {wanted}: is it of this state?")
    return codes.long()


def within(codes: Tensor, size: int) -> Tensor:
    """Return ``codes`` i64[...] plus a lookup that fails for a code out of range when the graph runs."""
    wrong = (codes < NONE) | (codes >= size)
    return codes + torch.zeros(1, dtype=torch.int64, device=codes.device)[wrong.long()]


def _place_values(levels: tuple[int, ...], like: Tensor) -> Tensor:
    return torch.tensor([1, *itertools.accumulate(levels[:-1], operator.mul)], dtype=torch.int64, device=like.device)
