"""Folders whose weights are quantised: loaded as Packed, they have the logits of their own library's decoded weights.

The folders are those that transformers writes, where its library runs on a CPU. GPTQ and AWQ need CUDA, so their
tensors are packed by the naive loops of the tests of ``fquant.io.quantized``.
"""

import dataclasses
import re
from functools import partial

import pytest
import safetensors.torch
import torch
from torchao.quantization import Int8WeightOnlyConfig, IntxWeightOnlyConfig, PerGroup
from torchao.utils import TorchAOBaseTensor
from transformers import (
    AutoModelForCausalLM,
    BitsAndBytesConfig,
    CompressedTensorsConfig,
    FineGrainedFP8Config,
    TorchAoConfig,
)

from fquant import FP4, INT8, NF4, NF4_DQ, Packed, dequantize, lora, quantize, random, tree
from fquant.format import DYNAMIC8
from fquant.lazy import Lazy
from models import decoder, hf
from models.export import bitsandbytes, compressed_tensors
from tests.helpers.arrays import without_digests
from tests.helpers.hf_models import CONFIGS, GQA, random_params
from tests.helpers.quantized_tensors import gptq, quantize_folder

WIDE = dataclasses.replace(GQA, dim=128, hidden=256, head_dim=32)
FAMILIES = {
    "llama": WIDE,
    "qwen2": dataclasses.replace(WIDE, family="qwen2", qkv_bias=True, tied=True),
    "gemma2": dataclasses.replace(CONFIGS["gemma2"], dim=128, hidden=256, head_dim=32),
    "phi3": dataclasses.replace(CONFIGS["phi3"], dim=128, hidden=256, head_dim=32),
}
LINEARS = r"layers\.\d+\.(q|k|v|qkv|o|gate|up|gate_up|down)"
TOKENS = torch.arange(40)[None]
FP4_DQ = dataclasses.replace(FP4, name="fp4_dq", scale=DYNAMIC8)
pytestmark = pytest.mark.filterwarnings("ignore")  # transformers and its libraries warn of their own deprecations


@pytest.fixture(autouse=True)
def eager():
    """Keep bitsandbytes from compiling its own reference."""
    with torch.compiler.set_stance("force_eager"):
        yield


def written_by_transformers(folder, cfg, params, config):
    hf.save(folder / "dense", cfg, params)
    model = AutoModelForCausalLM.from_pretrained(folder / "dense", quantization_config=config, dtype=params.embed.dtype)
    model.save_pretrained(folder / "theirs")
    return folder / "theirs"


def logits_of(folder, **options):
    """The logits of the decoded weights, by transformers in float32."""
    options = {"dtype": torch.float32, "attn_implementation": "eager"} | options
    model = AutoModelForCausalLM.from_pretrained(folder, **options)
    if any("bitsandbytes" in type(part).__module__ for part in model.modules()):
        model = model.dequantize()
    for part in model.modules():
        if isinstance(getattr(part, "weight", None), TorchAOBaseTensor):
            part.weight = torch.nn.Parameter(part.weight.dequantize())
    with torch.no_grad():
        return torch.nn.Module.float(model).eval()(TOKENS).logits


def check(folder, wanted):
    """Compare the logits of a folder, in float32, and check that its linears are Packed."""
    cfg, params = hf.load(folder)
    is_packed = lambda x: isinstance(x, Packed)
    for path, leaf in tree.items(params, is_leaf=is_packed):
        assert is_packed(leaf) == bool(re.fullmatch(LINEARS, path)), path
    with torch.no_grad():
        got = decoder.forward(params, TOKENS, cfg, dtype=torch.float32)
    assert wanted.std() > 0.5
    torch.testing.assert_close(got, wanted, rtol=0, atol=2e-5)
    return cfg, params


@pytest.mark.parametrize("format", [NF4, NF4_DQ, FP4, FP4_DQ, INT8], ids=str)
@pytest.mark.parametrize("name", FAMILIES)
def test_bitsandbytes(tmp_path, name, format):
    """The folder of transformers loads as our own Packed, and leaves with the same bytes."""
    cfg, params = FAMILIES[name], random_params(FAMILIES[name], torch.bfloat16)
    nested = {"bnb_4bit_use_double_quant": format.scale is not None, "bnb_4bit_compute_dtype": torch.bfloat16}
    four = {"load_in_4bit": True, "bnb_4bit_quant_type": format.name[:3], **nested}
    folder = written_by_transformers(
        tmp_path, cfg, params, BitsAndBytesConfig(**({"load_in_8bit": True} if format == INT8 else four))
    )
    got, loaded = hf.load(folder)
    assert got == cfg
    wanted = tree.map_at(LINEARS, partial(quantize, format=format), params)
    assert tree.structure(loaded) == tree.structure(wanted)
    assert all(torch.equal(a, b) for a, b in zip(tree.leaves(loaded), tree.leaves(wanted), strict=True))
    bitsandbytes.save(tmp_path / "again", got, hf.lazy(folder)[1], format)
    file = "model.safetensors"
    assert without_digests(tmp_path / "again" / file) == (folder / file).read_bytes()
    if format != INT8:  # transformers decodes LLM.int8 with another rounding
        check(folder, logits_of(folder))


@pytest.mark.parametrize("kind", compressed_tensors.KINDS)
@pytest.mark.parametrize("name", FAMILIES)
def test_compressed_tensors(tmp_path, name, kind):
    cfg, params = FAMILIES[name], random_params(FAMILIES[name], torch.bfloat16)
    compressed_tensors.save(tmp_path / "a", cfg, params, kind)
    check(tmp_path / "a", logits_of(tmp_path / "a", quantization_config=CompressedTensorsConfig(dequantize=True)))


