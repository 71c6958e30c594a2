"""The first replay of a captured graph, which checks the result of every node against the trace.

The memory plan relies on the trace. The trace relies on torch's description of each op for fake tensors, which is wrong
for some ops (tracing/fake_tensor.py). If a result differs in strides, or is lazily negated or zero, this replay and all
later ones use a copy in the traced layout. If it differs in dtype or shape, or is a view with other strides, the first
replay raises. One replay is enough, because the layout of a result does not depend on values.

It runs node by node, in the planned memory if there is a plan. An op that writes into a given tensor would cast its
result silently. So it is asked for the dtype first, without memory for a result.
"""

import operator
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.fx import GraphModule, Interpreter, Node

from ..kernels.dispatch import is_lazy
from . import graph as graphs
from .memory.out_variants import describe, result_names, without_results

_aten = torch.ops.aten


class Checked(Interpreter):
    """An interpreter that adds to ``wrong`` the nodes whose results are not in the traced layout.

    ``origin`` gives the nodes of the unplanned graph. Raises RuntimeError for an op whose result has another dtype,
    shape or view than the trace has.
    """

    def __init__(self, module: GraphModule, origin: Mapping[Node, Node], wrong: list[Node]) -> None:
        super().__init__(module)
        self.extra_traceback = False  # errors stay as ops raise them
        self.origin, self.wrong = origin, wrong

    def run_node(self, node: Node) -> Any:
        result = self.checked(node)
        return result if node.users or node.op == "output" else None  # an unused result would be held to the end

    def checked(self, node: Node) -> Any:
        """Return the result of a node, in the traced layout."""
        if node.op == "call_function" and (op := without_results(node.target)):
            return self.run_in_place(node, op)
        result, traced = super().run_node(node), node.meta.get("val")
        if node.op not in ("call_function", "get_attr") or not isinstance(traced, Tensor) or result is None:
            return result  # None: our out variants return nothing
        given, wanted = graphs.tensor_layout(result), graphs.tensor_layout(traced)
        if given == wanted and is_lazy(result) <= is_lazy(traced):
            return result
        fits = result.shape == traced.shape and result.dtype == traced.dtype
        node = self.origin.get(node, node)
        maker = node.all_input_nodes[0] if node.target is operator.getitem else node
        if given != wanted and (not fits or graphs.is_view(maker) or graphs.written_storages(maker)):
            raise _contradiction(maker.target, given, wanted)
        self.wrong.append(node)
        copy = torch.empty_strided(traced.shape, traced.stride(), dtype=traced.dtype, device=result.device)
        return copy.copy_(result)

    def run_in_place(self, node: Node, op: OpOverload) -> Any:
        """Return the results of an op in given memory, once it is known that it would not cast them."""
        args, kwargs = self.fetch_args_kwargs_from_env(node)
        names = result_names(node.target)  # type: ignore[arg-type]
        places = [kwargs[name] for name in names]
        rest = {name: value for name, value in kwargs.items() if name not in names}
        results = describe(op, args, rest)
        for result, place in zip([results] if isinstance(results, Tensor) else results, places, strict=True):
            if result.shape != place.shape or result.dtype != place.dtype:
                raise _contradiction(op, graphs.tensor_layout(result), graphs.tensor_layout(place))
        return node.target(*args, **kwargs)  # type: ignore[operator]


def _contradiction(op: Any, given: Any, wanted: Any) -> RuntimeError:
    fix = "let its arguments be of one dtype and contiguous"
    return RuntimeError(f"{op} gives {given}, and torch describes it to the trace as {wanted}; {fix}")


def correct(module: GraphModule, wrong: Sequence[Node]) -> None:
    """Replace uses of the nodes ``wrong`` with copies in the traced layout."""
    for node in wrong:
        traced, users = node.meta["val"], list(node.users)
        layout, kind = (list(traced.shape), list(traced.stride())), {"dtype": traced.dtype, "device": traced.device}
        empty = graphs.insert_before(node.next, _aten.empty_strided.default, layout, traced, kind)
        graphs.refresh_value(empty)
        graphs.replace_uses(node, graphs.insert_before(empty.next, _aten.copy_.default, (empty, node)), users)
    if wrong:
        module.graph.lint()
        module.recompile()
