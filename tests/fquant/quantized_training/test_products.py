"""Tests of the products of quantised training: torchao's functions, the definition, and every transform."""

from functools import partial

import pytest
import torch
from torch.func import grad, grad_and_value, hessian, jvp, vmap
from torchao.prototype.quantized_training.bitnet import get_bitnet_scale, quantize_bitnet_weight
from torchao.prototype.quantized_training.int8 import quantize_int8_rowwise
from torchao.prototype.quantized_training.int8_mixed_precision import (
    Int8MixedPrecisionTrainingConfig,
    _Int8MixedPrecisionTrainingLinearFunction,
)  # fmt: skip

from fquant import jit, linear
from fquant.dynamic_quantization import fake_quantize
from fquant.format import FP8_TENSOR, INT8_ROW, TERNARY
from fquant.quantized_training import (
    BITNET,
    FP8_ROWWISE,
    FP8_ROWWISE_HP,
    FP8_TENSORWISE,
    INT8_MIXED,
    RECIPES,
    Products,
    Trainable,
)  # fmt: skip
from tests.helpers.arrays import named, rng, same_bits

PAIR = (INT8_ROW, INT8_ROW)
EACH = {
    "all": INT8_MIXED, "output": Products(output=PAIR), "grad_input": Products(grad_input=PAIR),
    "grad_weight": Products(grad_weight=PAIR), "none": Products(),
}  # fmt: skip


def case(m=48, n=40, k=64, dtype=torch.float32):
    draw = lambda seed, *shape: torch.randn(*shape, generator=rng(seed)).to(dtype)
    return draw(0, m, k), draw(1, n, k), draw(2, m, n)


def products(x, w, g, recipe):
    """Return the output and the gradients for the cotangent g."""

    def loss(x, w):
        y = linear(x, Trainable(w, recipe))
        return (y * g).sum().float(), y

    (gx, gw), y = grad(loss, (0, 1), has_aux=True)(x, w)
    return y, gx, gw


def snr(wanted, got):
    return float(20 * torch.log10(wanted.norm() / (wanted - got).norm()))


@named("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", EACH)
def test_int8_mixed_precision_equals_torchao(name, dtype):
    """torchao's function of its swapped module; its default, a tensor subclass, computes in full precision."""
    x, w, g = case(dtype=dtype)
    on = lambda which: name in ("all", which)
    config = Int8MixedPrecisionTrainingConfig(on("output"), on("grad_input"), on("grad_weight"), True)
    x_, w_ = x.clone().requires_grad_(), w.clone().requires_grad_()
    y_ = _Int8MixedPrecisionTrainingLinearFunction.apply(x_, w_, None, config)
    y_.backward(g)
    for ours, theirs, full in zip(products(x, w, g, EACH[name]), (y_, x_.grad, w_.grad),
                                  (x @ w.mT, g @ w, g.mT @ x), strict=True):  # fmt: skip
        off = (ours.float() - theirs.float()).norm() / full.float().norm()
        assert off < (1e-6 if dtype == torch.float32 else 0.02)  # their scales are bfloat16 then
        assert snr(full.float(), ours.float()) > 20  # their bound


@pytest.mark.parametrize("recipe", [FP8_ROWWISE, FP8_ROWWISE_HP, FP8_TENSORWISE], ids=["row", "row_hp", "tensor"])
def test_float8_by_definition(recipe):
    x, w, g = case()
    y, gx, gw = products(x, w, g, recipe)
    by = lambda a, b, pair: a @ b.mT if pair is None else fake_quantize(a, pair[0]) @ fake_quantize(b, pair[1]).mT
    assert torch.allclose(y, by(x, w, recipe.output), atol=1e-5)
    assert torch.allclose(gx, by(g, w.mT.contiguous(), recipe.grad_input), atol=1e-5)
    assert torch.allclose(gw, by(g.mT.contiguous(), x.mT.contiguous(), recipe.grad_weight), atol=1e-5)
    assert snr(x @ w.mT, y) > 25 and snr(g @ w, gx) > 17 and snr(g.mT @ x, gw) > 17  # torchao's bounds: 18, 17


