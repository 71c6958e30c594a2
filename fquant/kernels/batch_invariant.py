"""Products in which the bits of a row do not depend on the rows beside it.

    with fquant.batch_invariant():
        losses = vmap(loss, (None, 0))(params, rows)      # losses[i] has the same bits for any other rows

The libraries of BLAS and oneDNN choose a kernel by all sizes of a product. So torch's products of the same row differ
in their last bits with the number of rows: on a Xeon with AMX those with 512 and more inputs, up to 683 rows. Inside
the context each product of floats on the host, torch's or ours, forward or backward, is one in a fixed order
(``ops/ordered_matmul.py``). A packed weight is multiplied with at least 16 rows, because fewer have a kernel of
their own. What a capture records inside the context has these products wherever it runs.

Elementwise ops, norms, losses and attention have the property by themselves, and so have sums along rows. But torch
divides the sum of all elements among its threads, as of a single row, so it is made beside a copy. Convolutions are as
they were, and so is all that runs on other devices than the host.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack

from ..device import HOST
from . import grouped_ops, integer_ops, packed_ops  # noqa: F401  (registers the ops)
from .arguments import COMPUTED
from .ops import decoding  # noqa: F401
from .ops.ordered_matmul import ordered_matmul, with_least_rows

DIVIDED = 1 << 15  # elements from which torch divides the sum of all among threads


def batch_invariant() -> TorchDispatchMode:
    """Return a context in which the bits of a row of a product do not depend on other rows; see the module.

    It serves under any transform of torch.func that is called inside. ``jit`` records what a function does inside. A
    function that was captured refuses to run inside, because its graph would not see the context.
    """
    return _BatchInvariant()


def is_batch_invariant() -> bool:
    """Return True inside :func:`batch_invariant`."""
    return any(isinstance(mode, _BatchInvariant) for mode in _get_current_dispatch_mode_stack())


class _BatchInvariant(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if (other := _IN_ORDER.get(func)) is not None and _is_of_floats(args[0]):
            return other(func, *args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def _is_of_floats(x: Tensor) -> bool:
    return x.device == HOST and x.dtype in COMPUTED


def _mm(func: Any, a: Tensor, b: Tensor) -> Tensor:
    return ordered_matmul(a, b)


def _mv(func: Any, a: Tensor, b: Tensor) -> Tensor:
    return ordered_matmul(a, b[:, None])[:, 0]


def _added(product: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def add(func: Any, c: Tensor, a: Tensor, b: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
        y = product(func, a, b)
        y = y if alpha == 1 else y * alpha
        return y if beta == 0 else y + (c if beta == 1 else c * beta)

    return add


def _packed(func: Any, x: Tensor, *weight: Any) -> Tensor:
    return func(with_least_rows(x), *weight)[..., : x.shape[-2], :]


def _dense(func: Any, x: Tensor, w: Tensor) -> Tensor:
    return ordered_matmul(x, w.mT)


def _grouped(func: Any, *args: Any) -> Tensor:
    return func(*args, True)


def _reduced(func: Any, x: Tensor, *rest: Any, **kwargs: Any) -> Tensor:
    """Reduce ``x``; to one number beside a copy, because torch then divides the elements among threads."""
    dim, *others = rest or (None,)
    dims = [dim] if isinstance(dim, int) else list(dim or range(x.ndim))
    kept = x.numel() // max(1, math.prod(x.shape[d] for d in dims))
    if kept != 1 or x.numel() < DIVIDED:
        return func(x, *rest, **kwargs)
    of_dims, above = _OF_DIMS.get(func) or func, [d % x.ndim + 1 for d in dims]
    return of_dims(torch.stack([x, x]), above[0] if isinstance(dim, int) else above, *others, **kwargs)[0]


_aten, _ours = torch.ops.aten, torch.ops.fquant
_OF_DIMS: dict[Any, Any] = {_aten.sum.default: _aten.sum.dim_IntList, _aten.mean.default: _aten.mean.dim}
_IN_ORDER: dict[Any, Callable[..., Tensor]] = {
    _aten.mm.default: _mm,
    _aten.bmm.default: _mm,
    _aten.mv.default: _mv,
    _aten.addmm.default: _added(_mm),
    _aten.baddbmm.default: _added(_mm),
    _aten.addmv.default: _added(_mv),
    _ours.matmul.default: _packed,
    _ours.integer_matmul.default: _packed,
    _ours.dense_matmul.default: _dense,
    _ours.grouped_mm.default: _grouped,
    _ours.grouped_matmul.default: _grouped,
    _ours.grouped_matmul_t.default: _grouped,
    **dict.fromkeys((_aten.sum.default, _aten.sum.dim_IntList, _aten.mean.default, _aten.mean.dim), _reduced),
    _aten.prod.dim_int: _reduced,
}
