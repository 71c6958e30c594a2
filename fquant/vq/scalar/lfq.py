"""Lookup-free quantisation: a code is the signs of its scalars, and entropies keep all codes in use (Yu et al. 2023).

    state = lfq.init(key, bits=16)                         # 65536 codes, dim 16, nothing to train
    state = lfq.init(key, bits=16, dim=64, spherical=True) # binary spherical quantisation (Zhao et al. 2024)

The first scalar is the most significant bit. A scalar becomes ±``scale`` with a straight-through gradient. A
``spherical`` state scales rows to length ``scale`` before, and its scalars become ±scale / √bits.

*Entropy.* Let p be the softmax over all codes c of 2 · inv_temperature · z · c. A row is sure of its code if H(p) is
low. All codes are used if the entropy of the mean of p over rows is high.

    loss = mean over rows of H(p) - gamma · H(mean over rows of p)       or softplus(loss + offset)

All codes have the same length, so p is a product over bits of ``σ(±4 · inv_temperature · |c_i| · z_i)``. H(p) is the
sum of the bits' entropies. The mean of p is one product of two matrices [rows, 2^(bits / 2)], one for each half of the
bits. No tensor has rows times codes numbers, and both entropies are exact. Beyond 24 bits the entropies of groups of
bits are added, as in the last paper; the sum is an upper bound.
"""

import math

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor

from ... import random, tree
from ...communication import identity
from ..codebook import rows
from ..codebook.gradient_estimators import straight_through
from ..codebook.losses import commitment
from ..precision import linear, matmul
from ..quantized import Key, Mask, Mean, Psum, Quantized, Seed
from . import projection_layers
from .projection_layers import Projections

ACTIVATIONS = {"identity": lambda z: z, "tanh": torch.tanh}  # whose gradients may pass straight through
CERTAIN = 1e3  # a logit at which the other value of a bit has probability 0, in float64 too
MOST_TOGETHER = 24  # bits whose patterns' probabilities are in one tensor
update = projection_layers.update


@tree.node
class LFQ:
    """``num_codebooks`` codes of ``bits`` scalars each."""

    params: Projections | None  # the trained leaves
    rotation: Tensor | None  # f32[bits bits], fixed
    bits: int = tree.static()
    dim: int = tree.static()
    num_codebooks: int = tree.static(default=1)
    scale: float = tree.static(default=1.0)
    spherical: bool = tree.static(default=False)
    clamp: float | None = tree.static(default=None)  # bounds the scalars to ± this by tanh
    cosine: float | None = tree.static(default=None)  # projects unit vectors onto unit vectors, times this
    activation: str = tree.static(default="identity")  # or "tanh": the function whose gradient x gets
    gamma: float = tree.static(default=1.0)  # the weight of the entropy of the mean
    share: float = tree.static(default=1.0)  # the share of the rows, drawn by key, that enter the entropies
    offset: float | None = tree.static(default=None)  # makes the entropy loss softplus(loss + offset), above 0
    group: int | None = tree.static(default=None)  # bits in a group of the entropy of the mean; None for all


