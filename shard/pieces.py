"""The bytes of a tree in pieces, each sent by the rank that has it to all ranks.

Of tensors those of rank 0 count, and a block is a piece. A Lazy leaf is read on one rank and sent in pieces of 16 MiB.
So a rank never holds more than one tensor beside what it keeps.
"""

import itertools
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from fquant import tree
from fquant.lazy import Lazy

from . import agree, bundle
from .bundle import Buffer, Layout
from .collectives import broadcast
from .rules import join

PIECE = 16 << 20  # bytes of one broadcast, which receiving needs in addition to the part that is kept

Pieces = Iterator[tuple[str, int, Tensor]]  # block, offset in it, bytes


def of(base: Any, layouts: dict[str, Layout], device: torch.device) -> Pieces:
    """Yield the bytes of every block of ``base`` on ``device``, on every rank; raise ValueError if a rank cannot read.

    The leaves of ``base`` are tensors, or Lazy.
    """
    some = any(isinstance(leaf, Lazy) for leaf in tree.leaves(base))
    return _read(base, layouts, device) if some else _send(base, layouts, device)


def _send(base: Any, layouts: dict[str, Layout], device: torch.device) -> Pieces:
    """Broadcast rank 0's bytes, a block at a time."""
    send = partial(of_root, "place", device=device)
    return ((path, 0, send(tree.get(base, path), path, it)) for path, it in layouts.items())


def of_root(what: str, x: Any, path: str, layout: Layout, device: torch.device) -> Tensor:
    """Return the bytes of rank 0's ``x`` on the ``device`` of every rank."""

    def own() -> Tensor:
        if dist.get_rank():
            return torch.empty(layout.size, dtype=torch.uint8, device=device)
        if meta := [join(path, name) for name, leaf in tree.items(x) if leaf.is_meta]:
            fault = f"{meta[0]} is a meta tensor on rank 0, whose values are the ones that count"
            raise ValueError(f"{fault}; read it there")
        return bundle.write(x, layout, device)

    whole = agree.attempt(what, own)
    if layout.size:
        broadcast(whole, 0)
    return whole


class _Leaf(NamedTuple):
    """A leaf of a block, and its buffers: one of a tensor, and of a Lazy leaf as many as it will have tensors."""

    block: str
    path: str
    leaf: Any
    buffers: tuple[Buffer, ...]


def _read(base: Any, layouts: dict[str, Layout], device: torch.device) -> Pieces:
    """Read every Lazy leaf on one rank and broadcast it; as many leaves are read at a time as there are ranks."""
    world, leaves = dist.get_world_size(), list[_Leaf]()
    for block, layout in layouts.items():
        buffers = iter(layout.buffers)
        for name, leaf in tree.items(tree.get(base, block)):
            count = len(tree.leaves(leaf.like)) if isinstance(leaf, Lazy) else 1
            leaves.append(_Leaf(block, join(block, name), leaf, tuple(itertools.islice(buffers, count))))
    for start in range(0, len(leaves), world):
        yield from _read_turn(leaves[start : start + world], device)  # a call of its own, to release all it held


def _read_turn(turn: list[_Leaf], device: torch.device) -> Pieces:
    """Read leaf ``i`` of ``turn`` on rank ``i``, then broadcast them one by one, from device to device."""
    rank = dist.get_rank()

    def read() -> Tensor | None:
        if rank >= len(turn):
            return None
        mine = turn[rank]
        if not isinstance(mine.leaf, Lazy):
            raise ValueError(f"{mine.path}: a tensor among Lazy leaves; make it Lazy, or read all (fquant.lazy.read)")
        with tree.at(mine.path):
            try:
                return _bytes_of(mine.leaf.read(), mine.buffers)
            except OSError as error:
                raise ValueError(f"cannot be read: {error}") from error

    own = agree.attempt("place", read)
    for owner, leaf in enumerate(turn):
        begin, end = leaf.buffers[0].offset, leaf.buffers[-1].end
        for offset in range(begin, end, PIECE):
            piece = torch.empty(min(PIECE, end - offset), dtype=torch.uint8, device=device)
            if owner == rank and own is not None:
                piece = own[offset - begin :][: piece.numel()].to(device)
            broadcast(piece, owner)
            yield leaf.block, offset, piece


def _bytes_of(x: Any, buffers: tuple[Buffer, ...]) -> Tensor:
    """Return the bytes of ``x``, from the first of its first buffer to the last of its last."""
    leaves, first = tree.leaves(x), buffers[0].offset
    got, wanted = [(t.dtype, tuple(t.shape)) for t in leaves], [(b.dtype, b.shape) for b in buffers]
    if got != wanted:
        raise ValueError(f"read {got}; wanted {wanted} as announced")
    if len(leaves) == 1:
        return bundle.raw(leaves[0])  # not a copy, which would be a second tensor
    shifted = tuple(replace(buffer, offset=buffer.offset - first) for buffer in buffers)
    return bundle.write(x, Layout(tree.structure(x), shifted, shifted[-1].end), leaves[0].device)
