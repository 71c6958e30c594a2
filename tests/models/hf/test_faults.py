"""Faulty Hugging Face folders and trees that cannot be saved: each is refused by name."""

import dataclasses
import json
import os
import shutil

import pytest
import safetensors.torch
import torch

from fquant import NF4, lora, quantize, random
from fquant.lazy import Lazy
from models import hf
from models.hf import saving
from tests.helpers.hf_models import CONFIGS, GQA, random_params

# Each takes a good folder and breaks it; the message names the file or tensor, what it got and what to do.


def edit_tensors(folder, change, file=hf.SINGLE):
    tensors = safetensors.torch.load_file(folder / file)
    change(tensors)
    safetensors.torch.save_file(tensors, folder / file, {"format": "pt"})


def edit_json(folder, file, change):
    content = json.loads((folder / file).read_text())
    change(content)
    (folder / file).write_text(json.dumps(content))


def shard_of(folder, name):
    return json.loads((folder / hf.INDEX).read_text())["weight_map"][name]


def cut(path, size):
    os.truncate(path, size)


Q, NORM = "model.layers.0.self_attn.q_proj.weight", "model.norm.weight"
SINGLE = {
    "no folder": (shutil.rmtree, "no such folder, want one with config.json"),
    "no config": (lambda f: (f / "config.json").unlink(), "config.json: no such file; fetch"),
    "config no JSON": (lambda f: (f / "config.json").write_text("{"), r"config.json: got no JSON \(.*\), wanted"),
    "config a list": (lambda f: (f / "config.json").write_text("[]"), "config.json: got a JSON list, wanted an object"),
    "config refused": (
        lambda f: edit_json(f, "config.json", lambda c: c.update(model_type="gpt2")),
        "config.json: model_type = 'gpt2', want 'llama'",
    ),
    "no weights": (
        lambda f: (f / hf.SINGLE).unlink(),
        "neither model.safetensors nor model.safetensors.index.json; fetch one",
    ),
    "cut short": (lambda f: cut(f / hf.SINGLE, 1000), "model.safetensors: got a header of .* cut short"),
    "cut in the data": (lambda f: cut(f / hf.SINGLE, 50_000), "model.safetensors: .* cut short"),
    "missing": (
        lambda f: edit_tensors(f, lambda t: t.pop(Q)),
        f"tensor {Q} is missing, want the 21 that config.json asks for; correct",
    ),
    "missing two": (
        lambda f: edit_tensors(f, lambda t: (t.pop(Q), t.pop(NORM))),
        rf"tensor {Q} \(and 1 more\) is missing",
    ),
    "unexpected": (
        lambda f: edit_tensors(f, lambda t: t.update({Q.replace("weight", "bias"): torch.ones(64)})),
        "model.safetensors: tensor model.layers.0.self_attn.q_proj.bias is not part of what config.json describes",
    ),
    "another layer": (
        lambda f: edit_json(f, "config.json", lambda c: c.update(num_hidden_layers=1)),
        r"tensor model.layers.1.input_layernorm.weight \(and 8 more\) is not part",
    ),
    "untied without head": (
        lambda f: edit_tensors(f, lambda t: t.pop("lm_head.weight")),
        "tensor lm_head.weight is missing",
    ),
    "shape": (
        lambda f: edit_tensors(f, lambda t: t.update({Q: torch.ones(64, 63)})),
        rf"layers.0.q: {Q} in .* has shape \(64, 63\), want \(64, 64\); correct config.json",
    ),
    "integers": (
        lambda f: edit_tensors(f, lambda t: t.update({Q: torch.ones(64, 64, dtype=torch.int8)})),
        f"{Q} in .* is torch.int8, want floats, or a quantization_config in the config",
    ),
    "both layouts": (
        lambda f: (f / hf.INDEX).write_text("{}"),
        "both model.safetensors and model.safetensors.index.json are there, want one of them; remove",
    ),
}
SHARDED = {
    "shard absent": (
        lambda f: (f / shard_of(f, Q)).unlink(),
        r"model-0000\d-of-0000\d.safetensors is missing, .* says it holds \d+ tensors; fetch it again",
    ),
    "wrong shard": (
        lambda f: edit_json(f, hf.INDEX, lambda c: c["weight_map"].update({Q: shard_of(f, NORM)})),
        f"{Q} should be in model-(.*).safetensors, but it is in model-(?!\\1)",
    ),
    "in no shard": (
        lambda f: edit_tensors(f, lambda t: t.pop(Q), shard_of(f, Q)),
        f"{Q} should be in model-.*, but no shard has it; fetch",
    ),
    "not in the index": (
        lambda f: edit_json(f, hf.INDEX, lambda c: c["weight_map"].pop(Q)),
        f"tensor {Q} is not where model.safetensors.index.json says",
    ),
    "twice": (
        lambda f: edit_tensors(f, lambda t: t.update({Q: torch.ones(64, 64)}), shard_of(f, NORM)),
        f"tensor {Q} is not where",
    ),
    "no table": (
        lambda f: edit_json(f, hf.INDEX, lambda c: c.pop("weight_map")),
        "want a table weight_map of tensor names",
    ),
    "another folder": (
        lambda f: edit_json(f, hf.INDEX, lambda c: c["weight_map"].update({Q: "../a.safetensors"})),
        "'../a.safetensors' is no plain file name",
    ),
    "index no JSON": (lambda f: (f / hf.INDEX).write_text("x"), "index.json: got no JSON"),
    "shard cut": (lambda f: cut(f / shard_of(f, Q), 9), "model-.*.safetensors: got a header of"),
}


