"""Tests of weights that stay quantised: gradients of the dense weight, unbiased rounding, and equal bits anywhere."""

from dataclasses import replace

import pytest
import torch
from torch.func import grad, jvp, vmap

from fquant import dequantize, jit, linear, optim, quantize, random
from fquant.format import FP8_E4M3, INT4, INT4_ZERO, INT8, INT8_GROUP, INT8_ROW, INT8_TENSOR, NF4
from fquant.quantized_training import weights
from fquant.quantized_training.weights import Carried, stochastic_quantize
from tests.helpers.arrays import equal, named, rng, same_bits
from tests.helpers.formats import KNOWN

W, X = torch.randn(40, 64, generator=rng(0)), torch.randn(6, 64, generator=rng(1))
TRAINED = [INT8_ROW, INT8_GROUP, INT4, INT4_ZERO]


@named("dtype", [torch.float32, torch.bfloat16])
@named("format", TRAINED)
def test_the_carrier_receives_the_gradient_of_the_dense_weight(format, dtype):
    packed, x = {"w": quantize(W, format)}, X.to(dtype)
    zeros = weights.carriers(packed)
    assert zeros["w"].untyped_storage().nbytes() == 4
    f = lambda c, x: linear(x, weights.attach({"w": packed["w"]}, packed, c)["w"]).float().square().sum()
    w = dequantize(packed["w"])
    plain = lambda w, x: (x @ w.to(dtype).mT).float().square().sum()
    close = dict(rtol=1e-4, atol=1e-3) if dtype == torch.float32 else dict(rtol=0.05, atol=2.0)
    assert torch.allclose(grad(f)(zeros, x)["w"], grad(plain)(w, x), **close)
    assert torch.allclose(grad(f, 1)(zeros, x), grad(plain, 1)(w, x), **close)
    each = vmap(grad(f), (None, 0))(zeros, x[:, None])["w"]
    assert torch.allclose(each, vmap(grad(plain), (None, 0))(w, x[:, None]), **close)
    tangent = {"w": W.flip(0)}
    y, dy, *_ = jvp(lambda c: linear(x, Carried(packed["w"], c["w"])), ({"w": zeros["w"].clone()},), (tangent,))
    assert torch.allclose(dy.float(), x.float() @ W.flip(0).mT, **close)
    assert same_bits(y, linear(x, packed["w"]))


def uneven():
    """Return rows of many ranges f32[8 150]: of one sign, far from zero, small, of zeros, one number alone."""
    w = torch.randn(8, 150, generator=rng(2))
    w[1], w[2], w[3], w[4], w[5] = w[1].abs(), -w[2].abs(), w[3] * 0.01 + 5, 0.0, 0.0
    w[5, 3], w[6], w[7] = 2.0, w[6] * 1e-30, w[7].clamp(-0.1, 0.9)
    return w


def trained(format):
    try:
        weights.check(format)
    except ValueError:
        return False
    return True


UNBIASED = [f for f in KNOWN.values() if trained(f)] + [
    replace(INT4_ZERO, name="signed_zero", table=INT4.table),
    replace(INT4, name="powers", power=True),
    replace(INT8_ROW, name="wide", unit=200.0),
]


@named("format", UNBIASED)
def test_the_mean_over_draws_is_the_value_also_at_the_extremes(format):
    w, count = uneven(), 4000
    packed = stochastic_quantize(w.repeat(count, 1), format, random.key(0))  # each row of each copy draws its own
    values = dequantize(packed).unflatten(0, (count, len(w))).double()
    assert isinstance(packed.scale, torch.Tensor)
    block = format.block or w.shape[1]
    step = packed.scale[: len(w)].double().repeat_interleave(block, 1)[:, : w.shape[1]].clamp(min=1e-300)
    y, values = w.double() / step, values / step
    up = y - y.floor()
    assert ((values - y).abs() < 1.0001).all()
    deviation = (up * (1 - up) / count).sqrt()
    assert ((values.mean(0) - y).abs() < 5 * deviation + 1e-3).all()  # 1e-3: of a draw in 1,000, seldom seen
    assert (values.std(0) > 0).double().mean() > 0.5


@named("format", UNBIASED)
def test_scales_do_not_grow_where_nothing_is_updated(format):
    first = packed = stochastic_quantize(uneven(), format, random.key(0))
    assert isinstance(first.scale, torch.Tensor)
    for i in range(1, 20):
        packed = stochastic_quantize(dequantize(packed), format, random.key(i))
    assert isinstance(packed.scale, torch.Tensor) and (packed.scale <= first.scale * 1.00001).all()


