"""Tests of fquant.io.quantized.compressed_tensors: its own compressors write, and decompress what we compare with."""

import pytest
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationConfig, QuantizationScheme

from fquant.io import quantized
from tests.helpers.arrays import randn
from tests.helpers.quantized_tensors import NAME, X, assert_loads, integers, scales

N, K = 64, 256


def config(format, **weights):
    """Return the dict that compressed-tensors writes to config.json."""
    scheme = QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(**weights))
    raw = QuantizationConfig(config_groups={"group_0": scheme}, format=format, quantization_status="compressed")
    return raw.model_dump(mode="json") | {"version": "0.20.0", "sparsity_config": {}, "transform_config": {}}


def scale_shape(strategy, group=None, block=None):
    blocks = block and (-(-N // block[0]), -(-K // block[1]))
    return {"tensor": (1,), "channel": (N, 1), "group": (N, K // (group or K)), "block": blocks}[strategy]


def compressed(format, dtype, seed=0, **weights):
    """Return the config, the tensors of a weight, and the weight that the library decompresses."""
    args = QuantizationArgs(**weights)
    scheme = QuantizationScheme(targets=["Linear"], weights=args)
    shape = scale_shape(args.strategy, args.group_size, args.block_structure)
    state = {"weight": randn(N, K, seed=seed, dtype=dtype) * 0.2, "weight_scale": scales(*shape, dtype=dtype)}
    if args.type == "int" and not args.symmetric:
        bound = 2 ** (args.num_bits - 1)
        state["weight_zero_point"] = integers(-bound, bound, *shape, seed=3).to(torch.int8)
    compressor = BaseCompressor.get_value_from_registry(format)
    state = compressor.compress(state, scheme)
    decoded = compressor.decompress(dict(state), scheme)["weight"]
    return config(format, **weights), {f"{X}.{name}": t for name, t in state.items()}, decoded


STRATEGIES = {
    "channel": {"strategy": "channel"}, "group 32": {"strategy": "group", "group_size": 32},
    "group 16": {"strategy": "group", "group_size": 16}, "tensor": {"strategy": "tensor"},
}  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("bits", range(1, 9))
def test_packed_integers(bits, strategy, symmetric, dtype):
    options = STRATEGIES[strategy] | {"num_bits": bits, "type": "int", "symmetric": symmetric}
    assert_loads(*compressed("pack-quantized", dtype, **options))


@pytest.mark.parametrize("format", ["int-quantized", "naive-quantized"])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_bytes_of_integers(dtype, strategy, symmetric, format):
    options = STRATEGIES[strategy] | {"num_bits": 8, "type": "int", "symmetric": symmetric}
    assert_loads(*compressed(format, dtype, **options))


BLOCKS = STRATEGIES | {"block": {"strategy": "block", "block_structure": [32, 128]}}


@pytest.mark.parametrize("strategy", BLOCKS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_float8(dtype, strategy):
    options = BLOCKS[strategy] | {"num_bits": 8, "type": "float", "symmetric": True}
    assert_loads(*compressed("float-quantized", dtype, **options))


@pytest.mark.parametrize("format, bits", [("mxfp4-pack-quantized", 4), ("mxfp8-quantized", 8)])
def test_microscaling(format, bits):
    options = {"num_bits": bits, "type": "float", "strategy": "group", "group_size": 32, "symmetric": True}
    if bits == 8:
        options |= {"scale_dtype": "torch.uint8"}
    raw, tensors, decoded = compressed(format, torch.bfloat16, **options)
    assert_loads(raw, tensors, decoded)


def test_nvfp4():
    options = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16, "symmetric": True}
    scheme = QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(**options))
    state = {
        "weight": randn(N, K, dtype=torch.bfloat16), "weight_global_scale": torch.tensor([743.7]),
        "weight_scale": (torch.rand(N, K // 16) * 300 + 1).to(torch.float8_e4m3fn).bfloat16(),
    }  # fmt: skip
    compressor = BaseCompressor.get_value_from_registry("nvfp4-pack-quantized")
    state = compressor.compress(state, scheme)
    state["weight_packed"] = integers(0, 256, N, K // 2).to(torch.uint8)
    decoded = compressor.decompress(dict(state), scheme)["weight"]
    tensors = {f"{X}.{name}": t for name, t in state.items()} | {f"{X}.input_global_scale": torch.ones(1)}
    assert_loads(config("nvfp4-pack-quantized", **options), tensors, decoded)


@pytest.mark.parametrize("bits", [3, 5, 6, 7])
def test_words_with_gaps_of_older_releases(bits):
    """Repack into 32 // bits integers a word, as releases before 0.10 do, which cannot run beside 0.20."""
    raw, tensors, decoded = compressed(
        "pack-quantized", torch.bfloat16, num_bits=bits, type="int", symmetric=False, strategy="group", group_size=32
    )
    each = 32 // bits

    def repack(t, count):
        fields = torch.nn.functional.pad(quantized.packing.fields(t, bits, count).long(), (0, -count % each))
        return (fields.unflatten(-1, (-1, each)) << torch.arange(each) * bits).sum(-1).to(torch.int32)

    tensors[f"{X}.weight_packed"] = repack(tensors[f"{X}.weight_packed"], K)
    tensors[f"{X}.weight_zero_point"] = repack(tensors[f"{X}.weight_zero_point"].T, N).T.contiguous()
    assert_loads(raw, tensors, decoded)


def test_the_scheme_that_fits_and_a_dense_weight():
    four, tensors, decoded = compressed("pack-quantized", torch.bfloat16, num_bits=4, strategy="group", group_size=32)
    eight, others, of_eight = compressed(
        "float-quantized", torch.bfloat16, num_bits=8, type="float", strategy="channel"
    )
    group = eight["config_groups"]["group_0"] | {"format": "float-quantized"}
    both = four | {"config_groups": four["config_groups"] | {"group_1": group}}
    assert_loads(both, tensors, decoded)
    assert_loads(both, others | {f"{X}.input_scale": torch.ones(1)}, of_eight)
    assert quantized.names(quantized.method(both), "lm_head.weight", {"lm_head.weight", *tensors}) == ()


def test_old_group_indices_must_be_in_order():
    raw, tensors, decoded = compressed("pack-quantized", torch.bfloat16, num_bits=4, strategy="group", group_size=32)
    raw["config_groups"]["group_0"]["weights"]["actorder"] = "group"
    order = torch.arange(K, dtype=torch.int32) // 32
    assert_loads(raw, tensors | {f"{X}.weight_g_idx": order}, decoded)
    with pytest.raises(ValueError, match=rf"^{X}.weight_g_idx: inputs of a group are scattered"):
        assert_loads(raw, tensors | {f"{X}.weight_g_idx": order.flip(0)}, decoded)


FAULTS = {
    "no scale": ({"weight_scale": None}, "weight_scale: missing, wanted float16"),
    "no shape": ({"weight_shape": None}, "weight_shape: missing, wanted int64 or int32"),
    "no zero": ({"weight_zero_point": None}, r"weight_zero_point: missing, wanted int32 \[8, 8\]"),
    "another shape": ({"weight_shape": torch.tensor([N, K - 1])}, r"weight_shape: got \[64, 255\], wanted \[64, 256\]"),
    "codes u8": ({"weight_packed": torch.zeros(N, 32, dtype=torch.uint8)}, r"weight_packed: got uint8 \[64, 32\]"),
    "codes short": ({"weight_packed": torch.zeros(N, 31).int()}, r"weight_packed: got int32 \[64, 31\], wanted int32"),
    "scale NaN": ({"weight_scale": torch.full((N, 8), torch.nan)}, "weight_scale: got values that are NaN or infinite"),
    "zero f32": ({"weight_zero_point": torch.zeros(8, 8)}, r"weight_zero_point: got float32 \[8, 8\], wanted int32"),
}  # fmt: skip


@pytest.mark.parametrize("changed, message", FAULTS.values(), ids=FAULTS)
def test_refuses(changed, message):
    options = {"num_bits": 4, "strategy": "group", "group_size": 32, "symmetric": False}
    raw, tensors, _ = compressed("pack-quantized", torch.bfloat16, **options)
    tensors = tensors | {f"{X}.{name}": t for name, t in changed.items()}
    tensors = {name: t for name, t in tensors.items() if t is not None}
    with pytest.raises(ValueError, match=rf"^{X}.{message}"):
        quantized.load(quantized.method(raw), NAME, tensors, (N, K), torch.bfloat16)


def test_refuses_nan_and_a_zero_point_that_the_config_denies():
    raw, tensors, _ = compressed("float-quantized", torch.bfloat16, num_bits=8, type="float", strategy="channel")
    codes = tensors[NAME].view(torch.uint8).clone()
    codes[0, 0] = 0xFF
    with pytest.raises(ValueError, match=f"^{NAME}: got 1 values that are NaN, wanted none"):
        load = tensors | {NAME: codes.view(torch.float8_e4m3fn)}
        quantized.load(quantized.method(raw), NAME, load, (N, K), torch.bfloat16)
    with pytest.raises(ValueError, match=f"^{X}.weight_zero_point: got one, wanted none by symmetric true"):
        zero = tensors | {f"{X}.weight_zero_point": torch.zeros(N, 1, dtype=torch.int8)}
        quantized.load(quantized.method(raw), NAME, zero, (N, K), torch.bfloat16)


def test_refuses_words_that_may_have_gaps_or_not():
    raw = config("pack-quantized", num_bits=3, strategy="channel")
    entries = {f"{X}.weight_packed": torch.zeros(N, 2, dtype=torch.int32)}
    with pytest.raises(ValueError, match=rf"^{X}.weight_packed: rows of 20 fields of 3 bits may have gaps or not"):
        quantized.like(quantized.method(raw), NAME, entries, (N, 20), torch.bfloat16)


def test_refuses_two_schemes_that_fit():
    raw, tensors, _ = compressed("pack-quantized", torch.bfloat16, num_bits=4, strategy="group", group_size=K)
    other = config("pack-quantized", num_bits=4, strategy="channel")["config_groups"]["group_0"]
    raw["config_groups"]["group_1"] = other
    with pytest.raises(ValueError, match=f"^{NAME}: fits 2 of the config_groups, wanted one"):
        quantized.load(quantized.method(raw), NAME, tensors, (N, K), torch.bfloat16)
