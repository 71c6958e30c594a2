"""The seconds of the nodes of a graph as they will run, once elementwise chains are fused.

Passes that place copies by time run before ``fuse_pointwise``. Unfused, the step of Llama-3-8B would take 0.61 s in
place of 0.52, and a link would seem to have as much more time.
"""

from torch.fx import Graph, Node

from ..passes.fuse_pointwise import fuse_pointwise
from .devices import Device
from .prediction import walk


def seconds_if_fused(graph: Graph, device: Device) -> list[float]:
    """Return the seconds of each node in order, of waits those that are exposed; a fused chain counts at its end."""
    fused, copies = Graph(graph.owning_module), dict[Node, Node]()
    fused.output(fused.graph_copy(graph, copies))
    at = {copies[node]: i for i, node in enumerate(graph.nodes) if node in copies}
    fuse_pointwise(fused)
    spent = dict[Node, float]()
    for each in walk(fused, device):
        spent[each.node] = spent.get(each.node, 0.0) + each.seconds
    found, place = [0.0] * len(graph.nodes), len(graph.nodes)
    for node in reversed(fused.nodes):
        place = at.get(node, place)
        found[place if node in at else max(0, place - 1)] += spent.get(node, 0.0)
    return found