@named("dtype", [torch.bfloat16, torch.float16])
@named("format", UNBIASED)
def test_codes_do_not_depend_on_the_dtype_that_they_decode_to(format, dtype):
    """Its rounding would add up over steps, also of updates of zero."""
    start = quantize(uneven(), format)
    for size in (0.0, 0.01):
        many = [{"w": replace(start, dtype=dtype)}, {"w": start}]
        for i in range(5):
            update = {"w": size * torch.randn(8, 150, generator=rng(i))}
            many = [weights.apply_updates(packed, update, random.key(i)) for packed in many]
        (narrow, wide) = (packed["w"] for packed in many)
        assert narrow.dtype == dtype and equal(narrow, replace(wide, dtype=dtype))
        if format == INT8_ROW and not size:
            assert same_bits(narrow.codes, start.codes)


def test_the_same_key_gives_the_same_bits_for_any_slice_of_rows():
    key = random.fold(random.key(3), "w")
    whole = stochastic_quantize(W, INT8_GROUP, key)
    parts = [stochastic_quantize(W[a:b], INT8_GROUP, key, a) for a, b in ((0, 13), (13, 14), (14, 40))]
    assert same_bits(torch.cat([p.codes for p in parts]), whole.codes)
    assert same_bits(torch.cat([p.scale for p in parts]), whole.scale)
    other = stochastic_quantize(W, INT8_GROUP, random.key(4))
    assert not torch.equal(other.codes, whole.codes) and same_bits(other.scale, whole.scale)


@named("format", TRAINED)
def test_a_step_is_captured(format):
    packed = {"w": quantize(W, format)}
    opt = optim.adamw(1e-2)
    state = opt.init(weights.dense(packed))

    def step(packed, state, x, key):
        zeros = weights.carriers(packed)
        grads = grad(lambda c: linear(x, weights.attach(packed, packed, c)["w"]).square().sum())(zeros)
        updates, state = opt.update(grads, state, weights.dense(packed))
        return weights.apply_updates(packed, updates, key), state

    args = packed, state, X, random.key(0)
    assert equal(jit(step)(*args), step(*args))
    after = step(*args)[0]["w"]
    assert (dequantize(after) - W).norm() > 0 and after.format == format and after.dtype == W.dtype


def test_five_steps_follow_the_float_run():
    """torchao's bound: the loss is within 2e-3 of that of float32 weights after 5 steps of AdamW."""
    target = torch.randn(6, 40, generator=rng(5))
    loss = lambda y: (y - target).square().mean()
    opt, packed, dense = optim.adamw(1e-3), {"w": quantize(W, INT8_ROW)}, {"w": W}
    states, key = [opt.init(dense), opt.init(dense)], random.key(0)
    for i in range(5):
        f = lambda c: loss(linear(X, weights.attach(packed, packed, c)["w"]))  # noqa: B023
        updates, states[0] = opt.update(grad(f)(weights.carriers(packed)), states[0], weights.dense(packed))
        packed = weights.apply_updates(packed, updates, random.fold(key, i))
        updates, states[1] = opt.update(grad(lambda d: loss(X @ d["w"].mT))(dense), states[1], dense)
        dense = optim.apply_updates(dense, updates)
    a, b = loss(linear(X, packed["w"])), loss(X @ dense["w"].mT)
    assert abs(a - b) < 2e-3 * b


update = lambda updates: weights.apply_updates({"w": quantize(W, INT4)}, updates, random.key(0))
REFUSED = [
    (lambda: weights.carriers({"a.b": quantize(W, NF4)}), "a.b: nf4 cannot be trained: wanted integers in blocks"),
    (lambda: weights.carriers({"w": quantize(W, INT8)}), "w: int8 cannot be trained: .* use INT8_ROW or INT8_GROUP"),
    (lambda: weights.carriers({"w": quantize(W, INT8_TENSOR)}), "w: int8_tensor cannot be trained"),
    (lambda: stochastic_quantize(W, FP8_E4M3, random.key(0)), "fp8_e4m3 cannot be trained"),
    (lambda: update({"w": X}), r"w: an update of shape \(6, 64\); wanted \(40, 64\)"),
    (lambda: update({}), r"updates: got \[\], wanted those of"),
    (
        lambda: weights.attach({"v": W}, p := {"w": quantize(W, INT4)}, weights.carriers(p)),
        "w: the base has no such weight",
    ),
]  # fmt: skip


@pytest.mark.parametrize("call, message", REFUSED)
def test_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()
