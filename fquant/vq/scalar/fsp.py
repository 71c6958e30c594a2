"""Finite scalar perturbation: a scalar's quantile is quantised, and in training shaken within its bin (2026).

    z -> u = CDF(z) in [0, 1] -> the middle of u's bin, one of L        codes: the bins in a mixed radix
                              -> or u + a uniform number in ±1/2L       in training, with probability 1 - quantize_rate

(https://arxiv.org/abs/2602.17133.) The distribution that the CDF is of is one of ``DISTRIBUTIONS``. What comes out is
(u - ½) · √12, which has variance 1 where u is uniform, and u's gradient; or with ``inverse`` the value of that
quantile, and z's gradient. A number that would leave (0, 1) is not shaken.

So that all levels are used, z has to follow that distribution: :class:`Moments` is a loss on its mean, variance,
skewness and kurtosis, feature by feature, over all rows there are. On a mesh these are the rows of all ranks:

    fsp.apply(state, x, key, psum=lambda sums: shard.psum(sums, mesh, ("dp", "fsdp")))

sums twice, first for the mean and then around it, on every rank with any number of rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from ... import random, tree
from ..codebook.gradient_estimators import straight_through
from ..quantized import Mean, Psum, Quantized, one_process
from . import mixed_radix, projection_layers
from .projection_layers import Projections, RowCounts, row

STD = 12**-0.5  # of a uniform number in [0, 1)


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
    """A loss on what each feature's rows have for mean, variance, skewness and excess kurtosis: the squared distances
    to ``targets``, in the mean over features, times ``weights``, are summed."""

    targets: tuple[float, float, float, float] = (0.0, 1.0, 0.0, 0.0)
    weights: tuple[float, float, float, float] = (0.1, 0.07, 0.06, 0.05)


KURT = Moments()
VAR = Moments(weights=(0.1, 0.07, 0.0, 0.0))
VAR_TANH = replace(VAR, targets=(0.0, 0.8225, 0.0, 0.0))  # the variance of the distribution that tanh is the CDF of
VAR_SIGMOID = replace(VAR, targets=(0.0, 3.29, 0.0, 0.0))
VAR_LAPLACE = replace(VAR, targets=(0.0, 2.0, 0.0, 0.0))


@tree.node
class FSP:
    """One code of ``len(levels)`` scalars."""

    params: Projections | None  # what trains
    levels: tuple[int, ...] = tree.static()
    dim: int = tree.static()
    distribution: str = tree.static(default="tanh")
    quantize_rate: float = tree.static(default=0.0)
    inverse: bool = tree.static(default=False)
    moments: Moments | None = tree.static(default=VAR_TANH)


def init(
    key: int | Tensor,
    levels: tuple[int, ...],
    dim: int | None = None,
    *,
    bias: bool | None = None,
    distribution: str = "tanh",
    quantize_rate: float = 0.0,
    inverse: bool = False,
    moments: Moments | None = VAR_TANH,
) -> FSP:
    """A state for x f[... dim], which by default is ``len(levels)`` and is projected otherwise.

    Raises ValueError for levels below 2, an unknown distribution, a probability outside [0, 1], and ``bias`` where
    nothing is projected.
    """
    levels = mixed_radix.check("fsp.init", levels, 2**22)  # between which float32 has a half
    if distribution not in DISTRIBUTIONS:
        raise ValueError(f"fsp.init: distribution is {distribution!r}; wanted one of {', '.join(DISTRIBUTIONS)}")
    if not 0.0 <= quantize_rate <= 1.0:
        raise ValueError(f"fsp.init: quantize_rate is {quantize_rate}; wanted a probability in [0, 1]")
    dim, params = projection_layers.init("fsp.init", random.key(key), dim, 1, len(levels), bias)
    return FSP(params, levels, dim, distribution, quantize_rate, inverse, moments)


def encode(state: FSP, x: Tensor) -> Tensor:
    """x f[... dim] -> codes i64[...]; -1 for a row that is not finite."""
    z, kept, _ = _enter("fsp.encode", state, x, None)
    return projection_layers.joined(mixed_radix.encode(_bins(state, _cdf(state)(z)).long(), state.levels), kept)


def decode(state: FSP, codes: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """codes i[...] -> x [... dim] in ``dtype``; zero for -1. Raises IndexError for one that is none."""
    codes, known = projection_layers.split("fsp.decode", codes, 1, math.prod(state.levels))
    u = _middle(state, mixed_radix.decode(codes, state.levels).to(dtype))
    return projection_layers.leave(_value(state, u), state.params, known)


def apply(
    state: FSP, x: Tensor, key: Tensor | None = None, mask: Tensor | None = None, *, psum: Psum = one_process
) -> Quantized:
    """x f[... dim] quantised, or with a ``key``, whose shape leads x's, shaken; a RowCounts as statistics.

    ``mask`` bool[...] is True for the rows that count. The loss "moments" is that of all rows that ``psum``, which is
    differentiable, sums over, weighted by the rows that are here: so sums over ranks are its own.
    """
    z, kept, counts = _enter("fsp.apply", state, x, mask)
    u = _cdf(state)(z)
    bins = _bins(state, u)
    q = straight_through(u, _middle(state, bins))
    if key is not None and state.quantize_rate < 1.0:
        noise = random.uniform(random.fold(key, "noise"), u.shape, u.dtype) * 2.0 - 1.0
        shaken = u + noise / (2.0 * row(state.levels, u))
        shaken = torch.where((shaken > 0.0) & (shaken < 1.0), shaken, u)
        q = torch.where(random.bernoulli(random.fold(key, "where"), state.quantize_rate, u.shape), q, shaken)
    value = _value(state, q)
    out = projection_layers.leave(straight_through(z, value) if state.inverse else value, state.params, kept[..., None])
    codes = projection_layers.joined(mixed_radix.encode(bins.long(), state.levels), kept)
    losses = {} if state.moments is None else {"moments": _moments(state.moments, z, kept, psum)}
    return Quantized(out.to(x.dtype), codes, losses, counts)


def update(state: FSP, stats: RowCounts) -> FSP:
    """The state itself: nothing of it is a statistic."""
    return state


def _enter(name: str, state: FSP, x: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor, RowCounts]:
    x, kept = projection_layers.start(name, x, state.dim, mask)
    z, kept = projection_layers.enter(x, kept, state.params, 1)
    return z, kept, projection_layers.counted(kept, mask)


def _cdf(state: FSP) -> Callable[[Tensor], Tensor]:
    return DISTRIBUTIONS[state.distribution].cdf


def _bins(state: FSP, u: Tensor) -> Tensor:
    """Which bin each u [... c d] is in, from 0; 1 is in the last."""
    return (u.clamp(max=1.0 - torch.finfo(u.dtype).eps) * row(state.levels, u)).floor().detach()


def _middle(state: FSP, bins: Tensor) -> Tensor:
    return (bins + 0.5) / row(state.levels, bins)


def _value(state: FSP, u: Tensor) -> Tensor:
    if not state.inverse:
        return (u - 0.5) / STD
    eps = torch.finfo(u.dtype).eps  # what is shaken may be so near to 0 or 1 that it has no finite value
    return DISTRIBUTIONS[state.distribution].inverse(u.clamp(eps, 1.0 - eps))


def _moments(of: Moments, z: Tensor, kept: Tensor, psum: Psum) -> Mean:
    """The loss of z [... c d], each of whose features is one for itself."""
    rows = z.reshape(kept.numel(), z.shape[-2] * z.shape[-1])  # [n d]
    weight = kept.reshape(kept.numel(), 1).to(z.dtype)
    here = weight.sum()
    first, n = psum((rows.sum(0), here))  # rows that do not count are zero
    n = n.clamp(min=1.0)
    mean = first / n
    apart = (rows - mean) * weight
    second, third, fourth = psum(tuple(apart.pow(k).sum(0) for k in (2, 3, 4)))
    variance = second / (n - 1.0).clamp(min=1.0)  # of one row it is zero
    std = variance.clamp(min=1e-16).sqrt()
    found = mean, variance, third / n / std**3, fourth / n / std**4 - 3.0
    loss = sum(w * (m - t).square().mean() for m, t, w in zip(found, of.targets, of.weights, strict=True))
    return Mean(loss * here, here)
