"""fake: what an op would give, told before anything is computed: torch's fake tensors, put right where they err.

A trace runs on tensors that have a shape, a dtype and a layout, and no memory. What an op gives of them is told by a
second description of it, and for some ops that is not what the op does: the product of a sum's gradient with a
transposed tensor is said to be contiguous, and is transposed; a view of one row is said to have other strides, by
which BLAS chooses how to multiply; ``mse_loss`` of bfloat16 and float32 is said to have
gradients of float32, and has them of bfloat16. Memory that is planned, viewed or written as the trace says would then
be other memory than there is.

Ops that are known to be told wrong are put right here. Of all others the first replay finds out (fquant/compile/validate.py).
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
        out = self._told(func, types, args, kwargs)
        if func in _VIEWS and isinstance(out, FakeTensor):  # of its own shape, told by a shorter way
            (t, *_) = args
            strides = torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="meta").view(out.shape).stride()
            place = (t, out.shape, strides, t.storage_offset())
            return out if strides == out.stride() else super().dispatch(_aten.as_strided.default, types, place)
        if func not in _KNOWN or not isinstance(out, FakeTensor):
            return out
        if (kwargs or {}).get("memory_format") not in (None, torch.preserve_format):
            return out
        strides, dtype = _KNOWN[func](out, args)
        if tuple(strides) == out.stride() and dtype == out.dtype:
            return out
        return FakeTensor(self, torch.empty_strided(out.shape, strides, dtype=dtype, device="meta"), out.device)

    def _told(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        """What torch says that ``func`` gives; not what it said before of other tensors, where it takes them for these.

        It tells them apart by shape, dtype and strides, and not by how large the memory is, nor zeros that are nowhere.
        """
        kept = self.cache_enabled
        self.cache_enabled = kept and func not in _OF_MEMORY and not _any_nowhere(args)
        try:
            return super().dispatch(func, types, args, kwargs)
        finally:
            self.cache_enabled = kept


def _any_nowhere(args: Any) -> bool:
    if isinstance(args, list | tuple):
        return any(map(_any_nowhere, args))
    return isinstance(args, Tensor) and args._is_zerotensor()


_OF_MEMORY = (_aten._has_same_storage_numel.default, _aten._new_zeros_with_same_feature_meta.default)
_VIEWS = (_aten.view.default, _aten._unsafe_view.default)


def _elementwise(out: Tensor, args: Sequence[Any]) -> Kind:
    """As the loop over elements lays it out: like what it reads, once that is cast, the first most of all.

    Strides of dims of one say nothing of where elements lie, but torch's ``matmul`` chooses by them how to multiply.
    """
    read = [t if out.dtype in (t.dtype, torch.bool) else torch.empty_like(t) for t in args if isinstance(t, Tensor)]
    if all(t.shape == out.shape and t.is_contiguous() for t in read):
        return torch.empty(out.shape, dtype=out.dtype, device="meta").stride(), out.dtype
    return compute_elementwise_output_strides(*(t.expand(out.shape) for t in read)), out.dtype


def _second_first(out: Tensor, args: Sequence[Any]) -> Kind:
    """The same of two, most of all like the second."""
    return _elementwise(out, args[1::-1])


def _of_two(out: Tensor, args: Sequence[Any]) -> Kind:
    """The same of two, of which one may be a number, that is a tensor without dims."""
    if 1 not in out.shape and out.is_contiguous() and all(x.is_contiguous() for x in args[:2] if isinstance(x, Tensor)):
        return out.stride(), out.dtype  # nearly always
    number = torch.empty((), dtype=out.dtype, device=out.device)
    return _elementwise(out, [x if isinstance(x, Tensor) else number for x in args[:2]])


def _like(out: Tensor, args: Sequence[Any]) -> Kind:
    """As what comes first, where that has neither gaps nor the same element twice."""
    return (args[0] if _aten.is_non_overlapping_and_dense(args[0]) else out).stride(), out.dtype


def _in_rows(out: Tensor, args: Sequence[Any]) -> Kind:
    """Contiguous."""
    return torch.empty(out.shape, dtype=out.dtype, device="meta").stride(), out.dtype


def _value(out: Tensor, args: Sequence[Any]) -> Kind:
    """A loss: of the dtype of what it is of, and laid out like it unless it is reduced."""
    return torch.empty_like(args[0]).stride() if out.dim() else (), args[0].dtype


def _slope(out: Tensor, args: Sequence[Any]) -> Kind:
    """The gradient of a loss: of the dtype of what it is of, which comes second."""
    return out.stride(), args[1].dtype


def _slope_like(out: Tensor, args: Sequence[Any]) -> Kind:
    """The same, laid out like that."""
    return torch.empty_like(args[1]).stride(), args[1].dtype


def _slope_in_rows(out: Tensor, args: Sequence[Any]) -> Kind:
    """The same, contiguous."""
    return torch.empty_like(args[1], memory_format=torch.contiguous_format).stride(), args[1].dtype


_KNOWN: dict[Any, Callable[[Tensor, Sequence[Any]], Kind]] = {
    op: rule
    for rule, ops in {
        _of_two: (
            _aten.add.Tensor, _aten.sub.Tensor, _aten.mul.Tensor, _aten.div.Tensor, _aten.div.Tensor_mode,
            _aten.copysign.Tensor, _aten.xlogy.Tensor, _aten.logaddexp.default, _aten.logaddexp2.default,
            _aten.special_xlog1py.default, _aten.heaviside.default, _aten.add.Scalar, _aten.sub.Scalar,
            _aten.mul.Scalar, _aten.div.Scalar, _aten.rsub.Scalar, _aten.fmod.Scalar, _aten.remainder.Scalar,
            _aten.copysign.Scalar, _aten.xlogy.Scalar_Self, _aten.xlogy.Scalar_Other, _aten.eq.Scalar,
            _aten.ne.Scalar, _aten.ge.Scalar, _aten.gt.Scalar, _aten.le.Scalar, _aten.lt.Scalar,
        ),
        _elementwise: (
            _aten.neg.default, _aten.pow.Tensor_Scalar, _aten.elu_backward.default, _aten.hardtanh_backward.default,
            _aten.hardswish_backward.default, _aten.softplus_backward.default, _aten.silu_backward.default,
            _aten.logit_backward.default, _aten.relu.default, _aten.hardsigmoid.default, _aten.hardshrink.default,
            _aten.threshold.default, _aten.clamp.default, _aten.clamp_min.default, _aten.clamp_max.default,
            _aten.softplus.default, _aten.leaky_relu.default, _aten.where.self, _aten.addcmul.default,
            _aten.lerp.Scalar, _aten.abs.default, _aten.isnan.default,
        ),
        _second_first: (_aten.threshold_backward.default,),
        _like: (
            _aten.empty_like.default, _aten.zeros_like.default, _aten.ones_like.default, _aten.full_like.default,
            _aten.flip.default, _aten.index_put.default, _aten.hardtanh.default, _aten.relu6.default,
            _aten.nan_to_num.default, _aten.deg2rad.default, _aten.rad2deg.default,
        ),
        _in_rows: (
            _aten.masked_fill.Scalar, _aten.masked_fill.Tensor, _aten.tril.default, _aten.triu.default,
            _aten._log_softmax.default, _aten.index_add.default,
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
