"""SGD with momentum, and Lion (Chen et al. 2023), with the moment in float32 or packed."""

from typing import Any

import torch
from torch import Tensor

from ..communication import BESIDE_PARAMETERS, Memory
from ..kernels.ops.moments import momentum_update
from ..tree import expect
from .leaves import update_leaves
from .moments import (
    Moments,
    Stored,
    as_moments,
    codes_and_scale,
    fuses,
    moment_like,
    narrow,
    rounding_of,
    text_of,
    zeros,
)  # fmt: skip
from .optimizer import MomentumState, Optimizer, Tree, applied, as_schedule, check_like, first_step
from .schedules import Rate


def sgd(
    lr: Rate,
    momentum: float = 0.0,
    nesterov: bool = False,
    weight_decay: float = 0.0,
    moments: Stored = None,
    memory: Memory = BESIDE_PARAMETERS,
) -> Optimizer[MomentumState]:
    """Return gradient descent with momentum as in ``torch.optim.SGD`` without dampening.

    ``moments`` says how the momentum is stored and ``memory`` where, as in :func:`adamw`.
    """
    rate = as_schedule(lr, momentum=momentum, weight_decay=weight_decay)
    expect(momentum > 0 or not nesterov, "nesterov: got momentum 0.0, wanted one above 0; use momentum=0.9")
    for name, is_given in (("moments", moments is not None), ("memory", memory != BESIDE_PARAMETERS)):
        fault = f"{name}: got momentum 0.0, which needs no moments; leave {name} out, or use momentum=0.9"
        expect(momentum > 0 or not is_given, fault)
    rule = "nesterov" if nesterov else "sgd"

    def dense(p: Tensor, g: Tensor, m: Any, factor: Tensor) -> tuple[Tensor, Any]:
        direction = g.float() + weight_decay * p.float()
        if not momentum:
            return factor * direction, None
        m = momentum * m + direction
        return factor * (direction + momentum * m if nesterov else m), m

    return _optimizer(rate, as_moments(moments), memory, dense, rule, momentum, 0.0, weight_decay, momentum > 0)


def lion(
    lr: Rate,
    b1: float = 0.9,
    b2: float = 0.99,
    weight_decay: float = 0.0,
    moments: Stored = None,
    memory: Memory = BESIDE_PARAMETERS,
) -> Optimizer[MomentumState]:
    """Return Lion, whose update is the sign of a mean that leans towards the newest gradient.

    The decay is beside the gradient. ``moments`` says how the mean is stored and ``memory`` where, as in :func:`adamw`.
    """
    rate = as_schedule(lr, b1=b1, b2=b2, weight_decay=weight_decay)

    def dense(p: Tensor, g: Tensor, m: Tensor, factor: Tensor) -> tuple[Tensor, Tensor]:
        change = factor * (torch.sign(b1 * m + (1 - b1) * g.float()) + weight_decay * p.float())
        return change, b2 * m + (1 - b2) * g.float()

    return _optimizer(rate, as_moments(moments), memory, dense, "lion", b1, b2, weight_decay)


def _optimizer(
    rate: Any,
    moments: Moments | None,
    memory: Memory,
    dense: Any,
    rule: str,
    b1: float,
    b2: float,
    decay: float,
    has_moment: bool = True,
) -> Optimizer[MomentumState]:
    """Return an optimiser of one moment: ``dense(p, g, m, factor)`` in float32, ``rule`` of an op."""

    def init(params: Any) -> MomentumState:
        zero = zeros(params, moments, memory)
        return MomentumState(first_step(params), zero if has_moment else None)

    def run(
        grads: Tree, state: MomentumState, params: Tree, apply: bool, key: Tensor | None
    ) -> tuple[Tree, MomentumState]:
        check_like(grads, params)
        factor = -rate(state.step)
        rates = factor.expand(3)

        def one(p: Tensor, g: Tensor, key: Tensor | None, m: Any = None) -> tuple[Any, ...]:
            if m is None or not fuses(g, p, m):
                change, m = dense(p, g, m, factor)
                return applied(p, change, key) if apply else change, *([m] if has_moment else [])
            new, codes, scale = momentum_update(
                narrow(g), narrow(p), *codes_and_scale(m), rates, text_of(m), rounding_of(moments), rule, b1, b2, decay,
                apply, key, 0, None,
            )  # fmt: skip
            return new.to(p.dtype) if apply else new, moment_like(m, codes, scale)

        new, *moment = update_leaves(one, memory, params, grads, key, *([state.momentum] if has_moment else []))
        return new, MomentumState(state.step + 1, *moment)

    update = lambda grads, state, params: run(grads, state, params, False, None)
    return Optimizer(init, update, lambda grads, state, params, key=None: run(grads, state, params, True, key))
