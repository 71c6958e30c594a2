"""RowLayout: a block of which each rank has rows of every tensor.

A row of integers is rounded with one scale, so a rank that updates it needs all of it. A :class:`Layout` cuts the run
of a block anywhere. Here each rank has as many rows of each tensor, side by side, and the last ranks have padding:

    tensors         q [5 4], norm [5]                     on 2 ranks
    part of rank 0  q[0:3]   norm[0:3]
    part of rank 1  q[3:5] 0 norm[3:5] 0

The rows of a rank are so many that their elements are a multiple of 256, here left out. So a block of an 8-bit moment
has the same elements on any number of ranks. *Blocks of 256 in order* are the form for files that says nothing of a
mesh: those of the first tensor, then those of the second, without padding.
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from fquant import tree
from fquant.quantized_training.weights import check_weight, is_packed
from fquant.tree import expect

from .. import bundle
from ..bundle import ALIGN, Buffer, Layout, round_up
from ..rules import join
from ..transport.wire import BLOCK


@dataclass(frozen=True)
class RowLayout(Layout):
    """The layout of a block, and how many ``rows`` of each buffer one of ``ranks`` has.

    Offsets of buffers are those in the whole block, tensor after tensor, which is how it is sent (shard/pieces.py).
    """

    rows: tuple[int, ...]
    ranks: int

    @property
    def starts(self) -> list[int]:
        """The first byte of each buffer in the part of a rank."""
        return _starts(self.buffers, self.rows)[:-1]


def plan(block: Any, ranks: int, at: str = "") -> RowLayout:
    """Return the layout of the ``block`` at a path, a tree of meta tensors and of Packed whose rows are trained.

    Raises ValueError, by path, for a format that cannot be trained, and for another dtype than float32 and below.
    """
    buffers, rows, offset = list[Buffer](), list[int](), 0
    for path, leaf in tree.items(block, is_leaf=is_packed):
        with tree.at(join(at, path)):
            _check(leaf)
        for inner, t in tree.items(leaf):
            dtype = t.dtype if is_packed(leaf) else torch.float32
            buffers.append(Buffer(join(path, inner), dtype, tuple(t.shape), offset))
            rows.append(_rows(tuple(leaf.shape), ranks))
            offset += round_up(buffers[-1].nbytes, ALIGN)
    size = ranks * _starts(buffers, rows)[-1]
    return RowLayout(tree.structure(block), tuple(buffers), size, tuple(rows), ranks)


def dense(block: Any, ranks: int) -> RowLayout:
    """Return the layout of the weights of ``block`` decoded to float32, of a gradient and a moment."""
    like = lambda leaf: torch.empty(leaf.shape, dtype=torch.float32, device="meta")
    return plan(tree.map(like, block, is_leaf=is_packed), ranks)


def _starts(buffers: Sequence[Buffer], rows: Sequence[int]) -> list[int]:
    """Return the first byte of each buffer in the part of a rank, and the end of the part."""
    sizes = (round_up(n * b.width, ALIGN) for b, n in zip(buffers, rows, strict=True))
    return list(itertools.accumulate(sizes, initial=0))


def _check(leaf: Any) -> None:
    if is_packed(leaf):
        check_weight(leaf)
    else:
        floats = torch.float16, torch.bfloat16, torch.float32
        expect(leaf.dtype in floats, f"got {leaf.dtype} beside packed weights that are trained; cast it to float32")
        expect(leaf.ndim > 0, "got a tensor without dims beside packed weights that are trained; give it one")


def _rows(shape: tuple[int, ...], ranks: int) -> int:
    width = math.prod(shape[1:])
    return round_up(-(-shape[0] // ranks), BLOCK // math.gcd(width, BLOCK))


def held(layout: Layout, rank: int, ranks: int) -> list[tuple[int, int, int]]:
    """Return the bytes of a block that a rank has: runs (begin, end, first byte in its part)."""
    if not isinstance(layout, RowLayout):
        size = layout.size // ranks
        return [(rank * size, (rank + 1) * size, 0)]
    out = list[tuple[int, int, int]]()
    for b, n, start in zip(layout.buffers, layout.rows, layout.starts, strict=True):
        begin = min(b.offset + rank * n * b.width, b.end)
        out.append((begin, min(begin + n * b.width, b.end), start))
    return out


def split(flat: Tensor, layout: RowLayout) -> list[Tensor]:
    """Return the rows [k·rows ...] of each tensor in the parts ``flat`` [k·n] of k ranks, in bytes or in elements."""
    sizes = {b.dtype.itemsize for b in layout.buffers}
    is_bytes = flat.dtype == torch.uint8
    assert is_bytes or len(sizes) == 1
    unit = 1 if is_bytes else sizes.pop()
    parts, out = flat.view(-1, layout.size // layout.ranks // unit), list[Tensor]()
    for b, n, start in zip(layout.buffers, layout.rows, layout.starts, strict=True):
        part = parts.narrow(1, start // unit, n * b.width // unit)
        shape = n, *b.shape[1:]
        t = bundle.view(part, replace(b, shape=shape)) if is_bytes else part.unflatten(1, shape)
        out.append(t.flatten(0, 1))
    return out


def read(flat: Tensor, layout: RowLayout) -> Any:
    """Return the block in the parts ``flat`` [size] of all ranks, bytes or floats; copies unless there is one rank."""
    whole = (t[: b.shape[0]] for t, b in zip(split(flat, layout), layout.buffers, strict=True))
    return tree.unflatten(layout.structure, list(whole))


def write(rows: Sequence[Tensor], layout: RowLayout) -> Tensor:
    """Return the part u8[size / ranks] with a rank's ``rows`` of each tensor."""
    parts, at = list[Tensor](), 0
    for t, start in zip(rows, [*layout.starts[1:], layout.size // layout.ranks], strict=True):
        flat = bundle.raw(t)
        parts += [flat, flat.new_zeros(start - at - flat.numel())]
        at = start
    return torch.cat([part for part in parts if part.numel()])


def joined(tensors: Sequence[Tensor | None], layout: RowLayout, dtype: torch.dtype) -> Tensor:
    """Return the parts of all ranks f[elements of size] of whole float ``tensors``; None is zeros."""
    like = next(t for t in tensors if t is not None)
    parts = list[Tensor]()
    for t, b, n in zip(tensors, layout.buffers, layout.rows, strict=True):
        total = layout.ranks * n, *b.shape[1:]
        if t is None:
            parts.append(like.new_zeros(total, dtype=dtype).view(layout.ranks, -1))
            continue
        padding = t.new_zeros((total[0] - b.shape[0], *b.shape[1:]), dtype=dtype)
        parts.append(torch.cat([t.to(dtype), padding]).view(layout.ranks, -1))
    return torch.cat(parts, 1).view(-1)


def in_blocks(t: Tensor, layout: RowLayout) -> Tensor:
    """Return ``t`` [ranks·n ...] of all ranks in blocks of 256 elements in order; ``t`` has as much for each block."""
    parts, out = _blocks(t, layout, layout.ranks), list[Tensor]()
    for b, begin, count in of_buffers(layout):
        out.append(parts[:, begin : begin + count].flatten(0, 1)[: -(-math.prod(b.shape) // BLOCK)])
    return torch.cat(out).reshape(-1, *t.shape[1:])


def of_blocks(t: Tensor, layout: RowLayout, like: Tensor, rank: int) -> Tensor:
    """Return what a rank holds of ``t``, which is in blocks of 256 elements in order; ``like`` is of that shape."""
    mine = _blocks(torch.zeros(like.shape, dtype=t.dtype, device=t.device), layout, 1)[0]
    blocks, at = t.reshape(-1, mine.shape[1]), 0
    for b, begin, count in of_buffers(layout):
        number = -(-math.prod(b.shape) // BLOCK)
        some = blocks[at : at + number][rank * count : (rank + 1) * count]
        mine[begin : begin + len(some)] = some
        at += number
    return mine.reshape(like.shape)


def _blocks(t: Tensor, layout: RowLayout, ranks: int) -> Tensor:
    """Return ``t`` of so many ranks as [ranks, blocks of 256 elements, values of each]."""
    blocks = layout.size // layout.ranks // (BLOCK * 4)
    return t.reshape(ranks, blocks, t.numel() // max(1, ranks * blocks))


def of_buffers(layout: RowLayout) -> list[tuple[Buffer, int, int]]:
    """Return each buffer of floats, its first block in a rank's part, and its blocks there."""
    wide = zip(layout.buffers, layout.starts, layout.rows, strict=True)
    return [(b, start // (4 * BLOCK), n * b.width // (4 * BLOCK)) for b, start, n in wide]
