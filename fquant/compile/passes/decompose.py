"""Decomposition of ops that allocate inside, on the host, as torch computes them; bits are equal.

    top = amax(x, dim, keepdim=True), or 0 where that is infinite      # logsumexp(x, dim)
    log(sum(exp(x - top), dim)) + top

    mm(clone(a), b)                                                    # mm(a, b), and addmm

    in_layout_of(g, gelu_backward(clone(g), x))                        # gelu_backward(g, x)

Inside ``logsumexp`` exp(x - top) is as large as x. A product copies an operand that BLAS cannot read, for example an
expanded one. oneDNN, which computes the gradient of ``gelu``, copies a gradient in another layout than x's, and the
result back. Neither the price of a step nor its memory plan knows of such memory, and the heap keeps holes of it.
"""

import math
from typing import Any

import torch
from torch.fx import Graph, Node

from .. import graph as graphs

_aten = torch.ops.aten
_PRODUCTS: dict[Any, tuple[int, int]] = {_aten.mm.default: (0, 1), _aten.addmm.default: (1, 2)}  # indices of operands


def decompose(graph: Graph) -> None:
    """Replace each ``logsumexp`` of floating point tensors on the host; copy operands that BLAS cannot read."""
    for node in graph.find_nodes(op="call_function", target=_aten.logsumexp.default):
        (x,) = graphs.tensors(node.all_input_nodes[0])
        if x.is_cpu and x.is_floating_point() and x.numel():
            graphs.replace_uses(node, _logsumexp(node, *node.args))
            graph.erase_node(node)
    for op, operands in _PRODUCTS.items():
        for node in graph.find_nodes(op="call_function", target=op):
            for i in operands:
                _copy_unreadable(node, i)
    for node in graph.find_nodes(op="call_function", target=_aten.gelu_backward.default):
        _in_one_layout(node)


def _copy_unreadable(product: Node, index: int) -> None:
    operand: Any = product.args[index]
    (x,) = graphs.tensors(operand)
    if x.is_cpu and x.dtype in (torch.float32, torch.float64) and x.numel() and not _blas_reads(x):
        kwargs = {"memory_format": torch.contiguous_format}
        product.update_arg(index, graphs.insert_before(product, _aten.clone.default, (operand,), kwargs=kwargs))


def _blas_reads(x: torch.Tensor) -> bool:
    """Return True for a matrix of rows or columns that do not overlap, as torch's addmm demands of BLAS's operands."""
    (down, across), (rows, columns) = x.stride(), x.shape
    return (down == 1 and across >= rows) or (across == 1 and down >= columns)


def _in_one_layout(node: Node) -> None:
    """Let a gradient of ``gelu`` be computed in the layout of its x, where oneDNN computes it.

    Bits of the approximation by tanh, and of torch's own kernel, depend on the layout.
    """
    g: Any = node.args[0]
    given, x = [graphs.tensors(argument)[0] for argument in node.args[:2]]  # type: ignore[arg-type]
    by_stride = sorted(range(given.ndim), key=given.stride, reverse=True)
    alike = given.stride() == x.stride() or given.shape != x.shape or not x.numel()
    theirs = torch.backends.mkldnn.is_available() and torch.backends.mkldnn.enabled  # type: ignore[attr-defined]
    theirs = theirs and node.kwargs.get("approximate", "none") == "none" and x.is_contiguous() and x.is_cpu
    if alike or not theirs or not given.dtype == x.dtype == torch.float32:
        return
    if not given.permute(by_stride).is_contiguous():
        return
    dense = {"memory_format": torch.contiguous_format}

    def call(op: Any, *args: Any, **kwargs: Any) -> Node:
        return graphs.insert_before(node, op, args, kwargs=kwargs)

    result = call(node.target, call(_aten.clone.default, g, **dense), *node.args[1:], **node.kwargs)
    result = call(_aten.clone.default, call(_aten.permute.default, result, by_stride), **dense)
    back = [by_stride.index(dim) for dim in range(given.ndim)]
    graphs.replace_uses(node, call(_aten.permute.default, result, back))
    node.graph.erase_node(node)


def _logsumexp(at: Node, x: Any, dims: Any, keepdim: bool = False) -> Node:
    def call(op: Any, *args: Any) -> Node:
        return graphs.insert_before(at, op, args)

    top = call(_aten.amax.default, x, dims, True)
    infinite = call(_aten.eq.Scalar, call(_aten.abs.default, top), math.inf)
    top = call(_aten.masked_fill.Scalar, top, infinite, 0)
    powers = call(_aten.exp_.default, call(_aten.sub.Tensor, x, top))
    total = call(_aten.log.default, call(_aten.sum.dim_IntList, powers, dims, keepdim))
    return call(_aten.add.Tensor, total, top if keepdim else call(_aten.squeeze.dims, top, dims))
