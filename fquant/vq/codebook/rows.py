"""Rows of any leading shape: validity, the layout by heads, tiles, and rows drawn from all ranks.

*Layout.* A book sees rows as [h n D], with h = 1 without heads, and masks and codes as [h n].

*Validity.* A row is *kept* if the mask selects it. A kept row is *lost* if it is not finite or has no code: it counts,
but adds nothing to any sum. The other kept rows are *valid*. Invalid rows become zeros before any arithmetic.

*Drawing.* K-means starts, and dead codes restart, at rows drawn by number among the kept rows of all ranks. Each rank
gives those that it has, among zeros, so their sum over ranks does not depend on the split. All rows are cut into as
many strata as are drawn, and each gives one, in random order, so rows are distinct.

``row_offset`` is (first, total): the number of this rank's first kept row, and the number of kept rows of all ranks. On
a mesh it is ``shard.rows(len(x), mesh, axes)``, or that of the sum of the mask. In one process it is None.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ... import random
from ...activation_checkpoint import remat
from ...kernels.dispatch import is_direct
from ..quantized import Key, Mask

if TYPE_CHECKING:
    from .book import Book

TILE = 16 << 20  # bytes of distances between the rows of a tile and all codes
MIN_LENGTH = 1e-6  # length below which a row has no direction

RowOffset = tuple[int | Tensor, int | Tensor]


def mask(lengths: Tensor, size: int) -> Tensor:
    """Return the mask bool[... size] of places below ``lengths`` i64[...]; ValueError unless these are 0 to size."""
    if is_direct(lengths) and lengths.numel() and not 0 <= int(lengths.min()) <= int(lengths.max()) <= size:
        raise ValueError(f"lengths: got {int(lengths.min())} to {int(lengths.max())}; wanted 0 to {size}, the places")
    return torch.arange(size, device=lengths.device) < lengths[..., None]


def check(book: Book, x: Tensor, top: int | None = None) -> None:
    """Check that ``x`` has floats (TypeError), its shape [... D] or [... h D], and ``top`` (ValueError)."""
    if not isinstance(x, Tensor) or not x.is_floating_point():
        got = x.dtype if isinstance(x, Tensor) else type(x).__name__
        raise TypeError(f"x: got {got}; wanted a tensor of floats")
    *heads, num_codes, dim = book.codes.shape
    if x.shape[-len(heads) - 1 :] != (*heads, dim):
        shown = " ".join(map(str, (*heads, dim)))
        raise ValueError(f"x: got shape {tuple(x.shape)} for a book of {dim} dims; wanted [... {shown}]")
    if top is not None and not 1 <= top <= num_codes:
        raise ValueError(f"top is {top} for a book of {num_codes} codes; wanted 1 to {num_codes}")


def at_least_float32(x: Tensor) -> Tensor:
    """Widen ``x`` to float32, unless it is as wide."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def unit(x: Tensor) -> Tensor:
    """Divide ``x`` by its length along the last dim, or by 1e-6 if it is shorter."""
    x = x / x.detach().abs().amax(-1, keepdim=True).clamp(min=1)  # else the squares of large numbers overflow
    # The root of the squared length, because a length has no second derivative at zero.
    return x * x.square().sum(-1, keepdim=True).clamp(min=MIN_LENGTH**2).rsqrt()


def direction(x: Tensor) -> Tensor:
    """Divide ``x`` [... d] by its length, however short or long; zeros stay zeros and pass their gradient."""
    largest = x.detach().abs().amax(-1, keepdim=True)
    x = x / torch.where(largest > 0, largest, 1.0)  # changes no direction, so no derivative
    return x * x.square().sum(-1, keepdim=True).clamp(min=1.0).rsqrt()


def finite(x: Tensor, dims: int = 1) -> Tensor:
    """Return which rows of ``x``, its last ``dims`` dims, are finite: bool[...]."""
    return x.detach().abs().flatten(-dims).amax(-1) < torch.inf  # NaN is the largest; isfinite with all is slower


def zero_invalid(x: Tensor, kept: Mask, dims: int = 1) -> tuple[Tensor, Tensor]:
    """Replace invalid rows by zeros; return the rows and which are valid, the finite ones of ``kept`` bool[...]."""
    valid = finite(x, dims) if kept is None else finite(x, dims) & kept
    if valid.is_cpu and is_direct(valid) and valid.all():  # most often, and a copy takes as long as the question
        return x, valid
    return torch.where(valid[(..., *[None] * dims)], x, 0), valid


def expand_mask(mask: Tensor, like: Tensor) -> Tensor:
    """Expand ``mask``, whose dims are the first of ``like``, to its shape."""
    return mask.reshape((*mask.shape, *[1] * (like.ndim - mask.ndim))).expand(like.shape)


def row_mask(mask: Tensor, x: Tensor, name: str = "") -> Tensor:
    """Expand ``mask`` bool, whose dims are the first of rows ``x`` [... D], to bool[...]; TypeError or ValueError."""
    if mask.dtype is not torch.bool:
        raise TypeError(f"{name}mask is {mask.dtype}; wanted bool, True for the rows that count")
    if mask.ndim >= x.ndim or mask.shape != x.shape[: mask.ndim]:
        got = f"mask is {tuple(mask.shape)} beside x {tuple(x.shape)}"
        raise ValueError(f"{name}{got}; wanted one bool a row, or the first dims of x")
    return expand_mask(mask, x[..., 0])


