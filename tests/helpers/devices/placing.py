"""Trees on a device, which may be one that is not there, and what a call makes on any other device."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from fquant import tree

META = torch.device("meta")


class Astray(TorchDispatchMode):
    """Lists tensors of one dim or more that ops make on another device than meta; numbers may be anywhere."""

    def __init__(self) -> None:
        super().__init__()
        self.found = list[str]()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = function(*args, **(kwargs or {}))
        for t in out if isinstance(out, list | tuple) else [out]:
            if isinstance(t, Tensor) and t.ndim and t.device != META:
                self.found.append(f"{function} made {tuple(t.shape)} on {t.device}")
        return out


class FakeConstants(TorchFunctionMode):
    """Makes ``torch.tensor`` of numbers a fake tensor on the device meta too, where torch makes a plain one."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if function is torch.tensor and kwargs.get("device") == META:
            with _disable_current_modes():
                like = function(*args, **kwargs | {"device": "cpu"})
            return torch.empty(like.shape, dtype=like.dtype, device=META)
        return function(*args, **kwargs)


@contextmanager
def astray(fake: bool) -> Iterator[list[str]]:
    """List what is made on another device than meta; ``fake`` tensors of meta refuse to be mixed with others."""
    with ExitStack() as stack:
        if fake:
            stack.enter_context(FakeTensorMode())
            stack.enter_context(FakeConstants())
        yield stack.enter_context(Astray()).found


def on(device: torch.device, x: Any) -> Any:
    """Return the tree ``x`` on ``device``; on meta, new tensors of its layouts."""
    if device != META:
        return tree.map(lambda t: t.to(device), x)
    return tree.map(lambda t: torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=META), x)


def elsewhere(x: Any, wanted: torch.device) -> list[str]:
    """Return the paths of the tensors of a tree that are not on ``wanted``, with their devices."""
    tensors = [("", x)] if isinstance(x, Tensor) else tree.items(x)
    return [f"{path} is on {t.device}" for path, t in tensors if isinstance(t, Tensor) and t.device != wanted]