@pytest.mark.parametrize("kind", [Int8WeightOnlyConfig(), IntxWeightOnlyConfig(torch.int4, PerGroup(32))], ids=str)
def test_torchao(tmp_path, kind):
    params = random_params(WIDE, torch.bfloat16)
    folder = written_by_transformers(tmp_path, WIDE, params, TorchAoConfig(kind))
    check(folder, logits_of(folder))


def test_fp8(tmp_path):
    """DeepSeek's blocks; transformers decodes at loading."""
    cfg, params = WIDE, random_params(WIDE, torch.bfloat16)
    hf.save(tmp_path, cfg, params)
    tensors = safetensors.torch.load_file(tmp_path / "model.safetensors")
    for name in [name for name in tensors if "_proj" in name]:
        blocks = tensors[name].float().reshape(tensors[name].shape[0] // 32, 32, -1, 32)
        scale = blocks.abs().amax((1, 3)) / 448
        codes = (blocks / scale[:, None, :, None]).reshape(tensors[name].shape)
        tensors[name], tensors[f"{name}_scale_inv"] = codes.to(torch.float8_e4m3fn), scale
    quantize_folder(tmp_path, tensors, {"quant_method": "fp8", "weight_block_size": [32, 32], "fmt": "e4m3"})
    check(
        tmp_path, logits_of(tmp_path, quantization_config=FineGrainedFP8Config(dequantize=True), dtype=torch.bfloat16)
    )


def test_gptq(tmp_path):
    """Old folders have a bias of zeros beside every weight."""
    held, config = gptq(tmp_path / "a", WIDE)
    check(tmp_path / "a", logits_of(tmp_path / "a-dense"))
    biases = {name.replace("qweight", "bias"): torch.zeros(t.shape[1]) for name, t in held.items() if "qweight" in name}
    quantize_folder(tmp_path / "a", held | biases, config)
    check(tmp_path / "a", logits_of(tmp_path / "a-dense"))


def test_adapters_train_on_a_loaded_folder(tmp_path):
    """Take gradients of adapters over the lazily opened folder; compare with those over its decoded weights."""
    gptq(tmp_path / "a", WIDE)
    cfg, opened = hf.lazy(tmp_path / "a")
    assert all(isinstance(leaf, Lazy) for leaf in tree.leaves(opened))
    base = tree.map_with_path(lambda _, leaf: leaf.read(), opened)
    adapters = lora.init(base, r"layers\.\d+\.(q|down)", rank=2, alpha=4, key=random.key(0))
    adapters = tree.map(lambda t: t + 0.05, adapters)

    def loss(adapters, base):
        return decoder.loss(lora.attach(base, adapters), TOKENS, TOKENS, cfg, dtype=torch.float32)

    got, wanted = (torch.func.grad(loss)(adapters, params) for params in (base, dequantize(base)))
    for ours, theirs in zip(tree.leaves(got), tree.leaves(wanted), strict=True):
        assert theirs.abs().max() > 0
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)


Q = "model.layers.0.self_attn.q_proj"
FAULTS = {
    "a part is missing": ({f"{Q}.scales": None}, {}, "q_proj.scales: missing, wanted float16"),
    "a part of another shape": ({f"{Q}.qzeros": torch.zeros(4, 15).int()}, {}, r"qzeros: got int32 \[4, 15\]"),
    "a bias that counts": ({f"{Q}.bias": torch.ones(128)}, {}, "q_proj.bias is not part of what config.json describes"),
    "dense beside packed": ({f"{Q}.weight": torch.ones(128, 128)}, {}, "q_proj.weight is not part of what config.json"),
    "no weight at all": ({f"{Q}.{part}": None for part in ("qweight", "qzeros", "scales", "g_idx")}, {},
                         "q_proj.weight is missing"),
    "a method that is unknown": ({}, {"quant_method": "hqq"}, "config.json: quantization_config: .* is 'hqq'"),
    "a key that is unknown": ({}, {"zeta": 1}, "config.json: quantization_config: key 'zeta' is unknown"),
    "another width": ({}, {"bits": 8}, r"qweight: got int32 \[16, 128\]"),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_refused(tmp_path, fault):
    held, config = gptq(tmp_path / "a", WIDE)
    changes, options, message = FAULTS[fault]
    quantize_folder(tmp_path / "a", {k: t for k, t in (held | changes).items() if t is not None}, config | options)
    with pytest.raises(ValueError, match=message):
        hf.lazy(tmp_path / "a")


def test_values_are_refused_when_they_are_read(tmp_path):
    held, config = gptq(tmp_path / "a", WIDE)
    held[f"{Q}.scales"][0, 0] = torch.nan
    quantize_folder(tmp_path / "a", held, config)
    _, params = hf.lazy(tmp_path / "a")
    with pytest.raises(ValueError, match=r"layers.0.q: .*model.safetensors: .*q_proj.scales: got values that are NaN"):
        tree.map_with_path(lambda _, leaf: leaf.read(), params)


def test_a_packed_weight_is_not_quantised_again(tmp_path):
    gptq(tmp_path / "a", WIDE)
    _, params = hf.lazy(tmp_path / "a")
    with pytest.raises(TypeError, match="quantize got a Packed; wanted a tensor"):
        quantize(params.layers[0].q, NF4)


def test_integers_without_a_config_are_refused(tmp_path):
    params = random_params(WIDE, torch.bfloat16)
    hf.save(tmp_path, WIDE, params)
    tensors = safetensors.torch.load_file(tmp_path / "model.safetensors")
    tensors[f"{Q}.weight"] = tensors[f"{Q}.weight"].to(torch.int8)
    safetensors.torch.save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match="q_proj.weight in .* is torch.int8, want floats, or a quantization_config"):
        hf.lazy(tmp_path)
