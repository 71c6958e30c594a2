"""Tests of fquant.io.quantized: damaged tensors of every method load or give one ValueError that names a tensor."""

import random

import pytest
import torch

from fquant import dequantize
from fquant.io import quantized
from tests.helpers.quantized_tensors import NAME, X, assert_loads

N, K = 48, 128
I32, U8, I8, F16, F32 = torch.int32, torch.uint8, torch.int8, torch.float16, torch.float32
DTYPES = (I32, U8, I8, F16, F32, torch.bfloat16, torch.int64, torch.float8_e4m3fn, torch.bool, torch.float64)
CT = {"num_bits": 4, "symmetric": False, "strategy": "group", "group_size": 32}
INTX = {
    "weight_dtype": {"_type": "torch.dtype", "_data": "int8"},
    "granularity": {"_type": "PerGroup", "_version": 1, "_data": {"group_size": 32}},
    "mapping_type": {"_type": "MappingType", "_data": "ASYMMETRIC"},
}
METHODS = {  # config, and the tensors of a weight
    "gptq": (
        {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": False},
        {f"{X}.qweight": (I32, 16, N), f"{X}.qzeros": (I32, 4, 6), f"{X}.scales": (F16, 4, N), f"{X}.g_idx": (I32, K)},
    ),
    "awq": (
        {"quant_method": "awq", "bits": 4, "group_size": 32},
        {f"{X}.qweight": (I32, K, 6), f"{X}.qzeros": (I32, 4, 6), f"{X}.scales": (F16, 4, N)},
    ),
    "compressed-tensors": (
        {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": {"a": {"weights": CT}}},
        {f"{X}.weight_packed": (I32, N, 16), f"{X}.weight_scale": (F16, N, 4), f"{X}.weight_shape": (torch.int64, 2),
         f"{X}.weight_zero_point": (I32, 6, 4)},
    ),
    "fp8": (
        {"quant_method": "fp8", "weight_block_size": [16, 32]},
        {NAME: (torch.float8_e4m3fn, N, K), f"{X}.weight_scale_inv": (F32, 3, 4)},
    ),
    "fbgemm_fp8": (
        {"quant_method": "fbgemm_fp8"},
        {NAME: (torch.float8_e4m3fn, N, K), f"{X}.weight_scale": (F32, N, 1)},
    ),
    "mxfp4": ({"quant_method": "mxfp4"}, {f"{X}_blocks": (U8, N, 4, 16), f"{X}_scales": (U8, N, 4)}),
    "torchao": (
        {"quant_method": "torchao", "quant_type":
            {"default": {"_type": "IntxWeightOnlyConfig", "_version": 2, "_data": INTX}}},
        {f"{X}._weight_qdata": (I8, N, K), f"{X}._weight_scale": (F32, N, 4), f"{X}._weight_zero_point": (I8, N, 4)},
    ),
    "bitsandbytes": (
        {"quant_method": "bitsandbytes", "load_in_8bit": True},
        {NAME: (I8, N, K), f"{X}.SCB": (F32, N), f"{X}.weight_format": (U8,)},
    ),
}  # fmt: skip


def draw(seed, dtype, *shape):
    """Draw small numbers of ``dtype``, none of them NaN."""
    return torch.randint(0, 100, shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def drawn(layout):
    tensors = {name: draw(0, *spec) for name, spec in layout.items()}
    known = {f"{X}.g_idx": torch.arange(K, dtype=I32) // 32, f"{X}.weight_shape": torch.tensor([N, K]),
             f"{X}.weight_format": torch.tensor(0, dtype=U8)}  # fmt: skip
    return {name: known.get(name, t) for name, t in tensors.items()}


def damaged(rng, tensors):
    """Return ``tensors`` with one of them missing, or of another dtype, shape or value."""
    name = rng.choice(list(tensors))
    t = tensors[name]
    match rng.randrange(5):
        case 0:
            return {key: other for key, other in tensors.items() if key != name}
        case 1:
            new = draw(rng.randrange(100), rng.choice(DTYPES), *t.shape)
        case 2:
            new = draw(0, t.dtype, *(max(0, n + rng.choice((-1, 0, 1))) for n in t.shape))
        case 3:
            new = draw(0, t.dtype, *rng.choice((t.shape[::-1], (*t.shape, 1), t.shape[:-1], (1, *t.shape), (0,))))
        case _:
            raw = torch.tensor(list(rng.randbytes(t.numel() * t.element_size())), dtype=U8)
            new = raw.view(t.dtype).reshape(t.shape)
    return tensors | {name: new}


@pytest.mark.parametrize("config, layout", METHODS.values(), ids=METHODS)
def test_damage_is_one_error_or_none(config, layout):
    rng, method, good = random.Random(0), quantized.method(config), drawn(layout)
    assert_loads(config, good, dequantize(quantized.load(method, NAME, good, (N, K), F16)))
    refused = 0
    for _ in range(150):
        tensors = damaged(rng, good)
        try:
            packed = quantized.load(method, NAME, tensors, (N, K), F16)
            assert dequantize(packed).shape == (N, K)
        except ValueError as error:
            refused += 1
            text = str(error)
            assert text.startswith(X) and "\n" not in text and len(text) < 400, text
    assert refused > 50


@pytest.mark.parametrize("config, layout", METHODS.values(), ids=METHODS)
def test_names_are_those_of_this_weight(config, layout):
    method, other = quantized.method(config), "model.layers.0.self_attn.q_proj2.weight"
    found = {*layout, f"{X}.bias", "lm_head.weight", "model.layers.0.self_attn.q_norm.weight"}
    assert set(quantized.names(method, NAME, found)) == set(layout)
    assert quantized.names(method, "lm_head.weight", found) == () == quantized.names(method, other, found)
    head = {name.replace(X, "lm_head") for name in layout}
    assert set(quantized.names(method, "lm_head.weight", found | head)) == head | ({"lm_head.weight"} & head)
