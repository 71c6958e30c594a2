"""Scenarios: split from tests.fquant.vq.test_scenarios."""

from typing import Any, NamedTuple

import pytest

import shard
from fquant import random, vq
from tests.helpers.vq.mesh import AXES, ROWS, D, K, spread

SIZES = {2: (41, 19), 3: (50, 0, 10)}  # rows of each rank


class Here(NamedTuple):
    """A rank, or one process alone: which of the rows it has, and those of whom it is to do as."""

    mesh: Any
    rank: int
    cut: slice
    sizes: tuple[int, ...]


def total(here, x, axes=AXES):
    return x if here.mesh is None else shard.psum(x, here.mesh, axes)


def mine(here, x):
    """Of x, which may be shorter than all rows are, this rank's part."""
    return x[here.cut.start * len(x) // ROWS : here.cut.stop * len(x) // ROWS]


def learn(here, book, x, step=0, mask=None, axes=AXES):
    """``book`` after a step with rows x, in which dead codes start again."""
    row_offset = None if here.mesh is None else shard.rows(len(x) if mask is None else mask.sum(), here.mesh, axes)
    key = random.fold(random.key(9), step)
    stats = vq.apply(book, x, key, mask=mask, draw=True, row_offset=row_offset).stats
    return vq.update(book, total(here, stats, axes), threshold=1.0)


def book_of(seed=3, **options):
    return spread(vq.init(seed, K, D, **options))


def worlds(names):
    """Each name with each number of ranks; with two and three in turn it is quick."""
    marks = lambda i, size: [] if i % 2 == size % 2 else pytest.mark.slow
    return [pytest.param(name, size, marks=marks(i, size)) for i, name in enumerate(names) for size in SIZES]
