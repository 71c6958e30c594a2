"""Finite scalar perturbation: quantise each scalar's quantile, and in training perturb it within its bin (2026).

    z -> u = CDF(z) in [0, 1] -> the middle of u's bin, one of L        codes: the bins in a mixed radix
                              -> or u + uniform noise in ±1/2L          in training, with probability 1 - quantize_rate

(https://arxiv.org/abs/2602.17133.) The output is (u - ½) · √12, of variance 1 for uniform u, with the gradient of u;
with ``inverse`` it is the value of that quantile, with the gradient of z. Noise that would leave (0, 1) is not added.
All levels are used if z follows the distribution, so :class:`Moments` is a loss on four moments of each feature.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from ... import random, tree
from ...communication import identity
from ..codebook.gradient_estimators import straight_through
from ..quantized import Key, Mask, Mean, Psum, Quantized, Seed
from . import projection_layers
from .projection_layers import Projections, per_scalar

STD = 12**-0.5  # of a uniform number in [0, 1)
update = projection_layers.update


class Distribution(NamedTuple):
    """A cumulative distribution function and its inverse."""

    cdf: Callable[[Tensor], Tensor]
    inverse: Callable[[Tensor], Tensor]


def _laplace(z: Tensor) -> Tensor:
    lower, upper = 0.5 * z.clamp(max=0.0).exp(), 1.0 - 0.5 * (-z.clamp(min=0.0)).exp()
    return torch.where(z > 0, upper, lower)


DISTRIBUTIONS = {
    "tanh": Distribution(lambda z: (torch.tanh(z) + 1.0) / 2.0, lambda p: torch.atanh(p * 2.0 - 1.0)),
    "sigmoid": Distribution(torch.sigmoid, torch.logit),
    "normal": Distribution(
        lambda z: (1.0 + torch.erf(z / math.sqrt(2.0))) / 2.0, lambda p: torch.erfinv(2.0 * p - 1.0) * math.sqrt(2.0)
    ),
    "laplace": Distribution(_laplace, lambda p: -torch.sign(p - 0.5) * torch.log(1.0 - 2.0 * torch.abs(p - 0.5))),
    "cauchy": Distribution(lambda z: torch.atan(z) / math.pi + 0.5, lambda p: torch.tan((p - 0.5) * math.pi)),
}


@tree.value
@dataclass(frozen=True)
class Moments:
    """A loss on moments of each feature over rows: ``weights`` times the squared distances to ``targets``, summed."""

    targets: tuple[float, float, float, float] = (0.0, 1.0, 0.0, 0.0)  # mean, variance, skewness, excess kurtosis
    weights: tuple[float, float, float, float] = (0.1, 0.07, 0.06, 0.05)


KURT = Moments()
VAR = Moments(weights=(0.1, 0.07, 0.0, 0.0))
VAR_TANH = replace(VAR, targets=(0.0, 0.8225, 0.0, 0.0))  # the variance of the distribution whose CDF is tanh
VAR_SIGMOID = replace(VAR, targets=(0.0, 3.29, 0.0, 0.0))
VAR_LAPLACE = replace(VAR, targets=(0.0, 2.0, 0.0, 0.0))


@tree.node
class FSP:
    """One code of ``len(levels)`` scalars."""

    params: Projections | None  # the trained leaves
    levels: tuple[int, ...] = tree.static()
    dim: int = tree.static()
    distribution: str = tree.static(default="tanh")
    quantize_rate: float = tree.static(default=0.0)
    inverse: bool = tree.static(default=False)
    moments: Moments | None = tree.static(default=VAR_TANH)


def init(
    key: Seed,
    levels: tuple[int, ...],
    dim: int | None = None,
    *,
    bias: bool | None = None,
    distribution: str = "tanh",
    quantize_rate: float = 0.0,
    inverse: bool = False,
    moments: Moments | None = VAR_TANH,
) -> FSP:
    """Return a state for x f[... dim], by default ``len(levels)``; another dim is projected."""
    levels = projection_layers.check_levels("fsp.init", levels, 2**22)  # up to there float32 represents half a level
    if distribution not in DISTRIBUTIONS:
        raise ValueError(f"fsp.init: distribution is {distribution!r}; wanted one of {', '.join(DISTRIBUTIONS)}")
    if not 0.0 <= quantize_rate <= 1.0:
        raise ValueError(f"fsp.init: quantize_rate is {quantize_rate}; wanted a probability in [0, 1]")
    dim, params = projection_layers.init("fsp.init", random.key(key), dim, 1, len(levels), bias)
    return FSP(params, levels, dim, distribution, quantize_rate, inverse, moments)


def encode(state: FSP, x: Tensor) -> Tensor:
    """Return codes i64[...] of x f[... dim]; -1 for a row that is not finite."""
    z, live = projection_layers.project_in("fsp.encode", x, state.dim, None, state.params)
    bins = _bins(state, DISTRIBUTIONS[state.distribution].cdf(z)).long()
    return projection_layers.encode_digits(bins, state.levels, live)


def decode(state: FSP, codes: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return x [... dim] of codes i[...]; zero for -1."""
    digits, known = projection_layers.decode_digits("fsp.decode", codes, state.levels)
    bins = digits.to(dtype)
    value = _value(state, (bins + 0.5) / per_scalar(state.levels, bins))
    return projection_layers.project_out(value, state.params, known)


