"""The torch.library of ``fquant::`` and the registration of its forward-only ops.

An op has a real and a fake implementation, a vmap rule, and no derivative: torch would silently use zeros, so the
autograd key raises TypeError. On CPUs an op also has an overload ``name.out``, which memory plans call.
"""

from collections.abc import Callable, Collection
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..autodiff import is_dual
from . import dispatch_bypass, reference
from .dispatch import backend

LIBRARY = torch.library.Library("fquant", "DEF")
Function = Callable[..., Any]


def by_backend(name: str, *args: Any, **out: Any) -> Any:
    """Call the function ``name`` of the backend of the first argument, or in float64 of the reference."""
    module = reference if args[0].dtype is torch.float64 else backend(args[0].device.type)[1]
    return getattr(module, name)(*args, **out)


def register(
    name: str,
    schema: str,
    check: Function,
    empty: Function,
    vmap: Function | None,
    fix: str | None = None,
    *tags: torch.Tag,
    real: Function | None = None,
) -> Function:
    """Define an op, and return it.

    ``check(name, *args)`` raises the errors of a call. Then ``empty(*args)`` returns results for fake tensors, and
    ``real(*args)`` computes (default: :func:`by_backend`). ``vmap`` is the rule of torch.library with the op in front.

    With ``fix`` a call that needs a derivative raises a TypeError that ends in it. The op then has an ``out`` overload,
    for which ``real`` takes the results as ``out``.
    """  # fmt: skip
    real = real or partial(by_backend, name)

    def checked(*args: Any, **out: Any) -> Any:
        check(name, *args)
        return real(*args, **out)

    def fake(*args: Any) -> Any:
        check(name, *args)
        return empty(*args)

    LIBRARY.define(name + schema, tags=(torch.Tag.pt2_compliant_tag, *tags))
    LIBRARY.impl(name, checked, "CompositeExplicitAutograd")
    torch.library.register_fake(f"fquant::{name}", fake, lib=LIBRARY)
    op = getattr(torch.ops.fquant, name).default
    if vmap is not None:
        torch.library.register_vmap(f"fquant::{name}", partial(vmap, op), lib=LIBRARY)
    if fix is not None:
        refuse_derivatives(name, fix)
        define_out(name, schema, checked)
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


def define_out(name: str, schema: str, real: Function) -> None:
    """Define ``name.out`` on CPUs, which writes the results of the op ``name`` into given tensors.

    ``real`` takes them as ``out``, one or a list, and C writes there directly; results of other backends are copied.
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


def map_rows(op: Function, info: Any, in_dims: Any, *args: Any, shared: Collection[int] = ()) -> Any:
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
