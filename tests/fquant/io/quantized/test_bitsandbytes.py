"""Tests of fquant.io.quantized.bitsandbytes: bitsandbytes quantises, and decodes what we compare with."""

import bitsandbytes as bnb
import pytest
import torch
from bitsandbytes.functional import dequantize_4bit, int8_vectorwise_dequant, int8_vectorwise_quant, quantize_4bit
from transformers import BitsAndBytesConfig

from fquant.io import quantized
from tests.helpers.arrays import randn
from tests.helpers.quantized_tensors import NAME, X, assert_loads

FOUR = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4").to_dict()
EIGHT = BitsAndBytesConfig(load_in_8bit=True).to_dict()


@pytest.fixture(autouse=True)
def eager():
    """Keep bitsandbytes from compiling its own reference for large blocks."""
    with torch.compiler.set_stance("force_eager"):
        yield


def four_bit(shape=(6, 128), kind="nf4", nested=True, block=64, dtype=torch.bfloat16, storage=torch.uint8):
    codes, state = quantize_4bit(randn(*shape, dtype=dtype), None, None, block, nested, kind, storage)
    tensors = {f"{NAME}.{key}": t for key, t in state.as_dict(packed=True).items()}
    # FP4's second zero has either sign there, by the kernel that the CPU allows.
    return {NAME: codes} | tensors, dequantize_4bit(codes, state) + 0.0


@pytest.mark.parametrize("shape", [(6, 128), (700, 64), (6, 100), (2, 16)], ids=str)
@pytest.mark.parametrize("block", [32, 64, 4096])
@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("kind", ["nf4", "fp4"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_4_bits(dtype, kind, nested, block, shape):
    tensors, decoded = four_bit(shape, kind, nested, block, dtype)
    if kind == "fp4" and shape[1] % block:
        decoded = decoded + 0.0  # both zeros of their FP4 have the sign of the code, and of ours, none
    assert_loads(FOUR, tensors, decoded)


@pytest.mark.parametrize("storage", [torch.int8, torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_storage_of_any_dtype(storage):
    tensors, decoded = four_bit(storage=storage)
    config = FOUR | {"bnb_4bit_quant_storage": str(storage).removeprefix("torch.")}
    assert_loads(config, tensors, decoded)


def test_8_bits():
    codes, absmax, _ = int8_vectorwise_quant(randn(6, 128, dtype=torch.float16))
    tensors = {NAME: codes, f"{X}.SCB": absmax, f"{X}.weight_format": torch.tensor(0, dtype=torch.uint8)}
    assert_loads(EIGHT, tensors, int8_vectorwise_dequant(codes, absmax))


def test_a_module_and_a_dense_weight():
    layer = bnb.nn.Linear4bit(128, 16, bias=True, quant_type="nf4").to("cpu")
    tensors = {f"{X}.{key}": t.detach() for key, t in layer.state_dict().items()}
    bias = {f"{X}.bias": tensors.pop(f"{X}.bias")}
    assert_loads(FOUR, tensors, dequantize_4bit(layer.weight.data, layer.weight.quant_state))
    assert quantized.names(quantized.method(FOUR), "lm_head.weight", {"lm_head.weight", *tensors, *bias}) == ()
    assert quantized.method({"load_in_8bit": True}) == quantized.method(EIGHT)  # as of older releases


FAULTS = {
    "no absmax": ({f"{NAME}.absmax": None}, r"\.absmax: missing, wanted uint8"),
    "absmax short": ({f"{NAME}.absmax": torch.zeros(11, dtype=torch.uint8)}, r"\.absmax: got uint8 \[11\], wanted"),
    "no state": ({f"{NAME}.quant_state.bitsandbytes__nf4": None}, ": 0 tensors quant_state"),
    "no codes": ({NAME: None}, ": missing, wanted its codes"),
    "codes short": ({NAME: torch.zeros(383, 1, dtype=torch.uint8)}, r": got uint8 \[383, 1\], wanted uint8 \[384, 1\]"),
    "codes i64": ({NAME: torch.zeros(48, 1, dtype=torch.int64)}, ": got torch.int64, wanted codes in a storage dtype"),
    "another map": ({f"{NAME}.quant_map": torch.linspace(-1, 1, 16)}, ": quant_map: got another table than nf4_dq's"),
    "another block": ({f"{NAME}.absmax": torch.zeros(6, dtype=torch.uint8)}, r": absmax: got torch.uint8 \(6,\)"),
}  # fmt: skip


@pytest.mark.parametrize("changed, message", FAULTS.values(), ids=FAULTS)
def test_refuses(changed, message):
    tensors = {name: t for name, t in (four_bit()[0] | changed).items() if t is not None}
    with pytest.raises(ValueError, match=f"^{NAME}{message}"):
        quantized.load(quantized.method(FOUR), NAME, tensors, (6, 128), torch.bfloat16)


def test_refuses_the_shape_of_another_weight():
    with pytest.raises(ValueError, match=rf"^{NAME}: its state says shape \(6, 128\), wanted \(12, 64\)"):
        quantized.load(quantized.method(FOUR), NAME, four_bit()[0], (12, 64), torch.bfloat16)
