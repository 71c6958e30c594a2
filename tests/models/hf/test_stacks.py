"""Experts of a folder as stacks: both layouts of transformers, packing expert by expert, round trips, gpt-oss, PEFT."""

import dataclasses
import json
from functools import partial
from typing import Any

import peft
import pytest
import safetensors.torch
import torch
import transformers

from fquant import MXFP4, NF4, NF4_DQ, Packed, dequantize, lora, quantize, tree
from fquant import lazy as lazies
from fquant.grouped_products import full_shape
from fquant.io import peft as peft_io
from models import decoder, hf
from models.export import bitsandbytes, compressed_tensors, dense, gguf
from tests.bench import timing
from tests.helpers.hf_models import CONFIGS, random_params

TOKENS = torch.randint(0, 96, (2, 40), generator=torch.Generator().manual_seed(0))
NAMES = ("mixtral", "qwen3_moe, dense layers, windows", "gpt_oss")
EXPERTS = r"layers\.\d+\.(gate_up|down)"


def theirs(folder) -> Any:
    options: Any = {"attn_implementation": "eager", "experts_implementation": "eager"}
    return transformers.AutoModelForCausalLM.from_pretrained(folder, **options).eval()


@pytest.mark.parametrize("name", NAMES)
def test_round_trips(name, tmp_path):
    """Save, load and save again: the same bytes; transformers' own folder comes back with its tensors, bit for bit."""
    cfg, params = CONFIGS[name], random_params(CONFIGS[name], torch.bfloat16)
    hf.save(tmp_path / "a", cfg, params)
    hf.save(tmp_path / "b", *hf.load(tmp_path / "a"))
    dense.save(tmp_path / "c", *hf.lazy(tmp_path / "a"), torch.bfloat16)
    for other in "bc":
        assert (tmp_path / "a" / hf.SINGLE).read_bytes() == (tmp_path / other / hf.SINGLE).read_bytes()
    theirs(tmp_path / "a").save_pretrained(tmp_path / "d")
    wanted = safetensors.torch.load_file(tmp_path / "d" / hf.SINGLE)
    hf.save(tmp_path / "e", *hf.load(tmp_path / "d"))
    got = safetensors.torch.load_file(tmp_path / "e" / hf.SINGLE)
    assert got.keys() == wanted.keys() and all(torch.equal(got[key], wanted[key]) for key in got)


@pytest.mark.parametrize("name", NAMES)
def test_stacked_layout(name, tmp_path):
    """Read the stacked tensors of transformers' memory, which it loads too."""
    cfg, params = CONFIGS[name], random_params(CONFIGS[name])
    hf.save(tmp_path / "a", cfg, params)
    state = theirs(tmp_path / "a").state_dict()
    assert sorted(state) == sorted(hf.tensor_name(path, cfg) for path in tree.paths(params))
    safetensors.torch.save_file(state, tmp_path / "a" / hf.SINGLE, {"format": "pt"})
    loaded = hf.load(tmp_path / "a")[1]
    assert all(map(torch.equal, tree.leaves(loaded), tree.leaves(params)))
    with torch.no_grad():
        wanted = theirs(tmp_path / "a")(TOKENS).logits
    torch.testing.assert_close(decoder.forward(loaded, TOKENS, cfg), wanted, rtol=0, atol=2e-5)


@pytest.mark.parametrize("format", [NF4, NF4_DQ], ids=lambda f: f.name)
def test_experts_are_packed_one_by_one(format, tmp_path):
    """Quantise an open folder: a stack of packed experts, with the logits and the export of its decoded weights."""
    cfg = CONFIGS["mixtral"]
    hf.save(tmp_path / "a", cfg, params := random_params(cfg))
    _, opened = hf.lazy(tmp_path / "a")
    packed = lazies.read(tree.map_at(EXPERTS, partial(quantize, format=format), opened))
    layer, w = packed.layers[0], params.layers[0].gate_up
    assert isinstance(layer.gate_up, Packed) and full_shape(layer.gate_up) == tuple(w.shape)
    assert torch.equal(dequantize(layer.gate_up), torch.stack([dequantize(quantize(each, format)) for each in w]))
    logits = decoder.forward(dequantize(packed), TOKENS, cfg)
    torch.testing.assert_close(decoder.forward(packed, TOKENS, cfg), logits, rtol=0, atol=2e-5)
    hf.save(tmp_path / "b", cfg, packed, dequantize=torch.float32)
    dense.save(tmp_path / "c", cfg, packed, torch.float32)
    assert (tmp_path / "b" / hf.SINGLE).read_bytes() == (tmp_path / "c" / hf.SINGLE).read_bytes()
    with torch.no_grad():
        torch.testing.assert_close(theirs(tmp_path / "b")(TOKENS).logits, logits, rtol=0, atol=2e-5)


def test_memory_of_packing(tmp_path):
    """Pack a stack of 32 experts from a folder: beside the result, a few experts at a time are dense."""
    cfg = dataclasses.replace(CONFIGS["mixtral"], num_layers=1, num_experts=32, dim=256, hidden=256)
    hf.save(tmp_path, cfg, random_params(cfg))
    leaf = hf.lazy(tmp_path)[1].layers[0].gate_up
    extra = timing.extra_bytes(lambda: (quantize(leaf, NF4).read(),))
    one = 4 * 2 * 256 * 256
    assert extra <= 4 * one < 32 * one / 4


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")
@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe", "gpt_oss"])
def test_peft(name, tmp_path):
    """Adapters of experts both ways: PEFT computes our logits from our folder, and we compute those of its folder."""
    cfg, params = CONFIGS[name], random_params(CONFIGS[name])
    hf.save(tmp_path / "base", cfg, params)
    adapters = tree.map(lambda t: t + 0.02, lora.init(params, rf"{EXPERTS}|layers\.\d+\.q", rank=2, alpha=4, key=0))
    peft_io.save(tmp_path / "ours", adapters, partial(hf.module_name, cfg=cfg))
    ours = decoder.forward(lora.attach(params, adapters), TOKENS, cfg)
    model = peft.PeftModel.from_pretrained(theirs(tmp_path / "base"), str(tmp_path / "ours")).eval()
    with torch.no_grad():
        torch.testing.assert_close(model(TOKENS).logits, ours, rtol=0, atol=2e-5)
    model.save_pretrained(str(tmp_path / "theirs"))
    back = peft_io.load(tmp_path / "theirs", partial(hf.path_of, cfg=cfg))
    assert back.keys() == adapters.keys()
    assert all(map(torch.equal, tree.leaves({path: back[path] for path in adapters}), tree.leaves(adapters)))


