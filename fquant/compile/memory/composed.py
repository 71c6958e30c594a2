"""Ops that have no kernel for given memory, as torch composes them: a fill or a copy, then an op in place.

    full(size, 3)                     # place.fill_(3)
    masked_fill(x, mask, 3)           # place.copy_(x); place.masked_fill_(mask, 3)
    select_backward(g, size, 0, 2)    # place.fill_(0); place.select(0, 2).copy_(g)
    eye(size)                         # place.fill_(0); place.diagonal().fill_(1)
    mul(x, 0.3)                       # mul.out(x, 0.3) into place: mul_ rounds the number to x's dtype
    stack([x, y], 1)                  # cat([x.unsqueeze(1), y.unsqueeze(1)], 1) into place

torch computes the same by the same kernels, in memory that it allocates, so bits are equal.
"""

from typing import Any

import torch
from torch.fx import Node

_aten = torch.ops.aten
_FILLS: dict[Any, Any] = {  # with a value
    _aten.zeros.default: 0, _aten.new_zeros.default: 0, _aten.ones.default: 1, _aten.new_ones.default: 1,
}  # fmt: skip
_VALUES = {_aten.full.default: 1, _aten.new_full.default: 2}  # the index of the argument that has the value
_IN_PLACE = {
    _aten.masked_fill.Scalar: _aten.masked_fill_.Scalar, _aten.masked_fill.Tensor: _aten.masked_fill_.Tensor,
    _aten.index_put.default: _aten.index_put_.default, _aten.relu.default: _aten.relu_.default,
}  # fmt: skip
_SCATTERS = {  # gradients of views, which are zero elsewhere
    _aten.select_backward.default: _aten.select.int, _aten.slice_backward.default: _aten.slice.Tensor,
    _aten.diagonal_backward.default: _aten.diagonal.default,
}  # fmt: skip
_EYES = (_aten.eye.default, _aten.eye.m)
COMPOSED = frozenset((*_FILLS, *_VALUES, *_IN_PLACE, *_SCATTERS, *_EYES, _aten.mul.Scalar, _aten.stack.default))


def compose(call: Node, place: Node) -> None:
    """Let ``call``, of one of the ops ``COMPOSED``, compute into ``place``, with other nodes before it."""
    op: Any = call.target
    args = call.args

    def before(target: Any, *given: Any) -> Node:
        with call.graph.inserting_before(call):
            return call.graph.call_function(target, given)

    if op in _FILLS or op in _VALUES:
        _replace(call, _aten.fill_.Scalar, place, _FILLS[op] if op in _FILLS else args[_VALUES[op]])
    elif op in _IN_PLACE:
        before(_aten.copy_.default, place, args[0])
        _replace(call, _IN_PLACE[op], place, *args[1:])
    elif op in _SCATTERS:
        before(_aten.fill_.Scalar, place, 0)
        _replace_in_view(call, _aten.copy_.default, before(_SCATTERS[op], place, *args[2:]), args[0])
    elif op in _EYES:
        before(_aten.fill_.Scalar, place, 0)
        _replace_in_view(call, _aten.fill_.Scalar, before(_aten.diagonal.default, place), 1)
    elif op is _aten.mul.Scalar:
        _replace(call, _aten.mul.out, *args, out=place)
    else:
        parts: Any = args[0]
        dim = args[1] if len(args) > 1 else 0
        _replace(call, _aten.cat.out, [before(_aten.unsqueeze.default, x, dim) for x in parts], dim, out=place)


def _replace(call: Node, target: Any, *args: Any, **kwargs: Any) -> None:
    call.target, call.args, call.kwargs = target, args, kwargs


def _replace_in_view(call: Node, target: Any, view: Node, value: Any) -> None:
    _replace(call, target, view, value)
    call.meta = {name: value for name, value in call.meta.items() if name != "val"}  # it is the view that is returned
