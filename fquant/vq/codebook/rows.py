"""rows: which rows of any shape count, how they lie before a book, and how some are drawn from all.

Whatever comes is computed in float32 at least (``wide``), by every quantiser.

*How they lie.* A book sees rows as [h n D], h being 1 without heads, and masks and codes as [h n]; ``lay`` and ``back``
go to and fro.

*Which count.* A mask says which rows are there at all: those it keeps are *kept*. Of these, rows that are not finite,
or have no code, are *lost*: they add nothing to any sum, and are counted. The others are *live*. What is not live is
zeros before anything is computed of it (``settle``), so that it reaches no gradient.

*Drawing.* Codes start at rows, and dead ones start again there. A row is drawn by its number among the kept rows of all
ranks, which is a function of the key alone, so every rank draws the same numbers and puts the rows that it has among
zeros: the sum over ranks are the rows, whichever way they were split. So that no number comes twice, and that nothing
depends on how many rows there are but the numbers, the rows are cut into as many strata as are drawn, and each gives
one, in random order; where rows are fewer, some strata are empty and draw nothing.

``where`` is (first, total): the number of this rank's first kept row, and how many all ranks keep. On a mesh that is
``shard.rows(len(x), mesh, axes)``, or of the sum of the mask; alone, None.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from ... import random
from ...activation_checkpoint import remat
from ...kernels.dispatch import is_direct

if TYPE_CHECKING:
    from .book import Book

TILE = 16 << 20  # bytes of distances between some rows and all codes
SMALLEST = 1e-6  # length below which a row has no direction

Where = tuple[int | Tensor, int | Tensor]


def mask(lengths: Tensor, size: int) -> Tensor:
    """Which of ``size`` places lie within ``lengths`` i64[...]: bool[... size].

    Raises ValueError for a length beyond ``size`` or below zero, where values can be seen.
    """
    if is_direct(lengths) and lengths.numel() and not 0 <= int(lengths.min()) <= int(lengths.max()) <= size:
        raise ValueError(f"lengths: got {int(lengths.min())} to {int(lengths.max())}; wanted 0 to {size}, the places")
    return torch.arange(size, device=lengths.device) < lengths[..., None]


def check(book: Book, x: Tensor) -> None:
    """Raise TypeError unless ``x`` is of floats, ValueError unless it is [... D], with heads [... h D]."""
    if not isinstance(x, Tensor) or not x.is_floating_point():
        got = x.dtype if isinstance(x, Tensor) else type(x).__name__
        raise TypeError(f"x: got {got}; wanted a tensor of floats")
    *front, _, dim = book.codes.shape
    wanted = (*front, dim)
    if x.shape[-len(wanted) :] != wanted or x.ndim < len(wanted):
        shown = " ".join(map(str, wanted))
        raise ValueError(f"x: got shape {tuple(x.shape)} for a book of {dim} dims; wanted [... {shown}]")


def wide(x: Tensor) -> Tensor:
    """At least float32."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def unit(x: Tensor) -> Tensor:
    """``x`` over its length, along the last dim; what is shorter than 1e-6 is taken to be that long."""
    x = x / x.detach().abs().amax(-1, keepdim=True).clamp(min=1)  # else squares of what is large would be inf
    # Of the square, since a length has no second derivative at zero.
    return x * x.square().sum(-1, keepdim=True).clamp(min=SMALLEST**2).rsqrt()


def direction(x: Tensor) -> Tensor:
    """``x`` [... d] at length 1, however short or long it is; zeros stay zeros, and their gradient as it is."""
    largest = x.detach().abs().amax(-1, keepdim=True)
    x = x / torch.where(largest > 0, largest, 1.0)  # which changes no direction, and so no derivative
    return x * x.square().sum(-1, keepdim=True).clamp(min=1.0).rsqrt()


def finite(x: Tensor, dims: int = 1) -> Tensor:
    """Which rows of ``x``, which are its last ``dims`` dims, are finite, bool[...]."""
    return x.isfinite().flatten(-dims).all(-1)


def settle(x: Tensor, kept: Tensor | None, dims: int = 1) -> tuple[Tensor, Tensor]:
    """``x`` with zeros for rows that are not live, and which are, bool[...]: of those ``kept`` the finite ones."""
    live = finite(x, dims) if kept is None else finite(x, dims) & kept
    return torch.where(live[(..., *[None] * dims)], x, 0), live


def expanded(mask: Tensor, like: Tensor) -> Tensor:
    """``mask``, whose dims are the first of ``like``, in its shape."""
    return mask.reshape((*mask.shape, *[1] * (like.ndim - mask.ndim))).expand(like.shape)


def asked(mask: Tensor, x: Tensor, name: str = "") -> Tensor:
    """``mask`` bool, its dims being the first of ``x`` [... d] without the last, as bool[...].

    Raises TypeError for another dtype, ValueError for another shape; ``name`` is whose mask it is.
    """
    if mask.dtype is not torch.bool:
        raise TypeError(f"{name}mask is {mask.dtype}; wanted bool, True for the rows that count")
    if mask.ndim >= x.ndim or mask.shape != x.shape[: mask.ndim]:
        got = f"mask is {tuple(mask.shape)} beside x {tuple(x.shape)}"
        raise ValueError(f"{name}{got}; wanted one bool a row, or the first dims of x")
    return expanded(mask, x[..., 0])


