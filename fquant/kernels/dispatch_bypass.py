"""Direct calls of our ops on CPUs, without torch's dispatcher.

    call = dispatch_bypass.of(torch.ops.fquant.matmul.out)    # same bits, a third of the time beside the work

The caller guarantees three things. The call has been checked, for instance when it was traced. All tensors are plain
CPU tensors whose values are in their memory. No mode or transform has to see the call. While a profiler runs, calls go
through torch.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

_FUNCTIONS = dict[str, Callable[..., Any]]()


def add(name: str, function: Callable[..., Any]) -> None:
    """Let ``function`` compute the op ``name``, a name with namespace and overload."""
    _FUNCTIONS[name] = function


def is_lazy(t: Tensor) -> bool:
    """Return True if the memory of ``t`` does not hold its values, as of negated and conjugated tensors."""
    return t.is_neg() or t.is_conj() or t._is_zerotensor()


def of(op: Any) -> Callable[..., Any] | None:
    """Return the function that computes ``op``, or None if it is not an op of ours."""
    function = _FUNCTIONS.get(op.name()) if isinstance(op, torch._ops.OpOverload) else None
    if function is None:
        return None

    def call(*args: Any, **kwargs: Any) -> Any:
        return (op if torch.autograd._profiler_enabled() else function)(*args, **kwargs)

    call.__name__ = str(op).replace(".", "_")
    return call
