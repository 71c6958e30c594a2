"""Adafactor (Shazeer & Stern 2018): the mean of squares of a matrix from the means of its rows and of its columns.

The arithmetic is that of ``torch.optim.Adafactor``. The state of a matrix [out in] is out + in numbers, so it is
float32 always.
"""

from typing import Any

import torch
from torch import Tensor

from ..tree import expect, node
from .leaves import map_leaves
from .optimizer import Optimizer, Tree, as_schedule, check_float, check_like, check_whole, first_step
from .schedules import Rate


@node
class FactoredState:
    """Means of squares: of rows and of columns of leaves with two dims or more, and of the elements of vectors."""

    step: Tensor  # i64[], updates made
    rows: Any  # like the parameters: f32[... out 1], or the squares f32[n] of a vector
    columns: Any  # like the parameters: f32[... 1 in], or f32[0] of a vector


def adafactor(
    lr: Rate = 1e-2,
    beta2_decay: float = -0.8,
    eps1: float | None = None,
    eps2: float = 1e-3,
    clip: float = 1.0,
    weight_decay: float = 0.0,
) -> Optimizer[FactoredState]:
    """Return Adafactor as in ``torch.optim.Adafactor``, without a first moment.

    The rate of step t is min(lr, 1 / sqrt(t)) times the root mean square of the parameter, at least ``eps2``. Means
    keep 1 - t^beta2_decay of their old value. An update has a root mean square of at most ``clip``. ``eps1`` bounds
    the means of squares, by default the eps of the parameter's dtype. Raises ValueError for an option out of range;
    ``init`` and ``update`` raise it for a tree of bundles (``shard.on_whole``).
    """
    rate = as_schedule(lr, weight_decay=weight_decay)
    expect(beta2_decay <= 0, f"beta2_decay: got {beta2_decay}, wanted at most 0")
    expect(eps1 is None or eps1 >= 0, f"eps1: got {eps1}, wanted None or at least 0")
    expect(eps2 >= 0, f"eps2: got {eps2}, wanted at least 0")
    expect(clip >= 1, f"clip: got {clip}, wanted at least 1")

    def init(params: Any) -> FactoredState:
        check_whole(params, "Adafactor")
        check_float(params)
        rows, columns = map_leaves(2, _zeros, params)
        return FactoredState(first_step(params), rows, columns)

    def update(grads: Tree, state: FactoredState, params: Tree) -> tuple[Tree, FactoredState]:
        check_whole(params, "Adafactor")
        check_like(grads, params)
        step, base = state.step + 1, rate(state.step)
        new, relative = step.float() ** beta2_decay, torch.minimum(base, step.float().rsqrt())

        def one(p: Tensor, g: Tensor, rows: Tensor, columns: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            g, p, least = g.float(), p.float(), torch.finfo(p.dtype).eps if eps1 is None else eps1
            if g.ndim > 1:
                rows = rows + new * (_mean_square(g, -1) - rows)
                columns = columns + new * (_mean_square(g, -2) - columns)
                squares = (rows @ columns) / rows.mean(-2, keepdim=True).clamp(min=least)
            else:
                squares = rows = rows + new * (g * g - rows)
            change = squares.clamp(min=least * least).rsqrt() * g
            size = _rms(p).clamp(min=eps2) * relative / (_rms(change) / clip).clamp(min=1.0)
            return -size * change - base * weight_decay * p, rows, columns

        updates, rows, columns = map_leaves(3, one, params, grads, state.rows, state.columns)
        return updates, FactoredState(step, rows, columns)

    return Optimizer(init, update)


def _zeros(p: Tensor) -> tuple[Tensor, Tensor]:
    make = lambda *shape: torch.zeros(shape, dtype=torch.float32, device=p.device)
    return (make(*p.shape[:-1], 1), make(*p.shape[:-2], 1, p.shape[-1])) if p.ndim > 1 else (make(*p.shape), make(0))


def _mean_square(x: Tensor, dim: int) -> Tensor:
    return x.norm(dim=dim, keepdim=True).square() / x.shape[dim]


def _rms(x: Tensor) -> Tensor:
    return x.norm() / x.numel() ** 0.5
