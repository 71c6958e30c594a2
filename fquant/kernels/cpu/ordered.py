"""Dense products on the CPU whose elements are sums in order, by csrc/matmul.h.

The C kernels multiply rows of x by rows of a weight, or by its columns. An operand in another layout is copied, the
smaller one where there is a choice. By rows C writes the product or, if that takes fewer copies, the transpose of the
product of the operands in the other order. All ways give the same bits.
"""

from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from .library import DTYPES, Settings, compute, result, settings

SHORT = 128  # inner elements up to which columns are faster, because their results need not be turned
FEW = 64  # columns up to which they take the place of the rows: these are then divided among the threads


class Plan(NamedTuple):
    """The way to compute a product of operands of some layouts."""

    is_swapped: bool  # bᵀ · aᵀ is computed, and turned: by C if by rows, else by torch
    copies: tuple[bool, bool]  # of x, of the weight
    by_columns: bool
    x: tuple[int, int, int]  # batch, rows, bytes from one x to the next
    weight: tuple[int, int, int]  # rows, columns, bytes from one weight to the next
    apart: int  # bytes from one result to the next
    room: int


def ordered_matmul(a: Tensor, b: Tensor, out: Tensor | None = None) -> Tensor:
    y = result(out, *a.shape[:-1], b.shape[-1], dtype=a.dtype)
    if not a.shape[-1] or not y.numel():
        return y.zero_()
    return run(plan(settings(), a.dtype, a.shape, a.stride(), b.shape, b.stride()), settings(), a, b, y)


def run(how: Plan, where: Settings, a: Tensor, b: Tensor, y: Tensor) -> Tensor:
    """Write the product to ``y``, which is contiguous, and return it."""
    x, w = (b.mT, a.mT) if how.is_swapped else (a, b)
    x, w = (t.contiguous() if copied else t for t, copied in zip((x, w), how.copies, strict=True))
    turned_here = how.is_swapped and how.by_columns
    to = y.new_empty(*y.shape[:-2], y.shape[-1], y.shape[-2]) if turned_here else y
    room = torch.empty(how.room, dtype=torch.uint8, device="cpu")
    _call(how, where, DTYPES[y.dtype], x.data_ptr(), w.data_ptr(), to.data_ptr(), room.data_ptr())
    return y.copy_(to.mT) if turned_here else y


def _call(how: Plan, where: Settings, dtype: int, x: int, w: int, y: int, room: int | None) -> int:
    (batch, m, next_x), (rows, columns, next_w) = how.x, how.weight
    ways = int(how.by_columns), int(how.is_swapped and not how.by_columns)
    sizes = batch, x, m, next_x, w, rows, columns, next_w, y, how.apart
    return compute("ordered_matmul", where, *ways, *sizes, dtype, room)


@lru_cache(maxsize=4096)
def plan(
    where: Settings, dtype: torch.dtype, a: torch.Size, of_a: tuple[int, ...], b: torch.Size, of_b: tuple[int, ...]
) -> Plan:
    """Return the plan for operands of these shapes and strides, none of them empty."""
    (*outer, m, k), n = a, b[-1]
    batch, next_of = (outer or [1])[0], lambda stride: stride[0] if outer else 0
    next_a, next_b = next_of(of_a), next_of(of_b)
    down_a, across_a, down_b, across_b = *of_a[-2:], *of_b[-2:]
    is_swapped = n < m and (n <= FEW or across_a != 1)
    if is_swapped:
        m, n, next_a, next_b = n, m, next_b, next_a
        down_a, across_a, down_b, across_b = across_b, down_b, across_a, down_a
    is_dense = lambda rows, width, down, across: (across == 1 or width == 1) and (down == width or rows == 1)
    copies_x = not is_dense(m, k, down_a, across_a) or (batch > 1 and next_a != m * k)
    by_columns = not is_dense(n, k, across_b, down_b)
    copies_w = by_columns and not is_dense(k, n, down_b, across_b)
    if not by_columns and k <= SHORT and n > 1:
        by_columns = copies_w = True
    size = dtype.itemsize
    next_w = (k * n if copies_w else next_b) * size * bool(outer)
    weight = (k, n, next_w) if by_columns else (n, k, next_w)
    how = Plan(is_swapped, (copies_x, copies_w), by_columns, (batch, m, m * k * size), weight, m * n * size, 0)
    return how._replace(room=_call(how, where, DTYPES[dtype], 0, 0, 0, None))
