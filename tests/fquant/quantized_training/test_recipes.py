"""Tests of recipes: what they cannot be, how they are attached, and what a Trainable cannot be used for."""

from dataclasses import replace

import pytest
import torch
from torch.func import grad

from fquant import dequantize, embedding, linear, lora, quantize, tree
from fquant.dynamic_quantization import fake_quantize
from fquant.format import AQ_2X8, INT4, INT4_ZERO, INT8_ROW, NF4
from fquant.quantized_training import INT8_MIXED, FakeQuantization, Products, Trainable, attach
from tests.helpers.arrays import named, rng, same_bits

W = torch.randn(40, 64, generator=rng(0))
X = torch.randn(6, 64, generator=rng(1))


def test_attach():
    params = {"layers": [{"q": W, "norm": torch.ones(64)}, {"q": W, "norm": torch.ones(64)}], "head": W}
    out = attach(params, r"layers\.\d+\.q", INT8_MIXED)
    assert out["layers"][1]["q"].recipe == INT8_MIXED and out["layers"][1]["q"].weight is W and out["head"] is W
    assert [path for path, _ in tree.items(out)][0] == "layers.0.q.weight"
    with pytest.raises(ValueError, match=r"'layers\\\\.q' matches no path; the tree has layers.0.q, layers.0.norm"):
        attach(params, r"layers\.q", INT8_MIXED)
    with pytest.raises(TypeError, match=r"layers.0.norm: got torch.float32 \(64,\); wanted a matrix of floats"):
        attach(params, r"layers\.\d+\.norm", INT8_MIXED)
    with pytest.raises(TypeError, match="head: got torch.float32 .* wanted|head: got .*Packed"):
        attach({"head": quantize(W, NF4)}, "head", INT8_MIXED)


@named("format", [NF4, INT4, INT4_ZERO])
def test_quantisation_aware_training_of_any_format_and_a_lora_beside_it(format):
    recipe = FakeQuantization(format, INT8_ROW)
    wanted = fake_quantize(X, INT8_ROW) @ dequantize(quantize(W, format)).mT
    y = linear(X, Trainable(W, recipe))
    assert torch.allclose(y, wanted, atol=1e-4)
    g = grad(lambda w: linear(X, Trainable(w, recipe)).square().sum())(W)
    assert torch.allclose(g, 2 * y.mT @ fake_quantize(X, INT8_ROW), atol=1e-3)
    adapters = lora.init({"w": W}, "w", rank=4, alpha=8, key=0)
    adapters = {"w": replace(adapters["w"], b=torch.randn(40, 4, generator=rng(2)))}
    both = lora.attach({"w": Trainable(W, recipe)}, adapters)["w"]
    a, b = adapters["w"].a, adapters["w"].b
    assert torch.allclose(linear(X, both), y + 2.0 * X @ a.mT @ b.mT, atol=1e-3)
    tokens = torch.tensor([3, 1])
    assert same_bits(embedding(tokens, Trainable(W, recipe)), dequantize(quantize(W, format))[tokens])


def test_after_training_the_quantised_model_is_the_trained_one():
    recipe = FakeQuantization(INT4)
    assert torch.allclose(linear(X, Trainable(W, recipe)), linear(X, quantize(W, INT4)), atol=1e-4)


REFUSED = [
    (lambda: Products(output=INT8_ROW), TypeError, "products: output is Format.*; wanted two formats, or None"),
    (lambda: Products(grad_weight=(AQ_2X8, INT8_ROW)), ValueError, "products: grad_weight: aq_2x8 has learned vectors"),
    (lambda: FakeQuantization("int4"), TypeError, "fake quantisation: weight is 'int4'; wanted a format or None"),
    (lambda: FakeQuantization(AQ_2X8), ValueError, "fake quantisation: weight: aq_2x8 has learned vectors"),
    (lambda: linear(X, Trainable(W, INT8_MIXED), act=INT8_ROW), TypeError, "act beside a Trainable; name the format"),
    (lambda: linear(X[:, :8], Trainable(W, INT8_MIXED)), ValueError, r"x \(6, 8\) and a weight \(40, 64\)"),
    (lambda: linear(X, Trainable(quantize(W, NF4), INT8_MIXED)), TypeError, "linear got a weight of type Trainable"),
]


@pytest.mark.parametrize("call, error, message", REFUSED)
def test_refused(call, error, message):
    with pytest.raises(error, match=message):
        call()
