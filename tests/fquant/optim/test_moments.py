"""Packed moments against bitsandbytes, torchao and torch in float32 over 50 steps; layout, errors, files."""

import re
from dataclasses import replace

import pytest
import torch

from fquant import dequantize, optim, tree
from fquant.format import DYNAMIC8, FP8, INT8, MOMENT4, MOMENT8, MOMENT8_UNSIGNED, NF4
from fquant.io import safetensors
from fquant.kernels.moment_codes import codes
from fquant.kernels.reference import encode_moment
from fquant.packed import Packed
from tests.helpers.formats import forced
from tests.helpers.optim.runs import leaf, normal, ours, theirs

bitsandbytes = pytest.importorskip("bitsandbytes")
bnb = bitsandbytes.optim
GRID = optim.DYNAMIC8_GRID
BNB = {
    "adamw": (optim.adamw(1e-3, moments=GRID), lambda p: bnb.AdamW8bit(p, 1e-3)),
    "adamw options": (
        optim.adamw(3e-3, 0.8, 0.95, 1e-6, 0.1, moments=GRID),
        lambda p: bnb.AdamW8bit(p, 3e-3, (0.8, 0.95), 1e-6, 0.1),
    ),
    "adam": (optim.adamw(1e-3, weight_decay=0.0, moments=GRID), lambda p: bnb.Adam8bit(p, 1e-3)),
    "lion": (optim.lion(1e-4, weight_decay=0.1, moments=GRID), lambda p: bnb.Lion8bit(p, 1e-4, weight_decay=0.1)),
    "sgd": (
        optim.sgd(1e-2, 0.9, weight_decay=0.01, moments=GRID),
        lambda p: bnb.SGD8bit(p, 1e-2, momentum=0.9, weight_decay=0.01),
    ),
}


def packed(state):
    return [x for x in tree.leaves(state, is_leaf=lambda x: isinstance(x, Packed)) if isinstance(x, Packed)]


@pytest.mark.parametrize(("opt", "peer"), BNB.values(), ids=BNB)
def test_fifty_steps_equal_bitsandbytes(opt, peer):
    """Bounds are those of bitsandbytes' own tests: fewer than 20 states that differ, and a mean error below 6e-5."""
    params, gradients = leaf()  # the last block is short
    got, state = ours(opt, params, gradients)
    want, other = theirs(peer, params, gradients)
    ((_, there),) = other.state.items()
    for i, moment in enumerate(packed(state), 1):
        assert (moment.codes != there[f"state{i}"]).sum() < 20
        torch.testing.assert_close(moment.scale, there[f"absmax{i}"], atol=3e-3, rtol=1e-3)
        table = torch.tensor(moment.format.table)
        assert torch.equal(table, there[f"qmap{i}"])
    error = (got["w"] - want["w"]).abs()
    assert error.mean() < 6e-6 and error.max() < 2e-3


TORCHAO = {
    "8": (optim.DYNAMIC8_TORCHAO, "AdamW8bit"),
    "4": (replace(optim.DYNAMIC4, rounding="torchao"), "AdamW4bit"),
    "fp8": (replace(optim.FP8, rounding="torchao"), "AdamWFp8"),
}


@pytest.mark.slow  # torchao compiles its step
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("moments", "name"), TORCHAO.values(), ids=TORCHAO)
def test_fifty_steps_equal_torchao(moments, name):
    peers = pytest.importorskip("torchao.optim")
    params, gradients = leaf((64, 256))  # whole blocks, because torchao packs no others
    got, state = ours(optim.adamw(1e-3, moments=moments), params, gradients)
    want, other = theirs(lambda p: getattr(peers, name)(p, 1e-3), params, gradients)
    ((_, there),) = other.state.items()
    for moment, name in zip(packed(state), ("exp_avg", "exp_avg_sq"), strict=True):
        theirs_ = there[name]
        assert (moment.codes.flatten() != theirs_.codes.view(torch.uint8).flatten()).float().mean() < 1e-3
        torch.testing.assert_close(moment.scale, theirs_.scale, atol=1e-9, rtol=1e-3)
    error = (got["w"] - want["w"]).abs()
    assert error.mean() < 1e-6 and error.max() < 1e-3


