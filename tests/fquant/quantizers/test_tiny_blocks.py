"""Tests of tiny blocks: bytes of bitsandbytes at the ends of the range."""

import itertools
import re
from dataclasses import replace

import bitsandbytes as bnb
import bitsandbytes.functional as peer
import pytest
import torch

from fquant import dequantize, quantize, random
from fquant.format import DYNAMIC8, FP4, INT8, NF4, NF4_DQ
from fquant.io import bnb as ours
from fquant.quantizers.tiny_blocks import encode
from tests.helpers.arrays import same_bits

FP4_DQ = replace(FP4, name="fp4_dq", scale=DYNAMIC8)
KINDS = {"nf4": NF4, "nf4_dq": NF4_DQ, "fp4": FP4, "fp4_dq": FP4_DQ}
LEAST = torch.finfo(torch.float32).tiny
SHAPES = [(1, 64), (2, 64), (8, 128), (256, 64), (257, 64), (64, 1028), (1, 96), (3, 65), (7, 101)]


@pytest.fixture(autouse=True)
def eager():
    """Keep bitsandbytes from compiling its own reference."""
    with torch.compiler.set_stance("force_eager"):
        yield


def normal(*shape, seed=0):
    return random.normal(random.key(seed), shape)


def _equal(x):
    flat = x.clone().reshape(-1)
    whole = flat[: len(flat) // 64 * 64].reshape(-1, 64)
    whole /= whole.abs().amax(1, keepdim=True)
    return flat.reshape(x.shape)


def _without(x, part):
    flat = x.clone().reshape(-1)
    flat[part] = 0.0
    return flat.reshape(x.shape)


VALUES = {
    "normal": lambda x: x,
    "zeros": torch.zeros_like,
    "negative zeros": lambda x: -torch.zeros_like(x),
    "ones": torch.ones_like,
    "equal absmax": _equal,
    "first block of zeros": lambda x: _without(x, slice(0, 64)),
    "last block of zeros": lambda x: _without(x, slice(-(x.numel() % 64 or 64), None)),
    "nested block of zeros": lambda x: _without(x, slice(0, 256 * 64)),
    "one value": lambda x: _without(x, slice(0, -1)),
    "sparse": lambda x: x * (x > 1.5),
    "small negative": lambda x: -x.abs() * 1e-3,
    **{f"near {scale:g}": lambda x, scale=scale: x * scale for scale in (1e-6, 1e-30, 1e-36, 1e-37, 1e30)},
    "near 1e-38": lambda x: x * 1e-30 * 1e-8,
    "subnormal": lambda x: x * 1e-30 * 1e-11,
}


SUBNORMAL = {"near 1e-36", "near 1e-37", "near 1e-38", "subnormal"}  # in part


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("values", VALUES)
def test_every_byte_is_that_of_bitsandbytes(values, kind):
    """Compare all tensors of a state dict, over shapes and dtypes, with those of bitsandbytes' own."""
    name, nested = kind[:3], kind.endswith("dq")
    for shape, dtype in itertools.product(SHAPES, (torch.float32, torch.bfloat16, torch.float16)):
        x = VALUES[values](normal(*shape)).to(dtype)
        if not x.isfinite().all():
            continue
        format = replace(KINDS[kind], flat=bool(shape[1] % 64))
        codes, state = peer.quantize_4bit(x, quant_type=name, compress_statistics=nested)
        wanted = {"w": codes} | {f"w.{key}": t for key, t in state.as_dict(packed=True).items()}
        got = ours.save(quantize(x, format), "w")
        assert got.keys() == wanted.keys()
        for key in wanted:
            assert same_bits(got[key].reshape(-1), wanted[key].reshape(-1)), (shape, dtype, key)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("values", sorted(set(VALUES) - SUBNORMAL))
def test_decoded_values_are_those_of_bitsandbytes(values, kind):
    """Compare whole blocks along rows; bitsandbytes makes zeros of bf16 values that are subnormal."""
    for shape, dtype in itertools.product(SHAPES[:6], (torch.float32, torch.bfloat16, torch.float16)):
        x = VALUES[values](normal(*shape)).to(dtype)
        if x.isfinite().all() and shape[1] % 64 == 0:
            codes, state = peer.quantize_4bit(x, quant_type=kind[:3], compress_statistics=kind.endswith("dq"))
            theirs = peer.dequantize_4bit(codes, state).reshape(shape)
            mine = dequantize(quantize(x, KINDS[kind]))
            assert same_bits(mine + 0.0, theirs + 0.0), (shape, dtype)  # zeros may have another sign


def test_the_second_zero_of_fp4():
    """bitsandbytes decodes it to -0 or +0, by the width and the CPU; ours is +0 for any."""
    x = torch.full((1, 64), 1e-4)
    x[0, 0] = 1.0
    for width in (30, 64):
        codes, state = peer.quantize_4bit(x[:, :width].contiguous(), quant_type="fp4")
        mine = dequantize(quantize(x[:, :width], replace(FP4, flat=width % 64 > 0)))
        theirs = peer.dequantize_4bit(codes, state)
        assert mine.equal(theirs) and not mine.signbit().any()


@pytest.mark.parametrize("scale", [1.0, 2.0**-13, 1e5])
def test_int8_rows_in_the_range_of_float16_are_those_of_bitsandbytes(scale):
    x = normal(9, 200).clamp(-0.6, 0.6) * scale
    codes, absmax, _ = peer.int8_vectorwise_quant(x.half())
    got = quantize(x, INT8)
    assert same_bits(got.codes, codes) and same_bits(got.scale[:, 0], absmax)


def test_int8_rows_below_that_range_keep_their_values():
    """bitsandbytes makes zeros of them, or codes of few values; rows beside them keep its bytes."""
    scales = torch.tensor([1.0, 2e-5, 1e-6, 1e-9, 1e-30, 1e-37, 0.0, 1e-3])[:, None]
    x = normal(8, 300).clamp(-2, 2) * scales
    got = quantize(x, INT8)
    error = (dequantize(got) - x).abs().amax(1) / x.abs().amax(1).clamp(min=LEAST)
    assert error.max() < 0.51 / 127 + 2**-11
    codes, absmax, _ = peer.int8_vectorwise_quant(x.half())
    assert isinstance(got.scale, torch.Tensor)
    scale = got.scale
    same = [i for i in range(8) if same_bits(got.codes[i], codes[i]) and same_bits(scale[i, 0], absmax[i])]
    assert same == [0, 6, 7] and not codes[4].any()


def test_a_layer_of_bitsandbytes_in_eval_mode_is_not_its_own_weight():
    """Some CPUs then multiply scales and inputs in bfloat16, so curves of such layers differ from ours by as much."""
    layer = bnb.nn.Linear4bit(1024, 256, bias=False, compute_dtype=torch.float32, quant_type="nf4")
    layer.weight = bnb.nn.Params4bit(normal(256, 1024), requires_grad=False, quant_type="nf4")
    layer = layer.to("cpu")
    x = normal(32, 1024, seed=1)
    decoded = peer.dequantize_4bit(layer.weight.data, layer.weight.quant_state)
    with torch.no_grad():
        wanted = x @ decoded.mT
        trained, evaluated = layer.train()(x), layer.eval()(x)
    off = lambda y: float((y - wanted).norm() / wanted.norm())
    assert off(trained) < 1e-5 and off(evaluated) < 6e-3


def test_nested_scales_near_the_largest_float():
    x = normal(4, 256).clamp(-1, 1) * 3.4e38
    for format in (NF4_DQ, FP4_DQ):
        got = dequantize(quantize(x, format))
        assert got.isfinite().all() and (got - x).abs().max() < 0.2 * 3.4e38
    assert not peer.dequantize_4bit(*peer.quantize_4bit(x, compress_statistics=True)).isfinite().all()


@pytest.mark.parametrize("dtype, top", [(torch.float16, 65504.0), (torch.bfloat16, 3.38e38), (torch.float32, 3.4e38)])
def test_values_that_would_decode_to_infinity_are_refused(dtype, top):
    """Nested scales are rounded too, some of them up, so the largest numbers of a dtype may not fit."""
    x = torch.full((8, 64), top)
    refused = 0
    for low in (0.0, 0.1, 0.3, 0.5, 0.7, 0.8):
        x[0] = low * top
        try:
            assert dequantize(quantize(x.to(dtype), NF4_DQ)).isfinite().all()
        except ValueError as error:
            refused += 1
            assert re.fullmatch(r"nf4_dq: values up to [\d.e+]+ decode beyond float(16|32); .*", str(error))
    assert refused or dtype == torch.bfloat16


def test_blocks_beside_tiny_ones_keep_their_bytes():
    x = normal(6, 100)
    format = replace(INT8, name="blocks", block=32)
    plain = quantize(x, format)
    x[2, 32:64] *= 1e-20
    x[4, 96:] *= 1e-30
    got = quantize(x, format)
    mask = torch.ones(6, 100, dtype=torch.bool)
    mask[2, 32:64] = mask[4, 96:] = False
    assert got.codes[mask].equal(plain.codes[mask])
    assert got.codes[~mask].float().abs().max() == 127 and (got.codes[~mask] - plain.codes[~mask]).abs().max() <= 1
    assert encode(torch.empty(2, 3, device="meta"), INT8)[0].is_meta
