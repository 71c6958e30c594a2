"""Products of integers: rows of x are quantised as they arrive, and multiplied with the codes of a packed weight.

    y = integer_matmul(x, buffers, spec, act)        x f[*stack m in], act a format of integers
    y = integer_mm(a, b, act_a, act_b)               a f[m k] · b f[n k]ᵀ, both quantised by rows

A row of x becomes integers of at most 255 and a scale (and, with a zero point, an integer that is subtracted). A block
of the weight gives one exact integer sum, which is scaled in float32: ``(sum - zero · sum of x) · scale``. Blocks are
added in order, and the total is scaled by the row of x. So all backends give the same bits.

The codes of NF4 are integers too in the format NF4_INT8, whose table is NF4's rounded to multiples of 1/127: a packed
weight changes over by ``replace(p, format=NF4_INT8)``, and one row is then multiplied at the speed of int4.

Sources: dynamic quantisation of activations, Jacob et al. 2018; by token, Yao et al. 2022 (ZeroQuant).
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from ..autodiff import to_front
from ..format import Format, read
from .arguments import COMPUTED
from .packed_ops import _checked_product
from .registry import by_backend, register
from .spec import Spec, spec_of


def integer_matmul(x: Tensor, buffers: Sequence[Tensor], spec: Spec, act: Format) -> Tensor:
    """Return ``x · Wᵀ`` f[*stack m out] in x's dtype, for x f[*stack m in] that is rounded to the integers of ``act``.

    Raises ValueError unless :func:`is_integer` is true of ``act`` by rows and of the weight, and what the product of a
    packed weight raises.
    """
    return _OP(x, buffers, spec.format.text, spec.shape, spec.dtype, act.text)


def integer_mm(a: Tensor, b: Tensor, act_a: Format, act_b: Format) -> Tensor:
    """Return ``a · bᵀ`` f[m n] in a's dtype, for a f[m k] and b f[n k] of that dtype, rounded to integers by rows.

    Raises ValueError for shapes that do not fit and formats that are not :func:`is_integer` by rows; TypeError for
    another dtype.
    """
    return _MM(a, b, act_a.text, act_b.text)


def is_integer(format: Format, rows: bool = False) -> bool:
    """Return True if the codes of ``format`` are integers by rows; if ``rows``, with one 8-bit scale for a row."""
    integer = format.levels is not None or (format.table is None and format.vectors is None)
    alone = not (format.flat or format.center or format.mean or format.power)
    by_row = (
        (format.table is None or format.integers is not None)
        and format.bits == 8
        and format.block is None
        and format.scale is None
        and not format.shared
    )
    return integer and (by_row and alone if rows else not (format.flat or format.center))


def _check(
    op: str, x: Tensor, buffers: list[Tensor], text: str, shape: Sequence[int], dtype: torch.dtype, act: str
) -> tuple[Any, ...]:
    spec, how = spec_of(text, shape, dtype), read(act)
    if not is_integer(spec.format):
        raise ValueError(f"{op} got a weight in {spec.format.name}; wanted integers in blocks along rows")
    if not is_integer(how, rows=True):
        raise ValueError(f"{op} got act {how.name}; wanted 8-bit integers with one float32 scale for a row")
    x, buffers, spec = _checked_product("matmul", x, buffers, spec)
    return x, buffers, spec, how


def _check_mm(op: str, a: Tensor, b: Tensor, act_a: str, act_b: str) -> tuple[Any, ...]:
    hows = read(act_a), read(act_b)
    for how in hows:
        if not is_integer(how, rows=True):
            raise ValueError(f"{op} got act {how.name}; wanted 8-bit integers with one float32 scale for a row")
    if a.ndim != 2 or b.ndim != 2 or a.shape[1] != b.shape[1]:
        raise ValueError(f"{op} got a {tuple(a.shape)} and b {tuple(b.shape)}; wanted [m k] and [n k]")
    if a.dtype not in COMPUTED or a.dtype != b.dtype or a.device != b.device:
        raise TypeError(f"{op} got a {a.dtype} on {a.device} and b {b.dtype} on {b.device}; wanted one float dtype")
    return a, b, *hows


def _vmap_mm(op: Any, info: Any, in_dims: Any, a: Tensor, b: Tensor, *acts: str) -> tuple[Tensor, int]:
    if in_dims[1] is None:  # rows are independent
        rows = a.movedim(in_dims[0], 0)
        return op(rows.flatten(0, 1), b, *acts).unflatten(0, rows.shape[:2]), 0
    pairs = zip(*(to_front(t, dim, info.batch_size) for t, dim in zip((a, b), in_dims, strict=False)), strict=True)
    return torch.stack([op(x, y, *acts) for x, y in pairs]), 0


def _real(x: Tensor, buffers: list[Tensor], spec: Spec, act: Format, **out: Tensor) -> Tensor:
    return by_backend("integer_matmul", x, buffers, spec, act, **out)


_OP = register(
    "integer_matmul(Tensor x, Tensor[] buffers, str format, int[] shape, ScalarType dtype, str act) -> Tensor",
    _check, lambda x, buffers, spec, act: x.new_empty(*x.shape[:-1], spec.shape[0]), None,
    "multiply with fquant.linear(x, w, act=...), which has derivatives with respect to x", real=_real,
)  # fmt: skip
_MM = register(
    "integer_mm(Tensor a, Tensor b, str act_a, str act_b) -> Tensor",
    _check_mm, lambda a, b, *_: a.new_empty(len(a), len(b)), _vmap_mm,
    "multiply with fquant.linear and a Trainable, which has derivatives", real=partial(by_backend, "integer_mm"),
)  # fmt: skip
register_flop_formula(torch.ops.fquant.integer_mm)(lambda a, b, *_, **__: 2 * a[0] * a[1] * b[0])
register_flop_formula(torch.ops.fquant.integer_matmul)(
    lambda x, buffers, format, shape, *_, **__: 2 * x[0] * shape[0] * shape[1]
)
