"""The gradient of each row of a batch, and their sums over the subtrees that this rank has whole.

A chunk of rows is one ``vmap``. Until its rows are added up, it holds a gradient of all parameters for each row. More
and smaller chunks hold less.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.func import vmap

from fquant import tree
from fquant.kernels.batch_invariant import batch_invariant

from ..device_mesh import position
from ..rules import Rules as Sharding
from .exchange import total
from .sum_tree import Node, Rows, joined, nodes, partial_sums, split


def grad_and_value(
    loss: Callable[..., Tensor], mesh: DeviceMesh, rules: Sharding, rows: int, dtype: torch.dtype | None = None
) -> Callable[[Any, Sequence[Any]], tuple[Any, Tensor]]:
    """Return a function of (params, chunks) that gives the gradient and the value of the sum of ``loss`` over all rows.

        loss(params, row)                          f32[], of one row: a tree of tensors without the dim of rows
        chunks = [first rows, next rows, ...]      trees of tensors [n ...]: this rank's rows, in order

    ``rows`` is the number of rows on all ranks, of which this one has those of ``shard.share``. The results are equal
    on every rank, and have the same bits on any mesh and with any chunks. The loss sees parameters in ``dtype``, by
    default their own; gradients are added in the parameters' own dtypes.

    One all-to-all and one all-gather for each dtype of parameters; chunks are computed one after the other. Raises
    ValueError for other rows than those of this rank. A loss may use the collectives of a Comm, except those of a head
    that is split (see ``shard.comm``), whose sums depend on the mesh; every rank needs as many chunks. A
    backward through the sums raises ValueError; for an outer loss use ``shard.reduce``.
    """

    def of(params: Any, chunks: Sequence[Any]) -> tuple[Any, Tensor]:
        index, ranks = position(mesh, rules.batch)
        if rows < ranks:
            raise ValueError(f"ordered.grad_and_value: got {rows} rows for {ranks} ranks, wanted at least as many")
        mine, found = split(rows, ranks)[index], dict[Node, Any]()
        start, add = mine.start, partial(tree.map, torch.add)
        for chunk in chunks:
            here = Rows(start, start + len(tree.leaves(chunk)[0]), rows)
            sums, start = _sums(loss, params, chunk, here, dtype), here.stop
            found |= {node: tree.map(lambda t, i=i: t[i], sums) for i, node in enumerate(nodes(here))}
            found = joined(found, rows, add)
        if start != mine.stop:
            got, wanted = start - mine.start, mine.stop - mine.start
            fault = f"got {got} of {rows} rows on rank {index} of {ranks}, wanted {wanted}"
            raise ValueError(f"ordered.grad_and_value: {fault}; pass those of shard.share")
        return total(found, mine, mesh, rules)

    return of


def _sums(loss: Callable[..., Tensor], params: Any, chunk: Any, rows: Rows, dtype: torch.dtype | None) -> Any:
    """Return the gradients and the values of ``loss``, each with a dim in front: a sum for each node of ``rows``."""
    leaves, structure = tree.flatten(chunk)

    def one(params: Any, *row: Tensor) -> Tensor:
        return loss(tree.map(lambda t: t.to(dtype or t.dtype), params), tree.unflatten(structure, row))

    with batch_invariant():
        found = vmap(torch.func.grad_and_value(one), (None, *[0] * len(leaves)))(params, *leaves)
    return tree.map(lambda t: partial_sums(t, rows), found)