def test_faults(tmp_path):
    cfg, params = CONFIGS["mixtral"], random_params(CONFIGS["mixtral"])
    hf.save(tmp_path / "a", cfg, params)
    state = safetensors.torch.load_file(tmp_path / "a" / hf.SINGLE)
    name = "model.layers.1.block_sparse_moe.experts.3.w3.weight"
    changes = {
        f"tensor {name} is missing": {},
        rf"{name} in .* has shape \(95, 64\), want \(96, 64\)": {name: state[name][:95].clone()},
        "layers.1.gate_up: tensors of rows have .* want one dtype": {name: state[name].bfloat16()},
        "experts.9.w1.weight is not part of what config.json describes": {
            name: state[name], name.replace("3.w3", "9.w1"): state[name].clone()
        },
    }  # fmt: skip
    for message, change in changes.items():
        kept = {key: t for key, t in state.items() if key != name}
        safetensors.torch.save_file(kept | change, tmp_path / "a" / hf.SINGLE, {"format": "pt"})
        with pytest.raises(ValueError, match=message):
            hf.lazy(tmp_path / "a")
    for export in (bitsandbytes, compressed_tensors, gguf):
        with pytest.raises(ValueError, match=r"num_experts = 5: .* of experts are not implemented; export a plain"):
            export.save(tmp_path / "x", cfg, params)


def test_mxfp4(tmp_path):
    """Read the layout in which gpt-oss is published as packed stacks, with the logits that transformers decodes."""
    cfg = dataclasses.replace(CONFIGS["gpt_oss"], hidden=64)
    params = random_params(cfg, torch.bfloat16)
    hf.save(tmp_path, cfg, params)
    state = safetensors.torch.load_file(tmp_path / hf.SINGLE)
    for path, w in tree.items(params):
        if path.endswith((".gate_up", ".down")):
            p, name = quantize(w, MXFP4), hf.tensor_name(path, cfg)
            del state[name]
            state[f"{name}_blocks"] = (p.codes >> 4 | p.codes << 4).unflatten(-1, (-1, 16))
            state[f"{name}_scales"] = p.scale.codes
    safetensors.torch.save_file(state, tmp_path / hf.SINGLE, {"format": "pt"})
    config = json.loads((tmp_path / hf.CONFIG).read_text()) | {"quantization_config": {"quant_method": "mxfp4"}}
    (tmp_path / hf.CONFIG).write_text(json.dumps(config))
    _, loaded = hf.load(tmp_path)
    assert isinstance(loaded.layers[0].gate_up, Packed) and loaded.layers[0].gate_up.shape == (5, 128, 64)
    options: Any = {"attn_implementation": "eager", "experts_implementation": "eager", "dtype": torch.bfloat16}
    options["quantization_config"] = transformers.Mxfp4Config(dequantize=True)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, **options).float().eval()
    with torch.no_grad():
        wanted = model(TOKENS).logits
    torch.testing.assert_close(decoder.forward(loaded, TOKENS, cfg, dtype=torch.float32), wanted, rtol=0, atol=2e-5)


def test_quantised_experts_of_a_folder(tmp_path):
    """Read experts that are quantised one by one, as compressed-tensors does, as packed stacks."""
    cfg = CONFIGS["qwen3_moe"]
    hf.save(tmp_path, cfg, random_params(cfg))
    state, dense_state = safetensors.torch.load_file(tmp_path / hf.SINGLE), {}
    kind = compressed_tensors.KINDS["int8"]
    for name in [name for name in state if name.endswith("_proj.weight")]:
        codes, scale = compressed_tensors.quantize(state[name], kind)
        dense_state[name] = compressed_tensors.dequantize(codes, scale)
        state |= {name: codes, f"{name}_scale": scale}
    safetensors.torch.save_file(state, tmp_path / hf.SINGLE, {"format": "pt"})
    config = json.loads((tmp_path / hf.CONFIG).read_text())
    table = compressed_tensors.quantization_config(kind)
    (tmp_path / hf.CONFIG).write_text(json.dumps(config | {"quantization_config": table}))
    _, loaded = hf.load(tmp_path)
    assert isinstance(loaded.layers[0].gate_up, Packed) and isinstance(loaded.layers[0].down, Packed)
    got = dequantize(loaded)
    for i, layer in enumerate(got.layers):
        part = lambda e, name, i=i: dense_state[f"model.layers.{i}.mlp.experts.{e}.{name}.weight"]
        both = torch.stack([torch.cat([part(e, "gate_proj"), part(e, "up_proj")]) for e in range(6)])
        torch.testing.assert_close(layer.gate_up, both, rtol=1e-6, atol=1e-7)
    logits = decoder.forward(got, TOKENS, cfg)
    torch.testing.assert_close(decoder.forward(loaded, TOKENS, cfg), logits, rtol=0, atol=2e-5)
