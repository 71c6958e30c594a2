"""Norms of rows and their gradients on every backend, against float64 with counted roundings.

Tests marked ``interpreted`` run the Triton kernels in Triton's interpreter, or on the card of ``--device``
(tests/helpers/kernels/interpreter.py).
"""

from functools import partial
from importlib.util import find_spec

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.func import vjp

from fquant.device import HOST
from fquant.kernels import cpu, reference
from fquant.kernels.ops.norm import rms_norm, rms_norm_backward
from tests.helpers.arrays import named
from tests.helpers.formats import ISAS, alike, built, forced, shifted, strided
from tests.helpers.kernels.interpreter import interpreted, interpreter  # noqa: F401
from tests.helpers.kernels.losses import ROWS, spread
from tests.helpers.kernels.norms import BACKENDS, DTYPES, EPSILON, PLACES, assert_backward, assert_scale, drawn, normed
from tests.helpers.kernels.threads import num_threads
from tests.helpers.live_memory import Peak

WIDTHS = [1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 31, 33, 63, 64, 65, 127, 128, 1000, 1023, 1024, 1025, 4096, 4113, 8200]


def assert_right(g, x, weight, eps=EPSILON):
    """Check that scale and gradient are within their bounds, and that y is exact for its scale."""
    y, scale = rms_norm(x, weight, eps)
    dx = rms_norm_backward(g, x, weight, scale)
    assert y.is_contiguous() and scale.is_contiguous() and dx.is_contiguous()
    assert y.dtype is dx.dtype is x.dtype and scale.dtype is torch.float32
    assert y.shape == dx.shape == x.shape and scale.shape == x.shape[:1]
    assert_scale(scale, x, eps)
    assert alike(y.cpu(), normed(x.cpu(), weight.cpu(), scale.cpu()))
    assert_backward(dx, g, x, weight, scale)


# --- what comes out ---------------------------------------------------------------------------------------------------


def test_the_slope_of_the_reference_is_its_derivative():
    g, x, weight = drawn(30, 50, torch.float64)
    y, pull, *_ = vjp(lambda x: reference.rms_norm(x, weight, 0.1)[0], x)
    scale = reference.rms_norm(x, weight, 0.1)[1]
    torch.testing.assert_close(reference.rms_norm_backward(g, x, weight, scale), pull(g)[0])
    torch.testing.assert_close(y, F.rms_norm(x, (50,), weight, 0.1))


@st.composite
def calls(draw):
    n, d = draw(st.integers(0, 70)), draw(st.sampled_from(WIDTHS) | st.integers(0, 300))
    n = n if n * d < 2**16 else n % 4
    dtype, seed = draw(st.sampled_from(DTYPES)), draw(st.integers(0, 2**16))
    g, x, weight = drawn(n, d, dtype, seed, draw(st.sampled_from([0.0, 1e-40, 1e-5, 1.0, 300.0])))
    weight = weight.to(draw(st.sampled_from([dtype, torch.float32, torch.float64, torch.bfloat16])))
    place, at = draw(st.sampled_from(PLACES)), draw(st.sampled_from(PLACES))
    return at(g), place(x), draw(st.sampled_from([shifted, strided]))(weight), draw(st.sampled_from([1e-6, 1e-5, 1.0]))


@named("backend", BACKENDS)
@given(call=calls(), threads=st.integers(1, 3))
@settings(max_examples=60)
def test_random_rows(backend, call, threads):
    with num_threads(threads), forced(backend):
        assert_right(*call)


def assert_all_right(dtype, device=HOST):
    """Check rows of all kinds, together and each alone."""
    rows = torch.stack(list(ROWS.values())).to(device)
    rows = torch.where(rows.isinf(), rows, rows.clamp(-6e4, 6e4)) if dtype is torch.float16 else rows
    g, _, weight = drawn(len(rows), rows.shape[1], dtype, device=device)
    assert_right(g, rows.to(dtype), weight)
    for row in rows.to(dtype):
        assert_right(g[:1, :70], row[None, :70], weight[:70])


@named("backend", BACKENDS)
@named("dtype", DTYPES)
def test_rows_of_all_kinds(backend, dtype):
    with forced(backend):
        assert_all_right(dtype)


