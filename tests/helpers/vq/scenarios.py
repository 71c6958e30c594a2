"""Training steps of codebooks that run on a rank or in one process, for scenarios and contradictions."""

from typing import Any, NamedTuple

import pytest

import shard
from fquant import random, vq
from tests.helpers.vq.mesh import AXES, ROWS, D, K, spread

SIZES = {2: (41, 19), 3: (50, 0, 10)}  # rows of each rank


class Here(NamedTuple):
    """A rank, or one process without a mesh: its mesh, rank, slice of the rows, and the rows of each rank."""

    mesh: Any
    rank: int
    cut: slice
    sizes: tuple[int, ...]


def total(here, x, axes=AXES):
    return x if here.mesh is None else shard.psum(x, here.mesh, axes)


def mine(here, x):
    """Return this rank's part of x, which may have fewer rows than a batch."""
    return x[here.cut.start * len(x) // ROWS : here.cut.stop * len(x) // ROWS]


def learn(here, book, x, step=0, mask=None, axes=AXES):
    """Update ``book`` by a step with rows x that restarts dead codes."""
    row_offset = None if here.mesh is None else shard.rows(len(x) if mask is None else mask.sum(), here.mesh, axes)
    key = random.fold(random.key(9), step)
    stats = vq.apply(book, x, key, mask=mask, draw=True, row_offset=row_offset).stats
    return vq.update(book, total(here, stats, axes), threshold=1.0)


def book_of(seed=3, **options):
    return spread(vq.init(seed, K, D, **options))


def worlds(names):
    """Parametrize names with 2 and 3 ranks; one of the two, in turn, is not slow."""
    marks = lambda i, size: [] if i % 2 == size % 2 else pytest.mark.slow
    return [pytest.param(name, size, marks=marks(i, size)) for i, name in enumerate(names) for size in SIZES]
