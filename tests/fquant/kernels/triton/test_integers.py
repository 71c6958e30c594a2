"""Products of integers in Triton: the bits of the reference, in the interpreter or on the card of ``--device``."""

import importlib
import itertools
from dataclasses import replace
from importlib.util import find_spec

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.func import grad

from fquant import linear, quantize
from fquant.format import INT2, INT4, INT4_ZERO, INT8, INT8_ROW, INT8_ROW_ZERO, TERNARY
from fquant.kernels import integer_ops, reference
from fquant.kernels.dispatch import backend
from fquant.kernels.integer_plans import CANDIDATES, Integral
from fquant.kernels.spec import Spec
from fquant.packed import FLOATS, buffers
from fquant.packed_linear import linear as linear_of
from fquant.quantized_training import INT8_MIXED, attach
from tests.helpers.arrays import named, rng
from tests.helpers.formats import alike, draw, shifted, strided
from tests.helpers.kernels.integers import ACTS, TABLES, WEIGHTS, inputs
from tests.helpers.kernels.interpreter import interpreted, interpreter  # noqa: F401

if find_spec("triton") is None:
    pytest.skip("triton is not installed; pip install triton", allow_module_level=True)
pytestmark = pytest.mark.xdist_group("interpreter")
SMALL = Integral(16, 32, 128, 4, 4)
PLACES = (lambda t: t, shifted, strided, lambda t: t.mT.contiguous().mT)
MINUS = replace(INT8_ROW, name="minus", table=tuple(map(float, range(-255, 1))), unit=255.0)  # integers up to zero


def check(device, x, buffers, spec, act, plan=None):
    """Compare a product with the reference's on the host."""
    there = [b.to(device) for b in buffers]
    got = backend(device.type)[1].integer_matmul(x.to(device), there, spec, act, plan)
    wanted = reference.integer_matmul(x.cpu(), [b.cpu() for b in buffers], spec, act)
    assert alike(got.cpu(), wanted), (spec, act, plan, x.shape, float((got.cpu() != wanted).float().mean()))