def init(
    key: Seed,
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
    """Return a state for x f[... dim], by default ``num_codebooks * bits``; another dim is projected.

    The options are those of :class:`LFQ`. ``bias`` False omits the projections' biases, and ``rotation`` draws a fixed
    one.
    """
    if not 1 <= bits <= 62:
        raise ValueError(f"lfq.init: bits are {bits}; wanted from 1 to 62; use codebooks for more")
    for name, number in {"scale": scale, "clamp": clamp, "cosine": cosine}.items():
        if number is not None and not 0.0 < number < math.inf:
            raise ValueError(f"lfq.init: {name} is {number}; wanted a positive number")
    if clamp is not None and clamp < scale:
        raise ValueError(f"lfq.init: clamp is {clamp}, below scale {scale}, which no scalar could reach; use more")
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
    matrix = projection_layers.orthogonal(random.fold(key, "rotation"), bits) if rotation else None
    options = (scale, spherical, clamp, cosine, activation, gamma, share, offset, group)
    return LFQ(params, matrix, bits, dim, num_codebooks, *options)


def encode(state: LFQ, x: Tensor) -> Tensor:
    """Return codes i64[...] of x f[... dim], or [... c] of several codebooks; -1 for a row that is not finite."""
    return _codes(state, *_project_in("lfq.encode", state, x, None))


def decode(state: LFQ, codes: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return x [... dim] of codes i[...] or [... c]; zero for -1."""
    ones, known = projection_layers.decode_digits("lfq.decode", codes, (2,) * state.bits, state.num_codebooks)
    return projection_layers.project_out(_value(state, ones.flip(-1) > 0, dtype), state.params, known, state.rotation)


def apply(
    state: LFQ, x: Tensor, key: Key = None, mask: Mask = None, *, inv_temperature: float = 100.0, psum: Psum = identity
) -> Quantized:
    """Quantise x f[... dim] with a straight-through gradient; two losses, and a RowCounts as statistics.

    "commitment" is the squared distance of scalars to their quantised values, which are constants. "entropy" covers all
    rows that ``psum``, which is differentiable, sums over; weighted by the local rows, it adds up over ranks. ``key``,
    whose shape leads x's, draws the ``share`` of rows in the entropies, rounded up for each key; without it all enter.
    """
    z, live = _project_in("lfq.apply", state, x, mask)
    q = _value(state, z > 0, z.dtype)
    value = straight_through(ACTIVATIONS[state.activation](z), q)
    out = projection_layers.project_out(value, state.params, live[..., None], state.rotation)
    per_row, of_mean, num_local = _entropies(state, z, live, key, inv_temperature, psum)
    entropy = per_row - state.gamma * of_mean
    if state.offset is not None:
        entropy = F.softplus(entropy + state.offset)
    entropy = Mean(entropy * num_local, num_local)
    losses = {"commitment": commitment(z, q, live), "entropy": entropy}
    return Quantized(out.to(x.dtype), _codes(state, z, live), losses, projection_layers.count_rows(live, mask))


def entropies(
    state: LFQ, x: Tensor, key: Key = None, mask: Mask = None, *, inv_temperature: float = 100.0, psum: Psum = identity
) -> tuple[Tensor, Tensor]:
    """Return the entropies of :func:`apply` in nats: the mean of the rows' entropies, and the entropy of the mean."""
    z, live = _project_in("lfq.entropies", state, x, mask)
    return _entropies(state, z, live, key, inv_temperature, psum)[:2]


def _project_in(name: str, state: LFQ, x: Tensor, mask: Mask) -> tuple[Tensor, Tensor]:
    if state.params is not None and state.cosine is not None:
        x, live = projection_layers.prepare_rows(name, x, state.dim, mask)
        z = linear(rows.direction(x), rows.direction(state.params.project_in.weight))
        z = rearrange(z, "... (c d) -> ... c d", c=state.num_codebooks) * state.cosine
    else:
        z, live = projection_layers.project_in(name, x, state.dim, mask, state.params, state.num_codebooks)
    if state.clamp is not None:
        z = torch.tanh(z / state.clamp) * state.clamp
    if state.rotation is not None:
        z, live = rows.zero_invalid(projection_layers.rotate(z, state.rotation), live, 2)
    if state.spherical:
        z = rows.direction(z) * state.scale
    return z, live


def _magnitude(state: LFQ) -> float:
    return state.scale * state.bits**-0.5 if state.spherical else state.scale


def _value(state: LFQ, ones: Tensor, dtype: torch.dtype) -> Tensor:
    return (ones.to(dtype) * 2.0 - 1.0) * _magnitude(state)


def _codes(state: LFQ, z: Tensor, live: Tensor) -> Tensor:
    return projection_layers.encode_digits((z > 0).long().flip(-1), (2,) * state.bits, live)


def _entropies(
    state: LFQ, z: Tensor, live: Tensor, key: Key, inv_temperature: float, psum: Psum
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the mean entropy of the rows of z [... c d], the entropy of the mean, and the number of local rows."""
    if key is not None and state.share < 1.0:
        n = math.prod(live.shape[key.ndim :])  # rows of each key
        z, live = z.reshape(*key.shape, n, *z.shape[-2:]), live.reshape(*key.shape, n)
        chosen = random.permutation(random.fold(key, "share"), n)[..., : math.ceil(state.share * n)]  # [*key m]
        z, live = z.take_along_dim(chosen[..., None, None], -3), live.take_along_dim(chosen, -1)
    num_rows, num_codebooks = live.numel(), z.shape[-2]
    weight = live.reshape(num_rows).to(z.dtype)
    logits = 4.0 * inv_temperature * _magnitude(state) * z.reshape(num_rows, *z.shape[-2:])
    logits = logits.clamp(-CERTAIN, CERTAIN)  # exact, and prevents inf * 0
    logits = rearrange(logits, "n c (g b) -> (c g) n b", b=state.group or state.bits)
    on, off = torch.sigmoid(logits), torch.sigmoid(-logits)
    each = -(on * F.logsigmoid(logits) + off * F.logsigmoid(-logits)).sum((0, 2))  # [n]
    halves = (t.tensor_split([t.shape[-1] // 2], -1) for t in (off, on))
    high, low = (_patterns(*half) for half in zip(*halves, strict=True))  # [(c g) n 2^(b/2)]
    sums = matmul((high * weight[:, None]).mT, low).flatten(1)  # of p, [(c g) 2^b]
    num_local = weight.sum()
    sums, each, n = psum((sums, (each * weight).sum(), num_local))
    n = n.clamp(min=1.0)
    p = sums / n
    surprise = -p.clamp(min=torch.finfo(p.dtype).tiny).log()  # so that p · surprise has a gradient at 0
    return each / n / num_codebooks, (p * surprise).sum() / num_codebooks, num_local


def _patterns(off: Tensor, on: Tensor) -> Tensor:
    """Return the probabilities of all patterns of bits [... b], the first most significant: [... 2^b]."""
    p = torch.ones_like(on[..., :0].sum(-1, keepdim=True))
    for i in range(on.shape[-1]):
        p = torch.stack([p * off[..., i, None], p * on[..., i, None]], -1).flatten(-2)
    return p
