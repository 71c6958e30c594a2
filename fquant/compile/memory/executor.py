"""Executor: split from fquant.compile.memory.plan."""

from __future__ import annotations

import mmap
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule
from torch.fx.node import map_arg

from . import allocator
from .plan import Placed, Slot


def run(
    placed: Placed,
    plain: GraphModule,
    tensors: Sequence[Tensor],
    by: Callable[[GraphModule], Callable[..., Any]] = lambda module: module,
) -> Any:
    """What ``placed`` computes of ``tensors``; by ``plain``, the same, where that is not to be.

    ``by`` makes of either what computes it.
    """
    if torch._C._len_torch_dispatch_stack() or not allocator.USED.acquire(blocking=False):
        return by(plain)(*tensors)
    try:
        memory = allocator.take(placed.nbytes)
        if placed.memory is not memory:
            _bind(placed, memory)
        return by(placed.module)(*tensors)
    finally:
        allocator.USED.release()


def _bind(placed: Placed, memory: mmap.mmap) -> None:
    """Make the tensors of a module, in ``memory``."""
    made = dict[str, Any]()
    with torch.inference_mode(False), torch.no_grad():  # inside of it they could be written nowhere else
        for name, what in placed.tensors.items():
            if isinstance(what, Slot):
                raw = torch.frombuffer(memory, dtype=torch.uint8, count=what.nbytes, offset=what.offset)
                made[name] = raw.view(what.dtype).as_strided(what.shape, what.stride)
            else:
                args, kwargs = map_arg((what.args, what.kwargs), lambda near: made[str(near.target)])
                made[name] = what.target(*args, **kwargs)
    placed.module.__dict__.update(made)
    placed.memory = memory
