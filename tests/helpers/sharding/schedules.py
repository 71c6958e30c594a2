"""Facts of a scheduled graph, read off the order of its nodes, as an oracle for the passes."""

from dataclasses import replace

import torch
from torch.fx import Graph, GraphModule

from fquant import tree
from fquant.compile import graph, liveness, roofline
from shard.passes import offload_activations

OPS = torch.ops._c10d_functional
WAIT, GATHER = OPS.wait_tensor.default, OPS.all_gather_into_tensor.default
GATHERS = GATHER, torch.ops.fquant.all_gather.default  # the second is that of shard.all_gather over gloo

RATE = 1e9  # FLOPs and bytes a second of a device on which each node of a small program takes a while


def slow_device(link):
    """Return a device that exchanges ``link`` bytes with the host in a second."""
    share = roofline.Shares(1.0, 1.0, 1.0, 1.0, 1.0)
    return roofline.Device("slow", 1 << 40, RATE, RATE, link, RATE, RATE, link, 0, share=share, launch=0.0, latency=0.0)


def slow(link, **options):
    """Return the pass that stashes activations, for such a device."""
    return offload_activations(min_bytes=1, device=slow_device(link), **options)


def passed(captured, *passes):
    """Return ``captured`` with ``passes`` applied to a copy of its graph."""
    g = Graph()
    g.output(g.graph_copy(captured.module.graph, {}))
    graph.run(g, passes)
    return replace(captured, module=GraphModule(captured.module, g))


def run(captured, args):
    """Call ``captured`` on copies of the tensors of ``args``."""
    return captured(*[leaf.clone() for leaf in tree.leaves(args) if isinstance(leaf, torch.Tensor)])


def places(captured):
    return {node.name: i for i, node in enumerate(captured.module.graph.nodes)}


def gathers(captured):
    """Return (name of the gather, name of its wait, bytes of the result), in order of issue."""
    nodes = [node for node in captured.module.graph.nodes if node.target in GATHERS]
    return [(node.name, next(iter(node.users)).name, tree.nbytes(node.meta["val"])) for node in nodes]


def early(captured, plain):
    """Return the maximum bytes of gathers that are issued earlier than in ``plain``."""
    was, now = places(plain), places(captured)
    return max(
        sum(size for name, _, size in gathers(captured) if now[name] < now[node] and was[name] > was[node])
        for node in now
    )


def under_way(captured):
    """Return the maximum number of gathers between issue and wait while another node runs."""
    place, found = places(captured), gathers(captured)
    busy = [node.name for node in captured.module.graph.nodes if node.target not in (*GATHERS, WAIT)]
    return max(sum(place[name] < place[node] < place[wait] for name, wait, _ in found) for node in busy)


def written_under_way(captured):
    """Return True if a node writes the input of a gather between its issue and its wait."""
    nodes, place = list(captured.module.graph.nodes), places(captured)
    for name, wait, _ in gathers(captured):
        (given,) = next(node for node in nodes if node.name == name).all_input_nodes
        if any(graph.written_storages(node) & graph.storages(given) for node in nodes[place[name] : place[wait]]):
            return True
    return False


def flights(captured):
    """Return (issue, wait, bytes) of every transfer and gather, in order of issue."""
    nodes = [node for node in captured.module.graph.nodes if graph.is_issue(node)]
    return [(node, next(iter(node.users)), graph.nbytes(node.meta["val"])) for node in nodes]


def check_order(captured):
    """Check that each copy is issued before its wait, that no node writes its input between, and that memory counts."""
    g = captured.module.graph
    at = {node: i for i, node in enumerate(g.nodes)}
    alive, near = [set(live) for _, _, live in liveness.walk_memory(g)], graph.storages_on_device(g)
    for issue, wait, _ in flights(captured):
        assert at[issue] < at[wait]
        given = graph.all_storages(issue.all_input_nodes)
        for node in list(g.nodes)[at[issue] : at[wait]]:
            assert node is issue or not graph.written_storages(node) & given
            assert (graph.storages(issue) | given) & near <= alive[at[node]]
