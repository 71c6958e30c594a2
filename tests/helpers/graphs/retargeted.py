"""Graphs for CUDA on a machine without a card: run on fake CUDA tensors, and on the host with values.

``on_fakes`` runs every node as the device's ops describe it, and compares the results with the trace. In ``on_host``
the host takes the place of the device, so the values of a graph can be compared with those of the function.
"""

import copy
from functools import partial

import torch
from torch.fx import GraphModule, Interpreter
from torch.fx.node import map_aggregate

from fquant import tree
from fquant.compile import graph as graphs
from fquant.compile.trace import apply, signature_of, trace
from fquant.compile.tracing.fake_tensor import Fake
from fquant.compile.tracing.retarget import stand_ins

CUDA, HOST = torch.device("cuda", 0), torch.device("cpu")


def traced(f, *args, **options):
    """Return ``f(*args)`` captured for CUDA, whatever the device of its arguments."""
    return trace(partial(apply, f), signature_of(f).bind(*args).arguments, device=CUDA, **options)


class _Fakes(Interpreter):
    def __init__(self, module, mode):
        super().__init__(module)
        self.mode = mode

    def run_node(self, n):
        if n.op == "get_attr":
            return stand_ins([n.meta["val"]], CUDA, self.mode)[0]
        result = super().run_node(n)
        if n.op == "call_function":
            got, wanted = _layouts(result), _layouts(n.meta["val"])
            assert got == wanted, f"{n.format_node()}: {got}, traced as {wanted}"
        return result


def _layouts(results):
    results = results if isinstance(results, list | tuple) else [results]
    return [(graphs.tensor_layout(t), t.device) for t in results if isinstance(t, torch.Tensor)]


def on_fakes(module):
    """Run the graph of ``module`` on fake tensors like those of its trace; every result is as traced."""
    mode, given = Fake(), [node.meta["val"] for node in module.graph.find_nodes(op="placeholder")]
    fakes = stand_ins(given, CUDA, mode, {id(t) for t in given if t.device == HOST})
    with torch.no_grad(), mode:
        return _Fakes(module, mode).run(*fakes)


def on_host(captured, *args):
    """Run the graph on the tensors of ``args`` on the host; return the result of the function."""
    module, given = at_home(captured.module), [t for t in tree.leaves(args) if isinstance(t, torch.Tensor)]
    with torch.no_grad():
        found = iter(module(*given))
    leaves = [next(found) if type(leaf) is object else leaf for leaf in captured.leaves]
    return captured.build(leaves)


def at_home(module):
    """Return a copy of a module for CUDA that runs on the host."""
    home = lambda x: HOST if isinstance(x, torch.device) and x.type == "cuda" else x
    module = GraphModule(module, copy.deepcopy(module.graph))
    for node in module.graph.nodes:
        node.args, node.kwargs = (map_aggregate(x, home) for x in (node.args, node.kwargs))
    module.recompile()
    return module


def devices(graph):
    """Return the devices of all tensors of a graph."""
    return {t.device for node in graph.nodes for t in graphs.tensors(node)}
