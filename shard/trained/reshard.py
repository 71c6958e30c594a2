"""Trained trees whole, and cut again for any mesh: what a checkpoint or a model's folder holds.

    whole = shard.whole(state, mesh, rules)            # every rank calls it; rank 0 has the tree, on the host
    state = shard.part(read, state, mesh, rules)       # of a tree that was whole, this rank's part

Inside a whole tree a FloatBundle is its block: tensors of the master's dtype by name, without padding. So it says
nothing of a mesh. An optimiser may keep a moment in another form than floats, such as packed codes beside scales. Then
each of its tensors is one of dim 0 in equal parts, and a list of the whole ones stands there.

The first rank holds one tree on the host, others one block at a time. Ranks of one mesh may use
torch.distributed.checkpoint on the result of :func:`shard.at_rest` instead, which needs no whole tree.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from fquant import lazy, tree
from fquant.device import HOST

from ..bundle import Layout
from ..collectives import collective
from ..device_mesh import device_of, position
from ..host_memory import moved
from ..rules import Rules
from . import row_layout
from .float_bundle import FloatBundle, length, spans
from .row_bundle import RowBundle
from .row_layout import RowLayout


def whole(x: Any, mesh: DeviceMesh, rules: Rules) -> Any:
    """Return the tree ``x`` with every FloatBundle whole, on the host of rank 0; other ranks get meta tensors.

        rank 0  FloatBundle(first half)   ->  {"w": w}
        rank 1  FloatBundle(second half)  ->  {"w": meta}

    ``x`` is placed or local. One all-gather for each tensor of a bundle, outside of steps; no backward. On one device
    it is a copy.
    """
    group = mesh.get_group(rules.block) if rules.block and position(mesh, rules.block)[1] > 1 else None
    is_first, device = dist.get_rank() == 0, device_of(mesh)

    def gathered(path: str, t: Tensor) -> Tensor:
        t = t.to_local() if isinstance(t, DTensor) else t
        t = t.to(device)  # behind what is still copied to the host
        found = collective(t.contiguous(), "all_gather", group, [path]) if group is not None else t
        return found.to(HOST, copy=True) if is_first else found.to("meta")

    one = lambda path, y: opened(y, partial(gathered, path)) if is_trained(y) else y
    return tree.map_with_path(one, x, is_leaf=is_trained)


def whole_like(x: Any) -> Any:
    """Return the result of :func:`whole` in meta tensors, without communication."""
    meta = lambda t: torch.empty(t.shape, dtype=t.dtype, device="meta")

    def one(y: FloatBundle | RowBundle) -> Any:
        if isinstance(y, RowBundle):
            return opened(y, lambda t: torch.empty(y.layout.size, dtype=t.dtype, device="meta"))
        if isinstance(y.values, Tensor):
            return opened(y, lambda t: torch.empty(length(y.layout), dtype=t.dtype, device="meta"))
        ranks = y.layout.ranks if isinstance(y.layout, RowLayout) else 1
        return opened(y, lambda t: meta(t.expand(ranks, *t.shape).flatten(0, 1)))

    return tree.map(lambda y: one(y) if is_trained(y) else y, x, is_leaf=is_trained)


def is_trained(x: Any) -> bool:
    """Return True for a bundle of a block that is trained."""
    return isinstance(x, FloatBundle | RowBundle)


def opened(x: FloatBundle | RowBundle, gathered: Callable[[Tensor], Tensor]) -> Any:
    """Return the block of a bundle, or the list of the tensors that an optimiser keeps in its place."""
    if isinstance(x, RowBundle):
        return row_layout.read(gathered(x.bytes), x.layout)
    layout = x.layout
    if not isinstance(x.values, Tensor):
        found = [gathered(t) for t in tree.leaves(x.values)]
        return [row_layout.in_blocks(t, layout) for t in found] if isinstance(layout, RowLayout) else found
    flat = gathered(x.values)
    if isinstance(layout, RowLayout):
        return row_layout.read(flat, layout)
    parts = [flat.narrow(0, *span).view(b.shape) for span, b in zip(spans(layout), layout.buffers, strict=True)]
    return tree.unflatten(layout.structure, parts)


def part(x: Any, like: Any, mesh: DeviceMesh, rules: Rules) -> Any:
    """Return this rank's part of the whole tree ``x``, in the form and on the devices of the local tree ``like``.

        rank 0  {"w": w}  ->  FloatBundle(first half)
        rank 1  {"w": w}  ->  FloatBundle(second half)

    No collective: every rank has ``x``, or opened it. Lazy leaves are read one at a time. Raises ValueError for a tree
    of another structure or other shapes.
    """
    rank, ranks = position(mesh, rules.block or ())
    leaves, structure = tree.flatten(like, is_leaf=is_trained)
    found = _split(x, leaves, structure)
    return tree.unflatten(structure, [_cut(*each, rank, ranks) for each in zip(found, leaves, strict=True)])


def _split(x: Any, leaves: list[Any], structure: tree.Structure) -> list[Any]:
    """Return the subtrees of ``x`` in the places of ``leaves``."""
    tops = [whole_like(leaf) for leaf in leaves]
    wanted = tree.structure(tree.unflatten(structure, tops))
    if tree.structure(x) != wanted:
        odd = set(tree.paths(x)) ^ set(tree.paths(tree.unflatten(structure, tops)))
        where = f"{min(odd)} is in one only" if odd else "their static fields or containers differ"
        raise ValueError(f"part: got a tree of another structure ({where}); wanted one from shard.whole of the same")
    given, out = iter(tree.leaves(x)), []
    for top in tops:
        inner, form = tree.flatten(top)
        out.append(tree.unflatten(form, [next(given) for _ in inner]))
    return out


def _cut(x: Any, like: Any, rank: int, ranks: int) -> Any:
    if not is_trained(like):
        x = lazy.read(x)
        return moved(x, like) if isinstance(x, Tensor) and isinstance(like, Tensor) else x
    if isinstance(like, RowBundle):
        return replace(like, bytes=_bytes(x, like, rank))
    if not isinstance(like.values, Tensor):
        inner, structure = tree.flatten(like.values)
        layout = like.layout
        cut = lambda t, to: (
            moved(row_layout.of_blocks(t, layout, to, rank).to(to.dtype), to)
            if isinstance(layout, RowLayout)
            else _rows(t, to, rank, ranks)
        )
        mine = [cut(lazy.read(t), to) for t, to in zip(x, inner, strict=True)]
        return FloatBundle(tree.unflatten(structure, mine), like.layout, like.precision)
    _check_shapes(x, like.layout)
    if isinstance(like.layout, RowLayout):
        rows = [_padded(lazy.read(t), n, rank) for t, n in zip(tree.leaves(x), like.layout.rows, strict=True)]
        return replace(like, values=moved(torch.cat([t.reshape(-1) for t in rows]).to(like.values.dtype), like.values))
    n = like.values.shape[0]
    out, begin = torch.zeros_like(like.values), rank * n
    for t, (first, count) in zip(tree.leaves(x), spans(like.layout), strict=True):
        low, high = max(first, begin), min(first + count, begin + n)
        if low < high:
            out[low - begin : high - begin] = lazy.read(t).reshape(-1)[low - first : high - first].to(out.device)
    return FloatBundle(moved(out, like.values), like.layout, like.precision)


def _rows(t: Tensor, like: Tensor, rank: int, ranks: int) -> Tensor:
    """Return this rank's rows of ``t``, whose padding at the end depends on the number of ranks."""
    rows = like.shape[0]
    padded = t.new_zeros((rows * ranks, *t.shape[1:]))
    kept = min(len(padded), len(t))
    padded[:kept] = t[:kept]
    return moved(padded[rank * rows : (rank + 1) * rows].to(like.dtype), like)


def _bytes(x: Any, like: RowBundle, rank: int) -> Tensor:
    """Return the bytes of a rank's rows of the block ``x``."""
    _check_shapes(x, like.layout)
    leaves = zip(tree.leaves(x), like.layout.buffers, like.layout.rows, strict=True)
    rows = [_padded(lazy.read(t).to(b.dtype), n, rank) for t, b, n in leaves]
    return row_layout.write(rows, like.layout).to(like.bytes.device)


def _padded(t: Tensor, n: int, rank: int) -> Tensor:
    """Return the ``n`` rows of ``t`` that a rank has, with zeros behind the last."""
    mine = t[rank * n : (rank + 1) * n]
    return torch.cat([mine, mine.new_zeros(n - len(mine), *t.shape[1:])])


def _check_shapes(x: Any, layout: Layout) -> None:
    for (path, t), buffer in zip(tree.items(lazy.like(x)), layout.buffers, strict=True):
        if tuple(t.shape) != buffer.shape:
            raise ValueError(f"{path}: got shape {tuple(t.shape)}, wanted {buffer.shape}")
