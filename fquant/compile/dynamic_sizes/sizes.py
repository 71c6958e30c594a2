"""Sizes that vary from call to call, and arguments that are padded to the next of a few."""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ...device import HOST
from ..guards import is_plain
from .results import same_up_to_rounding

Verify = Callable[[Any, Any], None]


@dataclasses.dataclass(frozen=True)
class DynamicSize:
    """A size that varies from call to call, of one or several arguments.

        name    in errors
        to      the sizes to pad to, increasing; or a number: itself and its doublings, without a bound
        agree   every rank of the default group calls the function and takes the size of the largest
        verify  compares a cut result with that of arguments that are not padded, and raises; None compares nothing

    ``verify`` gets two trees of one structure and shapes. Name another for results that rounding changes by more, such
    as codes of packed moments. Raises ValueError for sizes that are not positive and increasing.
    """

    name: str
    to: int | Sequence[int]
    agree: bool = False
    verify: Verify | None = same_up_to_rounding

    def __post_init__(self) -> None:
        if not isinstance(self.to, int):
            object.__setattr__(self, "to", tuple(self.to))  # which is hashable
        sizes = (self.to,) if isinstance(self.to, int) else self.to
        if not sizes or sizes[0] < 1 or any(b <= a for a, b in zip(sizes, sizes[1:], strict=False)):
            raise ValueError(f"DynamicSize({self.name!r}): to is {self.to}; wanted positive sizes that increase")


@dataclasses.dataclass(frozen=True)
class Padded:
    """An argument whose ``dim``, which may count from the end, has a varying ``size``; behind it is ``value``."""

    size: DynamicSize
    dim: int
    value: bool | int | float


def next_size(size: DynamicSize, n: int) -> int:
    """Return the least size of ``size.to`` that holds ``n``."""
    if isinstance(size.to, int):
        return size.to << max(0, math.ceil(n / size.to) - 1).bit_length()
    return next(each for each in size.to if each >= n)


def pad(t: Tensor, dim: int, to: int, value: Any) -> Tensor:
    """Return ``t`` with ``value`` behind its elements along ``dim``; contiguous, so that layouts cause no trace."""
    if t.shape[dim] == to or not is_plain(t):
        return t.contiguous()
    shape = list(t.shape)
    shape[dim] = to
    out = torch.full(shape, value, dtype=t.dtype, device=t.device)
    out.narrow(dim, 0, t.shape[dim]).copy_(t)
    return out


@functools.lru_cache(typed=True)
def holds(dtype: torch.dtype, value: Any) -> bool:
    """Return True if ``dtype`` has ``value``, up to the rounding of a float."""
    try:
        found = torch.tensor(value, dtype=dtype, device=HOST).item()
    except (RuntimeError, TypeError, OverflowError):
        return False
    return found == value or (dtype.is_floating_point and (value != value or math.isfinite(found)))
