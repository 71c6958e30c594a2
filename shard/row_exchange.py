"""across: what travels where something is spread over ranks by its first dim, and rows of their own meet all of it.

    gather    [n ...]     ->  [ranks·most ...]   of all, one after the other; what is not there is nan, or 0 of integers
    mine      [ranks·most ...]  ->  [n ...]      of these the rank's own, without a collective
    scatter   [ranks·most ...]  ->  [most ...]   the sum over ranks, of which each keeps its own
    largest   i64[N]  ->  i64[N]                 the largest over ranks
    sum       a tree                             the sum over ranks

Each but ``mine`` is one collective, and all but ``largest`` have derivatives. No rank knows how many rows another has:
``most`` is a bound on all of them. ``fquant.vq.sharded`` takes these as values, and knows no mesh.
"""

from __future__ import annotations

import math
from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from fquant.communication import ONE_PROCESS, RowExchange

from .collectives import all_gather, reduce_scatter
from .data import psum

_ops = torch.ops._c10d_functional


def exchange_rows(mesh: DeviceMesh, axis: str, most: int) -> RowExchange:
    """The functions along ``axis``, for ranks with up to ``most`` rows each; of one rank they are identities.

    Raises ValueError for ``most`` below 1, and ``gather`` for more rows than that.
    """
    if most < 1:
        raise ValueError(f"across: most is {most}; wanted at least 1, the rows of the rank with most of them")
    ranks, here = mesh[axis].size(), mesh.get_local_rank(axis)
    if ranks == 1:
        return ONE_PROCESS
    group = mesh.get_group(axis)
    return RowExchange(
        partial(_gather, group=group, most=most),
        lambda t, n: t.narrow(0, here * most, n),
        partial(reduce_scatter, group=group),
        partial(_largest, group=group),
        partial(psum, mesh=mesh, axes=(axis,)),
        (here, ranks),
    )


def local_range(size: int, mesh: DeviceMesh, axis: str) -> tuple[int, int]:
    """The first of ``size`` that this rank has along ``axis``, and behind the last; shares differ by at most one.

    Raises ValueError for fewer than ranks.
    """
    ranks, here = mesh[axis].size(), mesh.get_local_rank(axis)
    if size < ranks:
        raise ValueError(f"span: {size} over {axis}={ranks} leaves ranks with none; wanted at least {ranks}")
    begin = lambda i: i * (size // ranks) + min(i, size % ranks)
    return begin(here), begin(here + 1)


def _gather(x: Tensor, group: dist.ProcessGroup, most: int) -> Tensor:
    if x.shape[0] > most:
        raise ValueError(
            f"across: {x.shape[0]} rows, and this is for at most {most} a rank; use most={x.shape[0]} on all"
        )
    fill = math.nan if x.is_floating_point() else 0
    return all_gather(F.pad(x, (*[0, 0] * (x.ndim - 1), 0, most - x.shape[0]), value=fill), group)


def _largest(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    return _ops.wait_tensor(_ops.all_reduce(x.contiguous(), "max", group.group_name))
