"""Tests of calibration: statistics, GPTQ against a naive loop, AWQ and HQQ against rounding and torchao."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from torchao.quantization.quant_primitives import _choose_qparams_and_quantize_affine_hqq

from fquant import Packed, dequantize, jit, linear, quantize, remat, tree
from fquant.adapted.nodes import Scaled
from fquant.calibration import awq, calibrate, collect, gptq, hqq, importance, round_to_nearest, statistics
from fquant.calibration.channel_scaling import clipped, error
from fquant.communication import LOCAL
from fquant.format import (
    AQ_2X8,
    INT2_ZERO,
    INT3,
    INT4,
    INT4_ZERO,
    INT8,
    INT8_ROW,
    INT8_TENSOR,
    MXFP4,
    NF4,
    NF4_DQ,
    NVFP4,
)
from models import decoder, hf
from tests.helpers.arrays import named, rng

CFG, PARAMS = hf.load("examples/model", torch.float32)
ALL = r"layers\.\d+\.(q|k|v|o|gate|up|down)"
BATCHES = [torch.randint(CFG.vocab, (2, 33), generator=rng(i)) for i in range(3)]


def loss(params, tokens, comm=LOCAL):
    return decoder.loss(params, tokens[:, :-1], tokens[:, 1:], CFG, comm)


def correlated(rows=512, width=128):
    x = torch.randn(rows, width, generator=rng(0)) @ torch.randn(width, width, generator=rng(1)) / 8
    return x * torch.randn(width, generator=rng(2)).exp()


def stats_of(x):
    return statistics.Statistics(x.mT @ x, x.abs().sum(0), torch.tensor(float(len(x))))


def test_statistics_are_those_of_the_inputs():
    got = collect(loss, PARAMS, BATCHES, r"layers\.0\.(q|down)")
    assert set(got) == {"layers.0.q", "layers.0.down"}
    for comm in (LOCAL, replace(LOCAL, wrap=remat)):
        again = collect(partial(loss, comm=comm), PARAMS, BATCHES, r"layers\.0\.(q|down)")
        assert all(map(torch.allclose, tree.leaves(again), tree.leaves(got)))
    x = torch.cat([PARAMS.embed[b[:, :-1]].reshape(-1, CFG.dim) for b in BATCHES])
    x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + CFG.norm_eps)
    x = x * next(t for path, t in tree.items(PARAMS.layers[0]) if "norm" in path)
    assert torch.allclose(got["layers.0.q"].second, x.mT @ x, rtol=1e-3, atol=1e-2)
    assert torch.allclose(got["layers.0.q"].magnitude, x.abs().sum(0), rtol=1e-3)
    assert got["layers.0.q"].count == 3 * 2 * 32


def test_collecting_can_be_captured():
    zeros = statistics.probes(PARAMS, r"layers\.0\.q")
    one = torch.func.grad(lambda probes, params, batch: loss(statistics.attach(params, probes), batch))
    want, got = one(zeros, PARAMS, BATCHES[0]), jit(one)(zeros, PARAMS, BATCHES[0])
    assert all(map(torch.equal, tree.leaves(got), tree.leaves(want)))


def naive_gptq(w, p, h, order, damping=0.01):
    """The algorithm of the paper: remove a column of the inverse after each, in float64."""
    w, h = w.double().clone(), h.double()
    h = h + torch.eye(len(h)) * (damping * h.diagonal().mean())
    left, inverse, values = list(order), torch.linalg.inv(h), torch.zeros_like(w)
    scale = p.scale if isinstance(p.scale, torch.Tensor) else dequantize(p.scale)
    table = torch.tensor(p.format.table).double()
    for j in order:
        g = int(j) // p.format.block
        s, z = scale[:, g : g + 1].double(), torch.zeros(1) if p.zero is None else p.zero[:, g : g + 1].double()
        levels = (table[None] - z) * s
        values[:, j] = levels.gather(1, (w[:, j : j + 1] - levels).abs().argmin(1, keepdim=True))[:, 0]
        gap = (w[:, j] - values[:, j]) / inverse[j, j]
        w -= gap[:, None] * inverse[j]
        left.remove(j)
        inverse = inverse - inverse[:, j : j + 1] @ inverse[j : j + 1] / inverse[j, j]
    return values


@named("format", [INT4_ZERO, INT4, NF4, INT3])
def test_gptq_equals_the_naive_algorithm(format):
    format = replace(format, block=32)
    x, w = correlated(300, 64), torch.randn(24, 64, generator=rng(3))
    stats = stats_of(x)
    for by_magnitude in (False, True):
        p = gptq(format, by_magnitude=by_magnitude)(w, stats)
        order = stats.second.diagonal().argsort(descending=True) if by_magnitude else torch.arange(64)
        wanted = naive_gptq(w, quantize(w, format), stats.second, order.tolist())
        same = (dequantize(p).double() - wanted).abs() < 1e-4
        assert same.float().mean() > 0.98  # float32 chooses another side of a tie, and the columns after it follow


@named("format", [INT4_ZERO, INT4, NF4, NF4_DQ, INT2_ZERO, MXFP4, NVFP4, INT8_ROW])
def test_methods_beat_rounding(format):
    x, w = correlated(), torch.randn(64, 128, generator=rng(3))
    stats = stats_of(x)
    off = lambda decoded: float(error(w, decoded, stats))
    rounded = off(dequantize(quantize(w, format)))
    assert off(dequantize(gptq(format)(w, stats))) < 0.8 * rounded
    got = awq(format)(w, stats)
    y = linear(x, got)
    decoded = torch.linalg.lstsq(x, y).solution.mT  # the weight that the scaled product has
    assert off(decoded) < 0.9 * rounded and isinstance(got, Scaled)


@named("format", [INT4_ZERO, INT4, NF4, INT8_ROW])
def test_blocks_are_clipped_as_in_a_loop_over_them(format):
    """The columns of the last block are fewer."""
    block = format.block or 100
    x, w = correlated(300, 100).double(), torch.randn(12, 100, generator=rng(3))
    w[:, ::17] *= 6.0
    tried = [w.clamp(*most) for most in _clamps(w, block)]
    offs = [(w - dequantize(quantize(t, format))).double() for t in tried]
    got = clipped(w, format, stats_of(x.float()).second)
    off, fewer = (w - dequantize(quantize(got, format))).double(), 0
    for start in range(0, 100, block):
        some = slice(start, start + block)
        errors = torch.stack([(x[:, some] @ o[:, some].mT).square().sum(0) for o in offs])
        found = (x[:, some] @ off[:, some].mT).square().sum(0)
        torch.testing.assert_close(found, errors.amin(0), rtol=1e-3, atol=0)
        fewer += int((found < 0.99 * errors[0]).sum())
    assert fewer > 3


def _clamps(w, block):
    pad = torch.nn.functional.pad(w, (0, -w.shape[1] % block)).view(len(w), -1, block)
    largest = pad.abs().amax(-1, keepdim=True).expand_as(pad).flatten(1)[:, : w.shape[1]]
    return [(-largest * (1 - i / 20), largest * (1 - i / 20)) for i in range(10)]


@named("format", [INT4_ZERO, NF4])
def test_clipping_never_makes_the_error_larger(format):
    x, w = correlated(), torch.randn(64, 128, generator=rng(3))
    stats = stats_of(x)
    off = lambda p: float((x @ w.mT - linear(x, p)).square().sum())
    assert off(awq(format)(w, stats)) < off(awq(format, clip=False)(w, stats))


def test_statistics_of_a_wide_weight_go_through_the_lazy_blocks():
    x, w = correlated(600, 300), torch.randn(16, 300, generator=rng(3))
    p, stats = quantize(w, INT4_ZERO), stats_of(x)
    assert error(w, dequantize(gptq(INT4_ZERO)(w, stats)), stats) < 0.8 * error(w, dequantize(p), stats)


@named("format", [INT4_ZERO, replace(INT4_ZERO, block=64), INT2_ZERO])
def test_hqq_equals_torchao(format):
    w = torch.randn(48, 256, generator=rng(0)) * torch.randn(48, 1, generator=rng(1)).exp()
    w[3, ::50] = 8.0
    p, rounded = hqq(format)(w), quantize(w, format)
    bits = format.bits
    options = dict(nbits=bits, group_size=format.block, axis=1, device="cpu", compute_dtype=torch.float32)
    q, scale, zero, _ = _choose_qparams_and_quantize_affine_hqq(w, **options, raw_output=True)
    theirs = (q.float().reshape(-1, format.block) - zero.reshape(-1, 1)) * scale.reshape(-1, 1)
    size = lambda v: float((w - v.reshape(w.shape)).abs().pow(0.7).mean())
    assert size(dequantize(p)) < size(dequantize(rounded))
    assert size(dequantize(p)) < 1.03 * size(theirs)
    ragged = torch.randn(5, 100, generator=rng(0))
    off = lambda p: (dequantize(p) - ragged).abs().mean()
    assert off(hqq(format)(ragged)) <= off(quantize(ragged, format))


@pytest.mark.parametrize("in_order", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["at once", "in order"])
@pytest.mark.parametrize("method", [gptq(INT2_ZERO), awq(INT2_ZERO)], ids=["gptq", "awq"])
def test_a_calibrated_model_is_nearer_to_the_dense_one(method, in_order):
    logits = lambda p: torch.cat([decoder.forward(p, b, CFG) for b in BATCHES])
    wanted = logits(PARAMS)
    off = lambda p: float((logits(p) - wanted).norm() / wanted.norm())
    rounded = calibrate(PARAMS, BATCHES, loss, ALL, round_to_nearest(INT2_ZERO))
    groups = [rf"layers\.{i}\.(q|k|v|o|gate|up|down)" for i in range(len(PARAMS.layers))]
    assert off(calibrate(PARAMS, BATCHES, loss, groups if in_order else ALL, method)) < off(rounded)
    assert isinstance(PARAMS.layers[0].q, torch.Tensor)  # a pure function


def test_importance_weighs_columns():
    x, w = correlated(), torch.randn(64, 128, generator=rng(3))
    p = importance(AQ_2X8)(w, stats_of(x))
    assert isinstance(p, Packed)
    columns = stats_of(x).second.diagonal() / len(x)
    weighted = lambda p: float(((dequantize(p) - w).square() * columns).sum())
    assert weighted(p) < weighted(quantize(w, AQ_2X8))


REFUSED = [
    (lambda: calibrate(PARAMS, [], loss, ALL, gptq(INT4)), "calibrate: got no batches; wanted calibration data"),
    (lambda: calibrate(PARAMS, BATCHES, loss, "layers.9.q", gptq(INT4)), "'layers.9.q' matches no path"),
    (lambda: collect(loss, PARAMS, [], r"layers\.0\.q"), "layers.0.q: the batches gave it no input"),
    (lambda: gptq(INT8), "gptq: int8 has no table"),
    (lambda: gptq(INT8_TENSOR), "gptq: int8_tensor has no table, or no blocks of its own"),
    (lambda: gptq(INT4, damping=0.0), "gptq: damping is 0.0; wanted above 0"),
    (lambda: gptq(INT4)(torch.ones(2, 64), None), "gptq: got no statistics"),
    (lambda: awq(INT4)(torch.ones(2, 64), None), "awq: got no statistics"),
    (lambda: awq(INT4, steps=0), "awq: steps is 0"),
    (lambda: hqq(INT4), "hqq: int4 has no zero points; use INT4_ZERO"),
    (lambda: hqq(INT4_ZERO, norm=2.0), r"hqq: wanted norm in \(0, 1\]"),
]


@pytest.mark.parametrize("call, message", REFUSED)
def test_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()
