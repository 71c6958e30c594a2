"""Tests of fquant.io.quantized.torchao: torchao quantises, flattens for safetensors, unflattens and dequantises.

transformers' own writer is ``flatten_tensor_state_dict``. Float8 with activations quantises on CUDA only, so its
config is checked with the tensors of the weight-only class, which are the same.
"""

import pytest
import torch
from torchao.core.config import config_to_dict
from torchao.prototype.safetensors.safetensors_support import flatten_tensor_state_dict, unflatten_tensor_state_dict
from torchao.quantization import (
    Float8DynamicActivationFloat8WeightConfig,
    Float8Tensor,
    Float8WeightOnlyConfig,
    Int4WeightOnlyConfig,
    Int8DynamicActivationInt8WeightConfig,
    Int8DynamicActivationIntxWeightConfig,
    Int8WeightOnlyConfig,
    IntxWeightOnlyConfig,
    MappingType,
    PerAxis,
    PerGroup,
    PerRow,
    PerTensor,
    quantize_,
)

from fquant.io import quantized
from tests.helpers.arrays import randn
from tests.helpers.quantized_tensors import NAME, X, assert_loads

N, K = 48, 256
FLOATS = (torch.bfloat16, torch.float16, torch.float32)


def config(kind):
    return {"quant_method": "torchao", "quant_type": {"default": config_to_dict(kind)}, "modules_to_not_convert": None}


def written(kind, dtype):
    """Return the tensors of a file, and the weight that torchao reads back and dequantises."""
    layer = torch.nn.Linear(K, N, bias=False, dtype=dtype)
    layer.weight.data.copy_(randn(N, K) * 0.1)
    quantize_(layer, kind)
    return decoded(*flatten_tensor_state_dict({NAME: layer.weight.detach()}))


def decoded(tensors, metadata):
    return tensors, unflatten_tensor_state_dict(tensors, metadata)[0][NAME].dequantize()


def intx(bits, granularity, mapping):
    return IntxWeightOnlyConfig(getattr(torch, f"int{bits}"), granularity, mapping)


SYMMETRIC, ASYMMETRIC = MappingType.SYMMETRIC, MappingType.ASYMMETRIC
KINDS = {
    "int8": Int8WeightOnlyConfig(), "int8 dynamic": Int8DynamicActivationInt8WeightConfig(),
    "float8": Float8WeightOnlyConfig(),
    "int4 group": intx(4, PerGroup(32), SYMMETRIC), "int4 asymmetric": intx(4, PerGroup(64), ASYMMETRIC),
    "int3 rows": intx(3, PerAxis(0), ASYMMETRIC), "int8 group": intx(8, PerGroup(128), ASYMMETRIC),
    "int1 group": intx(1, PerGroup(16), SYMMETRIC), "int4 dynamic": Int8DynamicActivationIntxWeightConfig(torch.int4),
}  # fmt: skip


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_what_torchao_writes(kind, dtype):
    assert_loads(config(KINDS[kind]), *written(KINDS[kind], dtype))


@pytest.mark.parametrize("granularity", [PerRow(), PerTensor()], ids=str)
def test_float8_of_any_granularity(granularity):
    w = Float8Tensor.from_hp(randn(N, K, dtype=torch.bfloat16), granularity=granularity)
    tensors, wanted = decoded(*flatten_tensor_state_dict({NAME: w}))
    for kind in (Float8DynamicActivationFloat8WeightConfig, Float8WeightOnlyConfig):
        assert_loads(config(kind(granularity=granularity)), tensors, wanted)


def test_a_dense_weight_has_no_parts():
    method = quantized.method(config(Int8WeightOnlyConfig()))
    tensors, _ = written(Int8WeightOnlyConfig(), torch.bfloat16)
    assert quantized.names(method, "lm_head.weight", {"lm_head.weight", *tensors}) == ()