def apply(state: FSP, x: Tensor, key: Key = None, mask: Mask = None, *, psum: Psum = identity) -> Quantized:
    """Quantise x f[... dim], or perturb it if there is a ``key``, whose shape leads x's; a RowCounts as statistics.

    The loss "moments" covers all rows that ``psum``, which is differentiable, sums over, in two calls on every rank;
    weighted by the local rows, it adds up over ranks.
    """
    z, live = projection_layers.project_in("fsp.apply", x, state.dim, mask, state.params)
    u = DISTRIBUTIONS[state.distribution].cdf(z)
    bins = _bins(state, u)
    q = straight_through(u, (bins + 0.5) / per_scalar(state.levels, bins))
    if key is not None and state.quantize_rate < 1.0:
        noise = random.uniform(random.fold(key, "noise"), u.shape, u.dtype) * 2.0 - 1.0
        perturbed = u + noise / (2.0 * per_scalar(state.levels, u))
        perturbed = torch.where((perturbed > 0.0) & (perturbed < 1.0), perturbed, u)
        q = torch.where(random.bernoulli(random.fold(key, "where"), state.quantize_rate, u.shape), q, perturbed)
    value = straight_through(z, _value(state, q)) if state.inverse else _value(state, q)
    out = projection_layers.project_out(value, state.params, live[..., None])
    codes = projection_layers.encode_digits(bins.long(), state.levels, live)
    losses = {} if state.moments is None else {"moments": _moments(state.moments, z, live, psum)}
    return Quantized(out.to(x.dtype), codes, losses, projection_layers.count_rows(live, mask))


def _bins(state: FSP, u: Tensor) -> Tensor:
    """Return the bin of each u [... c d], from 0; 1 is in the last bin."""
    return (u.clamp(max=1.0 - torch.finfo(u.dtype).eps) * per_scalar(state.levels, u)).floor().detach()


def _value(state: FSP, u: Tensor) -> Tensor:
    if not state.inverse:
        return (u - 0.5) / STD
    eps = torch.finfo(u.dtype).eps  # because a perturbed quantile near 0 or 1 may have no finite value
    return DISTRIBUTIONS[state.distribution].inverse(u.clamp(eps, 1.0 - eps))


def _moments(moments: Moments, z: Tensor, live: Tensor, psum: Psum) -> Mean:
    """Return the loss of z [... c d]; each of the c·d features has moments of its own."""
    rows = z.reshape(live.numel(), z.shape[-2] * z.shape[-1])  # [n d]
    weight = live.reshape(live.numel(), 1).to(z.dtype)
    num_local = weight.sum()
    first, n = psum((rows.sum(0), num_local))  # rows that are not live are zero
    n = n.clamp(min=1.0)
    mean = first / n
    centred = (rows - mean) * weight
    second, third, fourth = psum(tuple(centred.pow(k).sum(0) for k in (2, 3, 4)))
    variance = second / (n - 1.0).clamp(min=1.0)  # of one row it is zero
    std = variance.clamp(min=1e-16).sqrt()
    measured = mean, variance, third / n / std**3, fourth / n / std**4 - 3.0
    terms = zip(measured, moments.targets, moments.weights, strict=True)
    loss = sum(weight * (moment - target).square().mean() for moment, target, weight in terms)
    return Mean(loss * num_local, num_local)
