"""data: who computes which part of a batch, and the one rule of what is summed over whom.

Every rank computes gradients of its share of the batch. They are summed, never averaged: a loss divides by the *global*
number of tokens, which is known before (``psum`` of the counts), so that shares may differ in size and in how many of
their tokens count, and the sum over ranks is the gradient of one process on the whole batch.

Sums are taken outside autodiff, on one flat buffer a dtype.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from fquant import tree

from .collectives import all_reduce
from .mesh import groups
from .spec import Rules


def share(x: Any, mesh: DeviceMesh, rules: Rules) -> Any:
    """This rank's rows of every tensor [batch ...] in ``x``; shares differ by at most one row."""
    index, parts = 0, 1
    for axis in rules.batch:
        index, parts = index * mesh[axis].size() + mesh.get_local_rank(axis), parts * mesh[axis].size()
    return tree.map(lambda t: t.tensor_split(parts)[index], x)


def most(rows: int, mesh: DeviceMesh, rules: Rules) -> int:
    """The rows of the largest share of ``rows``, on any rank."""
    return -(-rows // math.prod(mesh[axis].size() for axis in rules.batch))


def psum(x: Any, mesh: DeviceMesh, axes: tuple[str, ...]) -> Any:
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
