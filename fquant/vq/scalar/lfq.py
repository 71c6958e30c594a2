"""Lookup-free quantisation: a code is the signs of its scalars, and entropies keep all codes in use (Yu et al. 2023).

    state = lfq.init(key, bits=16)                         # 65536 codes, dim 16, nothing to train
    state = lfq.init(key, bits=16, dim=64, spherical=True) # binary spherical quantisation (Zhao et al. 2024)

The first scalar is the most significant bit. A scalar becomes ±``scale``, and ±scale / √bits of a ``spherical`` state,
which quantises what is scaled to that length before; what trains passes the gradient straight through.

*Entropy.* With p the softmax over all codes c of 2 · inv_temperature · z · c, a row's entropy is to be low (it is sure
of its code), that of the mean p over all rows high (all codes are used):

    loss = mean over rows of H(p) - gamma · H(mean over rows of p)       or softplus(loss + offset)

Every code has the same length and every bit a scalar of its own, so p is a product over bits, of which each is
σ(±4 · inv_temperature · |c_i| · z_i): H(p) is the sum of the bits' entropies. And with the bits in two halves the mean
of p is one product of two matrices [rows, 2^(bits / 2)]: rows times codes numbers there are nowhere. Both are exact,
with no floor under the probabilities. Of more than 24 bits the mean itself would be too large; in groups of bits the
entropies of the groups are added, which is no less than that of all together (and what the last paper does).

On a mesh the mean of p is that over all ranks' rows, so sums and counts travel, in one sum inside the gradient:

    lfq.apply(state, x, key, psum=lambda sums: shard.psum(sums, mesh, ("dp", "fsdp")))
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor

from ... import random, tree
from ..codebook import rows
from ..codebook.gradient_estimators import straight_through
from ..precision import matmul
from ..quantized import Mean, Psum, Quantized, one_process
from . import mixed_radix, projection_layers
from .projection_layers import Projections, RowCounts

ACTIVATIONS = {"identity": lambda z: z, "tanh": torch.tanh}  # whose gradients may pass straight through
CERTAIN = 1e3  # a logit of a bit whose other value has probability 0, of float64 too
MOST_TOGETHER = 24  # bits whose patterns' probabilities are in one tensor


@tree.node
class LFQ:
    """``num_codebooks`` codes of ``bits`` scalars each."""

    params: Projections | None  # what trains
    rotation: Tensor | None  # f32[bits bits], fixed
    bits: int = tree.static()
    dim: int = tree.static()
    num_codebooks: int = tree.static(default=1)
    scale: float = tree.static(default=1.0)
    spherical: bool = tree.static(default=False)
    clamp: float | None = tree.static(default=None)
    cosine: float | None = tree.static(default=None)
    activation: str = tree.static(default="identity")
    gamma: float = tree.static(default=1.0)
    share: float = tree.static(default=1.0)
    offset: float | None = tree.static(default=None)
    group: int | None = tree.static(default=None)


def init(
    key: int | Tensor,
    bits: int,
    dim: int | None = None,
    *,
    num_codebooks: int = 1,
    bias: bool | None = None,
    scale: float = 1.0,
    spherical: bool = False,
    rotation: bool = False,
    clamp: float | None = None,
    cosine: float | None = None,
    activation: str = "identity",
    gamma: float = 1.0,
    share: float = 1.0,
    offset: float | None = None,
    group: int | None = None,
) -> LFQ:
    """A state for x f[... dim], which by default is ``num_codebooks * bits`` and is projected otherwise.

    clamp       bounds the scalars softly, by tanh, to ± so much
    cosine      the first projection is of unit vectors onto unit vectors, times this
    activation  what the gradient is that of: "identity", "tanh"
    gamma       the weight of the entropy of the mean
    share       of the rows, drawn by key, enter the entropies
    offset      makes the entropy loss softplus(loss + offset), which is positive
    group       bits whose patterns are counted together in the entropy of the mean; all of them by default

    Raises ValueError for bits outside [1, 62], options out of range, ``clamp`` below ``scale``, more than 24 bits in a
    group, and options of projections where nothing is projected.
    """
    if not 1 <= bits <= 62:
        raise ValueError(f"lfq.init: bits are {bits}; wanted from 1 to 62; use codebooks for more")
    for name, number in (("scale", scale), ("clamp", clamp), ("cosine", cosine)):
        if number is not None and not 0.0 < number < math.inf:
            raise ValueError(f"lfq.init: {name} is {number}; wanted a positive number")
    if clamp is not None and clamp < scale:
        raise ValueError(f"lfq.init: clamp is {clamp}, which no scalar exceeds, below scale {scale}; wanted no less")
    if activation not in ACTIVATIONS:
        raise ValueError(f"lfq.init: activation is {activation!r}; wanted one of {', '.join(ACTIVATIONS)}")
    if not 0.0 < share <= 1.0:
        raise ValueError(f"lfq.init: share is {share}; wanted a part of the rows in (0, 1]")
    if group is None and bits > MOST_TOGETHER:
        raise ValueError(f"lfq.init: the mean of rows would be 2^{bits} probabilities; use group=, some of the bits")
    if group is not None and (not 1 <= group <= MOST_TOGETHER or bits % group):
        raise ValueError(f"lfq.init: group is {group}; wanted from 1 to {MOST_TOGETHER} bits that divide {bits}")
    key = random.key(key)
    dim, params = projection_layers.init("lfq.init", key, dim, num_codebooks, bits, bias, cosine is not None)
    turn = projection_layers.orthogonal(random.fold(key, "rotation"), bits) if rotation else None
    how = (scale, spherical, clamp, cosine, activation, gamma, share, offset, group)
    return LFQ(params, turn, bits, dim, num_codebooks, *how)


def encode(state: LFQ, x: Tensor) -> Tensor:
    """x f[... dim] -> codes i64[...], or [... c] of several codebooks; -1 for a row that is not finite."""
    z, kept, _ = _enter("lfq.encode", state, x, None)
    return projection_layers.joined(_codes(state, z), kept)


def decode(state: LFQ, codes: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """codes i[...], or [... c] -> x [... dim] in ``dtype``; zero for -1. Raises IndexError for one that is none."""
    codes, known = projection_layers.split("lfq.decode", codes, state.num_codebooks, 2**state.bits)
    ones = mixed_radix.decode(codes, (2,) * state.bits).flip(-1)
    return _leave(state, _value(state, ones > 0, dtype), known)


def apply(
    state: LFQ,
    x: Tensor,
    key: Tensor | None = None,
    mask: Tensor | None = None,
    *,
    inv_temperature: float = 100.0,
    psum: Psum = one_process,
) -> Quantized:
    """x f[... dim] quantised, its gradient passed straight through; a RowCounts as statistics, and the losses

    commitment  the squared distances of scalars from what they become, which is held fixed
    entropy     of all rows that ``psum``, which is differentiable, sums over, weighted by the rows that are here: so
                sums over ranks are its own

    ``key``, whose shape leads x's, draws the ``share`` of rows in the entropies: so many, rounded up, for each key;
    without one they are all. ``mask`` bool[...] is True for the rows that count.
    """
    z, kept, counts = _enter("lfq.apply", state, x, mask)
    q = _value(state, z > 0, z.dtype)
    out = _leave(state, straight_through(ACTIVATIONS[state.activation](z), q), kept[..., None])
    far = torch.where(kept[..., None, None], (z - q).square(), 0.0)
    per_row, of_mean, here = _entropies(state, z, kept, key, inv_temperature, psum)
    entropy = per_row - state.gamma * of_mean
    if state.offset is not None:
        entropy = F.softplus(entropy + state.offset)
    losses = {
        "commitment": Mean(far.sum(), kept.sum().to(z.dtype) * (z.shape[-2] * z.shape[-1])),
        "entropy": Mean(entropy * here, here),
    }
    return Quantized(out.to(x.dtype), projection_layers.joined(_codes(state, z), kept), losses, counts)


def entropies(
    state: LFQ,
    x: Tensor,
    key: Tensor | None = None,
    mask: Tensor | None = None,
    *,
    inv_temperature: float = 100.0,
    psum: Psum = one_process,
) -> tuple[Tensor, Tensor]:
    """What :func:`apply` has for entropies, in nats: the mean of the rows', and that of the mean."""
    z, kept, _ = _enter("lfq.entropies", state, x, mask)
    return _entropies(state, z, kept, key, inv_temperature, psum)[:2]


