"""Adam (Kingma & Ba 2015) and AdamW (Loshchilov & Hutter 2019), with moments in float32 or packed.

The arithmetic is torch's, with roots that are rounded correctly. A leaf is one op (``fquant/kernels/ops/moments.py``),
or the formula with the same bits (``moments.fuses``). With packed moments the debiasing factors are multiplied rather
than divided by.
"""

from typing import Any

import torch
from torch import Tensor

from ..communication import BESIDE_PARAMETERS, Memory
from ..kernels.ops.moments import adam_update
from ..packed import Packed
from .leaves import update_leaves
from .moments import Stored, as_moments, codes_and_scale, fuses, moment_like, narrow, rounding_of, text_of, zeros
from .optimizer import AdamState, Optimizer, Tree, applied, as_schedule, check_like, debias, first_step
from .schedules import Rate


def adamw(
    lr: Rate,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
    weight_decay: float = 0.01,
    moments: Stored = None,
    memory: Memory = BESIDE_PARAMETERS,
) -> Optimizer[AdamState]:
    """Return AdamW as in ``torch.optim.AdamW``: the decay is beside the gradient.

    ``moments`` says how both moments are stored: None for float32, ``optim.DYNAMIC8``, or another Moments or Format.
    ``memory`` says where: beside the parameters, or in the host's (``shard.PINNED``), from where a step fetches them.
    """
    return _adam(lr, b1, b2, eps, weight_decay, moments, memory, coupled=False)


def adam(
    lr: Rate,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    moments: Stored = None,
    memory: Memory = BESIDE_PARAMETERS,
) -> Optimizer[AdamState]:
    """Return Adam as in ``torch.optim.Adam``: the decay is added to the gradient.

    ``moments`` and ``memory`` are as in :func:`adamw`.

    bitsandbytes' Adam decays beside the gradient; that is :func:`adamw`.
    """
    return _adam(lr, b1, b2, eps, weight_decay, moments, memory, coupled=True)


def _adam(
    lr: Rate, b1: float, b2: float, eps: float, decay: float, stored: Stored, memory: Memory, coupled: bool
) -> Optimizer[AdamState]:
    rate, moments = as_schedule(lr, b1=b1, b2=b2, eps=eps, weight_decay=decay), as_moments(stored)

    def init(params: Any) -> AdamState:
        mean = zeros(params, moments, memory)
        return AdamState(first_step(params), mean, zeros(params, moments, memory, signed=False))

    def run(grads: Tree, state: AdamState, params: Tree, apply: bool, key: Tensor | None) -> tuple[Tree, AdamState]:
        check_like(grads, params)
        step = state.step + 1
        debias1, debias2, factor = debias(b1, step), debias(b2, step), -rate(state.step)
        divisors = torch.stack([factor, debias1, debias2])
        factors = torch.stack([factor, 1.0 / debias1, debias2.rsqrt()])

        def one(p: Tensor, g: Tensor, key: Tensor | None, m: Any, v: Any) -> tuple[Any, ...]:
            if not fuses(g, p, m, v):
                g = g.float() + decay * p.float() if coupled else g.float()
                m = b1 * m + (1 - b1) * g
                v = b2 * v + (1 - b2) * g**2
                change = (m / debias1) / ((v / debias2).double().sqrt().float() + eps)
                change = factor * (change if coupled else change + decay * p.float())
                return applied(p, change, key) if apply else change, m, v
            new, *codes = adam_update(
                narrow(g), narrow(p), *codes_and_scale(m), *codes_and_scale(v),
                factors if isinstance(m, Packed) else divisors, text_of(m), text_of(v), rounding_of(moments),
                b1, b2, eps, decay, coupled, apply, key, 0, None,
            )  # fmt: skip
            return new.to(p.dtype) if apply else new, moment_like(m, *codes[:2]), moment_like(v, *codes[2:])

        new, mean, square = update_leaves(one, memory, params, grads, key, state.mean, state.square)
        return new, AdamState(step, mean, square)

    update = lambda grads, state, params: run(grads, state, params, False, None)
    return Optimizer(init, update, lambda grads, state, params, key=None: run(grads, state, params, True, key))
