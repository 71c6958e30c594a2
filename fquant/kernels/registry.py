"""Registry: split from fquant.kernels.

register: an op of ``fquant::`` that computes values only, as torch wants to be told of it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..autodiff import is_dual
from . import dispatch_bypass
from .dispatch import backend

LIBRARY = torch.library.Library("fquant", "DEF")


def constant(name: str, fix: str, keys: Any, *args: Any) -> Any:
    """In autograd's place: an op has no derivative, and whoever asks it for one is told; torch would give zeros."""
    for t in [t for arg in args for t in (arg if isinstance(arg, list) else [arg]) if isinstance(t, Tensor)]:
        if t.requires_grad and torch.is_grad_enabled():
            raise TypeError(f"a gradient through {name} was asked for; {fix}")
        if is_dual(t):
            raise TypeError(f"a tangent through {name} was asked for; {fix}")
    with torch._C._AutoDispatchBelowAutograd():
        return getattr(torch.ops.fquant, name).default.redispatch(keys & torch._C._after_autograd_keyset, *args)


def into(library: torch.library.Library, name: str, schema: str, real: Callable[..., Any]) -> None:
    """Define ``name.out``, the op ``name`` that writes its results into tensors of their kind, on CPUs.

    ``real`` takes them as ``out``, one or a tuple, from which the kernels of csrc/kernels.c read where to write; what another
    backend made is copied there. They may not share memory with what is read, which nobody checks.
    """
    given, _, made = schema.rpartition(" -> ")
    names = [f"out{i}" for i in range(made.count("Tensor"))]
    listed = ", ".join(f"Tensor({chr(ord('a') + i)}!) {one}" for i, one in enumerate(names))
    library.define(f"{name}.out{given[:-1]}, *, {listed}) -> ()", tags=(torch.Tag.pt2_compliant_tag,))

    def compute(*args: Any, **named: Any) -> None:
        out: list[Tensor] = [named.pop(one) for one in names]
        in_c = backend("cpu")[0] == "cpu" and all(t.dtype is not torch.float64 for t in out)
        told = {"out": out if len(out) != 1 else out[0]} if in_c else {}
        results = real(*args, **named, **told)
        for t, result in zip(out, [results] if isinstance(results, Tensor) else results, strict=True):
            if result.data_ptr() != t.data_ptr():
                t.copy_(result)

    library.impl(f"{name}.out", compute, "CPU")
    dispatch_bypass.add(f"fquant::{name}.out", compute)


def register(name: str, schema: str, real: Any, fake: Any, vmap: Any, fix: str, *tags: torch.Tag) -> Callable[..., Any]:
    """The op ``name``, computed by ``real``; ``fake`` and ``vmap`` are as torch.library wants them.

    Who asks it for a derivative gets a TypeError that says ``fix``.
    """
    LIBRARY.define(name + schema, tags=(torch.Tag.pt2_compliant_tag, *tags))
    LIBRARY.impl(name, real, "CompositeExplicitAutograd")
    LIBRARY.impl(name, partial(constant, name, fix), "Autograd", with_keyset=True)
    into(LIBRARY, name, schema, real)
    torch.library.register_fake(f"fquant::{name}", fake, lib=LIBRARY)
    torch.library.register_vmap(f"fquant::{name}", vmap, lib=LIBRARY)
    return getattr(torch.ops.fquant, name).default
