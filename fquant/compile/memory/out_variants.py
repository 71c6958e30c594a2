"""The overloads of ops that compute into memory that they are given, with the bits of the op without.

Most ops of torch have an overload with results as arguments, but many of these compute elsewhere and copy. Those of
*structured* ops do not: with and without, one kernel is given its results. The dispatcher knows which ops are
structured. They have a kernel for CompositeExplicitAutogradNonFunctional, which torch generates for them, and their
overload has a kernel of its own for the device. (Copies of views have the former too, but not the latter.) A few more
ops also compute there; they are named here, as are the ops of fquant. Tests compare the bits of all.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.fx.node import map_aggregate

_aten = torch.ops.aten
OURS = (  # ops of torch.ops.fquant
    "matmul", "matmul_t", "nll", "nll_backward", "rms_norm", "rms_norm_backward", "attention", "attention_backward",
    "silu", "silu_derivative", "turn", "root", "grouped_matmul", "grouped_matmul_t", "grouped_mm", "grouped_outer",
    "cached_attention", "dense_matmul", "ordered_matmul", "adam_update", "momentum_update", "sums_by_code",
)  # fmt: skip
_OURS = {f"fquant.{name}.default": name for name in OURS}
UNSTRUCTURED = (  # ops that compute into their results and are not structured
    _aten.abs.default, _aten.where.self, _aten.index_select.default, _aten.logical_and.default,
    _aten.logical_or.default, _aten.logical_xor.default, _aten.logical_not.default,
    _aten.linalg_solve_triangular.default,
)  # fmt: skip
RESIZED = (_aten.mse_loss.default, _aten.smooth_l1_loss.default)  # structured ops that compute elsewhere if reduced
_STRUCTURED, _DEVICE = "CompositeExplicitAutogradNonFunctional", "CPU"  # keys of the dispatcher


@cache
def out_variant(op: Any) -> OpOverload | None:
    """Return the overload of ``op`` that computes into given results of the host, None if there is none."""
    if (name := _OURS.get(str(op))) is not None:
        return getattr(torch.ops.fquant, name).out
    if not isinstance(op, OpOverload) or op.namespace != "aten" or op._schema.is_mutable:
        return None
    if op in RESIZED or not (op in UNSTRUCTURED or _has_kernel(op, _STRUCTURED)):
        return None
    inputs = [(a.name, str(a.type)) for a in op._schema.arguments]
    for other in _overloads(op):
        given = [(a.name, str(a.type)) for a in other._schema.arguments if not a.is_out]
        if len(other._schema.arguments) > len(given) and given == inputs and _has_kernel(other, _DEVICE):
            return other
    return None


@cache
def without_results(variant: Any) -> OpOverload | None:
    """Return the op of torch that ``variant`` is the :func:`out_variant` of, None if there is none."""
    if not isinstance(variant, OpOverload) or variant.namespace != "aten" or not result_names(variant):
        return None
    return next((op for op in _overloads(variant) if out_variant(op) is variant), None)


def describe(op: OpOverload, args: Any, kwargs: Any) -> Any:
    """Return the results that an op of torch with an :func:`out_variant` gives, without values.

    The kernel of a structured op is that of all devices. torch's fake tensors have another, in Python, which may
    describe a wrong dtype. So an op of ``UNSTRUCTURED`` is asked for the dtype, with zeros of one element in each
    dimension.
    """
    like = lambda t: torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="meta")
    given = _map_tensors(like, (args, kwargs))
    if op in UNSTRUCTURED:
        small = _map_tensors(lambda t: t.new_zeros([min(n, 1) for n in t.shape]), (args, kwargs))
        return op(*given[0], **given[1]).to(op(*small[0], **small[1]).dtype)
    try:
        return op._op_dk(getattr(torch._C.DispatchKey, _STRUCTURED), *given[0], **given[1])
    except Exception:  # the last step of some kernels is in Python for meta tensors, and cannot take e.g. no rows
        return op(*args, **kwargs)


def _map_tensors(f: Callable[[Tensor], Tensor], given: Any) -> Any:
    return map_aggregate(given, lambda x: f(x) if isinstance(x, Tensor) else x)


def result_names(variant: OpOverload) -> list[str]:
    """Return the names of the arguments that are results of an op."""
    return [a.name for a in variant._schema.arguments if a.alias_info is not None and a.alias_info.is_write]


def _overloads(op: OpOverload) -> list[OpOverload]:
    return [getattr(op.overloadpacket, name) for name in op.overloadpacket.overloads()]


def _has_kernel(op: OpOverload, key: str) -> bool:
    try:
        return torch._C._dispatch_has_kernel_for_dispatch_key(op.name(), key)
    except RuntimeError:  # an overload of TorchScript alone, which the dispatcher does not know
        return False
