"""Lowering of graph nodes to steps of a pointwise program (``fquant/kernels/ops/pointwise.py``).

A node is a step only if the C kernels return its bits: operations of torch that IEEE 754 defines, and our own ops, on
the CPU, with dtypes and arguments for which the step means the same.
"""

from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from ...device import HOST
from ...kernels.dispatch import is_lazy
from ...kernels.ops.pointwise import ROTATE_HALF
from ...kernels.ops.pointwise_program import DTYPES, Step
from ...kernels.ops.silu import OPS as SILU
from .. import graph as graphs

_aten = torch.ops.aten
FLOATS = tuple(DTYPES.values())
_OPS: dict[Any, str] = {
    _aten.add.Tensor: "add", _aten.add.Scalar: "add", _aten.sub.Tensor: "sub", _aten.sub.Scalar: "sub",
    _aten.mul.Tensor: "mul", _aten.mul.Scalar: "mul", _aten.div.Tensor: "div", _aten.div.Scalar: "div",
    _aten.neg.default: "neg", _aten.reciprocal.default: "reciprocal", _aten._to_copy.default: "to",
    _aten.where.self: "where", ROTATE_HALF: "turn", **{op: name for name, op in SILU.items()},
}  # fmt: skip
SQUARE, COPY, FULL = _aten.pow.Tensor_Scalar, _aten.copy_.default, _aten.full.default


def step_of(node: Node) -> Step | str | None:
    """Return a node's step without its arguments; "copy" for a copy into an input of the graph; None for others."""
    if node.op != "call_function":
        return None
    if node.target is COPY:
        target, value, *rest = node.args
        if rest or not isinstance(target, Node) or target.op != "placeholder" or not isinstance(value, Node):
            return None
        return "copy" if graphs.tensor_layouts(target) == graphs.tensor_layouts(value) and _is_supported(node) else None
    op = "mul" if node.target is SQUARE else _OPS.get(node.target)
    if op is None or not _is_supported(node) or not node.all_input_nodes:  # casts of numbers, by vmap, stay
        return None
    (t,) = graphs.tensors(node)
    allowed = {"dtype", "device", "layout"} if op == "to" else set()  # autograd passes the layout, always strided
    if set(node.kwargs) - allowed or (node.target is SQUARE and node.args[1] != 2):
        return None
    args = node.args[:1] if node.target is SQUARE else node.args
    return Step(op, t.dtype, ()) if all(_is_argument(a, t.dtype, op, i) for i, a in enumerate(args)) else None


def _is_argument(argument: Any, dtype: torch.dtype, op: str, index: int) -> bool:
    """Return True if the C kernels convert an argument of a step as torch does."""
    if not isinstance(argument, Node):
        return type(argument) in (int, float) and abs(argument) < 2**24
    kinds = {t.dtype for t in graphs.tensors(argument) if t.is_cpu and not is_lazy(t)}
    if op == "where" and index == 0:
        return kinds == {torch.bool}
    return kinds == {dtype} or (len(kinds) == 1 and kinds < {*FLOATS} and (op == "to" or dtype is torch.float32))


def _is_supported(node: Node) -> bool:
    value = node.meta.get("val")
    if not isinstance(value, Tensor) or is_lazy(value):
        return False
    return value.is_cpu and value.dtype in FLOATS and value.is_contiguous()


def constant_value(argument: Any) -> float | None:
    """Return the number that fills an argument, rounded to its dtype; None if it is no constant."""
    if isinstance(argument, int | float):
        return float(argument)
    if isinstance(argument, Node) and argument.target in (FULL, _aten.scalar_tensor.default):
        (t,) = graphs.tensors(argument)
        number = argument.args[argument.target is FULL]
        if isinstance(number, int | float) and t.dtype in FLOATS:
            return float(torch.tensor(number, dtype=t.dtype, device=HOST))
    return None
