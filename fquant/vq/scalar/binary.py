"""Binary mapping: sampling of a one-hot vector over all patterns of some bits, given their logits (Fleuret 2025).

    state = binary.init(key, bits=8)
    x, codes, losses, _ = binary.apply(state, logits, key)     # logits f[... 8], x f[... 256] one-hot, codes i64[...]

Bit i is 1 with probability σ(logit_i / temperature) and has the weight 2^i. The gradient of the one-hot vector is that
of the patterns' probabilities at temperature 1. The loss "kl" keeps bits random: it is a row's divergence from fair
coins, bits · ln 2 - H, beyond ``free`` (one bit). The state trains nothing; the model that makes the logits trains.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from ... import random, tree
from ..codebook.gradient_estimators import straight_through
from ..precision import matmul
from ..quantized import Key, Mask, Mean, Quantized, Seed
from . import projection_layers

MOST = 20  # bits, because rows have 2^bits numbers
update = projection_layers.update


@tree.node
class Binary:
    """The number of ``bits``, and the ``free`` nats of divergence that cost nothing."""

    bits: int = tree.static()
    free: float = tree.static(default=math.log(2.0))


def init(key: Seed, bits: int, *, free: float = math.log(2.0)) -> Binary:
    """Return a state for logits f[... bits]; ``key`` is not used. Raises ValueError for bits outside [1, 20]."""
    if not 1 <= bits <= MOST:
        raise ValueError(f"binary.init: bits are {bits}; wanted from 1 to {MOST}, for rows have 2^bits numbers")
    if not free >= 0.0:
        raise ValueError(f"binary.init: free is {free}; wanted at least 0 nats")
    return Binary(bits, free)


def encode(state: Binary, x: Tensor) -> Tensor:
    """Return the most probable codes i64[...] of logits x f[... bits]; -1 for a row that is not finite."""
    x, live = projection_layers.prepare_rows("binary.encode", x, state.bits, None)
    return projection_layers.encode_digits((x > 0)[..., None, :].long(), (2,) * state.bits, live)


def decode(state: Binary, codes: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return the one-hot [... 2^bits] of codes i[...], zero for -1. Raises IndexError for a code out of range."""
    codes = projection_layers.check_codes("binary.decode", codes, 2**state.bits)
    return (codes[..., None] == torch.arange(2**state.bits, device=codes.device)).to(dtype)


def apply(state: Binary, x: Tensor, key: Key = None, mask: Mask = None, *, temperature: float = 1.0) -> Quantized:
    """Sample codes of logits x f[... bits]: one-hot f[... 2^bits] with the patterns' gradient, and the loss "kl".

    ``key``, whose shape leads x's, draws the bits; without it they are the most probable.
    """
    if not temperature > 0.0:
        raise ValueError(f"binary.apply: temperature is {temperature}; wanted more than 0")
    logits, live = projection_layers.prepare_rows("binary.apply", x, state.bits, mask)
    ones = logits > 0
    if key is not None:
        ones = random.uniform(key, logits.shape, logits.dtype) < torch.sigmoid(logits / temperature)
    codes = projection_layers.encode_digits(ones[..., None, :].long(), (2,) * state.bits, live)
    all_codes = torch.arange(2**state.bits, device=logits.device)
    pattern = projection_layers.digits_of(all_codes, (2,) * state.bits).to(logits.dtype)  # [2^bits bits]
    soft = (matmul(F.logsigmoid(logits), pattern.T) + matmul(F.logsigmoid(-logits), (1.0 - pattern).T)).exp()
    out = torch.where(live[..., None], straight_through(soft, decode(state, codes, soft.dtype)), 0.0)
    on, off = torch.sigmoid(logits), torch.sigmoid(-logits)
    entropy = -(on * F.logsigmoid(logits) + off * F.logsigmoid(-logits)).sum(-1)  # of a row's bits, in nats
    excess = F.relu(state.bits * math.log(2.0) - entropy - state.free)
    kl = Mean(torch.where(live, excess, 0.0).sum(), live.sum().to(excess.dtype))
    return Quantized(out.to(x.dtype), codes, {"kl": kl}, projection_layers.count_rows(live, mask))


def log_prob(state: Binary, x: Tensor, codes: Tensor) -> Tensor:
    """Return the log-probabilities [...] of codes i[...] under logits x f[... bits], in float32 or wider.

    They are zero for a code of -1 or a row that is not finite. Raises IndexError for a code out of range.
    """
    codes = projection_layers.check_codes("binary.log_prob", codes, 2**state.bits)
    if codes.shape != x.shape[:-1]:
        raise ValueError(f"binary.log_prob: codes are {tuple(codes.shape)} beside x {tuple(x.shape)}; wanted one a row")
    x, live = projection_layers.prepare_rows("binary.log_prob", x, state.bits, codes != -1)
    ones = projection_layers.digits_of(codes, (2,) * state.bits) > 0
    return torch.where(live, torch.where(ones, F.logsigmoid(x), F.logsigmoid(-x)).sum(-1), 0.0)
