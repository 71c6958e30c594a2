"""Tests of products of integers: bits of every backend against the reference, and the reference against float64."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from fquant import dequantize, linear, quantize
from fquant.dynamic_quantization import fake_quantize
from fquant.format import INT4, INT4_ZERO, INT8, INT8_ROW, INT8_ROW_ZERO, NF4, NF4_INT8
from fquant.kernels import integer_ops, reference
from fquant.kernels.spec import Spec
from fquant.packed import buffers
from tests.helpers.arrays import named, rng, same_bits
from tests.helpers.formats import ISAS, built, draw, forced, strided
from tests.helpers.kernels.integers import ACTS, TABLES, WEIGHTS, inputs

SHAPES = [
    (1, 5, 64),
    (7, 50, 301),
    (33, 30, 2200),
    (600, 26, 96),
    (2, 37, 256),
    (4, 16, 1024),
    (3, 2, 768),
    (70, 150, 2304),
]  # m out in


@built
@named("dtype", [torch.float32, torch.bfloat16, torch.float16])
@named("act", ACTS)
@named("format", WEIGHTS)
def test_every_instruction_set_gives_the_bits_of_the_reference(format, act, dtype):
    for shape in SHAPES if dtype == torch.float32 else (SHAPES[1], SHAPES[4]):
        x, w, spec = inputs(format, *shape, dtype)
        wanted = reference.integer_matmul(x, buffers(w), spec, act)
        for isa in ISAS:
            with forced(isa):
                assert same_bits(integer_ops.integer_matmul(x, buffers(w), spec, act), wanted), (isa, shape)


@built
@named("format", TABLES)
def test_tables_of_any_integers_and_every_code(format):
    """Few rows, whose bytes are multiplied, and many."""
    spec = Spec(format, (30, 256), torch.float32)
    for m in (1, 40):
        x, weight = torch.randn(m, 256, generator=rng(m)), draw(spec)
        for act in ACTS:
            wanted = reference.integer_matmul(x, weight, spec, act)
            for isa in ISAS:
                with forced(isa):
                    assert same_bits(integer_ops.integer_matmul(x, weight, spec, act), wanted), (isa, m, act)


@named("act", ACTS)
@named("format", WEIGHTS)
def test_the_product_is_that_of_the_decoded_values(format, act):
    x, w, spec = inputs(format, 33, 30, 301, torch.float32)
    q, scale = reference.quantize_rows(x, act)
    wanted = (q * scale.double()) @ dequantize(w).double().mT
    got = integer_ops.integer_matmul(x, buffers(w), spec, act).double()
    assert (got - wanted).norm() < 1e-6 * wanted.norm()
    rounded = x.half() if act == INT8 else x
    near = (q * scale.double() - rounded.double()).abs() <= (0.5 + 1e-5) * scale.double()  # half a step
    assert near.all() if act.unit != 127.5 else near.float().mean() > 0.99  # absmax itself is cut off


def test_quantised_rows_are_those_of_quantize():
    x = torch.randn(9, 130, generator=rng(0)) + 0.2
    for act in ACTS:
        q, scale = reference.quantize_rows(x, act)
        values = dequantize(quantize(x, act)).double()
        assert (q * scale.double() - values).abs().max() < 1e-5
        assert isinstance(quantize(x, act).scale, Tensor)


@built
def test_a_stack_strides_and_empty_products():
    x, w, spec = inputs(INT4_ZERO, 7, 50, 301, torch.float32)
    wanted = integer_ops.integer_matmul(x, buffers(w), spec, INT8_ROW)
    assert same_bits(integer_ops.integer_matmul(strided(x), [strided(b) for b in buffers(w)], spec, INT8_ROW), wanted)
    two = [torch.stack([b, b]) for b in buffers(w)]
    stacked = integer_ops.integer_matmul(torch.stack([x, 2 * x]), two, spec, INT8_ROW)
    assert same_bits(stacked[0], wanted) and same_bits(stacked[1], 2 * wanted)
    assert integer_ops.integer_matmul(x[:0], buffers(w), spec, INT8_ROW).shape == (0, 50)
    assert integer_ops.integer_matmul(x.double(), buffers(w), spec, INT8_ROW).dtype == torch.float64


@built
def test_a_long_row_whose_sum_is_beyond_int32():
    x = torch.ones(2, 140_000)
    w = quantize(torch.ones(3, 140_000), INT8)
    y = integer_ops.integer_matmul(x, buffers(w), Spec(INT8, w.shape, w.dtype), INT8_ROW)
    assert torch.allclose(y, torch.full((2, 3), 140_000.0), rtol=1e-5)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf], ids=str)
@built
def test_a_row_that_is_not_finite_is_nan_and_no_other(bad):
    x, w, spec = inputs(INT8, 7, 50, 301, torch.float32)
    x[3, 7] = bad
    for isa in (*ISAS, "reference"):
        with forced(isa):
            y = integer_ops.integer_matmul(x, buffers(w), spec, INT8_ROW)
            assert not y[3].isfinite().any() and y[[0, 1, 2, 4, 5, 6]].isfinite().all()


def test_activations_whose_scales_are_powers_of_two_are_not_multiplied_as_integers():
    x, w, spec = inputs(INT8, 7, 50, 64, torch.float32)
    act = replace(INT8_ROW, name="power", unit=None, power=True)
    assert same_bits(linear(x, w, act=act), linear(fake_quantize(x, act), w))
    with pytest.raises(ValueError, match="integer_matmul got act power; wanted 8-bit integers with one float32 scale"):
        integer_ops.integer_matmul(x, buffers(w), spec, act)


def test_what_is_not_integers_is_refused():
    x, w, spec = inputs(INT8, 7, 50, 64, torch.float32)
    with pytest.raises(ValueError, match="integer_matmul got act nf4; wanted 8-bit integers with one float32 scale"):
        integer_ops.integer_matmul(x, buffers(w), spec, NF4)
    with pytest.raises(ValueError, match="integer_matmul got a weight in nf4; wanted integers in blocks along rows"):
        n = quantize(torch.ones(5, 64), NF4)
        integer_ops.integer_matmul(x, buffers(n), Spec(NF4, n.shape, n.dtype), INT8_ROW)
    with pytest.raises(TypeError, match="a gradient through integer_matmul was asked for; multiply with fquant.linear"):
        integer_ops.integer_matmul(x.requires_grad_(), buffers(w), spec, INT8_ROW)


# --- two dense operands -----------------------------------------------------------------------------------------------


@built
@named("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("acts", [(INT8_ROW, INT8_ROW), (INT8_ROW_ZERO, INT8_ROW), (INT8, INT8_ROW_ZERO)], ids=str)
def test_dense_operands(acts, dtype):
    for m, n, k in [(1, 5, 64), (7, 50, 301), (600, 26, 96), (33, 30, 2201)]:
        a, b = torch.randn(m, k, generator=rng(0)).to(dtype), (torch.randn(n, k, generator=rng(1)) + 0.2).to(dtype)
        (q, scale), (r, scale_of_b) = reference.quantize_rows(a, acts[0]), reference.quantize_rows(b, acts[1])
        wanted = reference.integer_mm(a, b, *acts)
        exact = (q * scale.double()) @ (r * scale_of_b.double()).mT
        assert (wanted.double() - exact).norm() < {torch.float32: 1e-6}.get(dtype, 4e-3) * exact.norm()
        for isa in ISAS:
            with forced(isa):
                assert same_bits(integer_ops.integer_mm(a, b, *acts), wanted), isa
    stack = torch.stack([a, a.flip(0)])
    one = lambda a, b: integer_ops.integer_mm(a, b, *acts)
    assert same_bits(torch.vmap(one, (0, None))(stack, b)[1], one(a.flip(0), b))
    assert same_bits(torch.vmap(one)(stack, torch.stack([b, 2 * b]))[1], one(a.flip(0), 2 * b))


@built
@named("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("acts", [(INT8_ROW, INT8_ROW), (INT8_ROW_ZERO, INT8_ROW), (INT8, INT8_ROW_ZERO)], ids=str)
def test_dense_operands_that_are_stored_transposed(acts, dtype):
    """Alone, within a larger array, and with gaps between elements."""
    inside = lambda t: torch.nn.functional.pad(t, (3, 2)).mT.contiguous()[3:-2].mT
    views = [lambda t: t, lambda t: t.mT.contiguous().mT, lambda t: inside(t.mT).mT, inside, strided]
    for m, n, k in [(1, 5, 64), (7, 50, 301), (64, 65, 96), (600, 130, 33), (3, 2, 1)]:
        a, b = torch.randn(m, k, generator=rng(0)).to(dtype), (torch.randn(n, k, generator=rng(1)) + 0.2).to(dtype)
        wanted = reference.integer_mm(a, b, *acts)
        for isa in ISAS:
            with forced(isa):
                for of_a, of_b in [*((v, v) for v in views), (views[0], views[1]), (views[1], views[0])]:
                    assert same_bits(integer_ops.integer_mm(of_a(a), of_b(b), *acts), wanted), (isa, m, n, k)


def test_dense_operands_that_do_not_fit():
    a = torch.ones(3, 4)
    with pytest.raises(ValueError, match=r"integer_mm got a \(3, 4\) and b \(3, 5\); wanted \[m k\] and \[n k\]"):
        integer_ops.integer_mm(a, torch.ones(3, 5), INT8_ROW, INT8_ROW)
    with pytest.raises(TypeError, match="integer_mm got a torch.float32 on cpu and b torch.bfloat16"):
        integer_ops.integer_mm(a, a.bfloat16(), INT8_ROW, INT8_ROW)
    with pytest.raises(ValueError, match="integer_mm got act int4; wanted 8-bit"):
        integer_ops.integer_mm(a, a, INT8_ROW, INT4)


def test_nf4_as_integers_is_near_to_nf4():
    """The opt-in route of one row: the same codes, with levels rounded to multiples of 1/127 of the absmax."""
    w, x = torch.randn(64, 1024, generator=rng(0)), torch.randn(1, 1024, generator=rng(1))
    p = quantize(w, NF4)
    q = replace(p, format=NF4_INT8)
    gap = max(abs(a - b) for a, b in zip(NF4.table, NF4_INT8.table, strict=True))
    assert gap <= 0.5 / 127
    got = integer_ops.integer_matmul(x, buffers(q), Spec(NF4_INT8, q.shape, q.dtype), INT8_ROW)
    wanted, nf4 = x @ w.mT, x @ dequantize(p).mT
    off = lambda y, z: float((y - z).norm() / z.norm())
    assert off(got, nf4) < 0.012 and off(got, wanted) < 1.02 * off(nf4, wanted)
