"""given: what a captured function may be given, and what is told of anything else.

Tensors that are plain: dense, without scales of their own, of no subclass, and without a gradient to be recorded. What
is no tensor has to be hashable. A trace holds for a kind of tensor (fquant/compile/guards.py), and one that is not plain may look
like one that is, so that it is asked for in every call.

key: what of a call a trace holds for; a call with another key is traced again.

That is of tensors all but their values, of anything else itself, and what of torch's state decides what a function
computes: ``torch.ones(3)`` is of the dtype that is the default at the time, ``x @ y`` of autocast's where that is on,
and attention is computed in one of the ways that are allowed. Whether gradients are recorded, and inference mode, are
not among it: a captured function has its gradients inside of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import tree
from .closure import Closure, freeze


def is_plain(t: Tensor) -> bool:
    """Whether memory is what its shape and strides say: a tensor that is dense, and has no scales."""
    return t.layout is torch.strided and not (t.is_nested or t.is_quantized)


def check(name: str, bound: Any) -> None:
    """Raise TypeError for a tensor in the tree ``bound`` that the captured function ``name`` does not take."""
    for path, leaf in tree.items(bound):
        if not isinstance(leaf, Tensor):
            continue
        if type(leaf) not in (Tensor, torch.nn.Parameter):
            raise TypeError(f"{path} is a {type(leaf).__name__}; pass plain tensors, of a mesh shard.local(base)")
        if not is_plain(leaf):
            raise TypeError(f"{path} is a tensor that is {_other(leaf)}; pass a dense one")
        if wants_gradient(leaf):
            raise TypeError(
                f"{path} requires a gradient, which a captured function has none of; capture the gradient: "
                f"jit(grad({name}))"
            )


def unhashable(name: str, bound: Any) -> TypeError:
    """The error for what is neither tensor nor hashable in the tree ``bound``."""
    for path, leaf in tree.items(bound):
        try:
            hash(leaf)
        except TypeError:
            return TypeError(f"{path} is a {type(leaf).__name__}, neither a tensor nor hashable; use a frozen value")
    return TypeError(f"{name}: the structure of the arguments is not hashable")


def _other(t: Tensor) -> str:
    if t.layout is not torch.strided:
        return str(t.layout).removeprefix("torch.")
    return "nested" if t.is_nested else "quantised by torch"


_DEVICES = ("cpu", "cuda", "xpu", "mps")  # whose autocast is asked for


class Ambient(NamedTuple):
    """The state of torch that a trace holds for."""

    dtype: torch.dtype
    device: torch.device | None
    autocast: tuple[tuple[str, torch.dtype], ...]
    deterministic: bool
    attention: tuple[bool, ...]


class Key(NamedTuple):
    """What a trace holds for; hashable if the leaves are."""

    structure: tree.Structure
    kinds: tuple[Any, ...]  # of the leaves
    donated: tuple[bool, ...]  # of the tensors, whether they are written over
    ambient: Ambient
    closure: int  # version of the values that the function reads (fquant.compile.closure)


def key_of(structure: tree.Structure, leaves: Sequence[Any], donated: tuple[bool, ...], closure: int) -> Key:
    """The key of a call, in torch's present state."""
    return Key(structure, tuple(map(_kind, leaves)), donated, _ambient(), closure)


def wants_gradient(t: Tensor) -> bool:
    """Whether autograd would record what becomes of ``t``."""
    return t.requires_grad and torch.is_grad_enabled()


def changes(before: Key, now: Key, paths: Sequence[str], closure: Closure) -> str:
    """Return the differences of two keys as text; ``paths`` are those of the leaves."""
    if now.structure != before.structure:
        return f"the structure of the arguments is {now.structure}, and was {before.structure}"
    pairs = [(path, *each, _told) for path, *each in zip(paths, before.kinds, now.kinds, strict=True)]
    pairs += [(name, *each, str) for name, *each in zip(_NAMES, before.ambient, now.ambient, strict=True)]
    told = [f"{name} is {tell(new)}, and was {tell(old)}" for name, old, new, tell in pairs if old != new]
    told += closure.changes(before.closure, now.closure)
    return "; ".join(told[:3]) or "what shares memory with what was donated"


_NAMES = (
    "torch's default dtype", "torch's default device", "autocast", "whether torch's algorithms are deterministic",
    "what torch's attention may use",
)  # fmt: skip


def _kind(leaf: Any) -> Any:
    if isinstance(leaf, Tensor):
        return (type(leaf), leaf.dtype, leaf.shape, leaf.stride(), leaf.device, wants_gradient(leaf))
    return freeze(leaf)


def _told(kind: Any) -> str:
    if issubclass(kind[0], Tensor):
        return f"{str(kind[1]).removeprefix('torch.')}{list(kind[2])} with strides {list(kind[3])} on {kind[4]}"
    return repr(float.fromhex(kind[1]) if kind[0] is float else kind[1])


def _ambient() -> Ambient:
    on = _DEVICES if torch._C._is_any_autocast_enabled() else ()  # type: ignore[attr-defined]
    return Ambient(
        torch.get_default_dtype(),
        torch.get_default_device() if torch._C._is_torch_function_mode_enabled() else None,  # it is such a mode
        tuple((kind, torch.get_autocast_dtype(kind)) for kind in on if torch.is_autocast_enabled(kind)),
        torch.are_deterministic_algorithms_enabled(),
        tuple(getattr(torch._C, f"_get_{name}_sdp_enabled")() for name in ("math", "flash", "mem_efficient", "cudnn")),
    )
