"""given: what a captured function may be given, and what is told of anything else.

Tensors that are plain: dense, without scales of their own, of no subclass, and without a gradient to be recorded. What
is no tensor has to be hashable. A trace holds for a kind of tensor (fquant/key.py), and one that is not plain may look
like one that is, so that it is asked for in every call.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from . import tree
from .key import wants_gradient


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