@named("dtype", FLOATS)
@named("act", [*ACTS, MINUS])
@interpreted
def test_rows(device, act, dtype):
    """Integers, their sums and scales of rows of all kinds, also of rows that are columns of memory."""
    rows = importlib.import_module("fquant.kernels.triton.integers.rows")
    for width, block in ((1, None), (64, 64), (301, 16), (4129, 512), (9000, None)):
        x = torch.randn(9, width, generator=rng(width))
        x[1], x[2] = 0.0, -0.3
        x[3], x[4] = x[3] * 1e-39, x[4].abs()
        x[5, width // 2], x[6, -1], x[7, 0] = 3e38, float("inf"), float("nan")
        x = x.to(dtype)
        q, scale = reference.quantize_rows(x, act)
        order = rows.Order(8, min(64, block or 64), 64, -(-width // 64) * 64)
        for place in PLACES[:: 3 if block is None else 1]:
            got = rows.quantize_rows(place(x.to(device))[None], act, order, block, sums=True)
            bytes_ = got.bytes.cpu().int()
            integers = bytes_ if got.shift is None else bytes_ + got.shift.cpu()[:, None]
            assert alike(got.scale.cpu(), scale[:, 0]) and torch.equal(integers[:, :width].double(), q)
            assert not bytes_[:, width:].any()
            each = -(-width // (block or width))
            sums = torch.nn.functional.pad(q, (0, each * (block or width) - width)).unflatten(-1, (each, -1)).sum(-1)
            assert torch.equal(got.sums.cpu().double(), sums)


@named("act", ACTS)
@named("format", WEIGHTS)
@interpreted
def test_formats(device, format, act):
    for dtype, shape in zip(FLOATS, [(1, 5, 64), (7, 50, 301), (20, 37, 416)], strict=True):
        x, w, spec = inputs(format, *shape, dtype)
        check(device, x, buffers(w), spec, act)


@named("plan", CANDIDATES)
@interpreted
def test_plans(device, plan):
    """Every tile, cut short on all sides and whole, and blocks that are longer or shorter than its steps."""
    formats = [INT8, INT4_ZERO, replace(INT4_ZERO, block=16), replace(INT2, block=512), INT8_ROW_ZERO]
    for format, act in zip(formats, itertools.cycle([INT8_ROW_ZERO, INT8_ROW]), strict=False):
        for shape in ((plan.rows + 1, plan.columns + 3, 301), (3, plan.columns, 512)):
            x, w, spec = inputs(format, *shape, torch.bfloat16)
            check(device, x, buffers(w), spec, act, plan)


@named("format", [*(f for f in WEIGHTS if f is not TERNARY), *TABLES])  # TERNARY has three codes
@interpreted
def test_every_code(device, format):
    """Codes are drawn, so that -128 and the ends of all tables occur; zero points are no integers."""
    spec = Spec(format, (33, 260), torch.float32)
    x = torch.randn(5, 260, generator=rng(0))
    for act in (INT8_ROW, INT8_ROW_ZERO):
        check(device, x, draw(spec), spec, act)


@interpreted
def test_stacks_strides_and_nothing(device):
    for format in (INT4_ZERO, INT8, INT2):
        x, w, spec = inputs(format, 7, 50, 320, torch.bfloat16)
        for place in PLACES:
            check(device, place(x), [place(b) for b in buffers(w)], spec, INT8_ROW_ZERO)
        stack = [torch.stack([b, b.flip(0)]) for b in buffers(w)]
        check(device, torch.stack([x, 2 * x]), stack, spec, INT8_ROW)
        check(device, torch.stack([x, x])[:0], [b[:0] for b in stack], spec, INT8_ROW)
        check(device, x[:0], buffers(w), spec, INT8_ROW)
        none = Spec(format, (0, 320), torch.bfloat16)
        check(device, x, draw(none), none, INT8_ROW)
    there = x.to(device), [b.to(device) for b in buffers(w)]
    assert integer_ops.integer_matmul(there[0].double(), there[1], spec, INT8_ROW).dtype == torch.float64


@interpreted
def test_rows_whose_sum_is_beyond_int32(device):
    for format, act in ((INT8, INT8_ROW), (INT8_ROW_ZERO, INT8_ROW_ZERO), (replace(INT4, block=None), INT8)):
        w = quantize(torch.linspace(0.1, 1, 2 * 140_000).view(2, -1), format)
        x = torch.linspace(0, 1, 140_000)[None]
        check(device, x, buffers(w), Spec(format, w.shape, w.dtype), act)
    a, b = x, x + 1
    got = integer_ops.integer_mm(a.to(device), b.to(device), INT8_ROW_ZERO, INT8_ROW_ZERO).cpu()
    assert alike(got, reference.integer_mm(a, b, INT8_ROW_ZERO, INT8_ROW_ZERO))


@named("bad", [float("nan"), float("inf")])
@interpreted
def test_a_row_that_is_not_finite_is_nan_and_no_other(device, bad):
    for format, act in itertools.product((INT8, INT4_ZERO), (INT8_ROW, INT8_ROW_ZERO, INT8)):
        x, w, spec = inputs(format, 7, 50, 301, torch.float32)
        x[3, 7] = bad
        check(device, x, buffers(w), spec, act)


@named("dtype", FLOATS)
@pytest.mark.parametrize(
    "acts", [(INT8_ROW, INT8_ROW), (INT8_ROW_ZERO, INT8_ROW), (INT8, INT8_ROW_ZERO), (MINUS, INT8_ROW_ZERO)], ids=str
)
@interpreted
def test_dense_operands(device, acts, dtype):
    for m, n, k in [(1, 5, 64), (70, 50, 301), (0, 4, 8), (4, 4, 0)]:
        a, b = torch.randn(m, k, generator=rng(0)).to(dtype), (torch.randn(n, k, generator=rng(1)) + 0.2).to(dtype)
        wanted = reference.integer_mm(a, b, *acts) if m and k else a.new_zeros(m, n)
        for left, right in zip(PLACES, PLACES[::-1], strict=True):
            got = integer_ops.integer_mm(left(a.to(device)), right(b.to(device)), *acts)
            assert alike(got.cpu(), wanted), (m, n, k)


@given(
    format=st.sampled_from([*WEIGHTS, *TABLES]), block=st.sampled_from((None, 16, 32, 64, 256)),
    act=st.sampled_from([*ACTS, MINUS]), dtype=st.sampled_from(FLOATS), rows=st.integers(1, 40),
    out=st.integers(1, 70), width=st.integers(1, 700), stack=st.lists(st.integers(1, 2), max_size=1),
    plan=st.sampled_from([None, SMALL, Integral(32, 16, 64, 4, 3)]), seed=st.integers(0, 9),
)  # fmt: skip
@settings(max_examples=40, deadline=None)
def _any_product(device, format, block, act, dtype, rows, out, width, stack, plan, seed):
    spec = Spec(replace(format, block=block, shared=False), (out, width), torch.float32)
    x = torch.randn(*stack, rows, width, generator=rng(seed)).to(dtype)
    weight = draw(spec, stack, seed)
    if format is TERNARY:  # whose fourth code does not occur
        weight[0] = weight[0] & 0xAA
    check(device, x, weight, spec, act, plan)


@interpreted
def test_any_product(device):
    _any_product(device=device)


@interpreted
def test_linear_and_its_gradient(device):
    """The product of activations as they arrive, and the three products of a layer that is trained in int8."""
    w, x = torch.randn(48, 96, generator=rng(0)), torch.randn(5, 96, generator=rng(1))
    act = lambda x, w: linear(x, quantize(w, INT4), act=INT8_ROW)
    assert alike(act(x.to(device), w.to(device)).cpu(), reference_of(lambda: act(x, w)))
    loss = lambda w, x: linear_of(x, attach({"w": w}, "w", INT8_MIXED)["w"]).square().sum()
    for argnum in (0, 1):
        got = grad(loss, argnum)(w.to(device), x.to(device)).cpu()
        assert alike(got, reference_of(lambda argnum=argnum: grad(loss, argnum)(w, x)))


def reference_of(f):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FQUANT_KERNELS", "reference")
        return f()