def flatten_heads(book: Book, t: Tensor, dims: int = 0) -> Tensor:
    """Reshape ``t`` [... (h) *rest] to [h n *rest], where ``rest`` has ``dims`` dims."""
    *heads, _, _ = book.codes.shape
    outer = math.prod(t.shape[: t.ndim - dims - len(heads)])
    return t.reshape(outer, *heads or [1], *t.shape[t.ndim - dims :]).transpose(0, 1)


def unflatten_heads(t: Tensor, x: Tensor) -> Tensor:
    """Reshape ``t`` [h n *rest] to [... (h) *rest], for x [... (h) D]."""
    return t.transpose(0, 1).reshape((*x.shape[:-1], *t.shape[2:]))


def flat_mask(book: Book, mask: Mask, x: Tensor) -> Tensor | None:
    """Return :func:`row_mask` as [h n]."""
    return None if mask is None else flatten_heads(book, row_mask(mask, x))


def map_tiles(f: Callable[..., Tensor], width: int, *rows: Tensor, shared: tuple[Any, ...] = ()) -> Tensor:
    """Return ``f(*rows, *shared)`` by tiles along dim 0, for an ``f`` that needs ``width`` numbers a row.

    With ``shared``, which is differentiated too, a backward recomputes each tile.
    """
    size = len(rows[0])
    step = max(1, TILE // 4 // width)
    if size <= step:
        return f(*rows, *shared)
    tile = remat(f, order=2) if shared else f
    return torch.cat([tile(*(t[i : i + step] for t in rows), *shared) for i in range(0, size, step)])


def prepare(
    book: Book, x: Tensor, key: Key, mask: Mask, row_offset: RowOffset | None
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Prepare rows ``x`` [... D] for ``apply``, with the errors of :func:`check` and :func:`row_mask`.

    Returns rows, at least float32 and zeros where invalid; which are valid, bool[...]; their numbers i64[h n]; and
    their keys i64[...] for the gradient estimator, or None.
    """
    check(book, x)
    point, valid = zero_invalid(at_least_float32(x), None if mask is None else row_mask(mask, x))
    numbers = number_rows(flat_mask(book, mask, x), flatten_heads(book, x.detach(), 1), row_offset)
    keys = None if key is None else unflatten_heads(row_keys(random.fold(key, "gradient"), numbers), x)
    return point, valid, numbers, keys


def number_rows(kept: Mask, rows: Tensor, row_offset: RowOffset | None) -> Tensor:
    """Number ``rows`` [h n D] among the kept ones of all ranks: i64[h n], arbitrary for rows that are not kept."""
    first = 0 if row_offset is None else row_offset[0]
    if kept is None:
        return (torch.arange(rows.shape[1], device=rows.device) + first).expand(rows.shape[:2])
    return kept.cumsum(1) - 1 + first


def row_keys(key: Tensor, numbers: Tensor) -> Tensor:
    """Derive a key i64[h n] for each row from its head and its number, the same on every rank."""
    heads = len(numbers)
    return random.fold(key, numbers * heads + torch.arange(heads, device=numbers.device)[:, None])


def draw(
    key: Tensor, count: int, rows: Tensor, kept: Mask, valid: Tensor, row_offset: RowOffset | None
) -> tuple[Tensor, Tensor]:
    """Draw ``count`` distinct rows a head from the kept ``rows`` [h n D] of all ranks.

    Returns this rank's among zeros, [h count D], and ones f32[h count] where it has one that is not lost.
    """
    _check_row_offset(row_offset, rows.shape[1] if kept is None else kept)
    heads, size, dim = rows.shape
    num_kept = size if kept is None else kept.sum(1)[:, None]  # [] or [h 1], on this rank
    first, total = (0, num_kept) if row_offset is None else row_offset
    head_keys = random.fold(key, torch.arange(heads, device=rows.device))
    stratum = random.permutation(head_keys, count)  # [h count]
    low, high = stratum * total // count, (stratum + 1) * total // count
    bits = random.bits(random.fold(head_keys, "row"), (heads, count))
    number = low + bits % (high - low).clamp(min=1) - first  # on this rank
    hit = (high > low) & (number >= 0) & (number < num_kept)
    if size == 0:
        return rows.new_zeros(heads, count, dim), rows.new_zeros(heads, count)
    index = torch.where(hit, number, 0)
    if kept is not None:  # the index of each kept row, by its number; the other rows share a slot at the end
        slot = torch.where(kept, kept.cumsum(1) - 1, size)
        indices = torch.arange(size, device=rows.device).expand(heads, size)
        index = slot.new_zeros(heads, size + 1).scatter(1, slot, indices).gather(1, index)
    drawn = rows.gather(1, index[..., None].expand(heads, count, dim))
    hit = hit & valid.gather(1, index)
    return torch.where(hit[..., None], drawn, 0), hit.to(rows.dtype)


def _check_row_offset(row_offset: RowOffset | None, kept: int | Tensor) -> None:
    if row_offset is None or not all(isinstance(t, int) or is_direct(t) for t in (*row_offset, kept)):
        return
    num_kept = kept if isinstance(kept, int) else int(kept.sum(1).max())
    first, total = map(int, row_offset)
    if first < 0 or first + num_kept > total:
        wanted = "wanted no more rows than the total, use shard.rows(len(x) or mask.sum(), mesh, axes)"
        raise ValueError(f"row_offset: got {num_kept} kept rows from number {first} on, of {total} in all; {wanted}")
