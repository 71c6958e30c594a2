"""The choice of a backend for a device, and calls of our ops without torch's dispatcher.

``FQUANT_KERNELS`` overrides the table ``BY_DEVICE``. A backend that is not available is replaced by the reference, with
one warning, unless the variable names it.
"""

import hashlib
import os
import warnings
from collections.abc import Callable, Sequence
from functools import cache
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from ..device import HOST
from . import reference

VARIABLE = "FQUANT_KERNELS"
BACKENDS = ("reference", "cpu", "triton")
BY_DEVICE = {"cpu": "cpu", "cuda": "triton"}
DIRECT = dict[str, Callable[..., Any]]()  # what computes an op on CPUs, by its name with namespace and overload


def is_direct(*tensors: Tensor) -> bool:
    """Return True if only the kernel has to see a call: no derivative, transform, mode, subclass, profiler, laziness.

    Such a call bypasses torch's dispatcher, which takes a tenth as long as a product of one row.
    """
    if torch.compiler.is_dynamo_compiling() or torch._C._are_functorch_transforms_active():
        return False
    if torch._C._len_torch_dispatch_stack() or torch._C._is_torch_function_mode_enabled():
        return False
    if forward_ad._current_level >= 0 or torch.autograd._profiler_enabled():
        return False
    grads = torch.is_grad_enabled()
    for t in tensors:  # a loop, as `all` of a generator takes three times as long
        if type(t) is not Tensor or _is_wrapped(t) or (grads and t.requires_grad) or is_lazy(t):
            return False
    return True


_is_wrapped = torch._C._functorch.is_functorch_wrapped_tensor  # type: ignore[attr-defined]  # a vjp keeps such


def is_lazy(t: Tensor) -> bool:
    """Return True if the memory of ``t`` does not hold its values, as of negated and conjugated tensors."""
    return t.is_neg() or t.is_conj() or t._is_zerotensor()


def has_no_values(t: Tensor) -> bool:
    """Return True for a tensor of the device meta, but for those that stand in for others in a trace."""
    return t.is_meta and torch._C._get_dispatch_mode(_FAKE) is None  # type: ignore[attr-defined]


_FAKE = torch._C._TorchDispatchModeKey.FAKE  # type: ignore[attr-defined]


def direct(op: Any, given: tuple[Any, Any] | None = None) -> Callable[..., Any] | None:
    """Return the function that computes ``op`` without torch's dispatcher, or None if it is not an op of ours.

    It gives the same bits. ``given`` are positional and named arguments. Those of every call have their shapes,
    strides and dtypes, so C receives them once (``cpu/prepared.py``). Its caller guarantees four things. The call
    has been checked, for instance when it was traced. All tensors are plain CPU tensors whose values are in their
    memory. No mode or transform has to see the call. :func:`settle` was called before. While a profiler runs, calls go
    through torch.
    """
    function = DIRECT.get(op.name()) if isinstance(op, torch._ops.OpOverload) else None
    if function is None:
        return None
    prepared = _prepared()
    quick = prepared.prepare(op.name(), *given) if prepared and given is not None else None

    def call(*args: Any, **kwargs: Any) -> Any:
        if torch.autograd._profiler_enabled():
            return op(*args, **kwargs)
        return (quick if quick is not None and prepared.is_settled() else function)(*args, **kwargs)

    call.__name__ = str(op).replace(".", "_")
    return call


def settle() -> None:
    """Choose the backend of the calls of :func:`direct` that follow."""
    if prepared := _prepared():
        prepared.settle()


def empty(shape: Sequence[int], dtype: torch.dtype, device: torch.device = HOST) -> Tensor:
    """Allocate as ``torch.empty``, for a weight; on the host one of 4 MiB or more in pages of 2 MiB if there are such.

    Fewer pages make it a few hundredths faster to read, once a token.
    """
    if device == HOST and isinstance(_load("cpu"), ModuleType):
        from .cpu import library

        return library.empty(*shape, dtype=dtype)
    return torch.empty(tuple(shape), dtype=dtype, device=device)


def sha256(buffers: Sequence[memoryview]) -> list[bytes]:
    """Return the SHA-256 of each of ``buffers``; those of many together take C less time than one after the other."""
    if isinstance(_load("cpu"), ModuleType):
        from .cpu import sha256

        return sha256.digests(buffers)
    return [hashlib.sha256(buffer).digest() for buffer in buffers]


@cache
def _prepared() -> Any:
    """Return the module of prepared calls; None if the C library is not available."""
    if not isinstance(_load("cpu"), ModuleType):
        return None
    from .cpu import prepared

    return prepared


def backend(device: str) -> tuple[str, ModuleType]:
    """Return the name and the module of the backend for tensors on ``device``.

    Raises ValueError if FQUANT_KERNELS names no backend, or one that cannot compute there; RuntimeError if the backend
    it names is not available.
    """
    return _backend(os.environ.get(VARIABLE), device)


@cache
def _backend(forced: str | None, device: str) -> tuple[str, ModuleType]:
    if forced is None:
        name = BY_DEVICE.get(device, "reference")
        module = _load(name)
        if isinstance(module, ModuleType):
            return name, module
        _warn_once(module)
        return "reference", reference
    name, _, detail = forced.partition(":")
    if name not in BACKENDS or (detail and name != "cpu"):
        raise ValueError(f"{VARIABLE} is {forced!r}; wanted one of {', '.join(BACKENDS)}, or cpu:ISA")
    module = _load(name)
    if not isinstance(module, ModuleType):
        raise RuntimeError(f"{VARIABLE} is {forced!r}, but {module}")
    if device not in getattr(module, "DEVICES", (device,)):
        raise ValueError(f"{VARIABLE} is {forced!r}, but the tensors are on {device}; unset it or move them")
    return name, module


def backend_name(device: str) -> str:
    """Return the name of the backend for tensors on ``device``, with or without such a device on this machine.

    So a graph for CUDA is the same everywhere, if Triton is installed.
    """
    return _backend_name(os.environ.get(VARIABLE), device)


def runs_programs(device: str) -> bool:
    """Return True if elementwise programs are one kernel each on ``device``, and so worth making."""
    return backend_name(device) != "reference"


@cache
def _backend_name(forced: str | None, device: str) -> str:
    name = BY_DEVICE.get(device, "reference") if forced is None else forced.partition(":")[0]
    if name == "cpu" and device == "cpu":
        return _backend(forced, device)[0]
    if name != "triton":
        return "reference"
    try:
        from . import triton
    except ImportError:
        return "reference"
    return name if device in triton.DEVICES else "reference"


@cache
def _load(name: str) -> ModuleType | str:
    """Return the module of a backend, or the reason why it is not available."""
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
def _warn_once(reason: str) -> None:
    warnings.warn(f"fquant computes in plain torch, several times slower: {reason}", RuntimeWarning, stacklevel=2)