@pytest.mark.parametrize("name", [*SINGLE, *SHARDED])
def test_wrong_folder(name, tmp_path):
    folder = tmp_path / "model"
    hf.save(folder, GQA, random_params(GQA), max_shard_bytes=60_000 if name in SHARDED else 5 << 30)
    break_it, message = (SINGLE | SHARDED)[name]
    break_it(folder)
    with pytest.raises(ValueError, match=message) as caught:
        hf.lazy(folder)
    assert str(folder) in str(caught.value) and "\n" not in str(caught.value)


def with_q(q):
    params = random_params(GQA)
    return dataclasses.replace(params, layers=[dataclasses.replace(params.layers[0], q=q(params)), params.layers[1]])


UNSAVABLE = {
    "packed": (
        lambda: with_q(lambda p: quantize(p.layers[0].q, NF4)),
        TypeError,
        r"layers.0.q is packed \(nf4\), want a float tensor; pass dequantize=torch.bfloat16 to write it in that dtype",
    ),
    "adapted": (
        lambda: lora.attach(p := random_params(GQA), lora.init(p, r"layers\.0\.q", rank=2, alpha=2, key=random.key(0))),
        TypeError,
        "layers.0.q is of type Adapted, want a tensor; merge or read it first",
    ),
    "lazy": (
        lambda: with_q(lambda p: Lazy(lambda: None, None)),
        TypeError,
        "layers.0.q is of type Lazy, want a",
    ),
    "integers": (lambda: with_q(lambda p: p.layers[0].q.long()), TypeError, "layers.0.q is torch.int64, want floats"),
    "shape": (lambda: with_q(lambda p: p.layers[0].k), ValueError, r"q has shape \(32, 64\), want \(64, 64\)"),
    "absent": (lambda: with_q(lambda p: None), ValueError, "layers.0.q: missing from the parameters"),
    "too much": (
        lambda: random_params(CONFIGS["biases"]),
        ValueError,
        "layers.0.down_bias: not a parameter of this config; remove it",
    ),
}


@pytest.mark.parametrize("name", UNSAVABLE)
def test_save_refuses(name, tmp_path):
    make, error, message = UNSAVABLE[name]
    with pytest.raises(error, match=message):
        hf.save(tmp_path / "model", GQA, make())
    assert not (tmp_path / "model").exists()


def test_save_dequantizes_to_floats(tmp_path):
    with pytest.raises(TypeError, match="dequantize = torch.int8, want one of torch.float32, torch.bfloat16"):
        hf.save(tmp_path / "model", GQA, random_params(GQA), dequantize=torch.int8)
    assert not (tmp_path / "model").exists()


@pytest.mark.parametrize(
    ("extra", "message"),
    [({"sliding_window": 7}, "sliding_window = 7 is not a key"), ({"rms_norm_eps": 0.5}, "rms_norm_eps change the")],
)
def test_save_refuses_keys(extra, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        hf.save(tmp_path / "model", GQA, random_params(GQA), extra=extra)
    assert not (tmp_path / "model").exists()


@pytest.mark.parametrize("sharded", [False, True])
def test_save_leaves_a_model_alone(sharded, tmp_path):
    hf.save(tmp_path, GQA, random_params(GQA), max_shard_bytes=60_000 if sharded else 5 << 30)
    before = {p.name: p.read_bytes() for p in tmp_path.iterdir()}
    with pytest.raises(ValueError, match="there is a config.json already, want a folder without a model"):
        hf.save(tmp_path, GQA, random_params(GQA))
    assert {p.name: p.read_bytes() for p in tmp_path.iterdir()} == before


def test_save_interrupted_is_no_model(tmp_path, monkeypatch):
    """Write config.json last, so that an interrupted save is no model."""
    written, write = [], saving.safetensors.write

    def stop(path, *rest):
        written.append(path)
        if len(written) == 3:
            raise OSError("no space left on device")
        write(path, *rest)

    monkeypatch.setattr(saving.safetensors, "write", stop)
    with pytest.raises(OSError, match="no space"):
        hf.save(tmp_path, GQA, random_params(GQA), max_shard_bytes=60_000)
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted(p.name for p in written[:2])
    with pytest.raises(ValueError, match="config.json: no such file"):
        hf.lazy(tmp_path)
