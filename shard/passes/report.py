"""Report: split from shard.schedule."""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.fx import Graph

from fquant.compile import Captured, flops, graph

from .gathers import _name, _origin, _wait


@dataclass(frozen=True)
class Row:
    """One collective of a schedule; places count the calls of the graph from 0."""

    name: str  # all_gather, all_reduce, reduce_scatter ...
    axis: str  # of the mesh, or the name of the group where no mesh was given
    of: str  # the path of the argument that is sent, or its name in a graph without paths; "" for what is computed
    nbytes: int  # of the whole gathered or summed buffer
    issued: int
    waited: int
    ops: int  # between the two, without views and collectives
    flops: int  # of these


def schedule(x: Captured | Graph, mesh: DeviceMesh | None = None) -> list[Row]:
    """The collectives of what was captured, in the order in which they are issued.

    Raises ValueError as the passes do.
    """
    g = x.module.graph if isinstance(x, Captured) else x
    arguments = [node for node in g.nodes if node.op == "placeholder"]
    names = x.paths if isinstance(x, Captured) else [node.name for node in arguments]
    path = dict(zip(arguments, names, strict=True))
    calls = [node for node in g.nodes if node.op == "call_function"]
    place = {node: i for i, node in enumerate(calls)}
    axes, rows = _axes(mesh), []
    for node in calls:
        name = _name(node)
        if name is None:
            continue
        wait, group = _wait(node), str(node.args[-1])
        between = [n for n in calls[place[node] + 1 : place[wait]] if not graph.is_view(n) and _name(n) is None]
        size = max(graph.nbytes(t) for near in (node, *node.all_input_nodes) for t in graph.tensors(near))
        of, work = path.get(_origin(node)[0], ""), sum(map(flops, between))
        rows.append(Row(name, axes.get(group, group), of, size, place[node], place[wait], len(between), work))
    return rows


def _axes(mesh: DeviceMesh | None) -> dict[str, str]:
    """The axis of each group, by its name; a group of all ranks is along all axes."""
    if mesh is None:
        return {}
    used = [name for i, name in enumerate(mesh.mesh_dim_names or ()) if mesh.size(i) > 1]
    world = dist.group.WORLD
    assert world is not None
    return {str(world.group_name): "*".join(used)} | {str(mesh.get_group(name).group_name): name for name in used}


def schedule_text(rows: list[Row]) -> str:
    """A schedule as a table of text, a line a collective."""
    head = ("collective", "axis", "of", "KiB", "issued", "waited", "ops between", "MFLOP between")
    lines = [head] + [
        (
            row.name, row.axis, row.of or "(computed)", f"{row.nbytes / 1024:.1f}", str(row.issued), str(row.waited),
            str(row.ops), f"{row.flops / 1e6:.2f}",
        )
        for row in rows
    ]  # fmt: skip
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    left = 3  # columns of words; the others are numbers
    return "\n".join(
        "  ".join(f"{cell:{'<' if i < left else '>'}{widths[i]}}" for i, cell in enumerate(line)).rstrip()
        for line in lines
    )
