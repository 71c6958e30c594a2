"""direct: our ops as they are computed on CPUs, without what torch does around them.

    call = direct.of(torch.ops.fquant.matmul.out)        # the same to the bit, and a third of the time beside the work

Called through torch, an op is looked for by device, asked whether somebody wants its derivative, and given arguments
that are checked once more; of a graph that is replayed, in which an op may be an optimiser's few thousand elements,
that is a hundredth of the time. Whoever calls one directly vouches that the call was checked, when it was traced for
instance, that all tensors are plain ones on CPUs whose values are in their memory, and that no mode or transform is to
see it. A profiler does: while there is one, the call goes through torch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

_FUNCTIONS = dict[str, Callable[..., Any]]()


def add(name: str, function: Callable[..., Any]) -> None:
    """Let ``function`` be what computes the op ``name``, which is spelt with its namespace and overload."""
    _FUNCTIONS[name] = function


def is_lazy(t: Tensor) -> bool:
    """Whether the values of a tensor are not those in its memory: negated or conjugated as they are read, or zeros
    that are nowhere, as torch has them in some second derivatives. Its dispatcher makes plain ones of them."""
    return t.is_neg() or t.is_conj() or t._is_zerotensor()


def of(op: Any) -> Callable[..., Any] | None:
    """The function that computes ``op``; None for what is no op, or none of ours."""
    function = _FUNCTIONS.get(op.name()) if isinstance(op, torch._ops.OpOverload) else None
    if function is None:
        return None

    def call(*args: Any, **kwargs: Any) -> Any:
        return (op if torch.autograd._profiler_enabled() else function)(*args, **kwargs)

    call.__name__ = str(op).replace(".", "_")
    return call
