"""first: the first replay of a captured graph, in which every node is held to what the trace says of it.

Torch has two accounts of an op: what it does, and what is said of it while nothing is computed (fquant/fake.py). Where
they disagree about how a result lies in memory, or whether it is there at all, a replay goes on with a copy that lies
as was said, and so does every replay that follows: what was planned on the word of the trace holds. Where they disagree
about a dtype or a shape, or about how memory is seen, the first replay raises.

It is node by node, without memory that was laid out. A node gives what it gives whatever its arguments' values are, so
once is enough.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Interpreter, Node

from . import graph as graphs
from .kernels.direct import is_lazy

_aten = torch.ops.aten


def run(module: GraphModule, tensors: Sequence[Tensor]) -> Any:
    """What ``module`` gives of ``tensors``, its graph put right where a result lies otherwise than was said.

    Raises RuntimeError for an op that gives another dtype, shape or view than was said.
    """
    first = _First(module)
    result = first.run(*tensors)
    if first.wrong:
        for node in first.wrong:
            _relay(node)
        module.graph.lint()
        module.recompile()
    return result


class _First(Interpreter):
    """Computes node by node, and notes the nodes whose results lie otherwise than was said."""

    def __init__(self, module: GraphModule) -> None:
        super().__init__(module)
        self.extra_traceback = False  # errors are those of the ops
        self.wrong: list[Node] = []

    def run_node(self, node: Node) -> Any:
        """What ``node`` gives, as was said."""
        result, said = super().run_node(node), node.meta.get("val")
        if node.op != "call_function" or not isinstance(said, Tensor):
            return result
        alike = _kind(result) == _kind(said)
        if alike and is_lazy(result) <= is_lazy(said):
            return result
        maker = node.all_input_nodes[0] if node.target is operator.getitem else node
        fits = result.shape == said.shape and result.dtype == said.dtype
        if not alike and (not fits or graphs.is_view(maker) or graphs.written(maker)):
            raise RuntimeError(
                f"{maker.target} gives {_kind(result)}, and torch says, where nothing is computed, {_kind(said)}, by "
                "which a graph goes wrong; let its arguments be of one dtype and contiguous"
            )
        self.wrong.append(node)
        return torch.empty_strided(said.shape, said.stride(), dtype=said.dtype, device=result.device).copy_(result)


def _kind(t: Tensor) -> tuple[torch.dtype, torch.Size, tuple[int, ...]]:
    """A tensor's dtype, shape and strides, where these mean something."""
    strides = (step if size > 1 and t.numel() else 0 for size, step in zip(t.shape, t.stride(), strict=True))
    return t.dtype, t.shape, tuple(strides)


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
        graphs.revalue(new)
    graphs.substitute(node, copy, users)