def update(state: LFQ, stats: RowCounts) -> LFQ:
    """The state itself: nothing of it is a statistic."""
    return state


def _enter(name: str, state: LFQ, x: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor, RowCounts]:
    x, kept = projection_layers.start(name, x, state.dim, mask)
    if state.params is not None and state.cosine is not None:
        z = projection_layers.cosine(x, state.params, state.num_codebooks) * state.cosine  # [... c d]
    else:
        z, kept = projection_layers.enter(x, kept, state.params, state.num_codebooks)
    if state.clamp is not None:
        z = torch.tanh(z / state.clamp) * state.clamp
    if state.rotation is not None:
        z, kept = rows.zero_invalid(projection_layers.turn(z, state.rotation), kept, 2)
    if state.spherical:
        z = rows.direction(z) * state.scale
    return z, kept, projection_layers.counted(kept, mask)


def _leave(state: LFQ, q: Tensor, known: Tensor) -> Tensor:
    return projection_layers.leave(projection_layers.turn_back(q, state.rotation), state.params, known)


def _size(state: LFQ) -> float:
    """What the scalars become, without the sign."""
    return state.scale * state.bits**-0.5 if state.spherical else state.scale


def _value(state: LFQ, ones: Tensor, dtype: torch.dtype) -> Tensor:
    return (ones.to(dtype) * 2.0 - 1.0) * _size(state)


