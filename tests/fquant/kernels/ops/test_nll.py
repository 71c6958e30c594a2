"""The negative log likelihood and its gradient on every backend, against float64 with counted roundings.

Tests marked ``interpreted`` run the Triton kernels in Triton's interpreter, or on the card of ``--device``
(tests/helpers/kernels/interpreter.py).
"""

from importlib.util import find_spec

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.func import grad

from fquant.device import HOST
from fquant.kernels import cpu, dispatch, reference
from fquant.kernels.ops.nll import nll, nll_backward
from tests.helpers.arrays import named, rng
from tests.helpers.formats import ISAS, alike, built, forced, strided
from tests.helpers.kernels.interpreter import interpreted, interpreter  # noqa: F401
from tests.helpers.kernels.losses import (
    BACKENDS,
    DTYPES,
    EPS,
    IGNORE,
    INF,
    NAN,
    PLACES,
    ROWS,
    assert_near,
    drawn,
    exact,
    spread,
)
from tests.helpers.kernels.threads import num_threads
from tests.helpers.live_memory import Peak

WIDTHS = [1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 31, 33, 63, 64, 65, 127, 1000, 4095, 4096, 4097, 4113, 8200]


def assert_right(logits, targets, ignore=IGNORE, factor=None):
    """Check that values and gradients are within their bounds, and zero for ignored targets."""
    got, (again, slope) = nll(logits, targets, ignore), nll_backward(logits, targets, ignore, factor)
    assert alike(got, again) and got.is_contiguous() and slope.is_contiguous()
    assert got.dtype is torch.float32 and slope.dtype is logits.dtype and slope.shape == logits.shape
    extra, on_card = steps(logits), logits.is_cuda
    logits, targets, factor = logits.cpu(), targets.cpu(), None if factor is None else factor.cpu()
    value, true, bound, slope_bound = exact(logits, targets, ignore, factor, on_card)
    got, slope = got.cpu(), slope.cpu()
    assert_near(got, value, bound + EPS * extra(value))
    assert_near(slope, true, slope_bound)
    ignored = targets == ignore
    assert not got[ignored].any() and not slope[ignored].any()


def steps(logits):
    """Return a function of values: the sum of what is rounded to float32 between the logarithm and the value."""
    largest = logits.cpu().double().abs().nan_to_num(0.0, 0.0, 0.0).amax(-1)
    return {
        "cpu": lambda value: value.abs(),
        "triton": lambda value: 2 * value.abs(),
        "reference": lambda value: value.abs() + 2 * largest,
    }[dispatch.backend(logits.device.type)[0]]


# --- what comes out ---------------------------------------------------------------------------------------------------


def test_the_reference_is_the_cross_entropy_of_torch():
    logits, targets = drawn(30, 50, torch.float64)
    factor = torch.randn(30, generator=rng(2), dtype=torch.float64)
    peer = lambda x: F.cross_entropy(x, targets, reduction="none")
    value, slope = reference.nll_backward(logits, targets, IGNORE, factor)
    torch.testing.assert_close(value, peer(logits))
    torch.testing.assert_close(slope, grad(lambda x: (factor * peer(x)).sum())(logits))
    assert torch.equal(value, reference.nll(logits, targets, IGNORE))


@st.composite
def calls(draw):
    c, v = draw(st.integers(0, 4)), draw(st.sampled_from(WIDTHS) | st.integers(1, 300))
    dtype, seed = draw(st.sampled_from(DTYPES)), draw(st.integers(0, 2**16))
    size = draw(st.sampled_from([0.0, 1e-40, 0.1, 1.0, 5.0, 40.0, 300.0]))
    logits, targets = drawn(c, v, dtype, seed, size, draw(st.booleans()))
    ignore = draw(st.sampled_from([IGNORE, 0, v - 1, v, 2**40]))
    targets = targets.where(targets != IGNORE, ignore)
    factor = draw(st.sampled_from([None, torch.randn(4, generator=rng(seed))[:c], torch.tensor(1 / 7).expand(c)]))
    place = draw(st.sampled_from(PLACES))
    return place(logits), strided(targets), ignore, factor


@named("backend", BACKENDS)
@given(call=calls(), threads=st.integers(1, 3))
@settings(max_examples=60)
def test_random_rows(backend, call, threads):
    with num_threads(threads), forced(backend):
        assert_right(*call)


def assert_all_right(dtype, *places, device=HOST):
    """Check every row with targets at ``places``, and ignored."""
    for row in ROWS.values():
        targets = torch.tensor([*places, IGNORE])
        logits = row.clamp(-6e4, 6e4) if dtype is torch.float16 and not row.isinf().any() else row
        rows, factor = logits.to(device, dtype).expand(len(targets), -1), torch.linspace(-2, 2, len(targets))
        assert_right(rows, targets.to(device), IGNORE, factor.to(device))


