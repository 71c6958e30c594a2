"""Captured graphs that ``torch.compile`` runs, for ``jit(compile=)``.

A call has its key checked before it comes here (guards.py). So of Dynamo's own guards only those are kept that the key
lacks: whether two arguments are one tensor, and torch's number of threads, for which Inductor generates code.

Inductor replaces elements of an expanded tensor in place, although its elements share memory, and then gives wrong
values or an error (https://github.com/pytorch/pytorch/issues/183986). So such a tensor is copied in the graph before.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch.fx import Graph, GraphModule

from . import graph as graphs

__all__ = ["compiled"]

_KEPT = ("DUPLICATE_INPUT", "GLOBAL_STATE")  # Dynamo's guards
_REPLACE = ("aten::index_put", "aten::index_add", "aten::index_copy", "aten::index_fill")  # elements of the first


def compiled(module: GraphModule, backend: str) -> Callable[..., Any]:
    """Return what runs the graph of ``module`` by torch.compile, for tensors of the kinds that it was traced with."""
    _copy_expanded(module.graph)
    module.recompile()
    module.real_recompile()  # type: ignore[operator]  # a lazy module's code, which Dynamo does not look into
    options: dict[str, Any] = {"guard_filter_fn": lambda guards: [each.guard_type in _KEPT for each in guards]}
    return torch.compile(module.forward, backend=backend, fullgraph=True, dynamic=False, options=options)


def _copy_expanded(graph: Graph) -> None:
    """Copy expanded tensors before the ops that replace elements of them."""
    for node in list(graph.nodes):
        if not isinstance(node.target, torch._ops.OpOverload) or node.target._schema.name not in _REPLACE:
            continue
        x = graphs.tensors(node.args[0])[0]
        if any(step == 0 and size > 1 for step, size in zip(x.stride(), x.shape, strict=True)):
            kwargs = {"memory_format": torch.contiguous_format}
            copy = graphs.insert_before(node, torch.ops.aten.clone.default, (node.args[0],), kwargs=kwargs)
            node.update_arg(0, copy)