def test_float8_tensorwise_is_torchaos_cast():
    x = case()[0] * 3
    scale = (torch.finfo(torch.float8_e4m3fn).max / x.abs().max().double()).float()
    theirs = (x * scale).clamp(-448, 448).to(torch.float8_e4m3fn).float() / scale
    assert (fake_quantize(x, FP8_TENSOR) - theirs).abs().max() < 1e-6 * x.abs().max()


def test_bitnet_equals_torchao():
    x, w, g = case()
    scale = get_bitnet_scale(w)
    q = quantize_bitnet_weight(w, scale).float()
    codes, rows = quantize_int8_rowwise(x, eps=1e-5)
    xq = codes.float()
    theirs = (xq @ q.mT) * rows[:, None] * scale, (g @ q) * scale, g.mT @ (xq * rows[:, None])
    for ours, wanted in zip(products(x, w, g, BITNET), theirs, strict=True):
        assert torch.allclose(ours, wanted, rtol=1e-4, atol=1e-4)


def weighted(recipe, g, x, w):
    return (linear(x, Trainable(w, recipe)) * g).square().sum()


@pytest.mark.parametrize("name", RECIPES)
def test_transforms(name):
    recipe, (x, w, g) = RECIPES[name], case(6, 10, 16)
    loss = partial(weighted, recipe, g)
    both = grad_and_value(loss, (0, 1))
    (gx, gw), value = both(x, w)
    plain = grad(lambda x, w: ((x @ w.mT) * g).square().sum(), (0, 1))(x, w)
    assert snr(plain[0], gx) > 2 and snr(plain[1], gw) > 2
    captured = jit(lambda x, w, g: grad_and_value(partial(weighted, recipe), (1, 2))(g, x, w))(x, w, g)
    assert all(map(same_bits, (*captured[0], captured[1]), (gx, gw, value)))
    xs, ws = torch.stack([x, 2 * x, x.flip(0)]), torch.stack([w, -w, w.flip(0)])
    for dims, args in (((0, None), (xs, w)), ((None, 0), (x, ws)), ((0, 0), (xs, ws))):
        each = [both(*(t if d is None else t[i] for t, d in zip(args, dims, strict=True))) for i in range(3)]
        (mx, mw), mv = vmap(both, dims)(*args)
        for i, ((ex, ew), ev) in enumerate(each):
            assert torch.allclose(mx[i], ex, rtol=1e-4, atol=1e-3) and torch.allclose(mw[i], ew, rtol=1e-4, atol=1e-3)
            assert torch.allclose(mv[i], ev, rtol=1e-5)
    y, dy, *_ = jvp(lambda x: linear(x, Trainable(w, recipe)), (x,), (x.flip(0),))
    assert same_bits(y, linear(x, Trainable(w, recipe)))
    wanted = x.flip(0) @ (fake_quantize(w, TERNARY) if recipe is BITNET else w).mT
    assert torch.allclose(dy, wanted, atol=1e-4)
    assert hessian(lambda x: loss(x, w))(x).shape == (6, 16, 6, 16)


def test_any_leading_dims_a_bias_and_no_rows():
    x, w, _ = case(6, 10, 16)
    y = linear(x.reshape(2, 3, 16), Trainable(w, INT8_MIXED), torch.ones(10))
    assert torch.equal(y.reshape(6, 10), linear(x, Trainable(w, INT8_MIXED)) + 1)
    assert linear(x[:0], Trainable(w, INT8_MIXED)).shape == (0, 10)
    assert linear(x[0], Trainable(w, INT8_MIXED)).shape == (10,)
    assert linear(x.bfloat16(), Trainable(w, INT8_MIXED)).dtype == torch.bfloat16
