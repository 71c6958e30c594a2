"""Tests of models.export.bitsandbytes: transformers loads our folders, and its own have the same bytes and logits."""

import dataclasses
import json

import pytest
import torch
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

from fquant import FP4, INT8, NF4, NF4_DQ, dequantize, quantize, tree
from fquant.format import DYNAMIC8
from models import hf
from models.export import bitsandbytes
from tests.helpers.arrays import without_digests
from tests.helpers.hf_models import CONFIGS, GQA, random_params

FP4_DQ = dataclasses.replace(FP4, name="fp4_dq", scale=DYNAMIC8)
FORMATS = {"nf4": NF4, "nf4_dq": NF4_DQ, "fp4": FP4, "fp4_dq": FP4_DQ, "int8": INT8}
LLAMA = dataclasses.replace(GQA, hidden=128)
MODELS = {
    "llama": LLAMA,
    "llama, rows of 96": GQA,
    "llama, biases": dataclasses.replace(CONFIGS["biases"], hidden=128),
    "qwen3, tied": dataclasses.replace(CONFIGS["qwen3"], hidden=128, tied=True),
    "gemma2": dataclasses.replace(CONFIGS["gemma2"], hidden=128),
    "phi3": dataclasses.replace(CONFIGS["phi3"], hidden=128),
}
LINEARS = r"layers\.\d+\.(q|k|v|o|gate|up|down)"
pytestmark = pytest.mark.filterwarnings("ignore")  # transformers and bitsandbytes warn of their own deprecations


@pytest.fixture(autouse=True)
def eager():
    """Keep bitsandbytes from compiling its own reference."""
    with torch.compiler.set_stance("force_eager"):
        yield


def theirs(folder, cfg, params, format, dtype):
    """Let transformers quantise and save a model; return the folder and its logits."""
    hf.save(folder / "dense", cfg, params)
    if format == INT8:
        options = BitsAndBytesConfig(load_in_8bit=True)
    else:
        kind, nested = format.name[:3], format.scale is not None
        options = BitsAndBytesConfig(
            load_in_4bit=True, bnb_4bit_quant_type=kind, bnb_4bit_use_double_quant=nested, bnb_4bit_compute_dtype=dtype
        )
    model = AutoModelForCausalLM.from_pretrained(
        folder / "dense", quantization_config=options, device_map="cpu", dtype=dtype
    )
    model.save_pretrained(folder / "theirs")
    return folder / "theirs"


def logits(folder):
    # Not eval(): some CPUs then take a product that rounds scales to bfloat16.
    model = AutoModelForCausalLM.from_pretrained(folder, device_map="cpu").train()
    with torch.no_grad():
        return model(torch.arange(20)[None]).logits


@pytest.mark.parametrize("format", FORMATS.values(), ids=FORMATS)
@pytest.mark.parametrize("name", MODELS)
def test_files_are_those_of_transformers(tmp_path, name, format):
    cfg, dtype = MODELS[name], torch.bfloat16
    params = random_params(cfg, dtype)
    wanted = theirs(tmp_path, cfg, params, format, dtype)
    bitsandbytes.save(tmp_path / "ours", cfg, params, format)
    file = "model.safetensors"
    assert without_digests(tmp_path / "ours" / file) == (wanted / file).read_bytes()
    ours, expected = (json.loads((at / "config.json").read_text()) for at in (tmp_path / "ours", wanted))
    assert ours["quantization_config"] == expected["quantization_config"]
    assert ours["torch_dtype"] == expected["dtype"]
    for key in ours.keys() & expected.keys() - {"rope_parameters"}:
        assert ours[key] == expected[key], key
    # bitsandbytes 0.50 computes wrong products on the CPU if blocks straddle rows, and raises in eval mode.
    if name != "llama, rows of 96":
        assert torch.equal(logits(tmp_path / "ours"), logits(wanted))


@pytest.mark.parametrize("format", [NF4_DQ, INT8], ids=str)
def test_packed_and_lazy_leaves_make_the_same_folder(tmp_path, format):
    params = random_params(LLAMA, torch.bfloat16)
    hf.save(tmp_path / "dense", LLAMA, params)
    _, lazy = hf.lazy(tmp_path / "dense")
    packed = tree.map_at(LINEARS, lambda w: quantize(w, format), params)
    both = tree.map_at(LINEARS, lambda w: quantize(w, format), lazy)
    for i, given in enumerate((params, lazy, packed, both)):
        bitsandbytes.save(tmp_path / str(i), LLAMA, given, format)
    raw = [(tmp_path / str(i) / "model.safetensors").read_bytes() for i in range(4)]
    assert raw[0] == raw[1] == raw[2] == raw[3]


def test_other_blocks_and_shards(tmp_path):
    """Load weights in blocks of 128 from several files; compare with the logits of the decoded weights."""
    cfg = dataclasses.replace(GQA, dim=128, hidden=128, head_dim=32)
    format = dataclasses.replace(NF4, block=128)
    params = random_params(cfg)
    bitsandbytes.save(tmp_path / "ours", cfg, params, format, max_shard_bytes=20000)
    hf.save(tmp_path / "dense", cfg, tree.map_at(LINEARS, lambda w: dequantize(quantize(w, format)), params))
    assert len(list((tmp_path / "ours").glob("model-*-of-*.safetensors"))) > 2
    assert torch.equal(logits(tmp_path / "ours"), logits(tmp_path / "dense"))


def test_refused(tmp_path):
    params = random_params(LLAMA)
    pack = lambda pattern, format: tree.map_at(pattern, lambda w: quantize(w, format), params)
    cases = [
        (pack("layers.0.q", FP4), NF4, r"layers.0.q: got a Packed of Format\('fp4', block=64\), wanted .*'nf4'"),
        (pack("embed", NF4), NF4, "embed: got a Packed, but bitsandbytes folders keep it dense; dequantize it first"),
        (params, dataclasses.replace(INT8, name="mine", block=32), "bitsandbytes has no mine; wanted nf4, fp4 or int8"),
    ]
    odd = dataclasses.replace(LLAMA, hidden=80)
    rows = tree.map_at("layers.0.down", lambda w: quantize(w, NF4), random_params(odd))
    fault = "layers.0.down: got blocks of 64 that end with each row of 80, wanted blocks that straddle rows"
    with pytest.raises(ValueError, match=fault):
        bitsandbytes.save(tmp_path / "a", odd, rows, NF4)
    for given, format, fault in cases:
        with pytest.raises(ValueError, match=fault):
            bitsandbytes.save(tmp_path / "a", LLAMA, given, format)
        assert not list(tmp_path.iterdir())
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ValueError, match="there is a config.json already, want a folder without a model"):
        bitsandbytes.save(tmp_path, LLAMA, params)
