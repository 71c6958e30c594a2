"""Tests of fquant.io.quantized.config, and of the configs of all methods: those in use are read, others refused."""

import pytest
import torch
from torchao.quantization import Int8WeightOnlyConfig
from transformers import (
    AwqConfig,
    BitsAndBytesConfig,
    FbgemmFp8Config,
    FineGrainedFP8Config,
    GPTQConfig,
    Mxfp4Config,
    TorchAoConfig,
)

from fquant.io import quantized
from fquant.io.quantized.awq import Awq
from fquant.io.quantized.blocks import TENSOR, Grid
from fquant.io.quantized.compressed_tensors import Scheme
from fquant.io.quantized.fp8 import FbgemmFp8, Fp8
from fquant.io.quantized.gptq import Gptq

GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm"}
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
WEIGHTS = {
    "actorder": None, "block_structure": None, "dynamic": False, "group_size": 128, "num_bits": 4, "observer": "minmax",
    "observer_kwargs": {}, "strategy": "group", "symmetric": True, "type": "int",
}  # fmt: skip


def ct(weights=WEIGHTS, group=None, **more):
    known = {"targets": ["Linear"], "weights": weights, "input_activations": None, "output_activations": None}
    raw = {"quant_method": "compressed-tensors", "format": "pack-quantized", "ignore": ["lm_head"]}
    return raw | {"config_groups": {"group_0": known | (group or {})}, "quantization_status": "compressed"} | more


IN_USE = {
    "transformers gptq": (GPTQConfig(bits=4, group_size=64, sym=False).to_dict(), Gptq(4, 64, False, 1)),
    "transformers awq": (AwqConfig(group_size=32).to_dict(), Awq(32, "gemm")),
    "transformers fp8": (FineGrainedFP8Config().to_dict(), Fp8(Grid(128, 128), False, False)),
    "transformers fbgemm": (FbgemmFp8Config().to_dict(), FbgemmFp8()),
    "transformers mxfp4": (Mxfp4Config().to_dict(), quantized.Mxfp4()),
    "transformers bitsandbytes": (BitsAndBytesConfig(load_in_4bit=True).to_dict(), quantized.BitsAndBytes()),
    "transformers torchao": (TorchAoConfig(Int8WeightOnlyConfig()).to_dict(), None),
    "auto-gptq": (GPTQ | {"damp_percent": 0.1, "desc_act": True, "static_groups": False, "sym": True, "true_sequential":
                  True, "model_name_or_path": None, "model_file_base_name": "model"}, Gptq(4, 128, True, 1)),
    "gptqmodel": (GPTQ | {"checkpoint_format": "gptq_v2", "desc_act": False, "sym": True, "lm_head": False,
                  "pack_dtype": "int32", "meta": {"quantizer": ["gptqmodel:7.7.0"]}, "dynamic": {"-:.*gate": {}}},
                  Gptq(4, 128, True, 2)),
    "auto-round": (GPTQ | {"iters": 200, "data_type": "int", "sym": True, "autoround_version": "0.4"},
                   Gptq(4, 128, True, 1)),
    "autoawq": ({"quant_method": "awq", "zero_point": True, "q_group_size": -1, "w_bit": 4, "version": "GEMV"},
                Awq(None, "gemv")),
    "DeepSeek V3": (FP8 | {"fmt": "e4m3"}, Fp8(Grid(128, 128), False, False)),
    "AutoFP8": ({"quant_method": "fp8", "activation_scheme": "static", "ignored_layers": []}, Fp8(None, False, False)),
    "per tensor": (FP8 | {"weight_block_size": None}, Fp8(TENSOR, False, False)),
    "llm-compressor": (ct(global_compression_ratio=1.7, kv_cache_scheme=None, sparsity_config={"format": "dense"}),
                       quantized.CompressedTensors((Scheme("packed", 4, Grid(1, 128), False),))),
}  # fmt: skip


@pytest.mark.parametrize("raw, wanted", IN_USE.values(), ids=IN_USE)
def test_reads_what_is_in_use(raw, wanted):
    raw = raw | {"quant_method": getattr(raw["quant_method"], "value", raw["quant_method"])}
    method = quantized.method(raw)
    assert wanted is None or method == wanted
    assert hash(method) == hash(quantized.method(raw)) and method == quantized.method(raw)


