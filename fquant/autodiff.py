"""Saved tensors and forward mode inside autograd Functions under torch.func.

*Dead wrappers.* A backward may run after a transform around its forward has ended: torch.func.vjp returns before the
function that it returns is called. Saved tensors are then still wrapped for levels that have ended. Ops see through
such wrappers. A vjp with respect to them fails inside torch ("level.has_value() && level <= current_level",
"escaped?") if one has no gradient within an outer transform. So a backward that calls vjp passes its saved tensors
through :func:`unwrap_dead` first.

*Forward mode.* torch disables forward mode while the jvp of a Function runs. Values computed there carry no tangents,
so an outer jvp would find zeros, and the second forward derivative would be silently wrong. Every jvp therefore
computes inside :func:`forward_mode`, which enables it again. It yields the saved tensors without the tangents of this
jvp, which are its other arguments, and with those of the outer ones.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from torch import Tensor
from torch._C._functorch import get_unwrapped, is_batchedtensor, is_functorch_wrapped_tensor, unwrap_if_dead
from torch.autograd import forward_ad


def unwrap_dead(saved: Sequence[Tensor]) -> list[Tensor]:
    """Remove from ``saved`` tensors the wrappers of transforms that have ended."""
    return [_unwrap_dead(t) for t in saved]


def _unwrap_dead(t: Tensor) -> Tensor:
    while is_functorch_wrapped_tensor(t) and (inner := unwrap_if_dead(t)) is not t:
        t = inner
    return t


@contextmanager
def forward_mode(saved: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Enable forward mode as outside of the Function; yield the primals of the ``saved`` tensors."""
    with forward_ad._set_fwd_grad_enabled(True):  # type: ignore[attr-defined]
        yield [forward_ad.unpack_dual(t).primal for t in saved]


def is_mapped(t: Tensor) -> bool:
    """Return True if a vmap maps over a dim of ``t``."""
    while is_functorch_wrapped_tensor(t):
        if is_batchedtensor(t):
            return True
        t = get_unwrapped(t)
    return False


def is_dual(t: Tensor) -> bool:
    """Return True if ``t`` has a tangent in a ``dual_level``."""
    return forward_ad._current_level >= 0 and forward_ad.unpack_dual(t).tangent is not None
