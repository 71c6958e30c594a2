"""FSP: equality with vector-quantize-pytorch, narrow dtypes, distributions, the training noise and the moments loss."""

import math
from dataclasses import replace

import pytest
import torch
from torch.func import grad

from fquant import random
from fquant.vq import mean
from fquant.vq.scalar import fsp
from tests.helpers.vq.fsp import LEVELS, MOMENTS, both
from tests.helpers.vq.peers import assert_close, drawn, ours, theirs

CASES = {
    **{name: {"distribution": name} for name in fsp.DISTRIBUTIONS},
    **{f"{name}, inverse": {"distribution": name, "inverse": True} for name in fsp.DISTRIBUTIONS},
    **{f"moments {name}": {"moments": name} for name in MOMENTS},
    "projected": {"dim": 7, "moments": "kurt"},
    "projected without bias": {"dim": 3, "bias": False, "inverse": True},
}


@pytest.mark.parametrize("options", CASES.values(), ids=CASES)
def test_is_the_peers(options):
    peer, state = both(options)
    x = drawn(3, 40, state.dim)
    weight = drawn(3, 40, state.dim, seed=3)
    x_peer, codes, loss, _ = peer(x)
    got = fsp.apply(state, x)
    assert torch.equal(got.codes, codes.long()) and torch.equal(fsp.encode(state, x), got.codes)
    assert_close((got.x, fsp.decode(state, got.codes)), (x_peer.detach(), peer.indices_to_codes(codes).detach()))
    assert set(got.losses) == (set() if state.moments is None else {"moments"})
    if state.moments is not None:
        assert_close(mean(got.losses["moments"]), loss.detach())
    assert_close(
        ours(state, lambda s, x: total(fsp.apply(s, x), weight), x),
        theirs(peer, lambda p, x: (lambda out: (out[0] * weight).sum() + 10 * out[2])(p(x)), x),
    )


def total(got, weight):
    return (got.x * weight).sum() + sum(10 * mean(loss) for loss in got.losses.values())


def test_the_highest_and_the_lowest_of_every_scalar():
    for distribution in fsp.DISTRIBUTIONS:
        state = fsp.init(0, (8, 5, 5, 5), distribution=distribution)
        ends = torch.tensor([[1e30], [-1e30]]).expand(2, 4)
        assert fsp.encode(state, ends).tolist() == fsp.apply(state, ends).codes.tolist() == [999, 0]


@pytest.mark.parametrize("name", fsp.DISTRIBUTIONS)
def test_distributions_are_what_they_are_called(name):
    """The CDF equals the exact one in float64, and its gradient is the density, at 0 too."""
    here = fsp.DISTRIBUTIONS[name]
    exact = {
        "tanh": lambda z: (math.tanh(z) + 1) / 2,
        "sigmoid": lambda z: 1 / (1 + math.exp(-z)),
        "normal": lambda z: math.erfc(-z / math.sqrt(2)) / 2,
        "laplace": lambda z: math.exp(z) / 2 if z < 0 else 1 - math.exp(-z) / 2,
        "cauchy": lambda z: math.atan(z) / math.pi + 0.5,
    }[name]
    z = torch.linspace(-3, 3, 61, dtype=torch.float64)
    torch.testing.assert_close(here.cdf(z), torch.tensor([exact(v) for v in z.tolist()], dtype=torch.float64))
    torch.testing.assert_close(here.inverse(here.cdf(z)), z)
    h = 1e-6
    density = torch.tensor([(exact(v + h) - exact(v - h)) / (2 * h) for v in z.tolist()], dtype=torch.float64)
    slope = grad(lambda z: here.cdf(z).sum())
    torch.testing.assert_close(slope(z), density, rtol=1e-5, atol=1e-8)
    far = torch.tensor([-1e30, 1e30])
    torch.testing.assert_close(here.cdf(far), torch.tensor([0.0, 1.0]))
    assert torch.equal(slope(far), torch.zeros(2))


@pytest.mark.parametrize("distribution", fsp.DISTRIBUTIONS)
def test_what_follows_the_distribution_uses_all_codes_alike_and_has_variance_one(distribution):
    state = fsp.init(0, (4, 5), distribution=distribution)
    z = fsp.DISTRIBUTIONS[distribution].inverse(random.uniform(random.key(2), (50_000, 2), torch.float64))
    got = fsp.apply(state, z)
    share = torch.bincount(got.codes, minlength=20) / 50_000
    assert (share - 0.05).abs().max() < 5 * math.sqrt(0.05 * 0.95 / 50_000)
    levels = torch.tensor([4.0, 5.0])
    assert torch.allclose(got.x.var(0).float(), 1 - 1 / levels**2, atol=0.02)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_floats_are_quantised_in_float32(dtype):
    """In bfloat16 itself the last bin would be empty: its largest number below 1, 0.996, is in bin 498 of 500."""
    state = fsp.init(0, (500, 500))
    x = drawn(200, 2, size=3.0).to(dtype)
    got, wide = fsp.apply(state, x), fsp.apply(state, x.float())
    assert got.x.dtype is dtype and torch.equal(got.x, wide.x.to(dtype)) and torch.equal(got.codes, wide.codes)
    assert (got.codes % 500).max() == 499


