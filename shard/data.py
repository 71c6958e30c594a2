"""data: who computes which part of a batch, and the one rule of what is summed over whom.

Every rank computes gradients of its share of the batch. They are summed, never averaged: a loss divides by the *global*
number of tokens, which is known before (``psum`` of the counts), so that shares may differ in size and in how many of
their tokens count, and the sum over ranks is the gradient of one process on the whole batch.

Sums are taken outside autodiff, on one flat buffer a dtype.

Whatever is drawn from the rows of all ranks is drawn by number: ``rows`` tells a rank which numbers its rows have.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from fquant import tree

from .collectives import all_reduce
from .device_mesh import Axes, groups, position
from .rules import Rules


def share(x: Any, mesh: DeviceMesh, rules: Rules) -> Any:
    """This rank's rows of every tensor [batch ...] in ``x``; shares differ by at most one row."""
    index, parts = position(mesh, rules.batch)
    return tree.map(lambda t: t.tensor_split(parts)[index], x)


def max_local_rows(rows: int, mesh: DeviceMesh, rules: Rules) -> int:
    """The rows of the largest share of ``rows``, on any rank."""
    return -(-rows // position(mesh, rules.batch)[1])


def rows(n: int | Tensor, mesh: DeviceMesh, axes: Axes) -> tuple[Tensor, Tensor]:
    """The number of the first of this rank's ``n`` rows among those of all ranks along ``axes``, and of all: i64[].

    Ranks are in the order of :func:`share`; of rows with a mask, ``n`` is how many it keeps. One all-reduce. Where
    every rank knows how many the others have, the two are plain numbers and nobody has to ask.
    """
    index, parts = position(mesh, axes)
    here = torch.arange(parts, device=mesh.device_type) == index
    each = psum(torch.where(here, n, 0), mesh, axes)
    return each[:index].sum(), each.sum()


def psum(x: Any, mesh: DeviceMesh, axes: Axes) -> Any:
    """The tree ``x`` summed over the ranks along ``axes``, in one all-reduce for each dtype."""
    leaves, structure = tree.flatten(x)
    over = groups(mesh, axes)
    out: list[Any] = list(leaves)
    for dtype in dict.fromkeys(t.dtype for t in leaves):
        which = [i for i, t in enumerate(leaves) if t.dtype == dtype]
        flat = _sum(torch.cat([leaves[i].reshape(-1) for i in which]), over)
        for i, part in zip(which, flat.split([leaves[i].numel() for i in which]), strict=True):
            out[i] = part.reshape(leaves[i].shape)
    return tree.unflatten(structure, out)


def reduce(grads: Any, mesh: DeviceMesh, rules: Rules | None = None) -> Any:
    """Gradients of every rank's share of the batch to those of the whole: their sum over the axes of the batch.

    Raises TypeError, by path, for a leaf that is not a float.
    """
    for path, leaf in tree.items(grads):
        if not leaf.is_floating_point():
            raise TypeError(f"{path}: a gradient of {leaf.dtype}; wanted floats")
    return psum(grads, mesh, (rules or Rules()).batch)


def _sum(flat: Tensor, over: list[dist.ProcessGroup]) -> Tensor:
    for group in over:
        flat = all_reduce(flat, group)
    return flat
