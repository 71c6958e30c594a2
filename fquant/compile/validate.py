"""first: the first replay of a captured graph, in which every node is held to what the trace says of it.

Torch has two accounts of an op: what it does, and what is said of it while nothing is computed (fquant/compile/fake_tensor.py). Where
they disagree about how a result lies in memory, or whether it is there at all, a replay goes on with a copy that lies
as was said, and so does every replay that follows: what was planned on the word of the trace holds. Where they disagree
about a dtype or a shape, or about how memory is seen, the first replay raises.

It is node by node, in the memory that is laid out for all of them (fquant/compile/memory/plan.py), where there is. An op that is told
where to write, and would cast its result to what lies there, is computed as it was traced, and copied. A node gives
what it gives whatever its arguments' values are, so once is enough.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Interpreter, Node

from ..kernels.dispatch_bypass import is_lazy
from . import graph as graphs
from .memory import executor, plan

_aten = torch.ops.aten
_STRICT = (_aten.mm.default, _aten.bmm.default, _aten.addmm.default)  # which write no other dtype than theirs
_TRACED = {into: op for op, into in plan.OUT_VARIANTS.items() if op not in _STRICT}  # of what is told where to write


def run(module: GraphModule, placed: plan.MemoryPlan | None, tensors: Sequence[Tensor]) -> tuple[Any, bool]:
    """What ``module`` gives of ``tensors``, computed by ``placed`` where there is, and whether its graph was right.

    Where a result lies otherwise than was said, the graph of ``module`` is put right, and ``placed`` is out of date.
    Raises RuntimeError for an op that gives another dtype, shape or view than was said.
    """
    wrong = list[Node]()
    if placed is None:
        result = _First(module, {}, wrong).run(*tensors)
    else:
        origin = placed.origin
        result = executor.run_planned(placed, module, tensors, lambda module: _First(module, origin, wrong).run)
    for node in wrong:
        _relay(node)
    if wrong:
        module.graph.lint()
        module.recompile()
    return result, not wrong


class _First(Interpreter):
    """Computes node by node, and notes in ``wrong`` the nodes whose results lie otherwise than was said."""

    def __init__(self, module: GraphModule, origin: Mapping[Node, Node], wrong: list[Node]) -> None:
        super().__init__(module)
        self.extra_traceback = False  # errors are those of the ops
        self.origin, self.wrong = origin, wrong

    def run_node(self, node: Node) -> Any:
        """What ``node`` gives, as was said."""
        result, said = super().run_node(node), node.meta.get("val")
        if node.op not in ("call_function", "get_attr") or not isinstance(said, Tensor) or result is None:
            return result  # of ours that write where they are told nothing
        into = self.fetch_args_kwargs_from_env(node)[1]["out"] if node.target in _TRACED else None
        given, wanted = graphs.tensor_layout(result), graphs.tensor_layout(said)
        if given == wanted and is_lazy(result) <= is_lazy(said):
            return result if into is None else into.copy_(result)
        fits = result.shape == said.shape and result.dtype == said.dtype
        if into is not None and fits:
            return into.copy_(result)  # which lies as was said
        node = self.origin.get(node, node)
        maker = node.all_input_nodes[0] if node.target is operator.getitem else node
        if given != wanted and (not fits or graphs.is_view(maker) or graphs.written_storages(maker)):
            raise RuntimeError(
                f"{maker.target} gives {given}, and torch says, where nothing is computed, {wanted}, by "
                "which a graph goes wrong; let its arguments be of one dtype and contiguous"
            )
        self.wrong.append(node)
        return torch.empty_strided(said.shape, said.stride(), dtype=said.dtype, device=result.device).copy_(result)

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What ``target`` gives, before it is written anywhere."""
        if target in _TRACED:
            target, kwargs = _TRACED[target], {name: value for name, value in kwargs.items() if name != "out"}
        return super().call_function(target, args, kwargs)


def _relay(node: Node) -> None:
    """Let those that use ``node`` use a copy of it that lies as was said."""
    graph, said, users = node.graph, node.meta["val"], list(node.users)
    with graph.inserting_after(node):
        kind = {"dtype": said.dtype, "device": said.device}
        empty = graph.call_function(_aten.empty_strided.default, (list(said.shape), list(said.stride())), kind)
    with graph.inserting_after(empty):
        copy = graph.call_function(_aten.copy_.default, (empty, node))
    for new in (empty, copy):
        new.meta["val"] = said
        graphs.refresh_value(new)
    graphs.replace_uses(node, copy, users)
