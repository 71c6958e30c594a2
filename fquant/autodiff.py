"""Saved tensors and forward mode inside autograd Functions under torch.func.

*Dead wrappers.* A backward may run after a transform around its forward has ended, as that of torch.func.vjp does.
Saved tensors are then still wrapped for levels that have ended. A vjp with respect to them fails inside torch
("escaped?"), so a backward that calls vjp passes its saved tensors through :func:`unwrap_dead` first.

*Forward mode.* torch disables forward mode while the jvp of a Function runs, and the second forward derivative would
silently be wrong. Every jvp therefore computes inside :func:`forward_mode`, which enables it again. It yields the saved
tensors without the tangents of this jvp, and with those of the outer ones.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._C._functorch import get_unwrapped, is_batchedtensor, is_functorch_wrapped_tensor, unwrap_if_dead
from torch.autograd import forward_ad


def unwrap_dead(saved: Sequence[Tensor]) -> list[Tensor]:
    """Remove from ``saved`` tensors the wrappers of transforms that have ended."""
    out = []
    for t in saved:
        while is_functorch_wrapped_tensor(t) and (inner := unwrap_if_dead(t)) is not t:
            t = inner
        out.append(t)
    return out


@contextmanager
def forward_mode(saved: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Enable forward mode as outside of the Function; yield the primals of the ``saved`` tensors."""
    with forward_ad._set_fwd_grad_enabled(True):  # type: ignore[attr-defined]
        yield [forward_ad.unpack_dual(t).primal for t in saved]


def pull_back(f: Callable[..., Any], inputs: Sequence[Tensor], wanted: Sequence[int], grads: Sequence[Any]) -> Any:
    """Return the gradients of the ``wanted`` inputs of ``f``, given those of its results; None is zero."""
    of_wanted = lambda *some: f(*replace_at(inputs, wanted, some))
    outputs, pull, *_ = torch.func.vjp(of_wanted, *[inputs[i] for i in wanted])
    return pull(tuple(torch.zeros_like(t) if g is None else g for g, t in zip(grads, outputs, strict=True)))


def push_forward(f: Callable[..., Any], saved: Sequence[Tensor], tangents: Sequence[Any]) -> Any:
    """Return the tangents of the results of ``f``, given those of its ``saved`` inputs; None is zero."""
    moving = [i for i, t in enumerate(tangents) if t is not None]
    with forward_mode(saved) as inputs:
        of_moving = lambda *some: f(*replace_at(inputs, moving, some))
        return torch.func.jvp(of_moving, tuple(inputs[i] for i in moving), tuple(tangents[i] for i in moving))[1]


def replace_at(values: Sequence[Any], positions: Sequence[int], replacements: Sequence[Any]) -> list[Any]:
    """Return ``values`` with ``replacements`` at ``positions``."""
    out = list(values)
    for i, item in zip(positions, replacements, strict=True):
        out[i] = item
    return out


def to_front(t: Tensor, dim: int | None, batch_size: int) -> Tensor:
    """Move the mapped ``dim`` of ``t`` to the front; expand an argument that is not mapped."""
    return t.expand(batch_size, *t.shape) if dim is None else t.movedim(dim, 0)


def layers(t: Tensor) -> Iterator[Tensor]:
    """Yield ``t`` as every surrounding torch.func transform wraps it, from the innermost to the plain tensor."""
    yield t
    while is_functorch_wrapped_tensor(t):
        t = get_unwrapped(t)
        yield t


def is_mapped(t: Tensor) -> bool:
    """Return True if a vmap maps over a dim of ``t``."""
    return any(map(is_batchedtensor, layers(t)))


def is_transformed(t: Tensor) -> bool:
    """Return True if a transform of torch.func wraps ``t``, or if it carries a gradient or a tangent."""
    return is_functorch_wrapped_tensor(t) or (t.requires_grad and torch.is_grad_enabled()) or is_dual(t)


def is_dual(t: Tensor) -> bool:
    """Return True if ``t`` has a tangent in a ``dual_level``."""
    return forward_ad._current_level >= 0 and forward_ad.unpack_dual(t).tangent is not None
