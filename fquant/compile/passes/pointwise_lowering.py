"""steps: which nodes of a captured graph are steps of an elementwise program, and which are numbers.

A node is a step where C gives its bits (fquant/kernels/ops/pointwise.py): an operation of torch that IEEE 754 defines, or
one of our own ops, on the CPU, of dtypes and with arguments for which the step means what the operation does.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from ...kernels.dispatch_bypass import is_lazy
from ...kernels.ops.pointwise_program import DTYPES, Step
from ...kernels.ops.rotate_half import OP as TURN
from ...kernels.ops.silu import OPS as SILU
from .. import graph as graphs

_aten = torch.ops.aten
_FLOATS = tuple(DTYPES.values())
_OPS: dict[Any, str] = {
    _aten.add.Tensor: "add", _aten.add.Scalar: "add", _aten.sub.Tensor: "sub", _aten.sub.Scalar: "sub",
    _aten.mul.Tensor: "mul", _aten.mul.Scalar: "mul", _aten.div.Tensor: "div", _aten.div.Scalar: "div",
    _aten.neg.default: "neg", _aten.reciprocal.default: "reciprocal",
    _aten._to_copy.default: "to", _aten.where.self: "where", TURN: "turn", **{op: name for name, op in SILU.items()},
}  # fmt: skip
SQUARE, COPY, FULL = _aten.pow.Tensor_Scalar, _aten.copy_.default, _aten.full.default


def step_of(node: Node) -> Step | str | None:
    """The step that a node is, its arguments left out; "copy" for one over an argument; None where it is none."""
    if node.op != "call_function":
        return None
    if node.target is COPY:
        into, value, *rest = node.args
        if rest or not isinstance(into, Node) or into.op != "placeholder" or not isinstance(value, Node):
            return None
        return "copy" if graphs.tensor_layouts(into) == graphs.tensor_layouts(value) and _is_ours(node) else None
    op = "mul" if node.target is SQUARE else _OPS.get(node.target)
    if op is None or not _is_ours(node) or not node.all_input_nodes:  # vmap casts numbers, and they stay
        return None
    (t,) = graphs.tensors(node)
    allowed = {"dtype", "device", "layout"} if op == "to" else set()  # autograd tells the layout, which is the same
    if set(node.kwargs) - allowed or (node.target is SQUARE and node.args[1] != 2):
        return None
    args = node.args[:1] if node.target is SQUARE else node.args
    return Step(op, t.dtype, ()) if all(_fits(a, t.dtype, op, i) for i, a in enumerate(args)) else None


def _fits(argument: Any, dtype: torch.dtype, op: str, place: int) -> bool:
    """Whether C takes an argument of a step as torch does."""
    if not isinstance(argument, Node):
        return type(argument) in (int, float) and abs(argument) < 2**24
    kinds = {t.dtype for t in graphs.tensors(argument) if t.is_cpu and not is_lazy(t)}
    if op == "where" and place == 0:
        return kinds == {torch.bool}
    return kinds == {dtype} or (len(kinds) == 1 and kinds < {*_FLOATS} and (op == "to" or dtype is torch.float32))


def _is_ours(node: Node) -> bool:
    value = node.meta.get("val")
    if not isinstance(value, Tensor) or is_lazy(value):
        return False
    return value.is_cpu and value.dtype in _FLOATS and value.is_contiguous()


def constant(argument: Any) -> float | None:
    """The number that an argument is everywhere; None where it is not one."""
    if isinstance(argument, int | float):
        return float(argument)
    if isinstance(argument, Node) and argument.target in (FULL, _aten.scalar_tensor.default):
        (t,) = graphs.tensors(argument)
        number = argument.args[argument.target is FULL]
        known = isinstance(number, int | float) and t.dtype in _FLOATS
        return float(torch.tensor(number, dtype=t.dtype, device="cpu")) if known else None
    return None
