"""The executor of a memory plan: binds its tensors to the memory of replays, then replays its graph.

A replay takes the memory only if it is free. While another thread replays, the unplanned graph runs, whose bits are the
same. It also runs under a dispatch mode of torch, e.g. one that counts memory, which has to see tensors allocated.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule
from torch.fx.node import map_arg

from . import allocator
from .plan import MemoryPlan, Slot


def run_planned(
    plan: MemoryPlan,
    unplanned: GraphModule,
    tensors: Sequence[Tensor],
    interpret: Callable[[GraphModule], Callable[..., Any]] = lambda module: module,
) -> Any:
    """Run the memory-planned graph; run ``unplanned`` if a dispatch mode is active or the memory is in use.

    ``interpret`` returns the function that runs a module, by default the module itself.
    """
    if torch._C._len_torch_dispatch_stack() or not allocator.IN_USE.acquire(blocking=False):
        return interpret(unplanned)(*tensors)
    try:
        memory = allocator.acquire(plan.nbytes)
        if plan.memory is not memory:
            _bind(plan, memory)
        return interpret(plan.module)(*tensors)
    finally:
        allocator.IN_USE.release()


def _bind(plan: MemoryPlan, memory: mmap.mmap) -> None:
    """Make the tensors of a plan in ``memory``."""
    bound = dict[str, Any]()
    with torch.inference_mode(False), torch.no_grad():  # an inference tensor could not be written outside of the mode
        for name, value in plan.tensors.items():
            if isinstance(value, Slot):
                raw = torch.frombuffer(memory, dtype=torch.uint8, count=value.nbytes, offset=value.offset)
                bound[name] = raw.view(value.dtype).as_strided(value.shape, value.stride)
            else:
                args, kwargs = map_arg((value.args, value.kwargs), lambda node: bound[str(node.target)])
                bound[name] = value.target(*args, **kwargs)
    plan.module.__dict__.update(bound)
    plan.memory = memory
