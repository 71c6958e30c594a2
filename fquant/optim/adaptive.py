"""Adam (Kingma & Ba 2015) and AdamW (Loshchilov & Hutter 2019), with moments in float32 or packed.

The arithmetic is torch's. With packed moments the debiasing factors are multiplied rather than divided by, and a leaf
is one op (``fquant/kernels/ops/moments.py``).
"""

from typing import Any

import torch
from torch import Tensor

from .. import tree
from ..communication import BESIDE_PARAMETERS, Memory
from ..kernels.ops.moments import adam_update
from ..packed import Packed
from .leaves import update_leaves
from .moments import Stored, as_moments, codes_and_scale, narrow, packed_like, zeros
from .optimizer import AdamState, Optimizer, Tree, as_schedule, check_like, debias, first_step
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

    def run(grads: Tree, state: AdamState, params: Tree, apply: bool) -> tuple[Tree, AdamState]:
        check_like(grads, params)
        step = state.step + 1
        debias1, debias2, factor = debias(b1, step), debias(b2, step), -rate(state.step)
        is_packed = any(isinstance(m, Packed) for m in tree.leaves(state.mean, is_leaf=lambda x: isinstance(x, Packed)))
        rates = torch.stack([factor, 1.0 / debias1, debias2.rsqrt()]) if is_packed else None

        def one(p: Tensor, g: Tensor, m: Any, v: Any) -> tuple[Any, ...]:
            if not isinstance(m, Packed):
                g = g.float() + decay * p.float() if coupled else g.float()
                m = b1 * m + (1 - b1) * g
                v = b2 * v + (1 - b2) * g**2
                change = (m / debias1) / ((v / debias2).sqrt() + eps)
                change = factor * (change if coupled else change + decay * p.float())
                return (p + change).to(p.dtype) if apply else change, m, v
            assert moments is not None and rates is not None
            new, *codes = adam_update(
                narrow(g), narrow(p), *codes_and_scale(m), *codes_and_scale(v), rates, m.format.text, v.format.text,
                moments.rounding, b1, b2, eps, decay, coupled, apply,
            )  # fmt: skip
            return new.to(p.dtype) if apply else new, packed_like(m, *codes[:2]), packed_like(v, *codes[2:])

        new, mean, square = update_leaves(one, memory, params, grads, state.mean, state.square)
        return new, AdamState(step, mean, square)

    update = lambda grads, state, params: run(grads, state, params, False)
    return Optimizer(init, update, lambda grads, state, params: run(grads, state, params, True))