def lay(book: Book, t: Tensor, dims: int = 0) -> Tensor:
    """``t`` [... (h) *rest] as [h n *rest], ``rest`` having so many dims."""
    heads = book.codes.ndim == 3
    lead = t.ndim - dims - heads
    size = math.prod(t.shape[:lead])
    rest = t.shape[t.ndim - dims :]
    return t.reshape(size, book.codes.shape[0], *rest).transpose(0, 1) if heads else t.reshape(1, size, *rest)


def back(book: Book, t: Tensor, x: Tensor) -> Tensor:
    """``t`` [h n *rest] as [... (h) *rest], for x [... (h) D]."""
    return t.transpose(0, 1).reshape((*x.shape[:-1], *t.shape[2:]))


def laid_mask(book: Book, mask: Tensor | None, x: Tensor) -> Tensor | None:
    """The rows that are :func:`asked` for, as [h n]."""
    return None if mask is None else lay(book, asked(mask, x))


def by_rows(f: Callable[..., Tensor], width: int, *per_row: Tensor, given: tuple[Any, ...] = ()) -> Tensor:
    """``f(*per_row, *given)``, so many rows at a time that ``width`` numbers of each fit in a tile; results are joined.

    Of several tiles, none is kept for a backward: with ``given``, what f has besides rows and is differentiated in,
    each is made again there.
    """
    size = len(per_row[0])
    step = max(1, TILE // 4 // width)
    if size <= step:
        return f(*per_row, *given)
    again = remat(f, order=2) if given else f
    return torch.cat([again(*(t[at : at + step] for t in per_row), *given) for at in range(0, size, step)])


class Entered(NamedTuple):
    """What is known of rows x [... D] before they get codes."""

    point: Tensor  # [... D], at least float32, zeros where they are not live
    live: Tensor  # bool[...]
    number: Tensor  # i64[h n], see numbers
    keys: Tensor | None  # i64[...], for what is drawn of the gradient of each


def enter(book: Book, x: Tensor, key: Tensor | None, mask: Tensor | None, where: Where | None) -> Entered:
    """``x`` [... D] as ``apply`` wants it. Raises what :func:`check` and :func:`asked` do."""
    check(book, x)
    point, live = settle(wide(x), None if mask is None else asked(mask, x))
    number = numbers(laid_mask(book, mask, x), lay(book, x.detach(), 1), where)
    each = None if key is None else back(book, keys(random.fold(key, "gradient"), number), x)
    return Entered(point, live, number, each)


def numbers(kept: Tensor | None, rows: Tensor, where: Where | None) -> Tensor:
    """The number i64[h n] of each of ``rows`` [h n D] among the kept ones of all ranks; of others it means nothing."""
    first = 0 if where is None else where[0]
    if kept is None:
        return (torch.arange(rows.shape[1], device=rows.device) + first).expand(rows.shape[:2])
    return kept.cumsum(1) - 1 + first


def keys(key: Tensor, number: Tensor) -> Tensor:
    """A key i64[h n] for each row, of its ``number`` and its head: the same on whichever rank it is."""
    heads = len(number)
    return random.fold(key, number * heads + torch.arange(heads, device=number.device)[:, None])


def draw(
    key: Tensor, count: int, rows: Tensor, kept: Tensor | None, live: Tensor, where: Where | None
) -> tuple[Tensor, Tensor]:
    """``count`` of the kept rows of all ranks for each head: this rank's among zeros [h count D], and f32[h count]
    ones.

    What is kept and not live is drawn as zeros, without the one, and so is what is more than there are rows.
    """
    _check_where(where, rows.shape[1] if kept is None else kept)
    heads, size, dim = rows.shape
    total = (size if kept is None else kept.sum(1)[:, None]) if where is None else where[1]  # [] or [h 1]
    first = 0 if where is None else where[0]
    each = random.fold(key, torch.arange(heads, device=rows.device))
    stratum = random.permutation(each, count)  # [h count]
    low, high = stratum * total // count, (stratum + 1) * total // count
    number = low + random.bits(random.fold(each, "row"), (heads, count)) % (high - low).clamp(min=1) - first
    here = size if kept is None else kept.sum(1)[:, None]
    mine = (high > low) & (number >= 0) & (number < here)
    if size == 0:
        return rows.new_zeros(heads, count, dim), rows.new_zeros(heads, count)
    at = torch.where(mine, number, 0)
    if kept is not None:  # the place of each kept row, by its number on this rank; the others share a slot at the end
        slot = torch.where(kept, kept.cumsum(1) - 1, size)
        place = torch.arange(size, device=rows.device).expand(heads, size)
        at = slot.new_zeros(heads, size + 1).scatter(1, slot, place).gather(1, at)
    found = rows.gather(1, at[..., None].expand(heads, count, dim))
    mine = mine & live.gather(1, at)
    return torch.where(mine[..., None], found, 0), mine.to(rows.dtype)


def _check_where(where: Where | None, kept: int | Tensor) -> None:
    if where is None or not all(isinstance(t, int) or is_direct(t) for t in (*where, kept)):
        return
    here = kept if isinstance(kept, int) else int(kept.sum(1).max())
    first, total = map(int, where)
    if first < 0 or first + here > total:
        raise ValueError(
            f"where: got {here} kept rows from number {first} on, of {total} in all; wanted no more than there are, "
            "use shard.rows(len(x) or mask.sum(), mesh, axes)"
        )
