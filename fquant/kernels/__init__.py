"""The arithmetic of packed arrays as four forward-only ops, and the table of who computes them where.

    encode(rows, format)               f[... n] to codes and absmax
    decode(buffers, spec, out)         a packed array to f[*stack *shape] in dtype ``out``
    matmul(x, buffers, spec)           x · Wᵀ for W packed: f[*stack m in] to f[*stack m out]
    matmul_t(g, buffers, spec)         g · W, its dual:     f[*stack m out] to f[*stack m in]

``buffers`` are the leaves of a Packed and ``spec`` is the rest of it (``spec.py``). Each op is registered with torch
under ``fquant::``, with a fake implementation and without autograd, so that capture and compile see one node and the
derivatives are written once, in ``fquant/linear.py``; an op that is asked for a derivative itself says so.

Who computes is a table, device -> backend: ``cpu`` (cpu.c, all there is in C) for CPU tensors, ``triton`` for CUDA
tensors, and ``reference`` (plain torch, the definition of right) on any other device, or where a backend cannot be
had, which is said once. The environment variable ``FQUANT_KERNELS=reference|cpu|triton`` forces one, and
``cpu:avx2`` one instruction set of it. The ops of random words, in ``threefry.py``, those of a loss of logits, in
``nll.py``, of norms, in ``norm.py``, of attention, in ``attention.py``, of silu, in ``silu.py``, and the programs of
captured graphs, in ``pointwise.py``, to which ``turn.py`` belongs, go by the same table. The op of the nearest of
many rows, in ``nearest.py``, is torch's matrix product in tiles on every device; so are products with arrays of
learned vectors, in ``vectors.py``.
"""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Callable, Sequence
from functools import cache, partial
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils.flop_counter import register_flop_formula

from ..format import Format, num_blocks, num_bytes, read
from ..forward import is_dual
from . import direct, reference, vectors
from .spec import FLOATS, Spec, check, code_dtype

VARIABLE = "FQUANT_KERNELS"
BACKENDS = ("reference", "cpu", "triton")
BY_DEVICE = {"cpu": "cpu", "cuda": "triton"}
_COMPUTED = (*FLOATS, torch.float64)
_PACKED = "Tensor[] buffers, str format, int[] shape, ScalarType dtype"
SCHEMAS = {
    "encode": "(Tensor rows, str format) -> (Tensor codes, Tensor absmax)",
    "decode": f"({_PACKED}, ScalarType out) -> Tensor",
    "matmul": f"(Tensor x, {_PACKED}) -> Tensor",
    "matmul_t": f"(Tensor g, {_PACKED}) -> Tensor",
}


def encode(rows: Tensor, format: Format) -> tuple[Tensor, Tensor]:
    """``rows`` f[... n] to (codes u8[... n·bits/8] or i8[... n], absmax f32[... blocks])."""
    return _OPS["encode"](rows, format.text)


def decode(buffers: Sequence[Tensor], spec: Spec, out: torch.dtype) -> Tensor:
    """The array that the buffers stand for, f[*stack *shape], in ``spec.dtype``, rounded once, then in ``out``."""
    return _OPS["decode"](buffers, spec.format.text, spec.shape, spec.dtype, out)


def matmul(x: Tensor, buffers: Sequence[Tensor], spec: Spec) -> Tensor:
    """``x · Wᵀ``: x f[*stack m in] and the buffers of a packed [*stack out in] to f[*stack m out] in x's dtype."""
    if is_direct(x, *buffers):
        return product("matmul", x, buffers, spec)
    return _OPS["matmul"](x, buffers, spec.format.text, spec.shape, spec.dtype)


def matmul_t(g: Tensor, buffers: Sequence[Tensor], spec: Spec) -> Tensor:
    """``g · W``: g f[*stack m out] and the buffers of a packed [*stack out in] to f[*stack m in] in g's dtype."""
    if is_direct(g, *buffers):
        return product("matmul_t", g, buffers, spec)
    return _OPS["matmul_t"](g, buffers, spec.format.text, spec.shape, spec.dtype)


