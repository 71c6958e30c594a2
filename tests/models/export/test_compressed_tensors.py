"""Tests of models.export.compressed_tensors: its own library decodes our folders, and transformers loads them."""

import dataclasses
import json

import pytest
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationConfig
from compressed_tensors.quantization.lifecycle.forward import quantize as their_quantize
from compressed_tensors.quantization.quant_scheme import preset_name_to_scheme
from compressed_tensors.quantization.utils import calculate_qparams
from transformers import AutoModelForCausalLM, CompressedTensorsConfig

from fquant import INT8, NF4, quantize, tree
from fquant.io import safetensors
from models import decoder, hf
from models.export import compressed_tensors as exported
from models.export.compressed_tensors import KINDS
from tests.helpers.hf_models import CONFIGS, GQA, random_params

PRESETS = {"int8": "W8A8", "int4": "W4A16", "fp8": "FP8_DYNAMIC"}
WIDE = dataclasses.replace(GQA, dim=128, hidden=256, num_heads=4, head_dim=32)
MODELS = {
    "llama": WIDE,
    "biases": dataclasses.replace(WIDE, attention_bias=True, mlp_bias=True),
    "qwen3, tied": dataclasses.replace(WIDE, family="qwen3", norm_eps=1e-6, qk_norm=True, tied=True),
    "gemma2": dataclasses.replace(CONFIGS["gemma2"], dim=128, hidden=256, head_dim=32),
    "phi3": dataclasses.replace(CONFIGS["phi3"], dim=128, hidden=256, head_dim=32),
}
LINEARS = r"layers\.\d+\.(q|k|v|qkv|o|gate|up|gate_up|down)"
pytestmark = pytest.mark.filterwarnings("ignore")  # transformers warns of its own deprecations


def read(folder):
    header = safetensors.header(folder / "model.safetensors")
    return {name: safetensors.read(header, name) for name in header.tensors}


def module(tensors, path):
    name = hf.module_name(path, WIDE) + "."
    return {key.removeprefix(name): t for key, t in tensors.items() if key.startswith(name) and "bias" not in key}


def scheme(folder):
    config = QuantizationConfig(**json.loads((folder / "config.json").read_text())["quantization_config"])
    return config.config_groups["group_0"], config


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_codes_and_decoded_weights_are_the_librarys(tmp_path, kind, dtype):
    params = random_params(WIDE, dtype)
    params.layers[0].q[3] = 0
    exported.save(tmp_path / "a", WIDE, params, kind)
    tensors, (its, config) = read(tmp_path / "a"), scheme(tmp_path / "a")
    compressor = BaseCompressor.get_value_from_registry(config.format)
    for path, w in tree.items(params):
        if path.split(".")[-1] not in ("q", "k", "v", "o", "gate", "up", "down"):
            assert torch.equal(tensors[hf.tensor_name(path, WIDE)], w)
            continue
        codes, scale = exported.quantize(w, KINDS[kind])
        groups = w.float().reshape(len(w), scale.shape[1], -1)
        expected, _ = calculate_qparams(groups.amin(-1), groups.amax(-1), its.weights)
        zero = w.float().abs().reshape(groups.shape).amax(-1) == 0
        assert torch.equal(scale[~zero], expected.to(dtype)[~zero]) and (scale > 0).all()
        theirs = their_quantize(w.float(), scale.float(), None, its.weights, dtype=codes.dtype)
        assert torch.equal(theirs.float(), codes.float()), path
        parts = module(tensors, path)
        assert torch.equal(parts["weight_scale"], scale)
        decoded = compressor.decompress(dict(parts), its)["weight"]
        assert decoded.dtype == dtype and torch.equal(decoded, exported.dequantize(codes, scale)), path
        exact = {"weight": exported.dequantize(codes, scale.float()), "weight_scale": scale.float()}
        again = compressor.compress(exact, its)
        for key, t in again.items():
            assert torch.equal(t.float(), parts[key].float()), key


