"""Binary mapping: logits of bits to a one-hot vector over their patterns, by chance (Fleuret 2025).

    state = binary.init(key, bits=8)
    x, codes, losses, _ = binary.apply(state, logits, key)     # logits f[... 8], x f[... 256] one-hot, codes i64[...]

Bit i is 1 with probability σ(logit_i / temperature), and has the weight 2^i. The gradient of the one-hot vector is that
of the patterns' probabilities, of temperature 1: exp of the sum of the bits' log σ(±logit). The loss "kl" keeps bits
free: the divergence of a row's bits from fair coins, bits · ln 2 - H, as far as it exceeds ``free`` (one bit).

There is nothing in a state to train or to update: what trains makes the logits.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from ... import random, tree
from ..codebook.gradient_estimators import straight_through
from ..precision import matmul
from ..quantized import Mean, Quantized
from . import mixed_radix, projection_layers
from .projection_layers import RowCounts

MOST = 20  # bits, of which rows have 2^bits numbers


@tree.node
class Binary:
    """So many ``bits``, ``free`` nats of whose divergence cost nothing."""

    bits: int = tree.static()
    free: float = tree.static(default=math.log(2.0))


def init(key: int | Tensor, bits: int, *, free: float = math.log(2.0)) -> Binary:
    """A state for logits f[... bits]; nothing of it is drawn from ``key``.

    Raises ValueError for bits outside [1, 20], and for ``free`` below zero.
    """
    if not 1 <= bits <= MOST:
        raise ValueError(f"binary.init: bits are {bits}; wanted from 1 to {MOST}, for rows have 2^bits numbers")
    if not free >= 0.0:
        raise ValueError(f"binary.init: free is {free}; wanted at least 0 nats")
    return Binary(bits, free)


def encode(state: Binary, x: Tensor) -> Tensor:
    """The most probable codes i64[...] of logits x f[... bits]; -1 for a row that is not finite."""
    x, kept = projection_layers.start("binary.encode", x, state.bits, None)
    return _join(state, x > 0, kept)


def decode(state: Binary, codes: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """codes i[...] -> one-hot [... 2^bits] in ``dtype``; zero for -1. Raises IndexError for one that is none."""
    codes = mixed_radix.checked("binary.decode", codes, 2**state.bits)
    return (codes[..., None] == torch.arange(2**state.bits, device=codes.device)).to(dtype)


def apply(
    state: Binary, x: Tensor, key: Tensor | None = None, mask: Tensor | None = None, *, temperature: float = 1.0
) -> Quantized:
    """Logits x f[... bits] -> one-hot f[... 2^bits] of drawn codes, with the patterns' gradient; the loss "kl".

    ``key``, whose shape leads x's, draws the bits; without one they are the most probable. ``mask`` bool[...] is True
    for the rows that count. Raises ValueError for a temperature that is not positive.
    """
    if not temperature > 0.0:
        raise ValueError(f"binary.apply: temperature is {temperature}; wanted more than 0")
    logits, kept = projection_layers.start("binary.apply", x, state.bits, mask)
    ones = logits > 0 if key is None else _drawn(logits / temperature, key)
    codes = _join(state, ones, kept)
    soft = _log_p(state, logits).exp()
    out = torch.where(kept[..., None], straight_through(soft, decode(state, codes, soft.dtype)), 0.0)
    over = F.relu(state.bits * math.log(2.0) - _entropy(logits) - state.free)
    kl = Mean(torch.where(kept, over, 0.0).sum(), kept.sum().to(over.dtype))
    return Quantized(out.to(x.dtype), codes, {"kl": kl}, projection_layers.counted(kept, mask))


def log_prob(state: Binary, x: Tensor, codes: Tensor) -> Tensor:
    """The logarithms of the probabilities that logits x f[... bits] give codes i[...]: [...], in float32 at least.

    Zero for a code of -1, or a row that is not finite. Raises IndexError for a code that there is not, ValueError where
    there is not one a row.
    """
    codes = mixed_radix.checked("binary.log_prob", codes, 2**state.bits)
    if codes.shape != x.shape[:-1]:
        raise ValueError(f"binary.log_prob: codes are {tuple(codes.shape)} beside x {tuple(x.shape)}; wanted one a row")
    x, kept = projection_layers.start("binary.log_prob", x, state.bits, codes != mixed_radix.NONE)
    ones = mixed_radix.decode(codes, (2,) * state.bits) > 0
    return torch.where(kept, torch.where(ones, F.logsigmoid(x), F.logsigmoid(-x)).sum(-1), 0.0)


def update(state: Binary, stats: RowCounts) -> Binary:
    """The state itself: nothing of it is a statistic."""
    return state


def _drawn(logits: Tensor, key: Tensor) -> Tensor:
    return random.uniform(key, logits.shape, logits.dtype) < torch.sigmoid(logits)


def _join(state: Binary, ones: Tensor, kept: Tensor) -> Tensor:
    return projection_layers.joined(mixed_radix.encode(ones.long(), (2,) * state.bits)[..., None], kept)


def _log_p(state: Binary, logits: Tensor) -> Tensor:
    """Of every pattern: [... bits] -> [... 2^bits]."""
    ones = mixed_radix.decode(torch.arange(2**state.bits, device=logits.device), (2,) * state.bits).to(logits.dtype)
    return matmul(F.logsigmoid(logits), ones.T) + matmul(F.logsigmoid(-logits), (1.0 - ones).T)


def _entropy(logits: Tensor) -> Tensor:
    """Of a row's bits, in nats."""
    on, off = torch.sigmoid(logits), torch.sigmoid(-logits)
    return -(on * F.logsigmoid(logits) + off * F.logsigmoid(-logits)).sum(-1)
