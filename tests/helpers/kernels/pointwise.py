"""Test data of elementwise programs."""

import math

import torch

from tests.helpers.arrays import rng

SPECIAL = (0.0, -0.0, 1.0, -1.0, math.inf, -math.inf, math.nan, 1e-40, -1e-45, 3e38, -3e38, 65504.0, 1e-8, 1 / 3)


def values(n, dtype, seed=0):
    """Return numbers of all sizes, and every pair of special ones if n allows."""
    x = torch.randn(n, generator=rng(seed)) * torch.exp2(torch.randint(-20, 20, (n,), generator=rng(seed + 1)))
    special = torch.tensor(SPECIAL).repeat_interleave(len(SPECIAL) ** (seed % 2)).repeat(n // len(SPECIAL) + 1)[:n]
    return torch.where(torch.arange(n) < n // 2, special, x).to(dtype)
