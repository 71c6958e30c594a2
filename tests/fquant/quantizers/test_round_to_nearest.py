"""Tests of round to nearest: codes, scales and zero points equal torchao's. Bounds are in tests/integration/formats."""

from dataclasses import replace

import pytest
import torch
from torchao.prototype.mx_formats.mx_tensor import ScaleCalculationMode, to_mx
from torchao.prototype.mx_formats.nvfp4_tensor import nvfp4_quantize
from torchao.prototype.quantized_training.bitnet import get_bitnet_scale, quantize_bitnet_weight
from torchao.quantization.quant_primitives import (
    MappingType,
    _choose_scale_float8,
    _quantize_affine_float8,
    choose_qparams_affine,
    dequantize_affine,
    quantize_affine,
)

from fquant import dequantize, quantize, tree
from fquant.format import (
    FP8,
    FP8_E5M2,
    INT2,
    INT2_ZERO,
    INT3,
    INT3_ZERO,
    INT4,
    INT4_ZERO,
    INT8,
    INT8_ROW,
    INT8_TENSOR,
    MXFP4,
    MXFP8,
    NF4,
    NVFP4,
    TERNARY,
    bits,
)  # fmt: skip
from fquant.packed import FLOATS
from tests.helpers.arrays import named, rng
from tests.helpers.formats import alike

INT8_ZERO = replace(INT4_ZERO, name="int8_zero", bits=8, table=tuple(map(float, range(256))))
SIGNED8 = replace(INT8_ZERO, name="signed8", table=tuple(map(float, range(-128, 128))), zero=False)
SIGNED_ZERO = replace(INT4_ZERO, name="signed_zero", table=INT4.table)
THIRDS = replace(INT4, name="thirds", table=tuple(i / 3 for i in range(-8, 8)))
ALL = [INT4, INT4_ZERO, INT8_ZERO, SIGNED8, SIGNED_ZERO, MXFP4.plain, FP8, INT2_ZERO, INT3_ZERO, FP8_E5M2, THIRDS]


def weight(*shape, dtype=torch.float32):
    """Draw rows of many magnitudes and means, with a row of zeros, a positive and a negative one, and ties."""
    w = torch.randn(shape, generator=rng(0)) * torch.randn(*shape[:-1], 1, generator=rng(1)).mul(2).exp()
    w = w + torch.randn(*shape[:-1], 1, generator=rng(2))
    w[..., 1, :], w[..., 2, :], w[..., 3, :] = 0.0, w[..., 2, :].abs() + 1, -w[..., 3, :].abs() - 1
    w[..., 4, :] = (torch.arange(shape[-1]) % 29 - 14) * 0.5
    w[..., 4, ::16] = 7.5
    return w.to(dtype)


def codes_of(p):
    """Return the codes u8[... in], one a byte."""
    return bits.unpack(p.codes, p.format.bits, p.shape[-1])


def scale_of(p):
    """Return the scales f32[... blocks]."""
    return p.scale if isinstance(p.scale, torch.Tensor) else dequantize(p.scale)


# --- torchao ----------------------------------------------------------------------------------------------------------


@named("dtype", FLOATS)
@named("block", [32, 128, None])
@named("format", [INT4_ZERO, INT8_ZERO, SIGNED_ZERO, INT4, SIGNED8])
def test_integers_equal_torchao(format, block, dtype):
    w = weight(9, 512, dtype=dtype).float()  # torchao computes in the dtype of w
    p = quantize(w.to(dtype), replace(format, block=block))
    low, high = int(format.table[0]), int(format.table[-1])
    if not format.zero:
        low = -high  # so that the scale is absmax / high
    kind, of = (MappingType.ASYMMETRIC if format.zero else MappingType.SYMMETRIC), (1, block or 512)
    scale, zero = choose_qparams_affine(
        w, kind, of, torch.int32, low, high, eps=2.0**-126, zero_point_dtype=torch.int32
    )
    codes = quantize_affine(w, of, scale, zero, torch.int32, low, high)
    assert isinstance(p.scale, torch.Tensor)
    scale, zero = scale.view(p.scale.shape), zero.view(p.scale.shape).float()
    rows = [0, *range(2, 9)]  # torchao's scale of zeros is eps
    assert alike(p.scale[rows], scale[rows]) and (p.zero is None or alike(p.zero[rows], zero[rows]))
    assert torch.equal(codes_of(p).int()[rows], (codes - int(format.table[0]))[rows])
    assert not dequantize(p)[1].any() and not p.scale[1].any()
    values = dequantize_affine(codes, of, scale, zero, torch.int32, low, high)
    assert alike(dequantize(p)[rows], values[rows].to(dtype))


