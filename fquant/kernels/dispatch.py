"""Dispatch: split from fquant.kernels."""

from __future__ import annotations

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
        if type(t) is not Tensor or _is_wrapped(t) or (wanted and t.requires_grad) or dispatch_bypass.is_lazy(t):
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