PART = f"{X}._weight"
FAULTS = {
    "zero point": ({"_zero_point": torch.ones(N, 1, dtype=torch.int8)}, "_zero_point: got a value that is not 0"),
    "zero point f32": ({"_zero_point": torch.zeros(N, 1)}, r"_zero_point: got float32 \[48, 1\], wanted int8"),
    "no scale": ({"_scale": None}, "_scale: missing, wanted float16"),
    "scale NaN": ({"_scale": torch.full((N, 1), torch.nan)}, "_scale: got values that are NaN or infinite"),
    "int4": ({"_qdata": torch.zeros(N, K // 2, dtype=torch.int8)}, r"_qdata: got int8 \[48, 128\], wanted int8"),
    "tiles": ({"_scale_and_zero": torch.zeros(8, N, 2)}, "_scale_and_zero: a part of another class of torchao"),
}  # fmt: skip


@pytest.mark.parametrize("changed, message", FAULTS.values(), ids=FAULTS)
def test_refuses(changed, message):
    tensors = written(Int8WeightOnlyConfig(), torch.bfloat16)[0] | {PART + name: t for name, t in changed.items()}
    tensors = {name: t for name, t in tensors.items() if t is not None}
    with pytest.raises(ValueError, match=f"^{PART}{message}"):
        quantized.load(quantized.method(config(Int8WeightOnlyConfig())), NAME, tensors, (N, K), torch.bfloat16)


def kind(**changed):
    raw = config(changed.pop("of", Int8WeightOnlyConfig()))
    raw["quant_type"]["default"] |= changed
    return raw


DATA = config_to_dict(Int8WeightOnlyConfig())["_data"]
UNREAD = {
    "int4": (kind(of=Int4WeightOnlyConfig()), "_type' is 'Int4WeightOnlyConfig': its zero point is a float"),
    "NF4": (kind(_type="NF4WeightOnlyConfig"), "NF4WeightOnlyConfig': torchao does not write NF4 tensors"),
    "per name": (kind(_type="FqnToConfig"), "FqnToConfig': its weights have several configs"),
    "unknown": (kind(_type="Int5Config"), "_type' is 'Int5Config', wanted Int8WeightOnlyConfig or"),
    "a list": (kind(_type=[]), r"_type' is \[\], wanted"),
    "version 1": (kind(_version=1), "_version' is 1, wanted 2, because others are pickled"),
    "group": (kind(_data=DATA | {"group_size": 32}), "key 'group_size' is 32, wanted None"),
    "key": (kind(_data=DATA | {"rotate": 1}), "key 'rotate' is unknown"),
    "granularity": (kind(_data=DATA | {"granularity": {"_type": "PerBlock"}}), "granularity: got {'_type': 'Per"),
    "no granularity": (kind(_data=DATA | {"granularity": []}), r"granularity: got \[\], wanted PerRow"),
    "text": ({"quant_method": "torchao", "quant_type": "int8_weight_only"}, "quant_type: got str, wanted an object"),
    "two": ({"quant_method": "torchao", "quant_type": {"default": {}, "x": {}}}, "quant_type: key 'x' is unknown"),
    "none": ({"quant_method": "torchao"}, "key 'quant_type' is missing"),
}  # fmt: skip


@pytest.mark.parametrize("raw, message", UNREAD.values(), ids=UNREAD)
def test_refuses_a_config(raw, message):
    with pytest.raises(ValueError, match=rf"^quantization_config.*{message}"):
        quantized.method(raw)


def test_the_width_of_codes():
    four, eight = (written(intx(bits, PerGroup(32), SYMMETRIC), torch.bfloat16) for bits in (4, 8))
    assert assert_loads(config(intx(4, PerGroup(32), SYMMETRIC)), *four).codes.shape == (N, K // 2)
    assert assert_loads(config(intx(8, PerGroup(32), SYMMETRIC)), *eight).codes.shape == (N, K)
    with pytest.raises(ValueError, match=f"^{PART}_qdata: got .* integers beyond 4 bits; check the config"):
        assert_loads(config(intx(4, PerGroup(32), SYMMETRIC)), *eight)
