"""alive: what an autograd Function saved, without the transforms that have ended since.

The backward of a Function may run when transforms around its forward have ended: torch.func.vjp returns before what it
returns is called. Tensors that were saved are then wrapped in levels that are no more. Ops see through them, but a vjp
of them, in which one has no gradient, fails inside of torch ("level.has_value() && level <= current_level", "escaped?")
where a transform further out is still there. So a backward that takes a vjp takes it of what :func:`alive` gives.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor
from torch._C._functorch import is_functorch_wrapped_tensor, unwrap_if_dead


def alive(saved: Sequence[Tensor]) -> list[Tensor]:
    """The tensors ``saved`` as seen by the transforms that are at work."""
    return [_alive(t) for t in saved]


def _alive(t: Tensor) -> Tensor:
    while is_functorch_wrapped_tensor(t) and (inner := unwrap_if_dead(t)) is not t:
        t = inner
    return t
