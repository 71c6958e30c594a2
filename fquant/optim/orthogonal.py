"""Muon (Jordan et al. 2024): the momentum of a matrix, made nearly orthogonal, is its update.

Five steps of a quintic Newton-Schulz iteration bring all singular values near 1 (0.7 to 1.2). They run in bfloat16, as
in ``torch.optim.Muon``, whose bits these are for float32 parameters and moments.
"""

import math
from typing import Any

import torch
from torch import Tensor

from ..communication import BESIDE_PARAMETERS, Memory
from ..kernels.ops.moments import momentum_update
from ..packed import Packed
from ..tree import at, expect, items
from .leaves import update_leaves
from .moments import Stored, as_moments, codes_and_scale, moment_like, narrow, zeros
from .optimizer import MomentumState, Optimizer, Tree, as_schedule, check_like, check_whole, first_step
from .schedules import Rate

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
MOST_STEPS = 100
SCALES = {  # by name, what the learning rate is multiplied by for a matrix [out in]
    "original": lambda out, inner: math.sqrt(max(1, out / inner)),
    "match_rms_adamw": lambda out, inner: 0.2 * math.sqrt(max(out, inner)),
}


def muon(
    lr: Rate,
    momentum: float = 0.95,
    nesterov: bool = True,
    weight_decay: float = 0.1,
    eps: float = 1e-7,
    steps: int = 5,
    scale: str = "original",
    moments: Stored = None,
    memory: Memory = BESIDE_PARAMETERS,
) -> Optimizer[MomentumState]:
    """Return Muon as in ``torch.optim.Muon``, for matrices [out in] only; see :func:`partition` for the other leaves.

    ``scale`` multiplies the learning rate, but not the decay: ``original`` by sqrt(max(1, out / in)), and
    ``match_rms_adamw`` by 0.2 · sqrt(max(out, in)), which suits rates of AdamW (Liu et al. 2025). ``steps`` are those
    of the iteration. ``moments`` says how the momentum is stored and ``memory`` where, as in :func:`adamw`.

    ``init`` and ``update`` raise ValueError, with the path, for a leaf that is no matrix, and for bundles
    (``shard.on_whole``).
    """
    rate, stored = as_schedule(lr, momentum=momentum, weight_decay=weight_decay, eps=eps), as_moments(moments)
    expect(scale in SCALES, f"scale: got {scale!r}, wanted {' or '.join(map(repr, SCALES))}")
    expect(0 <= steps < MOST_STEPS, f"steps: got {steps}, wanted 0 to {MOST_STEPS - 1}")
    rule = "nesterov_mean" if nesterov else "mean"

    def init(params: Any) -> MomentumState:
        zero = zeros(params, stored, memory)
        _check_matrices(params)
        return MomentumState(first_step(params), zero)

    def update(grads: Tree, state: MomentumState, params: Tree) -> tuple[Tree, MomentumState]:
        check_like(grads, params)
        _check_matrices(params)
        factor = -rate(state.step)

        def one(p: Tensor, g: Tensor, _: Tensor | None, m: Any) -> tuple[Any, Any]:
            if isinstance(m, Packed):
                assert stored is not None
                plain = torch.ones_like(factor).expand(3)
                direction, codes, scales = momentum_update(
                    narrow(g), narrow(p), *codes_and_scale(m), plain, m.format.text, stored.rounding, rule, momentum,
                    0.0, 0.0, False, None, 0, None,
                )  # fmt: skip
                m = moment_like(m, codes, scales)
            else:
                m = torch.lerp(m, g.float(), 1 - momentum)
                direction = torch.lerp(g.float(), m, momentum) if nesterov else m
            change = SCALES[scale](*p.shape) * _orthogonal(direction, steps, eps).float()
            return factor * (change + weight_decay * p.float()), m

        updates, moment = update_leaves(one, memory, params, grads, None, state.momentum)
        return updates, MomentumState(state.step + 1, moment)

    return Optimizer(init, update)


def _orthogonal(x: Tensor, steps: int, eps: float) -> Tensor:
    """Return a matrix bf16 with the singular vectors of ``x`` f32[out in], and singular values near 1."""
    a, b, c = COEFFICIENTS
    tall, x = x.shape[0] > x.shape[1], x.bfloat16()
    x = x.mT if tall else x
    x = x / x.norm().clamp(min=eps)
    for _ in range(steps):
        gram = x @ x.mT
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if tall else x


def _check_matrices(params: Any) -> None:
    check_whole(params, "Muon")
    for path, p in items(params):
        with at(path):
            fix = "use another optimiser for it, by optim.partition({'...': muon(...), '...': adamw(...)})"
            expect(p.ndim == 2, f"got shape {tuple(p.shape)}, and Muon is for matrices; {fix}")
