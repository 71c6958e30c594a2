"""Decomposition of an op that allocates inside: ``logsumexp`` as the ops that torch makes it of, on the host.

    top = amax(x, dim, keepdim=True), or 0 where that is infinite
    log(sum(exp(x - top), dim)) + top

Inside the op ``exp(x - top)`` is as large as x, and neither the price of a step nor its memory plan knows of it. Bits
are equal, because torch calls the same ops.
"""

import math
from typing import Any

import torch
from torch.fx import Graph, Node

from .. import graph as graphs

_aten = torch.ops.aten


def decompose(graph: Graph) -> None:
    """Replace each ``logsumexp`` of floating point tensors on the host."""
    for node in graph.find_nodes(op="call_function", target=_aten.logsumexp.default):
        (x,) = graphs.tensors(node.all_input_nodes[0])
        if x.is_cpu and x.is_floating_point() and x.numel():
            graphs.replace_uses(node, _logsumexp(node, *node.args))
            graph.erase_node(node)


def _logsumexp(at: Node, x: Any, dims: Any, keepdim: bool = False) -> Node:
    def call(op: Any, *args: Any) -> Node:
        return graphs.insert_before(at, op, args)

    top = call(_aten.amax.default, x, dims, True)
    infinite = call(_aten.eq.Scalar, call(_aten.abs.default, top), math.inf)
    top = call(_aten.masked_fill.Scalar, top, infinite, 0)
    powers = call(_aten.exp_.default, call(_aten.sub.Tensor, x, top))
    total = call(_aten.log.default, call(_aten.sum.dim_IntList, powers, dims, keepdim))
    return call(_aten.add.Tensor, total, top if keepdim else call(_aten.squeeze.dims, top, dims))
