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
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch._prims_common import compute_elementwise_output_strides
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from ...device import HOST, META
from ...kernels.dispatch import is_lazy
from .tracer import tensors

_aten = torch.ops.aten
Kind = tuple[Sequence[int], torch.dtype]  # strides and dtype
Layout = tuple[torch.Size, Sequence[int], torch.dtype]
_LAYOUTS: dict[Any, "Results | None"] = {}  # by what they depend on; None for results that are not new tensors


class Results(NamedTuple):
    """The layouts of results in memory of their own, and what holds the tensors: a list, a tuple, or nothing."""

    layouts: list[Layout]
    holder: type | None


class Fake(FakeTensorMode):
    """A FakeTensorMode that corrects the results of the ops in ``_RULES``.

    Tensors that a function asks for on a device of the type ``replaced`` are on the device meta.
    """

    def __init__(self, replaced: str | None = None) -> None:
        super().__init__()
        self.replaced = replaced

    def dispatch(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.replaced is not None and (asked := kwargs.get("device")) is not None:
            kwargs = kwargs | {"device": META} if asked.type == self.replaced else kwargs
        kind = _kind_of_call(self, func, args, kwargs)
        if kind is None:
            return self._corrected(func, types, args, kwargs)
        if (known := _LAYOUTS.get(kind)) is None:
            out = self._corrected(func, types, args, kwargs)
            if kind not in _LAYOUTS:
                _LAYOUTS[kind] = _results(out, (*args, *kwargs.values()))
            return out
        made = [self._empty(each) for each in known.layouts]
        return made[0] if known.holder is None else known.holder(made)

    def _empty(self, layout: Layout) -> FakeTensor:
        shape, strides, dtype = layout
        return FakeTensor(self, torch.empty_strided(shape, strides, dtype=dtype, device=META), HOST)

    def _corrected(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        """Return torch's description of the results of an op, with the corrections of ``_RULES``."""
        out = self._described(func, types, args, kwargs)
        if func in _VIEWS and isinstance(out, FakeTensor):  # torch takes a shortcut for a view in its own shape
            (t, *_) = args
            strides = torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=META).view(out.shape).stride()
            place = (t, out.shape, strides, t.storage_offset())
            return out if strides == out.stride() else super().dispatch(_aten.as_strided.default, types, place)
        if func not in _RULES or not isinstance(out, FakeTensor):
            return out
        if kwargs.get("memory_format") not in (None, torch.preserve_format):
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


@functools.cache
def _is_functional(op: Any) -> bool:
    """Return True for an op whose results are new tensors, as its schema has it, with layouts that no value changes."""
    if not isinstance(op, OpOverload) or op in _OF_STORAGE:
        return False
    schema, dynamic = op._schema, {torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output}
    aliased = any(each.alias_info is not None for each in (*schema.arguments, *schema.returns))
    return not (aliased or schema.is_mutable or dynamic & {*op.tags})


def _kind_of_call(mode: Fake, op: Any, args: Any, kwargs: Any) -> Any:
    """Return what the layouts of an op's results depend on; None for other ops, tensors of other modes, devices."""
    if not _is_functional(op):
        return None
    exact = next(tensors(args), None) is None  # without a tensor a float may be a length, as in arange(4.0)
    kinds = [_kind(mode, x, exact) for x in (*args, *kwargs.values())]
    return None if None in kinds else (op, *kinds, *kwargs, torch.get_default_dtype())


def _kind(mode: Fake, x: Any, exact: bool) -> Any:
    if isinstance(x, Tensor):
        plain = isinstance(x, FakeTensor) and x.fake_mode is mode and x.fake_device == HOST and not is_lazy(x)
        return (x.shape, x.stride(), x.dtype) if plain else None
    if isinstance(x, list | tuple):
        kinds = [_kind(mode, each, True) for each in x]  # floats of a list are factors of a shape
        return None if None in kinds else tuple(kinds)
    if isinstance(x, float) and not exact:
        return float  # whose value no layout depends on
    if x is None or isinstance(x, int | float | str | torch.dtype | torch.device | torch.layout | torch.memory_format):
        return (type(x), x)
    return None


def _results(out: Any, args: Any) -> Results | None:
    made = [out] if isinstance(out, Tensor) else out
    if not isinstance(made, list | tuple) or not all(isinstance(t, FakeTensor) and _is_new(t) for t in made):
        return None
    read, written = ([t.untyped_storage()._cdata for t in tensors(x)] for x in (args, made))
    if len({*written}) < len(written) or {*written} & {*read}:
        return None
    return Results(
        [(t.shape, t.stride(), t.dtype) for t in made],
        None if isinstance(out, Tensor) else list if isinstance(out, list) else tuple,
    )


def _is_new(t: FakeTensor) -> bool:
    fills = t.untyped_storage().nbytes() == t.element_size() * _extent(t)
    return t.fake_device == HOST and not is_lazy(t) and t.storage_offset() == 0 and fills


def _extent(t: Tensor) -> int:
    """Return the elements that the memory of a new tensor has."""
    return 1 + sum((n - 1) * step for n, step in zip(t.shape, t.stride(), strict=True)) if t.numel() else 0


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
