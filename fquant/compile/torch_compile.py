"""Captured graphs that a backend of ``torch.compile`` runs, for ``jit(compile=)``.

The graph is handed to the backend as it is. Dynamo, which finds a function's graph in its bytecode, has no part: a call
has its key checked before it comes here (guards.py). Torch's global state decides too, such as the number of threads,
for which Inductor generates code. If that changes, the graph is compiled again. In a mode that sees every op, such as
``FlopCounterMode``, the graph is run op by op.

Inductor replaces elements of an expanded tensor in place, although its elements share memory, and then gives wrong
values or an error (https://github.com/pytorch/pytorch/issues/183986). So such a tensor is copied in the graph before.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._C._dynamo.guards import GlobalStateGuard
from torch.fx import Graph, GraphModule
from torch.utils._python_dispatch import _disable_current_modes

from . import graph as graphs

__all__ = ["compiled"]

Run = Callable[..., Any]
_REPLACE = ("aten::index_put", "aten::index_add", "aten::index_copy", "aten::index_fill")  # elements of the first


def compiled(module: GraphModule, backend: str) -> Run:
    """Return what runs the graph of ``module`` by ``backend``, for tensors of the kinds that it was traced with."""
    _copy_expanded(module.graph)
    module.recompile()
    module.real_recompile()  # type: ignore[operator]  # a lazy module's code
    lower = torch._dynamo.lookup_backend(backend)
    found = list[tuple[GlobalStateGuard, Run]]()

    def run(*tensors: Tensor) -> Any:
        if torch._C._len_torch_dispatch_stack():
            return module(*tensors)
        for guard, code in found:
            if guard.check():
                return code(*tensors)
        with _disable_current_modes():
            code = lower(_copy(module), list(tensors))
        found.append((GlobalStateGuard(), code))
        return code(*tensors)

    return run


def _copy(module: GraphModule) -> GraphModule:
    """Copy the graph, because Inductor changes it."""
    g = Graph()
    g.output(g.graph_copy(module.graph, {}))
    return GraphModule(module, g)


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
