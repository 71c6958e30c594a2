"""Learning rates as functions of the step: a schedule gets the number of updates made before, so the first is 0.

Numbers of a schedule may be tensors []. So under ``vmap`` each element may have a schedule of its own. Values
of tensors are not checked.
"""

import math
from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch import Tensor

from ..tree import expect

Schedule: TypeAlias = Callable[[Tensor], Tensor]  # step i64[] -> learning rate f32[]
Number: TypeAlias = float | Tensor
Rate: TypeAlias = Number | Schedule


def constant(lr: Number, warmup: int | Tensor = 0) -> Schedule:
    """Return the schedule ``lr`` after a linear warmup: step i < warmup has lr * (i + 1) / (warmup + 1)."""
    return _schedule(lr, warmup, torch.ones_like)


def linear(lr: Number, total: int | Tensor, warmup: int | Tensor = 0, end: Number = 0.0) -> Schedule:
    """Return a warmup as in :func:`constant`, then a line from ``lr`` at ``warmup`` to ``end`` from ``total`` on."""
    return _decay(lr, total, warmup, end, lambda t, low: 1 - (1 - low) * t)


def cosine(lr: Number, total: int | Tensor, warmup: int | Tensor = 0, end: Number = 0.0) -> Schedule:
    """Return a schedule as :func:`linear` that falls along half a cosine (Loshchilov & Hutter 2017)."""
    return _decay(lr, total, warmup, end, lambda t, low: low + (1 - low) * 0.5 * (1 + torch.cos(math.pi * t)))


def _decay(lr: Any, total: Any, warmup: Any, end: Any, shape: Callable[[Tensor, Any], Tensor]) -> Schedule:
    schedule = _schedule(lr, warmup, lambda i: shape((i / (total - warmup)).clamp(max=1.0), end / lr))
    if _are_known(total, warmup):
        expect(total > warmup, f"total: got {total} steps, wanted more than the {warmup} of warmup")
    if _are_known(end, lr):
        expect(0 <= end <= lr, f"end: got {end}, wanted between 0 and lr = {lr}")
    return schedule


def _schedule(lr: Any, warmup: Any, after_warmup: Callable[[Tensor], Tensor]) -> Schedule:
    if _are_known(lr):
        expect(0 < lr < math.inf, f"lr: got {lr}, wanted a finite number above 0")
    if _are_known(warmup):
        expect(warmup >= 0, f"warmup: got {warmup} steps, wanted at least 0")

    def schedule(step: Tensor) -> Tensor:
        i = step.float()  # exact up to 2^24 steps
        return lr * torch.where(i < warmup, (i + 1) / (warmup + 1), after_warmup(i - warmup))

    return schedule


def _are_known(*numbers: Number) -> bool:
    return not any(isinstance(x, Tensor) for x in numbers)