deep: list = []
for _ in range(400):
    deep = [deep]
FAULTS = {
    "no object": ([1], "got list, wanted an object"),
    "no method": ({}, "key 'quant_method' is None, wanted one of awq"),
    "hqq": ({"quant_method": "hqq"}, "key 'quant_method' is 'hqq', wanted one of"),
    "method of a list": ({"quant_method": [deep]}, r"key 'quant_method' is \[\["),
    "long": (GPTQ | {"x" * 10**6: 1}, r"key 'x+\.\.\.x+' is unknown, and may change the weights"),
    "number as key": (GPTQ | {7: 1}, "key 7 is unknown"),
    "deep": (GPTQ | {"bits": deep}, r"key 'bits' is \[\[.*wanted 2 or 3 or 4 or 8"),
    "gptq bits 5": (GPTQ | {"bits": 5}, "key 'bits' is 5, wanted 2 or 3 or 4 or 8"),
    "gptq bits 4.0": (GPTQ | {"bits": 4.0}, "key 'bits' is 4.0, wanted"),
    "gptq bits true": (GPTQ | {"bits": True}, "key 'bits' is True, wanted"),
    "gptq group 0": (GPTQ | {"group_size": 0}, "key 'group_size' is 0, wanted -1 or a positive integer"),
    "gptq group huge": (GPTQ | {"group_size": 10**30}, "key 'group_size' is 1000"),
    "gptq no bits": ({"quant_method": "gptq", "group_size": 128}, "key 'bits' is missing"),
    "gptq marlin": (GPTQ | {"checkpoint_format": "marlin"}, "'checkpoint_format' is 'marlin', wanted 'gptq' or"),
    "gptq planar": (GPTQ | {"format": "gptq_p"}, "'format' is 'gptq_p'"),
    "gptq formats": (GPTQ | {"format": "gptq", "checkpoint_format": "gptq_v2"}, "'format' differ"),
    "gptq dynamic": (GPTQ | {"dynamic": {"+:.*down": {"bits": 8}}}, "key 'dynamic' is"),
    "gptq pack": (GPTQ | {"pack_dtype": "int64"}, "key 'pack_dtype' is 'int64', wanted 'int32'"),
    "gptq adapter": (GPTQ | {"adapter": {"rank": 8}}, "key 'adapter' is"),
    "gptq 3 bits": (GPTQ | {"bits": 3, "sym": False, "meta": {"quantizer": ["gptqmodel:2.2.0"]}},
                    "key 'meta': quantizer .* shifts 3-bit zero points"),
    "gptq unknown": (GPTQ | {"hadamard": True}, "key 'hadamard' is unknown"),
    "awq bits": (AWQ | {"bits": 8}, "key 'bits' is 8, wanted 4"),
    "awq fast": (AWQ | {"version": "gemv_fast"}, "key 'version' is 'gemv_fast', wanted 'gemm' or 'gemv'"),
    "awq no zero": (AWQ | {"zero_point": False}, "key 'zero_point' is False, wanted True"),
    "awq two groups": (AWQ | {"q_group_size": 64}, "keys 'group_size' and 'q_group_size' differ"),
    "awq llm-awq": (AWQ | {"backend": "llm-awq"}, "key 'backend' is 'llm-awq'"),
    "fp8 block": (FP8 | {"weight_block_size": [128]}, r"'weight_block_size' is \[128\], wanted two positive integers"),
    "fp8 block huge": (FP8 | {"weight_block_size": [2**40, 1]}, "key 'weight_block_size' is"),
    "fp8 e5m2": (FP8 | {"fmt": "e5m2"}, "key 'fmt' is 'e5m2', wanted 'e4m3'"),
    "fp8 scale": (FP8 | {"scale_fmt": "e5m3"}, "key 'scale_fmt' is 'e5m3'"),
    "fp8 unknown": (FP8 | {"kv_cache_scheme": {}}, "key 'kv_cache_scheme' is unknown"),
    "fbgemm": ({"quant_method": "fbgemm_fp8", "bits": 8}, "key 'bits' is unknown"),
    "mxfp4": ({"quant_method": "mxfp4", "block": 16}, "key 'block' is unknown"),
    "bnb": ({"quant_method": "bitsandbytes", "bnb_4bit_quant_type": "nf3"}, "'bnb_4bit_quant_type' is 'nf3', wanted"),
    "bnb fp16": ({"quant_method": "bitsandbytes", "llm_int8_has_fp16_weight": True}, "'llm_int8_has_fp16_weight' is"),
    "ct no groups": (ct(config_groups={}), "key 'config_groups' is {}"),
    "ct a preset": (ct(config_groups={"W4A16": ["Linear"]}), "config_groups.W4A16: got list, wanted an object"),
    "ct no weights": (ct(None), "key 'config_groups' quantises no weights"),
    "ct bits": (ct(WEIGHTS | {"num_bits": 9}), "group_0.weights: key 'num_bits' is 9"),
    "ct unknown": (ct(WEIGHTS | {"rotation": 1}), "group_0.weights: key 'rotation' is unknown"),
    "ct dynamic": (ct(WEIGHTS | {"dynamic": True}), "key 'dynamic' is True"),
    "ct no group": (ct(WEIGHTS | {"group_size": None}), "group_0: key 'strategy' is 'group' with group_size None"),
    "ct group beside": (ct(WEIGHTS | {"strategy": "channel"}), "key 'strategy' is 'channel' with group_size 128"),
    "ct block": (ct(WEIGHTS | {"strategy": "block"}), "key 'strategy' is 'block' with group_size 128"),
    "ct float packed": (ct(WEIGHTS | {"type": "float"}), "weights of type float and 4 bits in format pack-quantized"),
    "ct int float": (ct(format="float-quantized"), "weights of type int and 4 bits in format float-quantized"),
    "ct mx group": (ct(WEIGHTS | {"type": "float"}, format="mxfp4-pack-quantized"), "wanted group_size 32 of"),
    "ct mxfp6": (ct(format="mxfp6-pack-quantized"), "key 'format' is 'mxfp6-pack-quantized'"),
    "ct sparse": (ct(format="marlin-24"), "key 'format' is 'marlin-24'"),
    "ct sparsity": (ct(sparsity_config={"format": "sparse-24-bitmask"}), "key 'sparsity_config' is"),
    "ct rotated": (ct(transform_config={"config_groups": {}}), "key 'transform_config' is"),
    "ct cache": (ct(kv_cache_scheme={"num_bits": 8}), "key 'kv_cache_scheme' is"),
    "ct mixed": (ct(format="mixed-precision"), "group_0: key 'format' is 'mixed-precision', wanted"),
    "ct status": (ct(quantization_status="calibration"), "key 'quantization_status' is 'calibration'"),
}  # fmt: skip


