"""What every quantiser returns, and how a mean over rows is kept until all rows are in.

Each quantiser is a module of functions over a *state*, a node of its own:

    state = fsq.init(key, levels=(8, 5, 5, 5))
    codes = fsq.encode(state, x)                       # integers, whose leading dims are those of x
    x     = fsq.decode(state, codes)
    x, codes, losses, stats = fsq.apply(state, x, key) # what training uses: x carries gradients, losses are Means
    state = fsq.update(state, stats)                   # stats may be summed over a mesh before: shard.psum

A mean of means is not the mean where shares of a batch differ in size, so a loss is its sum and how many terms it has:
what travels is the two, and who has the numbers of all rows divides.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from .. import tree


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


def mean(x: Mean) -> Tensor:
    """The mean, f32[]; zero of no terms."""
    return x.sum / x.count.clamp(min=1)
