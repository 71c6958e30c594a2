"""Tests of products with quantised activations, and of fake quantisation, under every transform."""

from dataclasses import replace

import bitsandbytes as bnb
import pytest
import torch
from torch.func import grad, jvp, vmap

from fquant import dequantize, jit, linear, lora, quantize
from fquant.dynamic_quantization import Outliers, fake_quantize
from fquant.format import (
    AQ_2X8,
    FP8,
    FP8_E4M3,
    INT4,
    INT4_ZERO,
    INT8,
    INT8_ROW,
    INT8_ROW_ZERO,
    NF4,
    NF4_DQ,
    TERNARY,
)  # fmt: skip
from tests.helpers.arrays import named, rng, same_bits
from tests.helpers.formats import KNOWN

WEIGHTS = [INT8, INT4, INT4_ZERO, NF4_DQ, FP8, None]
ACTS = [INT8_ROW, INT8_ROW_ZERO, INT8, FP8_E4M3, INT4]
PLAIN = [f for f in KNOWN.values() if f.vectors is None]


def case(format):
    w, x = torch.randn(40, 128, generator=rng(0)), torch.randn(6, 128, generator=rng(1))
    return (w if format is None else quantize(w, format)), x


@named("act", ACTS)
@pytest.mark.parametrize("format", WEIGHTS, ids=lambda f: f.name if f else "dense")
def test_it_is_the_product_of_the_quantised_x_with_straight_through_derivatives(format, act):
    w, x = case(format)
    dense = w if format is None else dequantize(w)
    wanted = dequantize(quantize(x, act)) @ dense.mT
    y = linear(x, w, act=act)
    assert (y - wanted).norm() < 1e-6 * wanted.norm()
    loss = lambda x: linear(x, w, act=act).square().sum()
    assert torch.allclose(grad(loss)(x), 2 * y @ dense, atol=1e-3)
    assert torch.allclose(jvp(lambda x: linear(x, w, act=act), (x,), (x.flip(0),))[1], x.flip(0) @ dense.mT, atol=1e-4)
    rows = vmap(lambda x: linear(x[None], w, act=act)[0])(x)
    assert torch.allclose(rows, y, atol=1e-5 if act.block is None else 1e-5)
    assert torch.allclose(vmap(grad(loss))(x[:, None])[:, 0], 2 * y @ dense, atol=1e-3)
    step = lambda x, w: grad(lambda x: linear(x, w, act=act).square().sum())(x)
    assert same_bits(jit(step)(x, w), grad(loss)(x))
    assert torch.equal(linear(x, w, torch.ones(40), act), y + 1)


@named("format", [INT8, INT4, NF4])
def test_a_lora_beside_a_base_with_act_trains(format):
    w, x = case(format)
    adapters = lora.init({"w": w}, "w", rank=4, alpha=8, key=0)
    adapters = {"w": replace(adapters["w"], b=torch.randn(40, 4, generator=rng(2)))}
    loss = lambda a, act: linear(x, lora.attach({"w": w}, a)["w"], act=act).square().sum()
    got, dense = grad(loss)(adapters, INT8_ROW), grad(loss)(adapters, None)
    a, b = adapters["w"].a, adapters["w"].b
    y = dequantize(quantize(x, INT8_ROW)) @ dequantize(w).mT + 2.0 * x @ a.mT @ b.mT  # the adapter gets x as it is
    assert torch.allclose(got["w"].b, 2.0 * (2 * y).mT @ (x @ a.mT), rtol=1e-3, atol=1e-2)
    assert torch.allclose(got["w"].a, 2.0 * (2 * y @ b).mT @ x, rtol=1e-3, atol=1e-2)
    assert (got["w"].a - dense["w"].a).norm() < 0.05 * dense["w"].a.norm()  # torchao's is off by 0.4


def test_outliers_equal_llm_int8_of_bitsandbytes():
    w, x = torch.randn(64, 128, generator=rng(0)), torch.randn(20, 128, generator=rng(1))
    x[:, [3, 77]] *= 20.0
    layer = bnb.nn.Linear8bitLt(128, 64, bias=False, has_fp16_weights=False, threshold=6.0)
    layer.weight = bnb.nn.Int8Params(w.clone(), requires_grad=False, has_fp16_weights=False)
    layer = layer.to("cpu")
    with torch.no_grad():
        theirs = layer(x.half()).float()
    wanted, p = x @ w.mT, quantize(w, INT8)
    ours, without = linear(x, p, act=Outliers(INT8, 6.0)), linear(x, p, act=INT8)
    off = lambda y: float((y - wanted).norm() / wanted.norm())
    assert off(ours) < 0.01 < off(without) and off(ours) < 1.1 * off(theirs)
    assert (ours - theirs).norm() < 0.01 * wanted.norm()
    g = grad(lambda x: linear(x, p, act=Outliers(INT8, 6.0)).square().sum())(x)
    assert torch.allclose(g, 2 * ours @ dequantize(p), rtol=1e-3, atol=1e-2)


@named("dtype", [torch.float32, torch.bfloat16])
@named("format", PLAIN)
def test_fake_quantisation_is_the_round_trip(format, dtype):
    x = torch.randn(5, 200, generator=rng(0)).to(dtype)
    wanted = dequantize(quantize(x, format))
    assert same_bits(fake_quantize(x, format), wanted)
    assert torch.equal(grad(lambda x: (fake_quantize(x, format) * x.detach()).sum())(x), x)
    y, dy, *_ = jvp(lambda x: fake_quantize(x, format), (x,), (2 * x,))
    assert same_bits(y, wanted) and torch.equal(dy, 2 * x)
    stack = torch.stack([x, x.flip(0) * 3])
    each = torch.stack([fake_quantize(t, format) for t in stack])
    assert same_bits(vmap(lambda t: fake_quantize(t, format))(stack), each)
    assert same_bits(jit(lambda x: fake_quantize(x, format))(x), fake_quantize(x, format))


def test_nan_is_not_hidden():
    x = torch.randn(3, 128, generator=rng(0))
    x[1, 5] = torch.nan
    for format in (INT4, FP8_E4M3, NF4, INT8_ROW, INT8):
        y = fake_quantize(x, format)
        assert y[1].isnan().any() and y[[0, 2]].isfinite().all()


def test_errors():
    w, x = case(INT8)
    with pytest.raises(TypeError, match="linear got act of type str; wanted a Format or Outliers"):
        linear(x, w, act="int8_row")
    with pytest.raises(TypeError, match=r"fake_quantize got torch.int64; wanted f32, bf16 or f16"):
        fake_quantize(torch.arange(3), INT8)
    with pytest.raises(ValueError, match="fake_quantize got aq_2x8, whose vectors are learned; quantize once"):
        fake_quantize(x, AQ_2X8)
    with pytest.raises(ValueError, match="outliers: threshold is 0.0; wanted above 0"):
        Outliers(INT8, 0.0)
    with pytest.raises(ValueError, match=r"linear got x \(6, 64\) and a weight \(40, 128\)"):
        linear(x[:, :64], w, act=INT8_ROW)
    assert TERNARY.mean