@pytest.mark.parametrize("raw, message", FAULTS.values(), ids=FAULTS)
def test_refuses(raw, message):
    with pytest.raises(ValueError, match=f"^quantization_config.*{message}") as caught:
        quantized.method(raw)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 500


METHODS = {name: raw for name, (raw, _) in IN_USE.items() if name in ("auto-gptq", "autoawq", "DeepSeek V3", "AutoFP8",
           "llm-compressor", "transformers mxfp4", "transformers torchao")}  # fmt: skip


@pytest.mark.parametrize("raw", METHODS.values(), ids=METHODS)
def test_shapes_and_dtypes_of_no_weight(raw):
    raw = raw | {"quant_method": getattr(raw["quant_method"], "value", raw["quant_method"])}
    method = quantized.method(raw)
    shapes = ((2**62, 2**62), (64, 2**62), (2**62, 64), (8, 128), (128, 128, 128))
    for shape, dtype in [
        *((shape, torch.bfloat16) for shape in shapes),
        ((8, 128), torch.float64),
        ((0, 4), torch.float32),
    ]:
        with pytest.raises(ValueError, match="^X") as caught:
            quantized.like(method, "X.weight", {}, shape, dtype)
        assert "\n" not in str(caught.value) and len(str(caught.value)) < 300