@pytest.mark.parametrize("inverse", [False, True])
def test_shaking_is_where_and_how_it_says(inverse):
    """A third of the scalars move to the middle of their bin; the others get uniform noise of a bin's width."""
    state = fsp.init(0, (4,), quantize_rate=1 / 3, inverse=inverse, distribution="sigmoid", moments=None)
    z = drawn(30_000, 1)
    x = fsp.apply(state, z, random.key(3)).x
    u, middle = torch.sigmoid(z), (fsp.encode(state, z)[:, None] + 0.5) / 4
    out = torch.sigmoid(x) if inverse else x * 12**-0.5 + 0.5
    quantised = (out - middle).abs() < 1e-6
    assert abs(quantised.double().mean() - 1 / 3) < 4 * math.sqrt(2 / 9 / 30_000)
    inner = ~quantised & (u > 0.13) & (u < 0.87)  # quantiles that no noise moves out of (0, 1)
    by = (out - u)[inner].double() * 8
    assert by.abs().max() <= 1 + 1e-4 and abs(by.mean()) < 4 * math.sqrt(1 / 3 / len(by))
    assert abs(by.square().mean() - 1 / 3) < 4 * math.sqrt(4 / 45 / len(by))
    assert out.min() > 0 and out.max() < 1
    assert torch.equal(fsp.apply(replace(state, quantize_rate=1.0), z, random.key(3)).x, fsp.apply(state, z).x)


def test_what_is_shaken_has_the_gradient_of_what_is_not():
    state = fsp.init(0, LEVELS)
    z = drawn(50, 4)
    slope = grad(lambda z, key: fsp.apply(state, z, key).x.sum())
    assert torch.equal(slope(z, random.key(1)), slope(z, None))
    torch.testing.assert_close(slope(z, None), (1 - z.tanh().square()) / 2 * math.sqrt(12))
    inverse = replace(state, inverse=True)
    assert grad(lambda z: fsp.apply(inverse, z, random.key(1)).x.sum())(z).eq(1).all()


@pytest.mark.parametrize("distribution", fsp.DISTRIBUTIONS)
def test_at_the_edge_the_inverse_is_finite(distribution):
    """At u = 0 or 1 no noise is added, because it would leave (0, 1)."""
    state = fsp.init(0, (2,), distribution=distribution, inverse=True)
    z = torch.tensor([[-1e30], [1e30], [-1e7], [1e7]]).repeat(1000, 1)
    assert fsp.apply(state, z, random.key(0)).x.isfinite().all()


def test_moments_of_few_rows_are_finite_and_have_gradients():
    """One row, or equal rows, have no variance, and the peer's loss is NaN."""
    state = fsp.init(0, LEVELS, moments=fsp.KURT)
    for x in (drawn(1, 4), torch.ones(5, 4), torch.empty(0, 4)):
        value = lambda x: mean(fsp.apply(state, x).losses["moments"])
        assert value(x).isfinite() and grad(value)(x).isfinite().all()
    assert mean(fsp.apply(state, torch.empty(0, 4)).losses["moments"]) == 0
    one = mean(fsp.apply(replace(state, moments=fsp.VAR), torch.full((1, 4), 2.0)).losses["moments"])
    torch.testing.assert_close(one, torch.tensor(0.1 * 4 + 0.07))


def test_moments_are_of_the_rows_that_count():
    state = fsp.init(0, LEVELS, moments=fsp.KURT)
    x, mask = drawn(3, 20, 4), torch.arange(60).reshape(3, 20) % 3 > 0
    bad = x.clone()
    bad[1, 3] = math.nan
    keep = mask.clone()
    keep[1, 3] = False
    value = lambda x, mask: mean(fsp.apply(state, x, mask=mask).losses["moments"])
    wanted = mean(fsp.apply(state, x[keep]).losses["moments"])
    torch.testing.assert_close(value(bad, mask), wanted)
    slope = grad(value)(bad, mask)
    assert slope[~keep].eq(0).all()
    torch.testing.assert_close(slope[keep], grad(lambda x: value(x, None))(x[keep]))


WRONG = {
    "one level": (dict(levels=(5, 1)), r"levels are \(5, 1\); .* from 2 to"),
    "a distribution": (dict(distribution="gauss"), "distribution is 'gauss'; wanted one of tanh, sigmoid, normal"),
    "a rate": (dict(quantize_rate=-0.1), "quantize_rate is -0.1; wanted a probability"),
    "a bias of nothing": (dict(bias=False), "options of a projection, but dim is that of the scalars, 4"),
}


@pytest.mark.parametrize("options, message", WRONG.values(), ids=WRONG)
def test_contradictions_are_refused(options, message):
    with pytest.raises(ValueError, match="fsp.init: .*" + message):
        fsp.init(0, **{"levels": LEVELS, **options})
