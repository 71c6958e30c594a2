"""Fake tensors with the layouts and dtypes that ops really give, where torch's own fake tensors are wrong.

torch describes the results of an op on fake tensors by a second implementation, which differs from the op in places:

* the product of a sum's gradient with a transposed tensor is described as contiguous, and is transposed;
* a view of one row is described with other strides, by which BLAS chooses how to multiply;
* ``mse_loss`` of bfloat16 and float32 is described with float32 gradients, and has bfloat16 ones.

Memory that is planned, viewed or written as the trace describes would then be wrong. The ops that are known to differ
are corrected here. The first replay finds any others (validate.py).
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._prims_common import compute_elementwise_output_strides
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

_aten = torch.ops.aten
Kind = tuple[Sequence[int], torch.dtype]  # strides and dtype


class Fake(FakeTensorMode):
    """A FakeTensorMode that corrects the results of the ops in ``_RULES``."""

    def dispatch(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = self._described(func, types, args, kwargs)
        if func in _VIEWS and isinstance(out, FakeTensor):  # torch takes a shortcut for a view in its own shape
            (t, *_) = args
            strides = torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="meta").view(out.shape).stride()
            place = (t, out.shape, strides, t.storage_offset())
            return out if strides == out.stride() else super().dispatch(_aten.as_strided.default, types, place)
        if func not in _RULES or not isinstance(out, FakeTensor):
            return out
        if (kwargs or {}).get("memory_format") not in (None, torch.preserve_format):
            return out
        strides, dtype = _RULES[func](out, args)
        if tuple(strides) == out.stride() and dtype == out.dtype:
            return out
        return FakeTensor(self, torch.empty_strided(out.shape, strides, dtype=dtype, device="meta"), out.device)

    def _described(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        """Return torch's description, without its cache where the cache takes different tensors for the same.

        The key of the cache has shape, dtype and strides, but neither the size of the storage nor zero tensors.
        """
        enabled = self.cache_enabled
        self.cache_enabled = enabled and func not in _OF_STORAGE and not _any_zero_tensor(args)
        try:
            return super().dispatch(func, types, args, kwargs)
        finally:
            self.cache_enabled = enabled


def _any_zero_tensor(args: Any) -> bool:
    if isinstance(args, list | tuple):
        return any(map(_any_zero_tensor, args))
    return isinstance(args, Tensor) and args._is_zerotensor()


_OF_STORAGE = (_aten._has_same_storage_numel.default, _aten._new_zeros_with_same_feature_meta.default)
_VIEWS = (_aten.view.default, _aten._unsafe_view.default)


def _elementwise(out: Tensor, args: Sequence[Any]) -> Kind:
    """Return the layout that TensorIterator gives: that of the operands after casts, the first before others."""
    read = [t if out.dtype in (t.dtype, torch.bool) else torch.empty_like(t) for t in args if isinstance(t, Tensor)]
    if all(t.shape == out.shape and t.is_contiguous() for t in read):
        return _contiguous(out, args)
    return compute_elementwise_output_strides(*(t.expand(out.shape) for t in read)), out.dtype


def _of_two(out: Tensor, args: Sequence[Any]) -> Kind:
    """Return the layout for two operands; a number counts as a tensor without dims."""
    if 1 not in out.shape and out.is_contiguous() and all(x.is_contiguous() for x in args[:2] if isinstance(x, Tensor)):
        return out.stride(), out.dtype  # the common case, without allocations
    number = torch.empty((), dtype=out.dtype, device=out.device)
    return _elementwise(out, [x if isinstance(x, Tensor) else number for x in args[:2]])


def _loss_gradient(out: Tensor, args: Sequence[Any], memory_format: Any = torch.preserve_format) -> Kind:
    """Return the layout and dtype of the loss's input, the second operand."""
    return torch.empty_like(args[1], memory_format=memory_format).stride(), args[1].dtype


_second_first = lambda out, args: _elementwise(out, args[1::-1])
_like = lambda out, args: ((args[0] if _aten.is_non_overlapping_and_dense(args[0]) else out).stride(), out.dtype)
_contiguous = lambda out, args: (torch.empty(out.shape, dtype=out.dtype, device="meta").stride(), out.dtype)
_loss = lambda out, args: (torch.empty_like(args[0]).stride() if out.dim() else (), args[0].dtype)  # reduced: no dims
_RULES: dict[Any, Callable[[Tensor, Sequence[Any]], Kind]] = {
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
        _contiguous: (
            _aten.masked_fill.Scalar, _aten.masked_fill.Tensor, _aten.tril.default, _aten.triu.default,
            _aten._log_softmax.default, _aten.index_add.default,
        ),
        _loss: (_aten.binary_cross_entropy.default, _aten.huber_loss.default, _aten.soft_margin_loss.default),
        lambda out, args: (out.stride(), args[1].dtype): (_aten.soft_margin_loss_backward.default,),
        _loss_gradient: (_aten.binary_cross_entropy_backward.default,),
        functools.partial(_loss_gradient, memory_format=torch.contiguous_format): (
            _aten.mse_loss_backward.default, _aten.smooth_l1_loss_backward.default, _aten.huber_loss_backward.default,
        ),
    }.items()
    for op in ops
}  # fmt: skip
