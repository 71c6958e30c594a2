"""Lazy: something that has not been read yet.

A checkpoint is opened as a tree whose leaves are Lazy: each knows what it will be (``like``, of meta tensors, so shapes
and formats can be planned with) and how to get it (``read``). Verbs pass over it: quantising a Lazy gives a Lazy that
reads and quantises. A model that fits nowhere whole is so quantised, placed and sharded a tensor at a time.

To torch's pytree a Lazy is an opaque leaf.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from . import tree


@dataclass(frozen=True, eq=False)
class Lazy:
    """``read()`` gives the tensor or node; ``like`` is the same with meta tensors.

    ``stamp()`` is a short text that tells apart sources of different content without reading them whole; ranks that
    are to read parts of the same thing compare it.
    """

    read: Callable[[], Any]
    like: Any
    stamp: Callable[[], str] = str


def map(f: Callable[[Any], Any], x: Lazy) -> Lazy:
    """A Lazy that reads ``x`` and applies ``f``, which must also accept meta tensors."""
    return replace(x, read=lambda: f(x.read()), like=f(x.like))


def read(x: Any) -> Any:
    """The tree ``x`` with every Lazy read; an error is raised with the leaf's path in front."""
    return tree.map_with_path(lambda _, leaf: leaf.read() if isinstance(leaf, Lazy) else leaf, x)


def like(x: Any) -> Any:
    """The tree ``x`` in meta tensors: every Lazy replaced by what it will be, every tensor by its outline."""
    return tree.map(lambda leaf: leaf.like if isinstance(leaf, Lazy) else leaf.to("meta"), x)
