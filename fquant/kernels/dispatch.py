"""The choice of a backend for a device, and the test for calls that need no dispatcher.

``FQUANT_KERNELS`` overrides the table ``BY_DEVICE``. A backend that is not available is replaced by the reference, with
one warning, unless the variable names it.
"""

import os
import warnings
from functools import cache
from types import ModuleType

import torch
from torch import Tensor
from torch.autograd import forward_ad

from . import dispatch_bypass, reference

VARIABLE = "FQUANT_KERNELS"
BACKENDS = ("reference", "cpu", "triton")
BY_DEVICE = {"cpu": "cpu", "cuda": "triton"}


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
        if type(t) is not Tensor or _is_wrapped(t) or (grads and t.requires_grad) or dispatch_bypass.is_lazy(t):
            return False
    return True


_is_wrapped = torch._C._functorch.is_functorch_wrapped_tensor  # type: ignore[attr-defined]  # a vjp keeps such


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
