"""Saved tensors, modes and forward mode inside autograd Functions under torch.func.

*Dead wrappers.* A backward may run after a transform around its forward has ended, as that of torch.func.vjp does.
Saved tensors are then still wrapped for levels that have ended. A vjp with respect to them fails inside torch
("escaped?"), so a backward that calls vjp passes its saved tensors through :func:`unwrap_dead` first.

*Forward mode.* torch disables forward mode while the jvp of a Function runs, and the second forward derivative would
silently be wrong. Every jvp therefore computes inside :func:`forward_mode`, which enables it again. It yields the saved
tensors without the tangents of this jvp, and with those of the outer ones.

*Modes.* torch calls a Function of torch.func, and every backward, outside of the function modes around the call, such
as ``with torch.device(...)``. A backward runs outside of autocast too, if a function entered it within its gradient.
What runs a caller's function there notes :func:`current_modes` at the call, and runs it :func:`in_modes`.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._C._functorch import (
    get_unwrapped,
    is_batchedtensor,
    is_functorch_wrapped_tensor,
    maybe_get_level,
    unwrap_if_dead,
)
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.autograd import forward_ad
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack, _pop_mode, _push_mode

from . import tree
from .device import HOST


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


class Modes(NamedTuple):
    """Autocast by type of device (type, dtype, enabled, with a cache of casts), and function modes, outermost first."""

    autocast: tuple[tuple[str, torch.dtype, bool, bool], ...]
    functions: tuple[TorchFunctionMode, ...]


def current_modes(tensors: Sequence[Tensor]) -> Modes:
    """Return the modes of here, with autocast for the host and the devices of ``tensors``."""
    types = dict.fromkeys([HOST.type, *(t.device.type for t in tensors)])
    autocast = tuple(_autocast(of) for of in types if torch.amp.is_autocast_available(of))
    return Modes(autocast, tuple(_get_current_function_mode_stack()))


@contextmanager
def in_modes(modes: Modes) -> Iterator[None]:
    """Run what is inside in ``modes`` in place of those of here."""
    here = _get_current_function_mode_stack()
    with ExitStack() as stack:
        for each in modes.autocast:
            if each != _autocast(each[0]):
                stack.enter_context(torch.autocast(*each))
        _replace_modes(modes.functions)
        stack.callback(_replace_modes, here)
        yield


def _autocast(of: str) -> tuple[str, torch.dtype, bool, bool]:
    return of, torch.get_autocast_dtype(of), torch.is_autocast_enabled(of), torch.is_autocast_cache_enabled()


def _replace_modes(modes: Sequence[TorchFunctionMode]) -> None:
    """Make ``modes`` the stack of function modes, without entering them again."""
    for _ in _get_current_function_mode_stack():
        _pop_mode()
    for mode in modes:
        _push_mode(mode)


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


def mapped_levels(t: Tensor) -> set[int]:
    """Return the levels of the vmaps that map over a dim of ``t``."""
    return {maybe_get_level(each) for each in layers(t) if is_batchedtensor(each)}


def has_derivatives(t: Tensor) -> bool:
    """Return True if ``t`` carries a gradient or a tangent, or a transform of torch.func other than vmap wraps it."""
    *wrapped, plain = each = [*layers(t)]
    recorded = torch.is_grad_enabled() and any(x.requires_grad for x in each)
    return recorded or is_dual(plain) or not all(map(is_batchedtensor, wrapped))


def in_dual_level() -> bool:
    """Return True inside a ``dual_level``, where tensors may have tangents."""
    return forward_ad._current_level >= 0


def is_dual(t: Tensor) -> bool:
    """Return True if ``t`` has a tangent in a ``dual_level``."""
    inner = (x for x in layers(t) if not is_batchedtensor(x))  # vmap has no rule for unpack_dual
    return in_dual_level() and any(forward_ad.unpack_dual(x).tangent is not None for x in inner)


def has_tangent(t: Tensor) -> bool:
    """Return :func:`is_dual` of ``t``, also inside a Function or a transform, where torch hides tangents of outside."""
    if is_functorch_wrapped_tensor(t) or not in_dual_level():
        return is_dual(t)
    with temporarily_clear_interpreter_stack(), forward_ad._set_fwd_grad_enabled(True):  # type: ignore[attr-defined]
        return is_dual(t)


def check_floats(x: Any, fix: str, allow_complex: bool = True) -> None:
    """Raise TypeError, naming the path, unless every leaf is a float tensor, or a complex one if these are allowed."""
    for path, leaf in tree.items(x):
        is_tensor = isinstance(leaf, torch.Tensor)
        if not is_tensor or not (leaf.is_floating_point() or (allow_complex and leaf.is_complex())):
            got = str(leaf.dtype).removeprefix("torch.") if is_tensor else type(leaf).__name__
            with tree.at(path):
                raise TypeError(f"got {got}, wanted a float tensor; {fix}")
