"""Lazy leaves: tensors or nodes that have not been read yet.

Verbs pass over a Lazy, an opaque leaf: quantising one gives a Lazy that reads and quantises, on the device to which it
reads. So a model that does not fit on any device is quantised, placed and sharded one tensor at a time.
"""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from . import tree
from .device import HOST


@dataclass(frozen=True, eq=False)
class Lazy:
    """A tensor or node that ``read()`` loads to ``device``; ``like`` is the same with meta tensors.

    ``stamp()`` is a short text that identifies the content of the source; ranks that read parts of it compare it.
    ``rows(slice)`` reads some rows of a tensor; with it ``quantize`` needs memory of a few rows beside its result.
    ``parts`` are the Lazy of a stack, along dim 0, if each can be read alone.
    """

    read: Callable[[], Any]
    like: Any
    stamp: Callable[[], str] = str
    rows: Callable[[slice], Any] | None = None
    parts: "tuple[Lazy, ...]" = ()
    device: torch.device = HOST


def map(f: Callable[[Any], Any], x: Lazy) -> Lazy:
    """Return a Lazy that reads ``x`` and applies ``f``, which must also accept meta tensors."""
    return replace(x, read=lambda: f(x.read()), like=f(x.like), rows=None, parts=())


def stack(parts: Sequence[Lazy]) -> Lazy:
    """Return a Lazy of the stack of tensors, or of nodes of one structure, that ``parts`` read; one is held at a time.

    Raises ValueError for parts of another structure, shape or dtype than the first's.
    """
    first = parts[0].like
    for i, part in enumerate(parts):
        got, wanted = ([(t.dtype, tuple(t.shape)) for t in tree.leaves(like)] for like in (part.like, first))
        if got != wanted or tree.structure(part.like) != tree.structure(first):
            raise ValueError(f"part {i} of a stack is {got}, want {wanted} as of the first")

    def read() -> Any:
        out = None
        for i, part in enumerate(parts):
            x = part.read()
            if out is None:
                out = tree.map(lambda t: t.new_empty(len(parts), *t.shape), x)
            tree.map(lambda to, t, i=i: to[i].copy_(t), out, x)
        return out

    like = tree.map(lambda t: t.new_empty(len(parts), *t.shape), first)
    return Lazy(read, like, lambda: _stamp(parts), parts=tuple(parts), device=parts[0].device)


def concatenate(parts: Sequence[Lazy], join: Callable[[list[Any]], Any] = torch.cat) -> Lazy:
    """Return a Lazy of what ``parts`` read, one below the other by ``join``, which must also accept meta tensors.

    Raises ValueError for parts of another dtype or width than the first's.
    """
    if len(parts) == 1:
        return parts[0]
    kinds = {(part.like.dtype, tuple(part.like.shape[1:])) for part in parts}
    if len(kinds) != 1:
        raise ValueError(f"tensors of rows have {sorted(repr(kind) for kind in kinds)}, want one dtype and width")
    like = join([part.like for part in parts])
    read = lambda: join([part.read() for part in parts])
    return Lazy(read, like, lambda: _stamp(parts), device=parts[0].device)


def _stamp(parts: Sequence[Lazy]) -> str:
    text = "\n".join(part.stamp() for part in parts)
    return "joined " + hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def read(x: Any) -> Any:
    """Read every Lazy of the tree ``x``; an error is raised with the leaf's path in front."""
    return tree.map_with_path(lambda _, leaf: leaf.read() if isinstance(leaf, Lazy) else leaf, x)


def like(x: Any) -> Any:
    """Return the tree ``x`` with meta tensors for leaves, of a Lazy its ``like``."""
    return tree.map(lambda leaf: leaf.like if isinstance(leaf, Lazy) else leaf.to("meta"), x)
