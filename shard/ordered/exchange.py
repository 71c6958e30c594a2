"""The end of an ordered sum: ranks exchange the sums of their subtrees, and add up the rest of the tree.

Numbers are cut into as many parts as there are ranks. An all-to-all brings each rank its part of the subtrees of all
ranks. It adds them up in the order of the tree, and an all-gather gives the sums to all. With one subtree a rank these
are the bytes of an all-reduce. A rank with fewer subtrees than another sends zeros for the rest.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from fquant import tree

from ..collectives import Group, collective
from ..data import by_path, psum
from ..device_mesh import groups, position
from ..rules import Rules as Sharding
from .sum_tree import Node, Rows, joined, nodes, partial_sums, split


def total(found: Mapping[Node, Any], rows: Rows, mesh: DeviceMesh, rules: Sharding) -> Any:
    """Return the sum over all rows of the batch of trees of tensors; ``found`` has those of the nodes of ``rows``."""
    every = [nodes(each) for each in split(rows.total, position(mesh, rules.batch)[1])]
    if len(every) == 1:
        return found[every[0][0]]
    (group,) = groups(mesh, rules.batch)
    trees = [tree.flatten(found[node]) for node in nodes(rows)]
    leaves = [each for each, _ in trees]
    out: list[Any] = list(leaves[0])
    places, told = by_path(out, trees[0][1])
    for dtype in dict.fromkeys(out[i].dtype for i in places):
        which = [i for i in places if out[i].dtype == dtype]
        sizes = [out[i].numel() for i in which]
        own = [[each[i].reshape(-1) for i in which] for each in leaves]
        flat = _sum(own, sum(sizes), every, rows.total, group, told)
        for i, part in zip(which, flat.split(sizes), strict=True):
            out[i] = part.reshape(out[i].shape)
    return tree.unflatten(trees[0][1], out)


def sum_rows(values: Tensor, rows: int, mesh: DeviceMesh, rules: Sharding) -> Tensor:
    """Return the sum [...] of ``values`` [n ...] over the ``rows`` of all ranks, the same bits on any mesh.

    This rank has the values of its rows of ``shard.share``, none if there are fewer rows than ranks. One all-reduce of
    the values of all rows, so they should be few. Raises ValueError for another number of values.
    """
    index, ranks = position(mesh, rules.batch)
    mine = split(rows, ranks)[index]
    if len(values) != mine.stop - mine.start:
        fault = f"got {len(values)} of {rows} rows on rank {index} of {ranks}, wanted {mine.stop - mine.start}"
        raise ValueError(f"ordered.sum_rows: {fault}; pass those of shard.share")
    every = values.new_zeros(rows, *values.shape[1:])
    every[mine.start : mine.stop] = values
    every = psum(every, mesh, rules.batch)  # exact: to each row of one rank the others add zeros
    return partial_sums(every, Rows(0, rows, rows))[0]


def _sum(
    own: list[list[Tensor]], size: int, every: list[list[Node]], rows: int, group: Group, told: Sequence[str]
) -> Tensor:
    """Return the sum [size] over all ranks, where ``own`` has the tensors of each subtree of this rank."""
    ranks, most = len(every), max(map(len, every))
    part = -(-size // ranks)
    fill = own[0][0].new_zeros(ranks * part - size)
    runs = [torch.cat([*each, fill]) for each in own]
    runs += [torch.zeros_like(runs[0]) for _ in range(most - len(runs))]
    sent = torch.stack([run.view(ranks, part) for run in runs], 1)  # [ranks most part]
    received = collective(sent.flatten(0, 1), "all_to_all", group, told).unflatten(0, (ranks, most))
    found = {node: received[rank, i] for rank, mine in enumerate(every) for i, node in enumerate(mine)}
    (root,) = joined(found, rows, torch.add).values()
    return collective(root, "all_gather", group, has_dual=False)[:size]
