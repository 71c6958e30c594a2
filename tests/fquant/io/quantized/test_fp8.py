"""Tests of fquant.io.quantized.fp8 against the decoder of transformers."""

import pytest
import torch
from transformers.integrations.finegrained_fp8 import Fp8Dequantize

from fquant.io import quantized
from tests.helpers.arrays import randn
from tests.helpers.quantized_tensors import NAME, X, assert_loads, integers, scales

E4M3 = torch.float8_e4m3fn
CONFIG = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128], "fmt": "e4m3"}
theirs = Fp8Dequantize(None)._dequantize_one


def codes(out, width):
    """Draw every number of E4M3."""
    bits = integers(0, 256, out, width).to(torch.uint8)
    return torch.where(bits & 0x7F == 0x7F, 1, bits).to(torch.uint8).view(E4M3)


def test_what_the_codes_are():
    assert codes(64, 64).float().isfinite().all() and (codes(64, 64).view(torch.uint8) == 0x80).any()  # -0 too


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("held", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("block", [[128, 128], [64, 32], [1, 128], [128, 256]], ids=str)
def test_blocks(block, held, dtype):
    weight, scale = codes(256, 512), scales(256 // block[0], 512 // block[1], dtype=held)
    decoded = theirs(weight, scale, dtype)
    assert_loads(CONFIG | {"weight_block_size": block}, {NAME: weight, f"{X}.weight_scale_inv": scale}, decoded)


@pytest.mark.parametrize("shape", [(192, 256), (128, 200), (100, 70)], ids=str)
def test_short_blocks(shape):
    """Compare with a loop: transformers takes another grid for such rows, and refuses such columns."""
    weight, scale = codes(*shape), scales(-(-shape[0] // 128), -(-shape[1] // 128), dtype=torch.float32)
    decoded = torch.empty(shape)
    for n in range(shape[0]):
        for k in range(0, shape[1], 128):
            decoded[n, k : k + 128] = weight[n, k : k + 128].float() * scale[n // 128, k // 128]
    tensors = {NAME: weight, f"{X}.weight_scale_inv": scale, f"{X}.input_scale": torch.ones(())}
    assert_loads(CONFIG, tensors, decoded.bfloat16())


@pytest.mark.parametrize("shape", [(), (1,), (1, 1)], ids=str)
def test_one_scale(shape):
    weight, scale = codes(48, 80), torch.tensor(0.013).reshape(shape)
    config = {"quant_method": "fp8", "weight_block_size": None, "activation_scheme": "static"}
    tensors = {NAME: weight, f"{X}.weight_scale_inv": scale, f"{X}.activation_scale": torch.ones(())}
    assert_loads(config, tensors, (weight.float() * scale.reshape(())).bfloat16())


@pytest.mark.parametrize("name", ["scale", "weight_scale_inv", "qscale_weight"])
@pytest.mark.parametrize("held", [torch.uint8, torch.float8_e8m0fnu], ids=str)
def test_exponents_as_scales(held, name):
    weight, scale = codes(256, 256), integers(90, 140, 2, 2).to(torch.uint8).view(held)
    decoded = theirs(weight, scale, torch.bfloat16)
    assert_loads(CONFIG | {"scale_fmt": "ue8m0"}, {NAME: weight, f"{X}.{name}": scale}, decoded)


def test_fp4_experts():
    weight, scale = integers(-128, 128, 64, 64).to(torch.int8), integers(90, 140, 64, 4).to(torch.uint8)
    decoded = theirs(weight, scale, torch.bfloat16)
    assert_loads(CONFIG | {"scale_fmt": "ue8m0", "expert_dtype": "fp4"}, {NAME: weight, f"{X}.scale": scale}, decoded)


def test_fbgemm():
    """Compare with its formula: FBGEMM multiplies on CUDA only, and has no function that decodes."""
    weight, scale = codes(48, 80), scales(48, 1, dtype=torch.float32)
    config = {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0, "modules_to_not_convert": ["lm_head"]}
    assert_loads(config, {NAME: weight, f"{NAME}_scale": scale}, (weight.float() * scale).bfloat16())


def test_a_dense_weight_has_no_parts():
    assert quantized.names(quantized.method(CONFIG), "lm_head.weight", {"lm_head.weight", NAME}) == ()


nan = codes(256, 256).view(torch.uint8).clone()
nan[3, 4] = 0x7F
FAULTS = {
    "weight bf16": ({NAME: randn(256, 256, dtype=torch.bfloat16)}, rf"{NAME}: got bfloat16 \[256, 256\], wanted"),
    "weight e5m2": ({NAME: codes(256, 256).view(torch.float8_e5m2)}, rf"{NAME}: got float8_e5m2 \[256, 256\], wanted"),
    "weight NaN": ({NAME: nan.view(E4M3)}, f"{NAME}: got 1 values that are NaN, wanted none"),
    "weight FP4": ({NAME: torch.zeros(256, 128, dtype=torch.int8)}, rf"{NAME}: got int8 \[256, 128\], wanted float8"),
    "scale grid": ({f"{X}.weight_scale_inv": torch.ones(2, 3)}, r".*weight_scale_inv: got float32 \[2, 3\], wanted"),
    "scale NaN": ({f"{X}.weight_scale_inv": torch.full((2, 2), torch.nan)}, ".*_inv: got values that are NaN"),
    "scale u8": ({f"{X}.weight_scale_inv": torch.ones(2, 2).to(torch.uint8)}, ".*_inv: got uint8"),
    "no weight": ({NAME: None}, f"{NAME}: missing, wanted float8_e4m3fn"),
    "no scale": ({f"{X}.weight_scale_inv": None}, f"{X}.weight_scale_inv: missing, wanted float32"),
}  # fmt: skip


@pytest.mark.parametrize("changed, message", FAULTS.values(), ids=FAULTS)
def test_refuses(changed, message):
    tensors = {NAME: codes(256, 256), f"{X}.weight_scale_inv": torch.ones(2, 2)} | changed
    tensors = {name: t for name, t in tensors.items() if t is not None}
    with pytest.raises(ValueError, match=f"^{message}"):
        quantized.load(quantized.method(CONFIG), NAME, tensors, (256, 256), torch.bfloat16)