def is_direct(*tensors: Tensor) -> bool:
    """Whether only the kernel has to see a call: no derivative, transform, mode, subclass, profiler or lazy tensor.

    A product of one row is then not sent through torch's dispatcher, which takes a tenth as long as the product.
    """
    if torch.compiler.is_dynamo_compiling() or torch._C._are_functorch_transforms_active():
        return False
    if torch._C._len_torch_dispatch_stack() or torch._C._is_torch_function_mode_enabled():
        return False
    if forward_ad._current_level >= 0 or torch.autograd._profiler_enabled():
        return False
    wanted = torch.is_grad_enabled()
    for t in tensors:  # a loop, as `all` of a generator takes three times as long
        if type(t) is not Tensor or _is_wrapped(t) or (wanted and t.requires_grad) or direct.is_lazy(t):
            return False
    return True


_is_wrapped = torch._C._functorch.is_functorch_wrapped_tensor  # type: ignore[attr-defined]  # as those that a vjp keeps


def backend(device: str) -> tuple[str, ModuleType]:
    """The name and the module of what computes for tensors on ``device``.

    Raises ValueError where FQUANT_KERNELS names no backend, or one that cannot compute there, and RuntimeError where
    the one it names cannot be had.
    """
    return _backend(os.environ.get(VARIABLE), device)


@cache
def _backend(asked: str | None, device: str) -> tuple[str, ModuleType]:
    if asked is None:
        name = BY_DEVICE.get(device, "reference")
        found = _load(name)
        if isinstance(found, ModuleType):
            return name, found
        _warn_once(name, found)
        return "reference", reference
    name, _, detail = asked.partition(":")
    if name not in BACKENDS or (detail and name != "cpu"):
        raise ValueError(f"{VARIABLE} is {asked!r}; wanted one of {', '.join(BACKENDS)}, or cpu:ISA")
    found = _load(name)
    if not isinstance(found, ModuleType):
        raise RuntimeError(f"{VARIABLE} is {asked!r}, but {found}")
    if device not in getattr(found, "DEVICES", (device,)):
        raise ValueError(f"{VARIABLE} is {asked!r}, but the tensors are on {device}; unset it or move them")
    return name, found


@cache
def _load(name: str) -> ModuleType | str:
    """The module of a backend, or why it cannot be had."""
    if name == "reference":
        return reference
    try:
        if name == "cpu":
            from . import cpu as module
        else:
            from . import triton as module
        module.load()
    except (ImportError, OSError) as error:
        return str(error)
    return module


@cache
def _warn_once(name: str, reason: str) -> None:
    message = f"fquant computes in plain torch, several times slower: {reason}"
    warnings.warn(message, RuntimeWarning, stacklevel=2)


def _of(format: Format, device: torch.device) -> ModuleType:
    """What computes with arrays of ``format`` on ``device``."""
    return backend(device.type)[1] if format.vectors is None else vectors


def _encode(rows: Tensor, format: str) -> tuple[Tensor, Tensor]:
    _check_rows(rows, kind := read(format))
    return backend(rows.device.type)[1].encode(rows, kind)


def _encode_fake(rows: Tensor, format: str) -> tuple[Tensor, Tensor]:
    _check_rows(rows, kind := read(format))
    *outer, width = rows.shape
    return (
        rows.new_empty(*outer, num_bytes(kind, width), dtype=code_dtype(kind)),
        rows.new_empty(*outer, num_blocks(kind, width), dtype=torch.float32),
    )


def _decode(buffers: list[Tensor], format: str, shape: list[int], dtype: torch.dtype, out: torch.dtype) -> Tensor:
    spec = Spec(read(format), tuple(shape), dtype)
    _check_decode(spec, buffers, out)
    return _of(spec.format, buffers[0].device).decode(buffers, spec, out)


def _decode_fake(buffers: list[Tensor], format: str, shape: list[int], dtype: torch.dtype, out: torch.dtype) -> Tensor:
    stack = _check_decode(Spec(read(format), tuple(shape), dtype), buffers, out)
    return buffers[0].new_empty(*stack, *shape, dtype=out)


def _product(
    name: str, x: Tensor, buffers: list[Tensor], format: str, shape: list[int], dtype: torch.dtype, **out: Tensor
) -> Tensor:
    return product(name, x, buffers, Spec(read(format), tuple(shape), dtype), **out)


def product(name: str, x: Tensor, buffers: Sequence[Tensor], spec: Spec, **out: Tensor) -> Tensor:
    """The op ``name``, a product, computed without the dispatcher; right only where :func:`is_direct` holds."""
    _check_product(name, x, buffers, spec)
    return getattr(_of(spec.format, x.device), name)(x, buffers, spec, **out)