@pytest.mark.parametrize("signed", [True, False])
@pytest.mark.parametrize("bits", ["8", "4"])
@pytest.mark.filterwarnings("ignore")
def test_codes_equal_torchao(bits, signed):
    """Their maps are ours, and so are codes of numbers that are not within 1e-4 of a middle between two values."""
    utils = pytest.importorskip("torchao.optim.quant_utils")
    moments = TORCHAO[bits][0]
    format = moments.signed if signed else moments.unsigned
    assert format.block is not None
    if bits == "8":
        table = torch.tensor(utils.create_dynamic_map(signed))
    else:
        table = torch.tensor(utils.create_dynamic_map(True, 3, 4)) if signed else torch.linspace(0, 1, 17)[1:]
    assert torch.equal(torch.tensor(format.table), table)
    x = normal("x", (64 * format.block,), 1e-3) * torch.exp(3 * normal("size", (64 * format.block,), 1.0))
    x = x if signed else x.square()
    got, scale = encode_moment(x, format, "torchao", square=not signed)
    part, wanted = utils.scale_tensor(x, format.block)
    want = getattr(utils, f"quantize_{bits}bit_with_qmap")(part, table)
    got = got if bits == "8" else torch.stack([got >> 4, got & 15], -1).flatten()
    middles = (table[1:] + table[:-1]) / 2
    near = ((part[:, None] - middles).abs() < 1e-4 * (table[1:] - table[:-1])).any(1)
    assert torch.equal(scale, wanted) and torch.equal(got[~near], want[~near]) and near.float().mean() < 0.01


TOLERANCES = {  # mean error of a parameter over its mean change
    "8": (optim.DYNAMIC8, 0.03), "grid": (GRID, 0.03), "fp8": (optim.FP8, 0.07), "4": (optim.DYNAMIC4, 0.4),
}  # fmt: skip
OPTIMISERS = {
    "adamw": (lambda m: optim.adamw(1e-3, moments=m), lambda p: torch.optim.AdamW(p, 1e-3)),
    "adam": (
        lambda m: optim.adam(1e-3, weight_decay=0.1, moments=m), lambda p: torch.optim.Adam(p, 1e-3, weight_decay=0.1)
    ),
    "sgd": (lambda m: optim.sgd(0.05, 0.9, moments=m), lambda p: torch.optim.SGD(p, 0.05, 0.9)),
    "nesterov": (
        lambda m: optim.sgd(0.05, 0.9, True, 0.01, moments=m),
        lambda p: torch.optim.SGD(p, 0.05, 0.9, weight_decay=0.01, nesterov=True),
    ),
    "muon": (lambda m: optim.muon(3e-3, moments=m), lambda p: torch.optim.Muon(p, 3e-3)),
}  # fmt: skip


@pytest.mark.parametrize(("moments", "most"), TOLERANCES.values(), ids=TOLERANCES)
@pytest.mark.parametrize(("opt", "peer"), OPTIMISERS.values(), ids=OPTIMISERS)
def test_parameters_stay_near_those_of_float32(opt, peer, moments, most):
    params, gradients = leaf((40, 100))
    got, _ = ours(opt(moments), params, gradients)
    want, _ = theirs(peer, params, gradients)
    assert (got["w"] - want["w"]).abs().mean() < most * (want["w"] - params["w"]).abs().mean()


def uneven(kind, size):
    """Return 100 gradients f32[32 250]: one column is ``size`` times as large, or a row has one in 16 steps."""
    each = [normal(f"uneven {i}", (32, 250), 1e-3) for i in range(100)]
    if kind != "rows":
        for g in each:
            g[:, 7] *= size
    if kind != "column":
        each = [g * (torch.arange(32) % 16 == i % 16)[:, None] for i, g in enumerate(each)]
    return [{"w": g} for g in each]


UNEVEN = [("rows", 1), *(("column", size) for size in (1, 300, 3e3, 1e5)), ("both", 300), ("both", 1e5)]


@pytest.mark.parametrize(("kind", "size"), UNEVEN)
def test_no_element_leaves_float32_by_more_than_six_mean_movements(kind, size):
    """bitsandbytes stays below as well, and torchao's rounding does not."""
    params, gradients = {"w": normal("w", (32, 250), 0.02)}, uneven(kind, size)
    want = ours(optim.adamw(1e-3), params, gradients)[0]["w"]
    movement = (want - params["w"]).abs().mean()
    distance = lambda got: float((got["w"] - want).abs().max() / movement)
    peer, _ = theirs(lambda p: bnb.AdamW8bit(p, 1e-3), params, gradients)
    assert distance(peer) < 6
    both = optim.Moments(MOMENT8, MOMENT8)
    for moments in (optim.DYNAMIC8, GRID, optim.FP8, optim.DYNAMIC4, both):
        assert distance(ours(optim.adamw(1e-3, moments=moments), params, gradients)[0]) < 6, moments
    if size > 1000:
        assert distance(ours(optim.adamw(1e-3, moments=optim.DYNAMIC8_TORCHAO), params, gradients)[0]) > 100


