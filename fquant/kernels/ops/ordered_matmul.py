"""Dense products whose elements are sums in the order of the inner dim.

    ordered_matmul(a, b)          [m k] · [k n] to [m n], or [b m k] · [b k n] to [b m n]

BLAS and oneDNN choose the order of a sum by all sizes, so the bits of a row depend on the number of rows. Here an
element depends on its row of ``a`` and its column of ``b`` alone: not on other rows and columns, the layouts of the
operands, or the number of threads. So the op is *batch-invariant*, on one instruction set: some sum pairs of 16-bit
numbers at once. ``fquant.batch_invariant`` puts the op in the place of torch's products.

The op has no derivatives. vmap makes one product of many.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.utils.flop_counter import register_flop_formula

from ..arguments import check_floats
from ..registry import register

LEAST_IN_ORDER = 16  # rows of a packed product in the order of more: fewer may have a kernel of their own


def with_least_rows(x: Tensor) -> Tensor:
    """Return ``x`` [... rows in] with zeros behind it up to LEAST_IN_ORDER rows."""
    missing = LEAST_IN_ORDER - x.shape[-2]
    return pad(x, (0, 0, 0, missing)) if missing > 0 else x


def ordered_matmul(a: Tensor, b: Tensor) -> Tensor:
    """Return ``a · b`` of f[m k] and f[k n], or of each of f[b m k] and f[b k n], in f32, bf16, f16 or f64.

    Sums of 16-bit numbers are in float32. Raises TypeError for other dtypes, ValueError for other shapes or devices.
    """
    return _ORDERED(a, b)


def _check(op: str, a: Tensor, b: Tensor) -> None:
    check_floats(op, a, "a")
    if b.dtype is not a.dtype:
        raise TypeError(f"{op} got a {a.dtype} and b {b.dtype}; wanted one dtype")
    if a.ndim not in (2, 3) or b.ndim != a.ndim or a.shape[-1] != b.shape[-2] or a.shape[:-2] != b.shape[:-2]:
        got = f"a {tuple(a.shape)} and b {tuple(b.shape)}"
        raise ValueError(f"{op} got {got}; wanted [m k] and [k n], or [b m k] and [b k n]")
    if a.device != b.device:
        raise ValueError(f"{op} got a on {a.device} and b on {b.device}; move one")


def _map(op: Any, info: Any, in_dims: Any, a: Tensor, b: Tensor) -> tuple[Tensor, int]:
    """Map the op: products of all examples are one batch."""
    front = lambda t, dim: t.expand(info.batch_size, *t.shape) if dim is None else t.movedim(dim, 0)
    a, b = (front(t, dim) for t, dim in zip((a, b), in_dims, strict=True))
    if a.ndim == 3:
        return op(a, b), 0
    return op(a.flatten(0, 1), b.flatten(0, 1)).unflatten(0, (info.batch_size, -1)), 0


_ORDERED = register(
    ordered_matmul, _check, lambda a, b: a.new_empty(*a.shape[:-1], b.shape[-1]), _map,
    "it computes values only: multiply with torch under fquant.batch_invariant(), which has derivatives",
)  # fmt: skip
register_flop_formula(torch.ops.fquant.ordered_matmul)(lambda a, b, *_, **__: 2 * torch.Size(a).numel() * b[-1])