def _codes(state: LFQ, z: Tensor) -> Tensor:
    return mixed_radix.encode((z > 0).long().flip(-1), (2,) * state.bits)


def _entropies(
    state: LFQ, z: Tensor, kept: Tensor, key: Tensor | None, inv_temperature: float, psum: Psum
) -> tuple[Tensor, Tensor, Tensor]:
    """Of z [... c d]: the mean of the rows' entropies, the entropy of the mean, and how many rows are here."""
    if key is not None and state.share < 1.0:
        z, kept = _some(state.share, z, kept, random.fold(key, "share"))
    rows, num_codebooks = kept.numel(), z.shape[-2]
    weight = kept.reshape(rows).to(z.dtype)
    a = 4.0 * inv_temperature * _size(state) * z.reshape(rows, *z.shape[-2:])
    a = a.clamp(-CERTAIN, CERTAIN)  # which changes no digit, but inf * 0 would be no number
    a = rearrange(a, "n c (g b) -> (c g) n b", b=state.group or state.bits)
    on, off = torch.sigmoid(a), torch.sigmoid(-a)
    each = -(on * F.logsigmoid(a) + off * F.logsigmoid(-a)).sum((0, 2))  # [n]
    high, low = (_patterns(*half) for half in zip(_halves(off), _halves(on), strict=True))  # [(c g) n 2^(b/2)]
    sums = matmul((high * weight[:, None]).mT, low).flatten(1)  # of p, [(c g) 2^b]
    here = weight.sum()
    sums, each, n = psum((sums, (each * weight).sum(), here))
    n = n.clamp(min=1.0)
    p = sums / n
    surprise = -p.clamp(min=torch.finfo(p.dtype).tiny).log()  # p times it is 0 at 0, and has a gradient
    return each / n / num_codebooks, (p * surprise).sum() / num_codebooks, here


def _halves(t: Tensor) -> tuple[Tensor, Tensor]:
    return t[..., : t.shape[-1] // 2], t[..., t.shape[-1] // 2 :]


def _patterns(off: Tensor, on: Tensor) -> Tensor:
    """The probability of every pattern of bits [... b], of which the first is the most significant: [... 2^b]."""
    p = torch.ones_like(on[..., :0].sum(-1, keepdim=True))
    for i in range(on.shape[-1]):
        p = torch.stack([p * off[..., i, None], p * on[..., i, None]], -1).flatten(-2)
    return p


def _some(share: float, z: Tensor, kept: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
    """A random ``share`` of the rows of each key: z [*key m c d] and kept bool[*key m]."""
    n = math.prod(kept.shape[key.ndim :])
    z, kept = z.reshape(*key.shape, n, *z.shape[-2:]), kept.reshape(*key.shape, n)
    chosen = random.permutation(key, n)[..., : math.ceil(share * n)]  # [*key m]
    return z.take_along_dim(chosen[..., None, None], -3), kept.take_along_dim(chosen, -1)