@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_a_mean_of_squares_above_zero_stays_above_zero(backend):
    """Zeros stay zeros, and the numbers that share the block do not matter."""
    table = tuple(i / 7 for i in range(-8, 8))
    with_zero = replace(optim.DYNAMIC4.signed, name="fifteenths", table=tuple(i / 15 for i in range(16)))
    formats = (MOMENT8, MOMENT8_UNSIGNED, optim.FP8.signed, replace(MOMENT4, name="sevenths", table=table), with_zero)
    grads = {"w": torch.cat([torch.logspace(-17, 15, 300), torch.zeros(40)])}  # of squares that float32 holds
    params = {"w": torch.zeros(340)}
    for format in formats:
        made = optim.adamw(1e-3, moments=optim.Moments(MOMENT8, format))
        with forced(backend):
            _, state = optim.step(made, grads, made.init(params), params)
        square = dequantize(state.square["w"])
        assert (square[:300] > 0).all() and not square[300:].any(), format


@pytest.mark.parametrize("backend", ["reference", "cpu"])
@pytest.mark.parametrize("moments", [optim.DYNAMIC8, GRID, optim.FP8, optim.DYNAMIC4, MOMENT8], ids=str)
def test_blocks_without_gradients_do_not_move(moments, backend):
    """The last block is short. bitsandbytes does not move them either."""
    params, gradients = {"w": normal("w", (600,), 1.0)}, [{"w": torch.zeros(600)}] * 5
    lion = {"lr": 1e-3, "weight_decay": 0.0}
    for made in (optim.lion(**lion, moments=moments), optim.adamw(**lion, moments=moments)):
        with forced(backend):
            assert torch.equal(ours(made, params, gradients)[0]["w"], params["w"])
    peer, _ = theirs(lambda p: bnb.Lion8bit(p, **lion, min_8bit_size=1), params, gradients)
    assert torch.equal(peer["w"], params["w"])


def test_adam_is_that_of_torch():
    params, gradients = leaf((40, 10))
    got, _ = ours(optim.adam(3e-3, 0.8, 0.95, 1e-6, 0.1), params, gradients)
    want, _ = theirs(lambda p: torch.optim.Adam(p, 3e-3, (0.8, 0.95), 1e-6, 0.1), params, gradients)
    torch.testing.assert_close(got["w"], want["w"], atol=1e-6, rtol=0)


def test_moments_are_packed_leaf_by_leaf():
    params = {"w": torch.ones(3, 5, 7), "norm": torch.ones(6), "scale": torch.ones(())}
    state = optim.adamw(1e-3, moments=replace(optim.DYNAMIC4, min_size=7)).init(params)
    mean, square = state.mean["w"], state.square["w"]
    assert (mean.format, square.format) == (optim.DYNAMIC4.signed, optim.DYNAMIC4.unsigned)
    assert mean.codes.shape == (53,) and mean.scale.shape == (1,) and mean.shape == (3, 5, 7)
    assert not dequantize(mean).any() and not dequantize(square).any()
    for name in ("norm", "scale"):
        assert state.mean[name].dtype == torch.float32 and state.mean[name].shape == params[name].shape
    state = optim.lion(1e-3, moments=MOMENT8).init(params)
    assert state.momentum["norm"].format == MOMENT8 and state.momentum["scale"].dtype == torch.float32


def test_eight_bits_take_a_quarter_of_the_bytes():
    params = {"w": torch.empty(1 << 20)}
    small, large = (tree.nbytes(optim.adamw(1e-3, moments=m).init(params)) for m in (optim.DYNAMIC8, None))
    assert 0.25 < small / large < 0.26