@named("dtype", FLOATS[:2])
def test_mxfp4_equals_torchao(dtype):
    w = weight(9, 512, dtype=dtype)
    p = quantize(w, MXFP4)
    scale, data = to_mx(w, torch.float4_e2m1fn_x2, 32, ScaleCalculationMode.FLOOR)
    data = data.view(torch.uint8)
    codes = torch.stack([data & 15, data >> 4], -1).flatten(-2)
    rows = [0, *range(2, 9)]  # a block of zeros has the least scale there, 2^-127
    assert alike(scale_of(p)[rows], scale.float()[rows])
    assert torch.equal(p.scale.codes[rows], scale.view(torch.uint8)[rows])
    assert torch.equal(codes_of(p)[rows], codes[rows]) and not dequantize(p)[1].any()


@named("dtype", FLOATS[:2])
def test_mxfp8_equals_torchao(dtype):
    w = weight(9, 512, dtype=dtype)
    p = quantize(w, MXFP8)
    scale, data = to_mx(w, torch.float8_e4m3fn, 32, ScaleCalculationMode.FLOOR)
    rows = [0, *range(2, 9)]
    assert torch.equal(p.scale.codes[rows], scale.view(torch.uint8)[rows])
    assert torch.equal(codes_of(p)[rows], data.view(torch.uint8)[rows])


@named("dtype", FLOATS[:2])
def test_nvfp4_equals_torchao(dtype):
    w = weight(9, 512, dtype=dtype)
    p = quantize(w, NVFP4)
    whole = w.float().abs().max() / 6.0 / 448.0
    scale, data = nvfp4_quantize(w, 16, whole)
    codes = torch.stack([data & 15, data >> 4], -1).flatten(-2)
    rows = [0, *range(2, 9)]
    assert alike(p.scale.scale, whole.expand(1).clone())
    large = scale.float()[rows] > 2.0**-6  # below it torchao has no scales, which E4M3 has
    assert torch.equal(p.scale.codes[rows][large], scale.view(torch.uint8)[rows][large])
    near = (codes_of(p).int() - codes.int())[rows].unflatten(-1, (-1, 16))[large].abs()
    assert (near > 0).float().mean() < 1e-3  # torchao rounds two reciprocals: another side of a tie, rarely


@named("dtype", FLOATS)
def test_fp8_equals_torchao(dtype):
    w = weight(9, 512, dtype=dtype)
    p = quantize(w, FP8)
    scale = _choose_scale_float8(w.float(), (1, 128))
    assert isinstance(p.scale, torch.Tensor) and alike(p.scale[2:], scale[2:])
    codes = _quantize_affine_float8(w.float(), scale).view(torch.uint8)
    near = (codes_of(p).int() - codes.int())[[0, *range(2, 9)]].abs()  # torchao divides: another side of a tie, rarely
    assert near.max() <= 1 and (near > 0).float().mean() < 1e-3
    assert not dequantize(p)[1].any() and not codes_of(p)[1].any()


