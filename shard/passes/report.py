"""The schedule of a graph: a row for each collective, with the computation between its issue and its wait."""

from dataclasses import dataclass

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.fx import Graph, Node

from fquant.compile import Captured, flops, graph

from .gathers import collective_name, origin, wait_of


@dataclass(frozen=True)
class Row:
    """One collective or transfer of a schedule. Positions count the calls of the graph from 0."""

    name: str  # all_gather, all_reduce, reduce_scatter ..., or fetch or stash
    axis: str  # of the mesh, or the name of the group without a mesh; "host" of a transfer
    of: str  # the path of the argument that is sent, its name in a graph without paths, or "" for a computed value
    nbytes: int  # of the whole gathered or summed buffer
    issued: int
    waited: int
    ops: int  # between the two, without views and collectives
    flops: int  # of these


def schedule(x: Captured | Graph, mesh: DeviceMesh | None = None) -> list[Row]:
    """Return the collectives and transfers of a captured step, in the order in which they are issued.

    Raises ValueError for a collective that shard does not use, and for one without a wait of its own.
    """
    g = x.module.graph if isinstance(x, Captured) else x
    arguments = [node for node in g.nodes if node.op == "placeholder"]
    names = x.paths if isinstance(x, Captured) else [node.name for node in arguments]
    path = dict(zip(arguments, names, strict=True))
    calls = [node for node in g.nodes if node.op == "call_function"]
    at = {node: i for i, node in enumerate(calls)}
    axes, rows = dict[str, str](), list[Row]()  # the axis of each group by the group's name
    if mesh is not None and (world := dist.group.WORLD) is not None:
        used = [name for i, name in enumerate(mesh.mesh_dim_names or ()) if mesh.size(i) > 1]
        axes = {str(world.group_name): "*".join(used)} | {str(mesh.get_group(name).group_name): name for name in used}
    for node in calls:
        transfer = graph.transfer(node)
        if (name := transfer or collective_name(node)) is None:
            continue
        wait, group = wait_of(node), "host" if transfer else str(node.args[-1])
        between = [n for n in calls[at[node] + 1 : at[wait]] if not graph.is_view(n) and not graph.is_issue(n)]
        size = max(graph.nbytes(t) for near in (node, *node.all_input_nodes) for t in graph.tensors(near))
        source, work = path.get(_argument(node), ""), sum(map(flops, between))
        rows.append(Row(name, axes.get(group, group), source, size, at[node], at[wait], len(between), work))
    return rows


def _argument(node: Node) -> Node:
    """Return the origin of a collective's or transfer's input, through the fetch if it was fetched."""
    found, _ = origin(node)
    return _argument(found) if graph.transfer(found) == "fetch" else found


def schedule_text(rows: list[Row]) -> str:
    """Return a schedule as a table of text, with a line for each collective."""
    head = ("collective", "axis", "of", "KiB", "issued", "waited", "ops between", "MFLOP between")
    lines = [head] + [
        (
            row.name, row.axis, row.of or "(computed)", f"{row.nbytes / 1024:.1f}", str(row.issued), str(row.waited),
            str(row.ops), f"{row.flops / 1e6:.2f}",
        )
        for row in rows
    ]  # fmt: skip
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    formats = [f"{'<' if i < 3 else '>'}{width}" for i, width in enumerate(widths)]  # three columns of words come first
    return "\n".join("  ".join(map(format, line, formats)).rstrip() for line in lines)
