"""What every quantiser returns, and how a mean over rows is kept until all rows are in.

Each quantiser is a module of functions over a *state*, a node of its own:

    state = fsq.init(key, levels=(8, 5, 5, 5))
    codes = fsq.encode(state, x)                       # integers, whose leading dims are those of x
    x     = fsq.decode(state, codes)
    x, codes, losses, stats = fsq.apply(state, x, key) # what training uses: x carries gradients, losses are Means
    state = fsq.update(state, stats)                   # stats may be summed over a mesh before: shard.psum

A mean of means is not the mean where shares of a batch differ in size, so a loss is its sum and how many terms it has:
what travels is the two, and who has the numbers of all rows divides. What is no mean over rows (an entropy of their
mean, say) needs the sum over ranks where it is made: ``psum``, by default that of a process ``alone``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from .. import tree

T = TypeVar("T")
Psum = Callable[[Any], Any]  # of a tree of sums to the tree of their sums over ranks, differentiable: shard.psum


def alone(sums: Any) -> Any:
    """The sum over ranks where there is one."""
    return sums


@tree.node
class Mean:
    """A mean that is not yet taken: the ``sum`` f32[] of so many terms, ``count`` f32[]."""

    sum: Tensor
    count: Tensor


class Quantized(NamedTuple):
    """What ``apply`` returns."""

    x: Tensor  # [... dim], of the dtype given: what was quantised, with the gradient that the state asks for
    codes: Tensor  # i64[...]
    losses: dict[str, Mean]
    stats: Any  # a tree to sum over ranks and to hand to ``update``; None where there is nothing to update


def beside(each: Sequence[T]) -> T:
    """Trees of one structure, of losses say, as one of [several ...] numbers."""
    return tree.map(lambda *parts: torch.stack(parts), *each)


def mean(x: Mean) -> Tensor:
    """The mean, f32[]; zero of no terms."""
    return x.sum / x.count.clamp(min=1)
