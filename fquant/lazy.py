"""Lazy leaves: tensors or nodes that have not been read yet.

Verbs pass over a Lazy, an opaque leaf: quantising one gives a Lazy that reads and quantises. So a model that does not
fit on any device is quantised, placed and sharded one tensor at a time.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from . import tree


@dataclass(frozen=True, eq=False)
class Lazy:
    """A tensor or node that ``read()`` loads; ``like`` is the same with meta tensors.

    ``stamp()`` is a short text that identifies the content of the source; ranks that read parts of it compare it.
    ``rows(slice)`` reads some rows of a tensor; with it ``quantize`` needs memory of a few rows beside its result.
    """

    read: Callable[[], Any]
    like: Any
    stamp: Callable[[], str] = str
    rows: Callable[[slice], Any] | None = None


def map(f: Callable[[Any], Any], x: Lazy) -> Lazy:
    """Return a Lazy that reads ``x`` and applies ``f``, which must also accept meta tensors."""
    return replace(x, read=lambda: f(x.read()), like=f(x.like), rows=None)


def read(x: Any) -> Any:
    """Read every Lazy of the tree ``x``; an error is raised with the leaf's path in front."""
    return tree.map_with_path(lambda _, leaf: leaf.read() if isinstance(leaf, Lazy) else leaf, x)


def like(x: Any) -> Any:
    """Return the tree ``x`` with meta tensors for leaves, of a Lazy its ``like``."""
    return tree.map(lambda leaf: leaf.like if isinstance(leaf, Lazy) else leaf.to("meta"), x)