@pytest.mark.parametrize("kind", KINDS)
def test_config_is_that_of_the_preset(tmp_path, kind):
    exported.save(tmp_path / "a", WIDE, random_params(WIDE), kind)
    its, config = scheme(tmp_path / "a")
    preset = preset_name_to_scheme(PRESETS[kind], ["Linear"])
    drop = lambda x: {key: item for key, item in x.model_dump(mode="json").items() if key not in ("format", "observer")}
    assert drop(its)["targets"] == drop(preset)["targets"]
    for part in ("weights", "input_activations", "output_activations"):
        ours, theirs = getattr(its, part), getattr(preset, part)
        assert (ours is None) == (theirs is None)
        if ours is not None:
            ours, theirs = ours.model_dump(mode="json"), theirs.model_dump(mode="json")
            assert {k: v for k, v in ours.items() if "observer" not in k} == {
                k: v for k, v in theirs.items() if "observer" not in k
            }
    assert config.quantization_status == "compressed" and config.ignore == ["lm_head"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", MODELS)
def test_transformers_has_the_logits_of_the_decoded_weights(tmp_path, name, kind):
    """Let transformers decode at loading, since activations are quantised otherwise."""
    cfg = MODELS[name]
    params = random_params(cfg)
    exported.save(tmp_path / "a", cfg, params, kind, max_shard_bytes=1 << 20)
    options = CompressedTensorsConfig(dequantize=True)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "a", quantization_config=options, device_map="cpu").eval()
    decoded = tree.map_at(LINEARS, lambda w: exported.dequantize(*exported.quantize(w, KINDS[kind])), params)
    tokens = torch.arange(20)[None]
    with torch.no_grad():
        assert (model(tokens).logits - decoder.forward(decoded, tokens, cfg)).abs().max() < 2e-5


def test_transformers_runs_compressed_int4(tmp_path):
    params = random_params(WIDE)
    exported.save(tmp_path / "a", WIDE, params, "int4")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "a", device_map="cpu").eval()
    decoded = tree.map_at(LINEARS, lambda w: exported.dequantize(*exported.quantize(w, KINDS["int4"])), params)
    tokens = torch.arange(20)[None]
    with torch.no_grad():
        assert (model(tokens).logits - decoder.forward(decoded, tokens, WIDE)).abs().max() < 2e-5


def test_packed_int8_keeps_its_codes(tmp_path):
    params = random_params(WIDE)
    packed = tree.map_at(LINEARS, lambda w: quantize(w, INT8), params)
    exported.save(tmp_path / "a", WIDE, packed, "int8")
    tensors = read(tmp_path / "a")
    for path in ("layers.0.q", "layers.1.down"):
        parts, p = module(tensors, path), tree.get(packed, path)
        assert torch.equal(parts["weight"], p.codes)
        assert torch.equal(parts["weight_scale"], p.scale / 127)


def test_lazy_leaves(tmp_path):
    params = random_params(WIDE, torch.bfloat16)
    hf.save(tmp_path / "dense", WIDE, params)
    _, lazy = hf.lazy(tmp_path / "dense")
    for i, given in enumerate((params, lazy)):
        exported.save(tmp_path / str(i), WIDE, given, "int4")
    assert (tmp_path / "0/model.safetensors").read_bytes() == (tmp_path / "1/model.safetensors").read_bytes()


def test_refused(tmp_path):
    params = random_params(GQA)
    pack = lambda format: tree.map_at(LINEARS, lambda w: quantize(w, format), params)
    cases = [
        (params, "int3", "kind = 'int3', want one of int8, int4, fp8"),
        (params, "int4", "layers.0.q: width 64 is not a multiple of the 128 weights of a group; use int8 or fp8"),
        (
            pack(NF4),
            "int8",
            "layers.0.q: got a Packed of .*nf4.*, which int-quantized cannot keep; dequantize",
        ),
        (pack(INT8), "fp8", "layers.0.q: got a Packed of .*int8.*, which float-quantized cannot keep"),
        (dataclasses.replace(params, embed=quantize(params.embed, NF4)), "fp8", "embed: got a Packed, want it dense"),
    ]
    for given, kind, fault in cases:
        with pytest.raises(ValueError, match=fault):
            exported.save(tmp_path / "a", GQA, given, kind)
        assert not list(tmp_path.iterdir())
    with pytest.raises(ValueError, match="got a weight that is NaN or infinite"):
        exported.quantize(torch.full((2, 8), float("nan")), KINDS["int8"])
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ValueError, match="there is a config.json already"):
        exported.save(tmp_path, GQA, params, "int8")
