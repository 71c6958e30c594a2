"""Rows over ranks: shares of the batch, sums, and rows that meet a sharded table. On one device all are the identity.

Every rank computes gradients of its share of the batch. They are summed, never averaged. A loss divides by the *global*
number of tokens, which is known beforehand (``psum`` of the counts). So shares may differ in size and in the number of
tokens that count. The sum over ranks is the gradient of one process on the whole batch. Sums are taken outside
autodiff, on one flat buffer for each dtype. Random draws use the numbers of rows in the whole batch (``rows``).

A table may be sharded by dim 0, and the rows of each rank meet all of it (``fquant.vq.sharded``). ``exchange_rows`` has
the collectives of that. Each except ``mine`` is one for each axis with more than one rank. All except ``largest`` have
derivatives; gather and scatter are each other's backward. With at most 2 rows on any rank:

    rank 0  [a]    -> gather ->  [a nan b c]  -> mine ->  [a]        gaps are nan, or 0 of integers
    rank 1  [b c]  -> gather ->  [a nan b c]  -> mine ->  [b c]
"""

import functools
import math
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from fquant import tree
from fquant.communication import ONE_PROCESS, RowExchange

from .collectives import all_gather, all_reduce, reduce_scatter
from .device_mesh import Axes, as_axes, groups, position
from .rules import Rules

_ops = torch.ops._c10d_functional


def share(x: Any, mesh: DeviceMesh, rules: Rules) -> Any:
    """Return this rank's rows of every tensor [batch ...] in ``x``; shares differ by at most one row. No collective.

    rank 0  [a b c]  ->  [a b]
    rank 1  [a b c]  ->  [c]
    """
    index, parts = position(mesh, rules.batch)
    return tree.map(lambda t: t.tensor_split(parts)[index], x)


def max_local_rows(rows: int, mesh: DeviceMesh, rules: Rules) -> int:
    """Return the rows of the largest share of ``rows``, on any rank."""
    return -(-rows // position(mesh, rules.batch)[1])


def rows(n: int | Tensor, mesh: DeviceMesh, axes: Axes) -> tuple[Tensor, Tensor]:
    """Return the number of this rank's first row among the rows of all ranks along ``axes``, and their total: i64[].

        rank 0  n = 2  ->  0, 5
        rank 1  n = 3  ->  2, 5

    ``n`` is the number of rows here; of rows with a mask, the number that it keeps. Ranks are in the order of
    :func:`share`. One all-reduce; no derivative. If every rank knows the numbers of the others, use plain numbers
    instead.
    """
    index, parts = position(mesh, axes)
    here = torch.arange(parts, device=mesh.device_type) == index
    each = psum(torch.where(here, n, 0), mesh, axes)
    return each[:index].sum(), each.sum()


def psum(x: Any, mesh: DeviceMesh, axes: Axes) -> Any:
    """Return the sum of the tree ``x`` over the ranks along ``axes``, with one all-reduce for each dtype.

        rank 0  {"n": a}  ->  {"n": a + b}
        rank 1  {"n": b}  ->  {"n": a + b}

    Backward: psum.
    """
    leaves, structure = tree.flatten(x)
    out: list[Any] = list(leaves)
    for dtype in dict.fromkeys(t.dtype for t in leaves):
        which = [i for i, t in enumerate(leaves) if t.dtype == dtype]
        flat = torch.cat([leaves[i].reshape(-1) for i in which])
        flat = functools.reduce(all_reduce, groups(mesh, axes), flat)
        for i, part in zip(which, flat.split([leaves[i].numel() for i in which]), strict=True):
            out[i] = part.reshape(leaves[i].shape)
    return tree.unflatten(structure, out)


def reduce(grads: Any, mesh: DeviceMesh, rules: Rules | None = None) -> Any:
    """Return the gradients of the whole batch: the sum, over its axes, of those of every rank's share.

    Raises TypeError, by path, for a leaf that is not a float.
    """
    for path, leaf in tree.items(grads):
        if not leaf.is_floating_point():
            raise TypeError(f"{path}: a gradient of {leaf.dtype}; wanted floats")
    return psum(grads, mesh, (rules or Rules()).batch)


def exchange_rows(mesh: DeviceMesh, axes: Axes, max_rows: int) -> RowExchange:
    """Return the collectives along ``axes``, for ranks with at most ``max_rows`` rows.

    Raises ValueError for ``max_rows`` below 1; its ``gather`` raises ValueError for more rows than ``max_rows``.
    """
    if max_rows < 1:
        raise ValueError(f"exchange_rows: max_rows is {max_rows}; wanted at least 1, the most rows that any rank has")
    here, ranks = position(mesh, axes)
    if ranks == 1:
        return ONE_PROCESS
    over = [mesh.get_group(axis) for axis in as_axes(axes) if position(mesh, axis)[1] > 1]

    def gather(x: Tensor) -> Tensor:
        if (n := x.shape[0]) > max_rows:
            wanted = f"wanted at most max_rows={max_rows}; use max_rows={n} on every rank"
            raise ValueError(f"exchange_rows: got {n} rows; {wanted}")
        fill = math.nan if x.is_floating_point() else 0
        padded = F.pad(x, (*[0, 0] * (x.ndim - 1), 0, max_rows - n), value=fill)
        return functools.reduce(all_gather, reversed(over), padded)  # the innermost axis first, in the order of ranks

    def largest(x: Tensor) -> Tensor:
        for group in over:
            x = _ops.wait_tensor(_ops.all_reduce(x.contiguous(), "max", group.group_name))
        return x

    mine, scatter = lambda t, n: t.narrow(0, here * max_rows, n), lambda x: functools.reduce(reduce_scatter, over, x)
    return RowExchange(gather, mine, scatter, largest, partial(psum, mesh=mesh, axes=axes), here, ranks)


def local_range(size: int, mesh: DeviceMesh, axes: Axes) -> tuple[int, int]:
    """Return the first of ``size`` rows that this rank holds along ``axes``, and the end of its range.

    Ranges differ by at most one row. Raises ValueError if there are more ranks than rows.
    """
    here, ranks = position(mesh, axes)
    if size < ranks:
        named = ",".join(f"{axis}={position(mesh, axis)[1]}" for axis in as_axes(axes))
        raise ValueError(f"local_range: {size} rows over {named} leave ranks without any; wanted at least {ranks}")
    begin = lambda i: i * (size // ranks) + min(i, size % ranks)
    return begin(here), begin(here + 1)