@named("dtype", FLOATS)
@named("format", [INT2, INT3, replace(INT4, unit=7.5), replace(INT8_ROW, unit=127.5)])
def test_integers_of_all_codes_equal_torchao(format, dtype):
    """torchao's usual symmetric scale is absmax / ((most - least) / 2), of which one sign is cut off by half a step."""
    w = weight(9, 512, dtype=dtype).float()
    p = quantize(w.to(dtype), format)
    low, high = format.integers or (0, 0)
    of = (1, format.block or 512)
    scale, zero = choose_qparams_affine(
        w, MappingType.SYMMETRIC, of, torch.int32, low, high, eps=2.0**-126, zero_point_dtype=torch.int32
    )
    codes = quantize_affine(w, of, scale, zero, torch.int32, low, high)
    rows = [0, *range(2, 9)]  # torchao's scale of zeros is eps
    assert isinstance(p.scale, torch.Tensor) and alike(p.scale[rows], scale.view(p.scale.shape)[rows])
    assert torch.equal(codes_of(p).int()[rows], (codes - low)[rows]) and not dequantize(p)[1].any()


@named("dtype", FLOATS)
def test_ternary_equals_torchao(dtype):
    w = weight(9, 500, dtype=dtype)
    p = quantize(w, TERNARY)
    scale = get_bitnet_scale(w)
    assert alike(p.scale, scale.float().expand(9, 1).clone())
    assert torch.equal(codes_of(p).int() - 1, quantize_bitnet_weight(w, scale).int())


def test_a_shared_scale_is_that_of_the_array():
    w = weight(9, 512)
    p, one = quantize(w, INT8_TENSOR), quantize(w.reshape(1, -1), INT8_ROW)
    assert torch.equal(p.scale, one.scale.expand(9, 1)) and torch.equal(p.codes.reshape(1, -1), one.codes)


# --- other arrays -----------------------------------------------------------------------------------------------------


@named("format", ALL)
def test_stacks_meta_and_chunks(format, monkeypatch):
    w = weight(2, 6, 200)
    whole = quantize(w, format)
    monkeypatch.setattr("fquant.quantizers.round_to_nearest.CHUNK", 300)
    assert all(map(alike, tree.leaves(quantize(w, format)), tree.leaves(whole)))
    each = [quantize(x, format) for x in w]
    stacked = tree.map(lambda *t: torch.stack(t), *each)
    assert all(map(alike, tree.leaves(stacked), tree.leaves(whole)))
    assert alike(dequantize(stacked), dequantize(whole)) and alike(torch.vmap(dequantize)(stacked), dequantize(whole))
    meta = quantize(w.to("meta"), format)
    assert tree.structure(meta) == tree.structure(whole)
    assert all(a.is_meta and a.shape == b.shape and a.dtype == b.dtype
               for a, b in zip(tree.leaves(meta), tree.leaves(whole), strict=True))  # fmt: skip


# --- what is refused --------------------------------------------------------------------------------------------------

REFUSED = {
    "zero points beside quantiles": replace(NF4, name="nf4_zero", zero=True),
    "no negative integers": replace(INT4, name="unsigned", table=INT4_ZERO.table),
    "no positive values": replace(INT4, name="negative", table=tuple(map(float, range(-15, 1)))),
}


@pytest.mark.parametrize("format", REFUSED.values(), ids=REFUSED)
def test_refused(format):
    with pytest.raises(ValueError, match=f"^quantize to {format.name} is not supported: "):
        quantize(torch.ones(2, 64), format)


def test_a_range_beyond_float32():
    w = torch.tensor([[3e38, -3e38]])
    with pytest.raises(
        ValueError, match="^int4_zero: a block has values up to 3e.38, and their range is beyond float32"
    ):
        quantize(w, INT4_ZERO)
    assert torch.allclose(dequantize(quantize(w, INT4)), w)


def test_kinds_that_have_kernels_are_not_concerned():
    assert NF4.in_absmax and INT8.in_absmax and not any(format.in_absmax for format in ALL)
