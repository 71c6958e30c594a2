"""forward: forward mode inside the jvp of an autograd Function.

torch turns forward mode off while the jvp of a Function runs. What is computed there has no tangents then, and a jvp
around the first finds zeros: the second forward derivative would be silently wrong. So every such jvp computes inside
:func:`forward`, which turns it on again, and gives what the Function saved without the tangents of this jvp, which are
its other arguments, and with those of the ones around it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from torch import Tensor
from torch.autograd import forward_ad


@contextmanager
def forward(saved: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Forward mode as outside of the Function; gives the primals of the tensors ``saved``."""
    with forward_ad._set_fwd_grad_enabled(True):  # type: ignore[attr-defined]
        yield [forward_ad.unpack_dual(t).primal for t in saved]


def is_dual(t: Tensor) -> bool:
    """Whether a tensor has a tangent, in a ``dual_level``."""
    return forward_ad._current_level >= 0 and forward_ad.unpack_dual(t).tangent is not None
