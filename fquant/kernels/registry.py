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
from . import reference
from .dispatch import DIRECT, backend

LIBRARY = torch.library.Library("fquant", "DEF")
Function = Callable[..., Any]
WAITS = dict[str, Function]()  # by op, why the host waits for the device in a call, or None; of ops that may wait


def by_backend(name: str, *args: Any, **out: Any) -> Any:
    """Call the function ``name`` of the first argument's backend; the reference's in float64, or if it has none."""
    module = reference if args[0].dtype is torch.float64 else backend(args[0].device.type)[1]
    return getattr(module, name, getattr(reference, name))(*args, **out)


def register(
    op: str | Function,
    check: Function,
    empty: Function,
    vmap: Function | None,
    fix: str | None = None,
    *tags: torch.Tag,
    real: Function | None = None,
    out: bool = True,
    waits: Function | None = None,
) -> Function:
    """Define an op, and return it. ``op`` is its schema, or a function with its name and its signature.

    ``check(name, *args)`` raises the errors of a call, and may return arguments that replace ``args`` in the following.
    ``empty(*args)`` returns results for fake tensors. ``real(*args)`` computes (default: :func:`by_backend`). ``vmap``
    is the rule of torch.library with the op in front.

    With ``fix`` a call that needs a derivative raises a TypeError that ends in it. Unless ``out`` is False, the op then
    has an ``out`` overload, for which ``real`` takes the results as ``out``.

    ``waits(*args)`` returns the reason why the host waits for the device in a call, or None. It needs no values.
    Without it no call waits.
    """
    if not isinstance(op, str):  # numbers are not symbolic, unlike shapes
        op = torch.library.infer_schema(op, mutates_args=(), op_name=op.__name__).replace("SymInt ", "int ")
    name = op.partition("(")[0]
    real = real or partial(by_backend, name)

    def checked(*args: Any, **out: Any) -> Any:
        return real(*(check(name, *args) or args), **out)

    def fake(*args: Any) -> Any:
        return empty(*(check(name, *args) or args))

    LIBRARY.define(op, tags=(torch.Tag.pt2_compliant_tag, *tags, *([torch.Tag.cudagraph_unsafe] if waits else [])))
    LIBRARY.impl(name, checked, "CompositeExplicitAutograd")
    torch.library.register_fake(f"fquant::{name}", fake, lib=LIBRARY)
    overload = getattr(torch.ops.fquant, name).default
    if waits is not None:
        WAITS[overload.name()] = lambda *args: waits(*(check(name, *args) or args))
    if vmap is not None:
        torch.library.register_vmap(f"fquant::{name}", partial(vmap, overload), lib=LIBRARY)
    if fix is not None:
        LIBRARY.impl(name, partial(_without_derivatives, overload, fix), "Autograd", with_keyset=True)
    if fix is not None and out:
        _define_out(name, op, checked)
    return overload


def _without_derivatives(op: Any, fix: str, keys: Any, *args: Any) -> Any:
    """Call ``op`` below autograd; TypeError for arguments that carry gradients or tangents."""
    for t in [t for arg in args for t in (arg if isinstance(arg, list) else [arg]) if isinstance(t, Tensor)]:
        kind = "gradient" if t.requires_grad and torch.is_grad_enabled() else "tangent" if is_dual(t) else ""
        if kind:
            raise TypeError(f"a {kind} through {op.name().partition('::')[2]} was asked for; {fix}")
    with torch._C._AutoDispatchBelowAutograd():
        return op.redispatch(keys & torch._C._after_autograd_keyset, *args)


def _define_out(name: str, schema: str, real: Function) -> None:
    """Define ``name.out`` on CPUs, which writes the results of the op ``name`` into given tensors.

    ``real`` takes them as ``out``, one or a list, and C writes there directly; results of other backends are copied.
    They may not share memory with an argument, which is not checked.
    """
    arguments, _, results = schema.removeprefix(name).rpartition(" -> ")
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
    DIRECT[f"fquant::{name}.out"] = compute


def map_rows(op: Function, info: Any, in_dims: Any, *args: Any, shared: Collection[int] = ()) -> Any:
    """Map an op of rows: merge the mapped dim of each tensor into its first dim, and split the results.

    The rest of the arguments is as for a vmap rule of torch.library. Arguments whose places are in ``shared`` have no
    rows and are passed as they are.
    """
    b, rows, each = info.batch_size, list(args), 0
    for i, (arg, dim) in enumerate(zip(args, in_dims, strict=True)):
        if isinstance(arg, Tensor) and i not in shared:
            mapped = arg.expand(b, *arg.shape) if dim is None else arg.movedim(dim, 0)
            rows[i], each = mapped.flatten(0, 1), mapped.shape[1]
    out = op(*rows)
    split = lambda t: t.unflatten(0, (b, len(t) // b if b else each))
    return (split(out), 0) if isinstance(out, Tensor) else (tuple(map(split, out)), (0,) * len(out))
