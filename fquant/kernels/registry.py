"""The torch.library of ``fquant::`` and the registration of its forward-only ops.

An op has a real and a fake implementation, a vmap rule, and no derivative: torch would silently use zeros, so the
autograd key raises TypeError. On CPUs an op also has an overload ``name.out``, which memory plans call.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..autodiff import is_dual
from . import dispatch_bypass
from .dispatch import backend

LIBRARY = torch.library.Library("fquant", "DEF")


def define(name: str, schema: str, real: Any, fake: Any, vmap: Any, *tags: torch.Tag) -> Callable[..., Any]:
    """Define an op without an autograd rule, for results that have no derivative, and return it.

    ``fake`` and ``vmap`` are as torch.library wants them; with ``vmap`` None the op has no rule.
    """
    LIBRARY.define(name + schema, tags=(torch.Tag.pt2_compliant_tag, *tags))
    LIBRARY.impl(name, real, "CompositeExplicitAutograd")
    torch.library.register_fake(f"fquant::{name}", fake, lib=LIBRARY)
    if vmap is not None:
        torch.library.register_vmap(f"fquant::{name}", vmap, lib=LIBRARY)
    return getattr(torch.ops.fquant, name).default


def register(name: str, schema: str, real: Any, fake: Any, vmap: Any, fix: str, *tags: torch.Tag) -> Callable[..., Any]:
    """Define an op that refuses derivatives and has an ``out`` overload, and return it.

    A call that needs a derivative raises a TypeError that ends in ``fix``.
    """
    op = define(name, schema, real, fake, vmap, *tags)
    refuse_derivatives(name, fix)
    define_out(name, schema, real)
    return op


def refuse_derivatives(name: str, fix: str) -> None:
    """Make the op ``name`` raise TypeError for arguments that carry gradients or tangents."""
    LIBRARY.impl(name, partial(_without_derivatives, name, fix), "Autograd", with_keyset=True)


def _without_derivatives(name: str, fix: str, keys: Any, *args: Any) -> Any:
    for t in [t for arg in args for t in (arg if isinstance(arg, list) else [arg]) if isinstance(t, Tensor)]:
        if t.requires_grad and torch.is_grad_enabled():
            raise TypeError(f"a gradient through {name} was asked for; {fix}")
        if is_dual(t):
            raise TypeError(f"a tangent through {name} was asked for; {fix}")
    with torch._C._AutoDispatchBelowAutograd():
        return getattr(torch.ops.fquant, name).default.redispatch(keys & torch._C._after_autograd_keyset, *args)


def define_out(name: str, schema: str, real: Callable[..., Any]) -> None:
    """Define ``name.out`` on CPUs, which writes the results of the op ``name`` into given tensors.

    ``real`` takes them as ``out``, one or a tuple, and C writes there directly; results of other backends are copied.
    They may not share memory with an argument, which is not checked.
    """
    arguments, _, results = schema.rpartition(" -> ")
    names = [f"out{i}" for i in range(results.count("Tensor"))]
    listed = ", ".join(f"Tensor({chr(ord('a') + i)}!) {out}" for i, out in enumerate(names))
    LIBRARY.define(f"{name}.out{arguments[:-1]}, *, {listed}) -> ()", tags=(torch.Tag.pt2_compliant_tag,))

    def compute(*args: Any, **named: Any) -> None:
        out: list[Tensor] = [named.pop(name) for name in names]
        in_c = backend("cpu")[0] == "cpu" and all(t.dtype is not torch.float64 for t in out)
        results = real(*args, **named, **({"out": out if len(out) != 1 else out[0]} if in_c else {}))
        for t, result in zip(out, [results] if isinstance(results, Tensor) else results, strict=True):
            if result.data_ptr() != t.data_ptr():
                t.copy_(result)

    LIBRARY.impl(f"{name}.out", compute, "CPU")
    dispatch_bypass.add(f"fquant::{name}.out", compute)


def map_rows(op: Callable[..., Any], info: Any, in_dims: Any, *args: Any, shared: Collection[int] = ()) -> Any:
    """Map an op of rows: merge the mapped dim of each tensor into its first dim, and split the results.

    The rest of the arguments is as for a vmap rule of torch.library. Arguments whose places are in ``shared`` have no
    rows and are passed as they are.
    """
    b, rows = info.batch_size, list(args)
    for i, (arg, dim) in enumerate(zip(args, in_dims, strict=True)):
        if isinstance(arg, Tensor) and i not in shared:
            rows[i] = (arg.expand(b, *arg.shape) if dim is None else arg.movedim(dim, 0)).flatten(0, 1)
    out = op(*rows)
    split = lambda t: t.unflatten(0, (b, len(t) // b))
    return (split(out), 0) if isinstance(out, Tensor) else (tuple(map(split, out)), (0,) * len(out))
