"""The result of every quantiser, and means whose sums and counts travel separately.

Each quantiser is a module of functions over a *state*, a node of its own:

    state = fsq.init(key, levels=(8, 5, 5, 5))
    codes = fsq.encode(state, x)                       # integers, with the leading dims of x
    x     = fsq.decode(state, codes)
    x, codes, losses, stats = fsq.apply(state, x, key) # for training: x carries gradients, losses are Means
    state = fsq.update(state, stats)                   # on a mesh, after shard.psum of the stats

A ``mask`` bool[...] is True for the rows that count; its dims are the first of x. A loss is a sum and a count, which
ranks add before they divide: a mean of means is wrong for different numbers of rows. A loss that is no mean over rows,
such as the entropy of a mean, sums over ranks inside: it takes ``psum``.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from .. import tree

T = TypeVar("T")
Seed = int | Tensor  # of ``init``: a number, or a key i64[] of fquant.random
Key = Tensor | None  # of ``apply``: without one nothing is random
Mask = Tensor | None  # bool, True for the rows that count; its dims are the first of theirs
Codes = Tensor | None  # of ``apply``: i64, those of another search, -1 for none
Psum = Callable[[Any], Any]  # from a tree of sums to their sums over ranks, differentiable: shard.psum


@tree.node
class Mean:
    """A mean before the division: the ``sum`` f32[] of ``count`` f32[] terms."""

    sum: Tensor
    count: Tensor


class Quantized(NamedTuple):
    """The result of ``apply``."""

    x: Tensor  # [... dim], quantised, in the dtype of the input, with the gradient that the state asks for
    codes: Tensor  # i64[...]
    losses: dict[str, Mean]
    stats: Any  # a tree to sum over ranks and to pass to ``update``; None without an update


def stack_trees(trees: Sequence[T]) -> T:
    """Stack trees of one structure along a new first dim."""
    return tree.map(lambda *leaves: torch.stack(leaves), *trees)


def mean(x: Mean) -> Tensor:
    """Return the mean, f32[]; zero if there are no terms."""
    return x.sum / x.count.clamp(min=1)
