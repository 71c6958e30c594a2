"""A code and its digits: which level each scalar is on, as one integer in a mixed radix.

    levels (8, 5, 5)     digits [... 3], the first below 8, the others below 5     codes = d0 + 8·d1 + 40·d2

The first digit is the least significant. All of it is in int64, which is exact as long as the levels' product is below
2^63; a code of -1 is none at all, and its digits, though there are some, say nothing.
"""

from __future__ import annotations

import itertools
import math
import operator

import torch
from torch import Tensor

from ...kernels.dispatch import is_direct

NONE = -1  # the code of a row that has none


def check(name: str, levels: tuple[int, ...], most: int) -> tuple[int, ...]:
    """``levels`` as a tuple of ints; ValueError for none, one below 2 or above ``most``, or a product of 2^63."""
    levels = tuple(int(n) for n in levels)
    if not levels or min(levels) < 2 or max(levels) > most:
        raise ValueError(f"{name}: levels are {levels}; wanted one number a scalar, each from 2 to {most}")
    if math.prod(levels) >= 2**63:
        raise ValueError(f"{name}: levels {levels} make 2^{math.log2(math.prod(levels)):.0f} codes; use codebooks")
    return levels


def encode(digits: Tensor, levels: tuple[int, ...]) -> Tensor:
    """digits i64[... d] -> codes i64[...]."""
    return (digits * _weights(levels, digits)).sum(-1)


def decode(codes: Tensor, levels: tuple[int, ...]) -> Tensor:
    """codes i64[...] -> digits i64[... d]."""
    sizes = torch.tensor(levels, dtype=torch.int64, device=codes.device)
    return codes[..., None].div(_weights(levels, codes), rounding_mode="floor") % sizes


def checked(name: str, codes: Tensor, size: int) -> Tensor:
    """``codes`` as int64.

    Raises TypeError for what are no integers, and IndexError for a code that is neither in [0, size) nor -1: on CUDA
    by an assertion on the device, and inside a transform or a trace when it is run.
    """
    if not isinstance(codes, Tensor) or codes.dtype is torch.bool or codes.is_floating_point() or codes.is_complex():
        got = codes.dtype if isinstance(codes, Tensor) else type(codes).__name__
        raise TypeError(f"{name}: codes are {got}; wanted a tensor of integers, as encode returns them")
    if is_direct(codes) and not codes.is_meta:
        wrong = (codes < NONE) | (codes >= size)
        wanted = f"wanted one in [0, {size}), or {NONE} for none"
        if codes.is_cuda:
            torch._assert_async(~wrong.any(), f"{name} got another code; {wanted}")  # nobody waits for the device
        elif wrong.any():
            at = tuple(wrong.nonzero()[0].tolist())
            raise IndexError(f"{name}: the code at {at} is {int(codes[at])}; {wanted}: is it of this state?")
        return codes.long()
    return within(codes.long(), size)


def within(codes: Tensor, size: int) -> Tensor:
    """``codes`` i64[...], to be looked up where nobody can see their values: that of one beyond ``size`` fails."""
    wrong = (codes < NONE) | (codes >= size)
    return codes + torch.zeros(1, dtype=torch.int64, device=codes.device)[wrong.long()]


def _weights(levels: tuple[int, ...], like: Tensor) -> Tensor:
    return torch.tensor([1, *itertools.accumulate(levels[:-1], operator.mul)], dtype=torch.int64, device=like.device)
