"""The batch over ranks: the share of each rank, and sums over ranks. On one device all are the identity.

Every rank computes gradients of its share of the batch. They are summed, never averaged. A loss divides by the *global*
number of tokens, which is known beforehand (``psum`` of the counts). So shares may differ in size and in the number of
tokens that count. The sum over ranks is the gradient of one process on the whole batch. Sums are taken outside
autodiff, on one flat buffer for each dtype. Random draws use the numbers of rows in the whole batch (``rows``).
"""

import functools
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from fquant import tree

from .collectives import all_reduce
from .device_mesh import Axes, device_of, groups, position
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
    here = torch.arange(parts, device=n.device if isinstance(n, Tensor) else device_of(mesh)) == index
    each = psum(torch.where(here, n, 0), mesh, axes)
    return each.narrow(0, 0, index).sum(), each.sum()


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
