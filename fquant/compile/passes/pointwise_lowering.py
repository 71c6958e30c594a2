"""Lowering of graph nodes to steps of a pointwise program (``fquant/kernels/ops/pointwise.py``).

A node is a step only if a program returns its bits. It is our own op, or an operation of torch that IEEE 754 defines.
Its dtypes and arguments mean the same to the step, and the backend of its device has programs. Torch computes such
operations in float32 too, and rounds once, on CPUs and on CUDA. The two differ in numbers that are no tensors:

    x + 0.1    of a narrow x: the CPU rounds the number to the dtype of x first, CUDA does not
    x / 0.1    CUDA multiplies by the reciprocal, in a precision that depends on torch's version; a step if all agree
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from ...device import HOST
from ...kernels.dispatch import is_lazy, runs_programs
from ...kernels.ops.pointwise import ROOT, ROTATE_HALF
from ...kernels.ops.pointwise_program import DTYPES, Step
from ...kernels.ops.silu import OPS as SILU
from .. import graph as graphs

_aten = torch.ops.aten
FLOATS = tuple(DTYPES.values())
_OPS: dict[Any, str] = {
    _aten.add.Tensor: "add", _aten.add.Scalar: "add", _aten.sub.Tensor: "sub", _aten.sub.Scalar: "sub",
    _aten.mul.Tensor: "mul", _aten.mul.Scalar: "mul", _aten.div.Tensor: "div", _aten.div.Scalar: "div",
    _aten.neg.default: "neg", _aten.reciprocal.default: "reciprocal", _aten._to_copy.default: "to",
    _aten.where.self: "where", ROTATE_HALF: "turn", ROOT: "root", **{op: name for name, op in SILU.items()},
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
    if not all(_is_argument(a, t, op, i) for i, a in enumerate(args)):
        return None
    if op == "div" and t.device != HOST and isinstance(args[1], int | float) and _reciprocal(args[1]) is None:
        return None
    return Step(op, t.dtype, ())


def with_arguments(node: Node, step: Step, number: Mapping[Node, int]) -> Step:
    """Return the step of a node with its arguments: values, by the ``number`` of each node, or constants."""
    given: Any = node.args if node.target is not SQUARE else (node.args[0],) * 2
    args, (t,) = list[int | float](), graphs.tensors(node)
    for i, argument in enumerate(given):
        constant = constant_value(argument)
        if constant is None:
            args.append(number[argument])
        elif isinstance(argument, Node) or step.op not in ("add", "sub", "div"):
            args.append(constant)
        elif step.op != "div":
            args.append(added_number(constant, t.dtype, t.device))
        elif i == 1 and t.device != HOST:
            step, reciprocal = step._replace(op="mul"), _reciprocal(argument)
            assert reciprocal is not None
            args.append(reciprocal)
        else:
            args.append(constant)
    return step._replace(args=tuple(args))


def added_number(number: float, dtype: torch.dtype, device: torch.device) -> float:
    """Return the constant of float32 that torch on ``device`` adds to tensors of ``dtype`` for a number."""
    return float(torch.tensor(number, dtype=dtype if device == HOST else torch.float32, device=HOST))


def _reciprocal(number: float) -> float | None:
    """Return the constant by which CUDA multiplies to divide by a number; None if versions of torch disagree."""
    if not number:
        return None
    wide, narrow = (torch.tensor(number, dtype=dtype, device=HOST) for dtype in (torch.float64, torch.float32))
    found = {float((1 / wide).float()), float(1 / narrow)}
    return found.pop() if len(found) == 1 else None


def _is_argument(argument: Any, result: Tensor, op: str, index: int) -> bool:
    """Return True if programs convert an argument of a step with this ``result`` as torch does."""
    if not isinstance(argument, Node):
        return type(argument) in (int, float) and abs(argument) < 2**24
    kinds = {t.dtype for t in graphs.tensors(argument) if t.device == result.device and not is_lazy(t)}
    if op == "where" and index == 0:
        return kinds == {torch.bool}
    widened = op == "to" or result.dtype is torch.float32
    return kinds == {result.dtype} or (len(kinds) == 1 and kinds < {*FLOATS} and widened)


def _is_supported(node: Node) -> bool:
    value = node.meta.get("val")
    if not isinstance(value, Tensor) or is_lazy(value) or not runs_programs(value.device.type):
        return False
    return value.dtype in FLOATS and value.is_contiguous()


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