@named("backend", BACKENDS)
@named("dtype", DTYPES)
def test_what_is_not_finite_stays_where_it_is(backend, dtype):
    """An infinite element gives NaN at its place and zeros in its row; a NaN gives NaN in its row only."""
    g, x, weight = drawn(70, 40, dtype)
    x[3, 7], x[5, 39], x[69, 0] = torch.inf, torch.nan, -torch.inf
    with forced(backend):
        y, scale = rms_norm(x, weight, EPSILON)
        dx = rms_norm_backward(g, x, weight, scale)
        hole = rms_norm_backward(torch.where(torch.arange(70)[:, None] == 9, torch.nan, g), x, weight, scale)
    assert y[[3, 69], [7, 0]].isnan().all() and y[5].isnan().all() and y.isnan().sum() == 42
    assert (y[[3, 69]].nan_to_num(0.0) == 0).all() and scale[[3, 69]].eq(0).all() and scale[5].isnan()
    assert dx[[3, 5, 69]].isnan().all() and dx.isnan().sum() == 120
    assert hole[9].isnan().all() and hole.isnan().sum() == 160


@named("backend", BACKENDS)
def test_zeros_without_eps_are_no_numbers(backend):
    with forced(backend):
        y, scale = rms_norm(torch.zeros(2, 9), torch.ones(9), 0.0)
    assert y.isnan().all() and scale.isinf().all()


@built
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_instruction_set_gives_the_same_bits(dtype):
    for i, d in enumerate(WIDTHS):
        g, x, weight = drawn(1 + i % 3, d, dtype, seed=i)
        found = []
        for isa in ISAS:
            with forced(isa):
                y, scale = rms_norm(x, weight, EPSILON)
                found.append((y, scale, rms_norm_backward(g, x, weight, scale)))
        assert all(all(map(alike, one, found[0])) for one in found)


@named("backend", ISAS)
def test_a_long_row_is_summed_as_exactly_as_a_short_one(backend):
    """Equal terms that are added one by one in float32 would all be rounded in the same direction."""
    for d, fill in ((300_001, -0.3), (2**20, -0.3), (2**20, 0.1), (2**20, 1.3)):
        row = spread((0, 0.5), fill=fill, width=d)[None]
        with forced(backend):
            assert_right(torch.full_like(row, 0.7), row, row[0])
            assert_right(*drawn(1, d))


@named("backend", BACKENDS)
def test_float64_is_computed_in_float64(backend):
    g, x, weight = drawn(5, 33, torch.float64)
    with forced(backend):
        got = rms_norm(x, weight, EPSILON)
        dx = rms_norm_backward(g, x, weight, got[1])
    assert all(map(alike, got, reference.rms_norm(x, weight, EPSILON)))
    assert alike(dx, reference.rms_norm_backward(g, x, weight, got[1]))
    assert got[0].dtype is got[1].dtype is dx.dtype is torch.float64
    torch.testing.assert_close(got[0], F.rms_norm(x, (33,), weight, EPSILON), rtol=1e-14, atol=0)


@named("backend", BACKENDS)
def test_nothing_is_a_norm_too(backend):
    with forced(backend):
        for n, d in ((0, 5), (3, 0), (0, 0)):
            g, x, weight = drawn(n, d)
            y, scale = rms_norm(x, weight, EPSILON)
            assert y.shape == (n, d) and scale.shape == (n,) and scale.isnan().all()
            assert rms_norm_backward(g, x, weight, scale).shape == (n, d)


@built
def test_nothing_is_made_beside_the_results():
    g, x, weight = drawn(64, 5000, torch.bfloat16)
    for place in (lambda t: t, lambda t: F.pad(t, (3, 5))[:, 3:-5]):
        far, rows = place(g), place(x)
        with Peak() as peak:
            _, scale = cpu.rms_norm(rows, weight, EPSILON)
        assert peak.most == 64 * 5000 * 2 + 64 * 4
        with Peak() as peak:
            cpu.rms_norm_backward(far, rows, weight, scale)
        assert peak.most == 64 * 5000 * 2


# --- in Triton ------------------------------------------------------------------------------------------------------

triton = pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed; pip install triton")


@triton
@pytest.mark.xdist_group("interpreter")
@interpreted
def test_triton(device):
    for i, d in enumerate([1, 2, 17, 64, 127, 1000, 4096, 4097, 8200]):
        g, x, weight = drawn((3, 70, 9, 65)[i % 4], d, DTYPES[i % 3], i, 10.0 ** (i % 3), device)
        assert_right(PLACES[-i % 5](g), PLACES[i % 5](x), strided(weight.to(DTYPES[i // 3])))
    ones = partial(torch.ones, device=device)
    assert rms_norm(ones(0, 5), ones(5), EPSILON)[0].shape == (0, 5)
    assert rms_norm(ones(2, 9).double(), ones(9), EPSILON)[1].dtype is torch.float64


@triton
@pytest.mark.xdist_group("interpreter")
@named("dtype", DTYPES)
@interpreted
def test_triton_rows_of_all_kinds(device, dtype):
    assert_all_right(dtype, device)
