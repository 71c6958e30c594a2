"""fake: what an op would give, told before anything is computed: torch's fake tensors, put right where they err.

A trace runs on tensors that have a shape, a dtype and a layout, and no memory. What an op gives of them is told by a
second description of it, and for some ops that is not what the op does: the product of a sum's gradient with a
transposed tensor is said to be contiguous, and is transposed; a view of one row is said to have other strides, by
which BLAS chooses how to multiply; ``mse_loss`` of bfloat16 and float32 is said to have
gradients of float32, and has them of bfloat16. Memory that is planned, viewed or written as the trace says would then
be other memory than there is.

Ops that are known to be told wrong are put right here. Of all others the first replay finds out (fquant/first.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._prims_common import compute_elementwise_output_strides
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

_aten = torch.ops.aten
Kind = tuple[Sequence[int], torch.dtype]  # strides and dtype


class Fake(FakeTensorMode):
    """Torch's mode of fake tensors, of which ops in ``_KNOWN`` give what they really do."""

    def dispatch(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """What ``func`` gives."""
        out = super().dispatch(func, types, args, kwargs)
        if func in _VIEWS and isinstance(out, FakeTensor):  # of its own shape, told by a shorter way
            (t, *_) = args
            strides = torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="meta").view(out.shape).stride()
            place = (t, out.shape, strides, t.storage_offset())
            return out if strides == out.stride() else super().dispatch(_aten.as_strided.default, types, place)
        if func not in _KNOWN or not isinstance(out, FakeTensor):
            return out
        strides, dtype = _KNOWN[func](out, [x for x in args if isinstance(x, Tensor)])
        if tuple(strides) == out.stride() and dtype == out.dtype:
            return out
        return FakeTensor(self, torch.empty_strided(out.shape, strides, dtype=dtype, device="meta"), out.device)


_VIEWS = (_aten.view.default, _aten._unsafe_view.default)


def _elementwise(out: Tensor, tensors: Sequence[Tensor]) -> Kind:
    """As the loop over elements lays it out: like what it reads, once that is cast, the first most of all."""
    if out.is_contiguous() and all(t.is_contiguous() for t in tensors):
        return out.stride(), out.dtype  # nearly always
    read = (t if t.dtype == out.dtype else torch.empty_like(t) for t in tensors)
    return compute_elementwise_output_strides(*(t.expand(out.shape) for t in read)), out.dtype


def _value(out: Tensor, tensors: Sequence[Tensor]) -> Kind:
    """A loss: of the dtype of what it is of, and laid out like it unless it is reduced."""
    return torch.empty_like(tensors[0]).stride() if out.dim() else (), tensors[0].dtype


def _slope(out: Tensor, tensors: Sequence[Tensor]) -> Kind:
    """The gradient of a loss: of the dtype of what it is of, which comes second."""
    return out.stride(), tensors[1].dtype


def _slope_like(out: Tensor, tensors: Sequence[Tensor]) -> Kind:
    """The same, laid out like that."""
    return torch.empty_like(tensors[1]).stride(), tensors[1].dtype


def _slope_in_rows(out: Tensor, tensors: Sequence[Tensor]) -> Kind:
    """The same, contiguous."""
    return torch.empty_like(tensors[1], memory_format=torch.contiguous_format).stride(), tensors[1].dtype


_KNOWN: dict[Any, Callable[[Tensor, Sequence[Tensor]], Kind]] = {
    op: rule
    for rule, ops in {
        _elementwise: (
            _aten.add.Tensor, _aten.sub.Tensor, _aten.mul.Tensor, _aten.div.Tensor, _aten.div.Tensor_mode,
            _aten.copysign.Tensor, _aten.xlogy.Tensor, _aten.elu_backward.default, _aten.hardtanh_backward.default,
            _aten.hardswish_backward.default, _aten.softplus_backward.default,
        ),
        _value: (
            _aten.binary_cross_entropy.default, _aten.huber_loss.default, _aten.soft_margin_loss.default,
        ),
        _slope: (_aten.soft_margin_loss_backward.default,),
        _slope_like: (_aten.binary_cross_entropy_backward.default,),
        _slope_in_rows: (
            _aten.mse_loss_backward.default, _aten.smooth_l1_loss_backward.default, _aten.huber_loss_backward.default,
        ),
    }.items()
    for op in ops
}  # fmt: skip