def _product_fake(
    name: str, x: Tensor, buffers: list[Tensor], format: str, shape: list[int], dtype: torch.dtype
) -> Tensor:
    _check_product(name, x, buffers, Spec(read(format), tuple(shape), dtype))
    return x.new_empty(*x.shape[:-1], shape[name == "matmul_t"])


def _check_rows(rows: Tensor, format: Format) -> None:
    if format.vectors is not None:
        raise ValueError(f"encode got {format.name}, whose vectors have to be learned; use fquant.quantize")
    if rows.dtype not in FLOATS or rows.ndim == 0:
        raise TypeError(f"encode got {rows.dtype} {tuple(rows.shape)}; wanted f32, bf16 or f16 with at least one dim")


def _check_decode(spec: Spec, buffers: list[Tensor], out: torch.dtype) -> tuple[int, ...]:
    if out not in _COMPUTED:
        raise TypeError(f"decode got {out}; wanted f32, bf16, f16 or f64")
    return check(spec, buffers)


def _check_product(name: str, x: Tensor, buffers: Sequence[Tensor], spec: Spec) -> None:
    if len(spec.shape) != 2 or x.dtype not in _COMPUTED or x.ndim < 2:
        raise TypeError(
            f"{name} got x {x.dtype} {tuple(x.shape)} and a weight {spec.shape}; wanted f[*stack m n], 2 dims"
        )
    check(spec, buffers, tuple(x.shape[:-2]))
    inner = spec.shape[name == "matmul"]
    if x.shape[-1] != inner:
        raise ValueError(f"{name} got x {tuple(x.shape)} and a weight {spec.shape}; x's last dim must be {inner}")
    if x.device != buffers[0].device:
        raise ValueError(f"{name} got x on {x.device} and a weight on {buffers[0].device}; move one")


def _decode_vmap(info: Any, in_dims: Any, buffers: list[Tensor], *rest: Any) -> tuple[Tensor, int]:
    """A mapped dim of a packed array is one more dim of a stack."""
    mapped = [
        b.expand(info.batch_size, *b.shape) if at is None else b.movedim(at, 0)
        for b, at in zip(buffers, in_dims[0], strict=True)
    ]
    return _OPS["decode"](mapped, *rest), 0


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

    ``real`` takes them as ``out``, one or a tuple, from which the kernels of cpu.c read where to write; what another
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
    direct.add(f"fquant::{name}.out", compute)


_FIX = (
    "a Packed is a constant: train a Lora beside it (fquant.lora.init, attach) or a dense weight, and multiply with "
    "fquant.linear, which has derivatives with respect to x"
)


def _product_flops(x: Any, buffers: Any, format: str, shape: list[int], *rest: Any, **kwargs: Any) -> int:
    """As many as of the dense weight; torch's counter gives shapes for tensors."""
    return 2 * math.prod(x[:-1]) * math.prod(shape)


def _register() -> dict[str, Callable[..., Any]]:
    real: dict[str, Any] = {"encode": _encode, "decode": _decode}
    fake: dict[str, Any] = {"encode": _encode_fake, "decode": _decode_fake}
    for name in ("matmul", "matmul_t"):
        real[name], fake[name] = partial(_product, name), partial(_product_fake, name)
    for name in ("matmul", "matmul_t"):
        into(_LIBRARY, name, SCHEMAS[name], real[name])
    for name, schema in SCHEMAS.items():
        _LIBRARY.define(name + schema, tags=(torch.Tag.pt2_compliant_tag,))
        for key in ("CPU", "CUDA"):
            _LIBRARY.impl(name, real[name], key)
        _LIBRARY.impl(name, partial(constant, name, _FIX), "Autograd", with_keyset=True)
        torch.library.register_fake(f"fquant::{name}", fake[name], lib=_LIBRARY)
    register_flop_formula([torch.ops.fquant.matmul, torch.ops.fquant.matmul_t])(_product_flops)
    torch.library.register_vmap("fquant::decode", _decode_vmap, lib=_LIBRARY)
    return {name: getattr(torch.ops.fquant, name).default for name in SCHEMAS}


_LIBRARY = torch.library.Library("fquant", "DEF")
_OPS = _register()
