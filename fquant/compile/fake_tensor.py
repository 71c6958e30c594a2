"""Fake tensors with the layouts and dtypes that ops really give, where torch's own fake tensors are wrong.

torch describes the results of an op on fake tensors by a second implementation, which differs from the op in places:

* the product of a sum's gradient with a transposed tensor is described as contiguous, and is transposed;
* a view of one row is described with other strides, by which BLAS chooses how to multiply;
* ``mse_loss`` of bfloat16 and float32 is described with float32 gradients, and has bfloat16 ones.

Memory that is planned, viewed or written as the trace describes would then be wrong. The ops that are known to differ
are corrected here. The first replay finds any others (validate.py).

The mode also lets the device meta stand in for another device during a trace (retarget.py).
"""

import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._prims_common import compute_elementwise_output_strides
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

_aten = torch.ops.aten
META = torch.device("meta")
Kind = tuple[Sequence[int], torch.dtype]  # strides and dtype


class Fake(FakeTensorMode):
    """A FakeTensorMode that corrects the results of the ops in ``_RULES``.

    Tensors that a function asks for on a device of the type ``replaced`` are on the device meta.
    """

    def __init__(self, replaced: str | None = None) -> None:
        super().__init__()
        self.replaced = replaced

    def dispatch(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.replaced is not None and (asked := (kwargs or {}).get("device")) is not None:
            kwargs = kwargs | {"device": META} if asked.type == self.replaced else kwargs
        out = self._described(func, types, args, kwargs)
        if func in _VIEWS and isinstance(out, FakeTensor):  # torch takes a shortcut for a view in its own shape
            (t, *_) = args
            strides = torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=META).view(out.shape).stride()
            place = (t, out.shape, strides, t.storage_offset())
            return out if strides == out.stride() else super().dispatch(_aten.as_strided.default, types, place)
        if func not in _RULES or not isinstance(out, FakeTensor):
            return out
        if (kwargs or {}).get("memory_format") not in (None, torch.preserve_format):
            return out
        strides, dtype = _RULES[func](out, args)
        if tuple(strides) == out.stride() and dtype == out.dtype:
            return out
        return FakeTensor(self, torch.empty_strided(out.shape, strides, dtype=dtype, device=META), out.device)

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


def _elementwise(out: Tensor, args: Sequence[Any], uncast: Sequence[Tensor] = ()) -> Kind:
    """Return the layout that TensorIterator gives: that of the operands after casts, the first before others."""
    cast = [t if out.dtype in (t.dtype, torch.bool) else torch.empty_like(t) for t in args if isinstance(t, Tensor)]
    read = [*uncast, *cast]
    if all(t.shape == out.shape and t.is_contiguous() for t in read):
        return _contiguous(out, args)
    return compute_elementwise_output_strides(*(t.expand(out.shape) for t in read)), out.dtype


def _of_two(out: Tensor, args: Sequence[Any]) -> Kind:
    """Return the layout for two operands; a number counts as a tensor without dims."""
    if 1 not in out.shape and out.is_contiguous() and all(x.is_contiguous() for x in args[:2] if isinstance(x, Tensor)):
        return out.stride(), out.dtype  # the common case, without allocations
    number = torch.empty((), dtype=out.dtype, device=META)
    return _elementwise(out, [x if isinstance(x, Tensor) else number for x in args[:2]])


def _loss_gradient(out: Tensor, args: Sequence[Any], memory_format: Any = torch.preserve_format) -> Kind:
    """Return the layout and dtype of the loss's input, the second operand."""
    return torch.empty_like(args[1], memory_format=memory_format).stride(), args[1].dtype


_where = lambda out, args: _elementwise(out, args[1:], args[:1])
_second_first = lambda out, args: _elementwise(out, args[1::-1])
_like = lambda out, args: ((args[0] if _aten.is_non_overlapping_and_dense(args[0]) else out).stride(), out.dtype)
_contiguous = lambda out, args: (torch.empty(out.shape, dtype=out.dtype, device=META).stride(), out.dtype)
_loss = lambda out, args: (torch.empty_like(args[0]).stride() if out.dim() else (), args[0].dtype)  # reduced: no dims
_OPS: dict[Callable[[Tensor, Sequence[Any]], Kind], str] = {  # by rule, the ops of torch.ops.aten
    _of_two: (
        "add.Tensor sub.Tensor mul.Tensor div.Tensor div.Tensor_mode copysign.Tensor xlogy.Tensor logaddexp "
        "logaddexp2 special_xlog1py heaviside add.Scalar sub.Scalar mul.Scalar div.Scalar rsub.Scalar fmod.Scalar "
        "remainder.Scalar copysign.Scalar xlogy.Scalar_Self xlogy.Scalar_Other eq.Scalar ne.Scalar ge.Scalar "
        "gt.Scalar le.Scalar lt.Scalar"
    ),
    _elementwise: (
        "neg pow.Tensor_Scalar elu_backward hardtanh_backward hardswish_backward softplus_backward silu_backward "
        "logit_backward relu hardsigmoid hardshrink threshold clamp clamp_min clamp_max softplus leaky_relu "
        "addcmul lerp.Scalar abs isnan"
    ),
    _where: "where.self",
    _second_first: "threshold_backward",
    _like: "empty_like zeros_like ones_like full_like flip index_put hardtanh relu6 nan_to_num deg2rad rad2deg",
    _contiguous: "masked_fill.Scalar masked_fill.Tensor tril triu _log_softmax index_add",
    _loss: "binary_cross_entropy huber_loss soft_margin_loss",
    lambda out, args: (out.stride(), args[1].dtype): "soft_margin_loss_backward",
    _loss_gradient: "binary_cross_entropy_backward",
    functools.partial(_loss_gradient, memory_format=torch.contiguous_format): (
        "mse_loss_backward smooth_l1_loss_backward huber_loss_backward"
    ),
}
_op = lambda name: operator.attrgetter(name if "." in name else f"{name}.default")(_aten)
_RULES = {_op(name): rule for rule, names in _OPS.items() for name in names.split()}
