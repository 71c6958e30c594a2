"""Row exchange: the collectives of a table that is sharded by dim 0, when the rows of each rank meet all of it.

With n rows on this rank, at most ``max_rows`` on any, and ``ranks`` along the axes:

    gather    [n ...]               ->  [ranks·max_rows ...]  all rows, rank by rank; gaps are nan, or 0 of integers
    mine      [ranks·max_rows ...]  ->  [n ...]               this rank's rows, without a collective
    scatter   [ranks·max_rows ...]  ->  [max_rows ...]        the sum over ranks, of which each rank keeps its rows
    largest   i64[N]                ->  i64[N]                the maximum over ranks
    sum       a tree                ->  a tree                the sum over ranks

    rank 0  [a]    -> gather ->  [a nan b c]  -> mine ->  [a]        with max_rows = 2
    rank 1  [b c]  -> gather ->  [a nan b c]  -> mine ->  [b c]

Each except ``mine`` is one collective for each axis with more than one rank. All except ``largest`` have derivatives;
gather and scatter are each other's backward. ``fquant.vq.sharded`` takes these functions as values.
"""

import functools
import math
from functools import partial

import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from fquant.communication import ONE_PROCESS, RowExchange

from .collectives import all_gather, all_reduce_max, reduce_scatter
from .data import psum
from .device_mesh import Axes, as_axes, position
from .ordered.sum_tree import split


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
            x = all_reduce_max(x, group)
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
    mine = split(size, ranks)[here]
    return mine.start, mine.stop
