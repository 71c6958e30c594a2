"""The ranges that a rank has of the whole tensors of a tree: elements in order, as views of the rank's memory.

    for it in local_ranges(state, mesh, rules):
        it.values[:] = read(it.name, it.start, len(it.values))

A bundle has parts of many tensors in one run of bytes, and where they lie depends on the number of ranks. The ranges of
all ranks together are the whole tensors, in order and flat, and the same on every mesh. So what one mesh has written as
ranges, another reads: its ranges are other cuts of the same tensors.

Tensors in bundles have the names of their buffers, behind the path of the bundle. An optimiser may keep a moment as
packed codes beside scales, whose rows are blocks of elements. Their tensors are numbered, and end with padding whose
length depends on the number of ranks.
"""

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from fquant import tree

from ..bundle import Bundle, Layout
from ..device_mesh import position
from ..rules import Rules, join
from ..trained import FloatBundle, RowBundle
from ..trained.row_layout import RowLayout, held, of_buffers
from ..transport.wire import BLOCK

NOTHING = torch.empty(0, dtype=torch.uint8, device="meta")  # a leaf of an outline


class Range(NamedTuple):
    """A range of a whole tensor, which ``copies`` ranks have, this one as number ``copy``; it may be empty."""

    name: str
    shape: tuple[int, ...]  # of the whole tensor
    start: int  # the number of the first element
    values: Tensor  # [n], a view
    copy: int
    copies: int
    is_padded: bool = False  # whether the whole tensor ends with padding, which depends on the mesh
    leaf: int = 0  # the number of the leaf of the tree whose memory ``values`` views


def local_ranges(x: Any, mesh: DeviceMesh, rules: Rules) -> list[Range]:
    """Return the ranges that this rank has of all tensors of the tree ``x``, placed or local; no collective.

    Tensors outside of bundles are whole on every rank. Raises ValueError for one that is not contiguous, of which there
    is no flat view.
    """
    rank, ranks = position(mesh, rules.block or ())
    rest = tuple(axis for axis in mesh.mesh_dim_names or () if axis != rules.block)
    among, everyone = position(mesh, rest), position(mesh, tuple(mesh.mesh_dim_names or ()))
    out, number = list[Range](), 0
    for path, leaf in tree.items(x, is_leaf=_is_bundle):
        if not _is_bundle(leaf):
            tree.expect(
                leaf.is_contiguous(), f"{path}: got a tensor with strides {leaf.stride()}, wanted a contiguous one"
            )
            out.append(Range(path, tuple(leaf.shape), 0, leaf.detach().view(-1), *everyone, leaf=number))
            number += 1
            continue
        with tree.at(path):
            for it in _of(leaf, rank, ranks):
                name, at = join(path, it.name), number + it.leaf
                out.append(it._replace(name=name, copy=among[0], copies=among[1], leaf=at))
        number += len(tree.leaves(leaf))
    return out


def outline(x: Any) -> Any:
    """Return the tree ``x`` with each bundle as its block, in empty tensors; a packed moment is a list of them."""

    def one(b: Any) -> Any:
        if isinstance(b, FloatBundle) and not isinstance(b.values, Tensor):
            return [NOTHING for _ in tree.leaves(b.values)]
        return tree.unflatten(b.layout.structure, [NOTHING for _ in b.layout.buffers])

    return tree.map(lambda y: one(y) if _is_bundle(y) else NOTHING, x, is_leaf=_is_bundle)


def _is_bundle(x: Any) -> bool:
    return isinstance(x, Bundle | FloatBundle | RowBundle)


def _of(b: Any, rank: int, ranks: int) -> Iterator[Range]:
    values = b.values if isinstance(b, FloatBundle) else b.bytes
    if isinstance(values, Tensor):
        part = (values.to_local() if isinstance(values, DTensor) else values).detach()
        yield from _of_bytes(part.view(torch.uint8), b.layout, rank, ranks)
    else:
        for i, (_, t) in enumerate(tree.items(values)):
            t = t.to_local() if isinstance(t, DTensor) else t
            yield from _of_moment(i, t.detach(), b.layout, rank, ranks)


def _of_bytes(part: Tensor, layout: Layout, rank: int, ranks: int) -> Iterator[Range]:
    """Yield the range of each buffer in the ``part`` u8[n] of a rank."""
    runs = held(layout, rank, ranks)
    for buffer in layout.buffers:
        start, values = 0, part[:0]
        for begin, end, first in runs:
            low, high = max(begin, buffer.offset), min(end, buffer.end)
            if low < high:
                start, values = low - buffer.offset, part[first + low - begin : first + high - begin]
        size = buffer.dtype.itemsize
        yield Range(buffer.path, buffer.shape, start // size, values.view(buffer.dtype), 0, 1)


def _of_moment(leaf: int, t: Tensor, layout: Layout, rank: int, ranks: int) -> Iterator[Range]:
    """Yield the ranges of a tensor of a packed moment: its rows, or of a RowLayout the blocks of each buffer."""
    if not isinstance(layout, RowLayout):
        whole = t.shape[0] * ranks, *t.shape[1:]
        yield Range(str(leaf), whole, rank * t.numel(), t.view(-1), 0, 1, is_padded=True, leaf=leaf)
        return
    flat, each = t.view(-1), t.numel() * BLOCK * 4 // max(1, layout.size // layout.ranks)
    for buffer, begin, count in of_buffers(layout):
        total = -(-math.prod(buffer.shape) // BLOCK)
        mine = max(0, min(count, total - rank * count))
        values = flat[begin * each : (begin + mine) * each]
        yield Range(join(str(leaf), buffer.path), (total, each), rank * count * each, values, 0, 1, leaf=leaf)