@named("backend", BACKENDS)
@named("dtype", DTYPES)
def test_rows_of_all_kinds(backend, dtype):
    with forced(backend):
        assert_all_right(dtype, 0, 1, 3, 16, 17, 4095, 4097, 4999, 5001, 5002)


@named("backend", ISAS)
def test_the_exponential(backend):
    """Beside a logit of zero, a gradient is the exponential times a factor, 1 below -17: 1.1 units there, 2 above."""
    x = torch.cat([-104 * torch.rand(200_000, generator=rng(0)), torch.linspace(-105, 0, 10_001), torch.tensor([-0.0])])
    with forced(backend):
        _, slope = nll_backward(
            torch.stack([torch.zeros_like(x), x], -1), torch.zeros(len(x), dtype=torch.long), IGNORE
        )
    true = x.double().exp() / (1 + x.double().exp())
    unit = torch.maximum(2.0 ** (true.log2().floor() - 23), torch.tensor(2.0**-149, dtype=torch.float64))
    off = (slope[:, 1].double() - true).abs() / unit
    assert off[x < -17.4].max() < 1.1 and off.max() < 2
    assert not slope[x < -103.98].any() and slope[(x > -103.9) & (x < -80), 1].all()


@named("backend", ISAS)
def test_a_long_row_is_summed_as_exactly_as_a_short_one(backend):
    """Equal terms that are added one by one in float32 would all be rounded in the same direction."""
    for v, fill in ((300_001, -0.3), (2**20, -0.3), (2**20, -0.1), (2**20, -1.3)):
        with forced(backend):
            assert_right(spread((0, 0.0), fill=fill, width=v)[None], torch.tensor([v - 1]))
            assert_right(*drawn(1, v, ignored=False))


@named("backend", BACKENDS)
def test_an_ignored_row_may_hold_anything(backend):
    logits = torch.full((3, 40), NAN)
    logits[1] = 1.0
    with forced(backend):
        value, slope = nll_backward(logits, torch.tensor([-1, 3, -1]), -1, torch.tensor([NAN, 1.0, INF]))
    assert value[1] > 0 and slope[1].any() and not value[::2].any() and not slope[::2].any()


@named("backend", BACKENDS)
def test_float64_is_computed_in_float64(backend):
    logits, targets = drawn(5, 33, torch.float64)
    factor = torch.rand(5, generator=rng(3), dtype=torch.float64)
    with forced(backend):
        assert alike(nll(logits, targets, IGNORE), reference.nll(logits, targets, IGNORE))
        got = nll_backward(logits, targets, IGNORE, factor)
    assert all(map(alike, got, reference.nll_backward(logits, targets, IGNORE, factor)))
    assert got[0].dtype is got[1].dtype is torch.float64


@built
def test_nothing_is_made_beside_the_results():
    logits, targets = drawn(64, 5000, torch.bfloat16)
    for place in (lambda t: t, lambda t: F.pad(t, (3, 5))[:, 3:-5]):
        rows = place(logits)
        with Peak() as peak:
            cpu.nll_backward(rows, targets, IGNORE, None)
        assert peak.most == 64 * 5000 * 2 + 64 * 4
    with Peak() as peak:
        cpu.nll(logits, targets, IGNORE)
    assert peak.most == 64 * 4


# --- in Triton ------------------------------------------------------------------------------------------------------

triton = pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed; pip install triton")


@triton
@pytest.mark.xdist_group("interpreter")
@interpreted
def test_triton(device):
    for i, v in enumerate([1, 2, 17, 64, 127, 1000, 4096, 4097, 8200]):
        logits, targets = drawn(i % 4, v, DTYPES[i % 3], i, 10.0 ** (i % 3), device=device)
        factor = None if i % 2 else torch.randn(i % 4, generator=rng(i)).to(device)
        assert_right(PLACES[i % 5](logits), strided(targets), IGNORE, factor)
    for targets in ([0, 18, 19], [0, -1, 3]) if device == HOST else ():  # a card asserts, which ends the process's use
        with pytest.raises(IndexError, match="wanted one in"):
            nll(torch.ones(3, 19, device=device), torch.tensor(targets, device=device), IGNORE)


@triton
@pytest.mark.xdist_group("interpreter")
@named("dtype", DTYPES)
@interpreted
def test_triton_rows_of_all_kinds(device, dtype):
    assert_all_right(dtype, 4095, device=device)
