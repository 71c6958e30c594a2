"""alive: what an autograd Function saved, without the transforms that have ended since.

The backward of a Function may run when transforms around its forward have ended: torch.func.vjp returns before what it
returns is called. Tensors that were saved are then wrapped in levels that are no more. Ops see through them, but a vjp
of them, in which one has no gradient, fails inside of torch ("level.has_value() && level <= current_level", "escaped?")
where a transform further out is still there. So a backward that takes a vjp takes it of what :func:`alive` gives.

forward: forward mode inside the jvp of an autograd Function.

torch turns forward mode off while the jvp of a Function runs. What is computed there has no tangents then, and a jvp
around the first finds zeros: the second forward derivative would be silently wrong. So every such jvp computes inside
:func:`forward`, which turns it on again, and gives what the Function saved without the tangents of this jvp, which are
its other arguments, and with those of the ones around it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from torch import Tensor
from torch._C._functorch import get_unwrapped, is_batchedtensor, is_functorch_wrapped_tensor, unwrap_if_dead
from torch.autograd import forward_ad


def unwrap_dead(saved: Sequence[Tensor]) -> list[Tensor]:
    """The tensors ``saved`` as seen by the transforms that are at work."""
    return [_alive(t) for t in saved]


def _alive(t: Tensor) -> Tensor:
    while is_functorch_wrapped_tensor(t) and (inner := unwrap_if_dead(t)) is not t:
        t = inner
    return t


@contextmanager
def forward_mode(saved: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Forward mode as outside of the Function; gives the primals of the tensors ``saved``."""
    with forward_ad._set_fwd_grad_enabled(True):  # type: ignore[attr-defined]
        yield [forward_ad.unpack_dual(t).primal for t in saved]


def is_mapped(t: Tensor) -> bool:
    """Return True if a vmap that is at work maps over a dim of ``t``."""
    while is_functorch_wrapped_tensor(t):
        if is_batchedtensor(t):
            return True
        t = get_unwrapped(t)
    return False


def is_dual(t: Tensor) -> bool:
    """Whether a tensor has a tangent, in a ``dual_level``."""
    return forward_ad._current_level >= 0 and forward_ad.unpack_dual(t).tangent is not None
