"""Folders that are damaged or hostile: each gives one clear ValueError or loads, and allocates nothing large.

A mutation changes a config, an index, an adapter's settings, or the bytes of any file. What loads must be what the
config says, so a changed value is never ignored silently (``test_families.py`` compares values with transformers).
"""

import copy
import json
import random
import resource
import shutil
from functools import partial
from pathlib import Path

import pytest
import torch

import fquant.random
from fquant import NF4_DQ, dequantize, lora, quantize, tree
from fquant.io import peft
from models import decoder, encoder, hf, hf_encoder
from models.config import Config
from models.export import bitsandbytes, compressed_tensors
from tests.helpers.hf_models import CONFIGS, random_params
from tests.helpers.models.encoders import CONFIGS as ENCODERS
from tests.helpers.quantized_tensors import gptq

CFG = Config(32, 16, 1, 2, 1, 8, 16, max_positions=32)
ENCODER = ENCODERS["bert, masked_lm"]
NASTY = [
    None, True, False, -1, 0, 1, 2, 3, 7, 2**31 - 1, 2**31, 2**63, 2**64, -(2**63), 10**400, 1e308, -0.0, 1e-308,
    float("inf"), float("nan"), "", "a", "x" * 100_000, "../../etc/passwd", "/etc/passwd", "C:\\x", "a\x00b",
    "model.safetensors", "n" * 300, "\ud800", "{{ 7 * 7 }}", "(.*a?)*b", "((a+)+)+$", "__import__('os')", "float32",
    "bfloat16", [], [1], [[]], ["full_attention"], {}, {"a": 1}, {"rope_type": "yarn"}, {"full_attention": 3},
    {"rope_type": "longrope", "short_factor": [1] * 5000, "long_factor": []}, [0.5] * 10_000,
    {"a": {"b": {"c": [None] * 100}}},
]  # fmt: skip
MOST_MIB, LONGEST = 300, 2500  # growth of resident memory over all mutations; characters of a message


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Write good folders: one file, shards, another family, and an adapter."""
    root = tmp_path_factory.mktemp("good")
    params = random_params(CFG)
    hf.save(root / "single", CFG, params)
    hf.save(root / "shards", CFG, params, max_shard_bytes=4000)
    hf.save(root / "gemma", CONFIGS["gemma3"], random_params(CONFIGS["gemma3"]))
    hf.save(root / "phi", CONFIGS["phi3, longrope"], random_params(CONFIGS["phi3, longrope"]))
    for name in ("mixtral", "gpt_oss"):
        hf.save(root / name, CONFIGS[name], random_params(CONFIGS[name]))
    hf_encoder.save(root / "encoder", ENCODER, encoder.init(ENCODER, fquant.random.key(0)))
    hf.save_packed(root / "packed", CFG, tree.map_at(r"layers.*\.(q|down)", lambda w: quantize(w, NF4_DQ), params))
    bitsandbytes.save(root / "bitsandbytes", CFG, params, NF4_DQ)
    compressed_tensors.save(root / "compressed", CFG, params, "int8")
    gptq(root / "gptq", CFG)
    peft.save(
        root / "adapter",
        lora.init(params, r"layers\.\d+\.(q|v)", rank=2, alpha=4, key=0),
        partial(hf.module_name, cfg=CFG),
    )
    return root


def mutate(folder, rng):
    """Change one file of the folder, and return what was done."""
    file = rng.choice(sorted(folder.iterdir()))
    data = file.read_bytes()
    length = int.from_bytes(data[:8], "little")
    content = parsed(data if file.suffix == ".json" else data[8 : 8 + length])
    if file.suffix == ".json" and content and rng.random() < 0.75:
        change_json(content, rng)
        text = json.dumps(content)
        if rng.random() < 0.05:
            text = text.replace("{", '{"model_type": "llama", "model_type": "qwen3", ', 1)  # a key twice
        file.write_text(text)
    elif file.suffix == ".safetensors" and content and rng.random() < 0.6:
        change_json(content, rng)
        text = json.dumps(content).encode()
        file.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + length :])
    else:
        file.write_bytes(change_bytes(data, rng))
    return file.name


def parsed(data):
    """Return the JSON object ``data``; None if it is none any more."""
    try:
        content = json.loads(data)
    except (ValueError, RecursionError):
        return None
    return content if isinstance(content, dict) else None


def change_json(content, rng):
    """Change, remove, add or move a value somewhere in a JSON object."""
    at, path = content, []
    while isinstance(at, dict | list) and at:
        key = rng.choice(list(at) if isinstance(at, dict) else range(len(at)))
        path.append((at, key))
        if rng.random() < 0.5 or not isinstance(at[key], dict | list):
            break
        at = at[key]
    holder, key = path[-1] if path else (content, "a")
    kind = rng.random()
    if kind < 0.6:
        holder[key] = copy.deepcopy(rng.choice(NASTY))
    elif kind < 0.75:
        del holder[key]
    elif isinstance(holder, dict):
        name = rng.choice([str(rng.choice(NASTY))[:1000], rng.choice(list(content)), "lm_head.weight", "rope_scaling"])
        holder[name] = copy.deepcopy(rng.choice([*NASTY, holder[key]]))
    else:
        holder.append(copy.deepcopy(rng.choice(NASTY)))


def change_bytes(data, rng):
    """Cut, extend, overwrite or replace the bytes of a file."""
    at, kind = rng.randrange(len(data) + 1), rng.random()
    if kind < 0.3:
        return data[:at]
    if kind < 0.4:
        return data + rng.randbytes(rng.randrange(1, 100))
    if kind < 0.8:
        return data[:at] + rng.randbytes(rng.randrange(1, 9)) + data[at + rng.randrange(9) :]
    if kind < 0.9:
        return rng.choice([2**62, 16 << 30, 10**8, 0, len(data)]).to_bytes(8, "little") + data[8:]
    return rng.choice([b"PK\x03\x04" + data, b"\x80\x04cos\nsystem\n(S'true'\ntR.", b"", b"{" * 50_000, b"[" * 100_000])


def load(folder):
    """Load a folder as far as it goes: all of its tensors, and a forward pass of their shapes."""
    if (folder / peft.CONFIG).exists():
        return peft.load(folder, partial(hf.path_of, cfg=CFG))
    if folder.name == "encoder":
        cfg, params = hf_encoder.load(folder)
        assert tree.structure(params) == tree.structure(encoder.shapes(cfg))
        return params
    cfg, params = hf.load(folder)
    for path, like in tree.items(decoder.shapes(cfg)):
        assert tuple(tree.get(params, path).shape) == tuple(like.shape), path
    return dequantize(params)


@pytest.mark.parametrize("count, seed", [(1000, 0), pytest.param(200_000, 1, marks=pytest.mark.slow)])
def test_mutations(count, seed, folders, tmp_path):
    rng, outcomes = random.Random(seed), {"loaded": 0, "refused": 0}
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    files = {p: p.read_bytes() for p in folders.rglob("*") if p.is_file()}
    names = sorted(p.name for p in folders.iterdir())
    for name in names:
        shutil.copytree(folders / name, tmp_path / name)
    for i in range(count):
        folder = tmp_path / rng.choice(names)
        changed = [mutate(folder, rng) for _ in range(rng.choice([1, 1, 1, 2]))]
        try:
            load(folder)
            outcomes["loaded"] += 1
        except ValueError as error:
            message = str(error)
            assert len(message) <= LONGEST and "\n" not in message.strip(), (i, changed, message[:500])
            outcomes["refused"] += 1
        for name in set(changed):
            (folder / name).write_bytes(files[folders / folder.name / name])
        assert {p.name for p in folder.iterdir()} == {p.name for p in (folders / folder.name).iterdir()}
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    assert grown < MOST_MIB, f"{grown:.0f} MiB"
    assert outcomes["loaded"] > count / 50 and outcomes["refused"] > count / 2, outcomes


def test_values_of_a_file_are_not_echoed_at_length(folders, tmp_path):
    shutil.copytree(folders / "single", tmp_path / "x")
    config = json.loads((tmp_path / "x" / "config.json").read_text())
    for key, value in (("model_type", "x" * 10**5), ("y" * 10**5, 1), ("rope_scaling", {"z" * 10**5: 1})):
        (tmp_path / "x" / "config.json").write_text(json.dumps(config | {key: value}))
        with pytest.raises(ValueError) as caught:
            hf.lazy(tmp_path / "x")
        assert len(str(caught.value)) < LONGEST


def test_sizes_that_would_take_memory(folders, tmp_path):
    """Refuse numbers of layers, and headers, before anything of their size is made."""
    shutil.copytree(folders / "single", tmp_path / "x")
    path = tmp_path / "x" / "config.json"
    config = json.loads(path.read_text())
    for key, value in (("num_hidden_layers", 2**31), ("head_dim", 2**63), ("vocab_size", 10**30)):
        path.write_text(json.dumps(config | {key: value}))
        with pytest.raises(ValueError, match=f"config.json: {key} = {value}, want"):
            hf.lazy(tmp_path / "x")
    path.write_text(json.dumps(config))
    with (tmp_path / "x" / hf.SINGLE).open("r+b") as file:
        file.write((16 << 30).to_bytes(8, "little"))
        file.truncate((16 << 30) + 8)  # sparse
    with pytest.raises(ValueError, match="got a header of 17179869184 bytes, wanted at most 100000000"):
        hf.lazy(tmp_path / "x")


def test_names_of_shards(folders, tmp_path):
    """Refuse shards outside the folder, and names that no file can have."""
    shutil.copytree(folders / "shards", tmp_path / "x")
    path = tmp_path / "x" / hf.INDEX
    index = json.loads(path.read_text())
    tensor = next(iter(index["weight_map"]))
    for name in ("../x/model.safetensors", "/etc/passwd", "a/b", "n" * 300, "a\x00b", "", ".", "..", "\ud800"):
        index["weight_map"][tensor] = name
        path.write_text(json.dumps(index))
        with pytest.raises(ValueError, match="is no plain file name; shards are beside their index|is missing"):
            hf.lazy(tmp_path / "x")
    assert not Path(tmp_path / "etc").exists() and torch.get_default_dtype() is torch.float32