@pytest.mark.parametrize("opt", ["adamw", "lion", "chain"])
def test_a_run_that_is_saved_and_resumed_has_the_same_bits(opt, tmp_path):
    made = {
        "adamw": optim.adamw(optim.cosine(1e-3, 20), moments=optim.DYNAMIC8),
        "lion": optim.lion(1e-3, moments=optim.DYNAMIC4),
        "chain": optim.chain(optim.clip_by_global_norm(0.1), optim.sgd(0.1, 0.9, moments=optim.FP8)),
    }[opt]
    params, gradients = leaf((30, 50), torch.bfloat16, steps=10)
    want = ours(made, params, gradients)
    halfway = ours(made, params, gradients[:5])
    safetensors.save(tmp_path / "run.safetensors", halfway)
    params, state = safetensors.load(tmp_path / "run.safetensors")
    assert tree.structure((params, state)) == tree.structure(want)
    for grads in gradients[5:]:
        params, state = optim.step(made, grads, state, params)
    assert all(map(torch.equal, tree.leaves((params, state)), tree.leaves(want)))


def test_thresholds_are_those_of_the_nearest_value():
    for format in (optim.DYNAMIC8.signed, optim.DYNAMIC8.unsigned, optim.DYNAMIC4.signed, optim.DYNAMIC4.unsigned):
        order, thresholds = codes(format, "nearest")
        table = torch.tensor(format.table, dtype=torch.float64)[list(order)]
        middles, gaps = (table[1:] + table[:-1]) / 2, table[1:] - table[:-1]
        assert ((thresholds - middles).abs() <= 3e-5 * gaps).all() and (thresholds.diff() > 0).all()


PARAMS = {"w": torch.zeros(30, 20)}
PACKED = optim.adamw(1e-3, moments=optim.DYNAMIC8)
STATE = PACKED.init(PARAMS)
BAD = {
    "no format": (lambda: optim.adamw(1e-3, moments="int8"), TypeError, "moments: got str; use optim.DYNAMIC8"),
    "field": (lambda: optim.Moments(MOMENT8, None), TypeError, "unsigned: got NoneType, wanted a Format"),
    "rows": (lambda: optim.lion(1e-3, moments=NF4), ValueError, "moments: signed: nf4 cannot hold a moment: its"),
    "rows of fp8": (lambda: optim.lion(1e-3, moments=FP8), ValueError, "fp8 cannot hold a moment: its blocks follow"),
    "integers": (lambda: optim.lion(1e-3, moments=INT8), ValueError, "int8 cannot hold a moment: it has no table"),
    "centre": (lambda: optim.adamw(1e-3, moments=DYNAMIC8), ValueError, "dynamic8 cannot hold a moment: it has center"),
    "no number": (
        lambda: optim.sgd(0.1, 0.9, moments=replace(MOMENT4, name="x", table=(1e999, *(MOMENT4.table or ())[1:]))),
        ValueError, "x cannot hold a moment: it has codes of 4 bits or fewer that are no finite number",
    ),
    "unsigned": (
        lambda: optim.sgd(0.1, 0.9, moments=MOMENT8_UNSIGNED), ValueError,
        "signed: moment8_unsigned has no values below zero, and a mean of gradients has a sign; use a signed format",
    ),
    "rounding": (lambda: replace(GRID, rounding="up"), ValueError, "rounding: got 'up', wanted one of 'nearest', 'gr"),
    "grid": (lambda: replace(optim.DYNAMIC4, rounding="grid"), ValueError, "moment4: the grid is of 8 bits"),
    "min_size": (lambda: replace(GRID, min_size=-1), ValueError, "min_size: got -1, wanted a number of elements"),
    "sgd": (lambda: optim.sgd(0.1, moments=MOMENT8), ValueError, "moments: got momentum 0.0, which needs no moments"),
    "unknown option": (lambda: optim.adamw(1e-3, bits=8), TypeError, "unexpected keyword argument 'bits'"),
    "packed parameter": (
        lambda: PACKED.init(STATE.mean), TypeError, "w.codes: got uint8, wanted a float",
    ),
    "other state": (
        lambda: optim.adamw(1e-3).update({"v": torch.zeros(2)}, STATE, {"v": torch.zeros(2)}), ValueError,
        "the state is not that of these parameters",
    ),
    "other shape": (
        lambda: PACKED.update({"w": torch.zeros(5, 20)}, STATE, {"w": torch.zeros(5, 20)}),
        ValueError, "w: adam_update got codes (30, 20) and param (5, 20); wanted codes (5, 20)",
    ),
    "gradient": (
        lambda: PACKED.update(PARAMS, STATE, {"w": torch.zeros(30, 20, requires_grad=True)}),
        TypeError, "w: a gradient through adam_update was asked for",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("call", "error", "message"), BAD.values(), ids=BAD)
def test_bad_input_says_what_is_wrong(call, error, message):
    with pytest.raises(error, match=re.escape(message)):
        call()
