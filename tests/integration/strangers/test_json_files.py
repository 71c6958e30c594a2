"""Every JSON file that a program reads, with each value in turn of another type: read, or one line that names the file.

A run tries some of the cases by a seed; ``-m slow`` tries all.
"""

import copy
import json
import math
import random
from functools import partial

import pytest
import torch

from examples import inspect
from examples.common import run_folder
from examples.common.model_folders import companions
from examples.data import tokenizer
from examples.generate import prompts
from examples.plan.cli import Options as Plan
from examples.qlora.options import Options as Qlora
from examples.vqvae.options import Options as Vqvae
from fquant.io import peft, peft_ia3, safetensors
from models import hf, hf_encoder
from models.export.gguf_tokenizer import tokenizer_values
from tests.helpers import tokenizers
from tests.helpers.hf_models import GQA, random_params

VALUES = [
    None,
    True,
    -1,
    0,
    1.5,
    10**30,
    -(10**400),
    math.nan,
    math.inf,
    "",
    "x",
    "\x1b[31m\n",
    [],
    [1],
    [None],
    [[]],
    {},
]
VALUES += [{"a": None}, {"a": [1]}, [{}], "x" * 100_000]
SAMPLE = 25
NAMES = partial(hf.path_of, cfg=GQA)
ADAPTER = {
    "peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj"], "rank_pattern": {"q_proj": 4},
    "alpha_pattern": {"v_proj": 8}, "bias": "none", "use_dora": False, "use_rslora": True, "lora_dropout": 0.1,
    "modules_to_save": None, "layers_to_transform": [0, 1], "layers_pattern": "layers", "exclude_modules": None,
    "init_lora_weights": True, "target_parameters": None, "ensure_weight_tying": False, "base_model_name_or_path": "x",
}  # fmt: skip
METHODS = {
    "bitsandbytes": {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True},
    "gptq": {"bits": 4, "group_size": 32, "desc_act": False, "sym": True, "checkpoint_format": "gptq"},
    "awq": {"bits": 4, "group_size": 32, "version": "gemm", "zero_point": True, "modules_to_not_convert": ["x"]},
    "fp8": {"activation_scheme": "dynamic", "weight_block_size": [128, 128], "modules_to_not_convert": ["x"]},
    "mxfp4": {"modules_to_not_convert": ["x"]},
    "compressed-tensors": {
        "format": "pack-quantized", "ignore": ["lm_head"], "kv_cache_scheme": None, "config_groups": {"group_0": {
            "targets": ["Linear"], "weights": {
                "num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32}}},
    },
    "torchao": {"quant_type": {"default": {"_type": "Int4WeightOnlyConfig", "_data": {"group_size": 128}}}},
}  # fmt: skip
SETTINGS = {
    "eos_token_id": [1, 2], "do_sample": True, "temperature": 0.7, "top_k": 5, "top_p": 0.9, "min_p": 0.1,
    "repetition_penalty": 1.1, "num_beams": 1, "suppress_tokens": [1], "typical_p": 1.0,
}  # fmt: skip
ENCODER = {
    "model_type": "bert", "architectures": ["BertModel"], "vocab_size": 96, "hidden_size": 64, "hidden_act": "gelu",
    "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 96, "max_position_embeddings": 128,
    "type_vocab_size": 2, "layer_norm_eps": 1e-12, "position_embedding_type": "absolute", "pad_token_id": 0,
}  # fmt: skip


for _name in METHODS:
    METHODS[_name]["quant_method"] = _name


def settings(folder):
    found = prompts.settings(folder)
    prompts.sampling(found, {})
    prompts.stop_tokens(found)
    prompts.unapplied(found)


def resumed(kind):
    def read(folder):
        run_folder.check_resumed(folder, run_folder.restored(kind, folder / "run.json"))

    return read


def run_of(kind):
    return lambda f: {"options": kind().shared(), "mesh": "fsdp=2", "inputs": {"--data": "ab"}, "ranks": []}


def config(f):
    return json.loads((f / "config.json").read_text())


def own(name):
    return lambda f: json.loads((f / name).read_text())


READERS = {  # file, its content without a fault, and what reads it
    "config": ("config.json", config, hf.lazy),
    "config, inspected": ("config.json", config, inspect.inspect),
    "config, planned": ("config.json", config, lambda f: Plan(model=str(f)).found()),
    "config, copied": ("config.json", config, companions),
    "encoder": ("config.json", lambda f: ENCODER, hf_encoder.lazy),
    "index": ("model.safetensors.index.json", own("model.safetensors.index.json"), hf.lazy),
    "generation": ("generation_config.json", lambda f: SETTINGS, settings),
    "tokenizer's config": (
        "tokenizer_config.json",
        own("tokenizer_config.json"),
        tokenizer.text,
    ),
    "GGUF's tokenizer": ("tokenizer.json", own("tokenizer.json"), lambda f: tokenizer_values(f, 320)),
    "GGUF's config": ("tokenizer_config.json", own("tokenizer_config.json"), lambda f: tokenizer_values(f, 320)),
    "adapter": ("adapter_config.json", lambda f: ADAPTER, lambda f: peft.load(f, NAMES)),
    "adapter, inspected": ("adapter_config.json", lambda f: ADAPTER, inspect.inspect),
    "IA3": (
        "adapter_config.json",
        lambda f: {"peft_type": "IA3", "feedforward_modules": ["down_proj"], "fan_in_fan_out": False},
        lambda f: peft_ia3.load(f, NAMES),
    ),
    "run of qlora": ("run.json", run_of(Qlora), resumed(Qlora)),
    "run of vqvae": ("run.json", run_of(Vqvae), resumed(Vqvae)),
} | {
    f"config of {name}": (
        "config.json",
        lambda f, name=name: config(f) | {"dtype": "bfloat16", "quantization_config": METHODS[name]},
        hf.lazy,
    )
    for name in METHODS
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with a sharded model, a tokenizer and the weights of an adapter."""
    path = tmp_path_factory.mktemp("model") / "model"
    hf.save(path, GQA, random_params(GQA), max_shard_bytes=60_000, extra={"eos_token_id": 1})
    named = {"eos_token": "<|end|>", "bos_token": {"content": "<think>"}, "extra_special_tokens": {"image": "<|end|>"}}
    templates = [{"name": "default", "template": "{{ messages[0].content }}"}]
    tokenizers.write(path, tokenizers.byte_level(first="<|end|>"), **named, chat_template=templates)
    module = "base_model.model.model.layers.{}.self_attn.q_proj.lora_{}.weight"
    tensors = {
        module.format(i, kind): torch.zeros(4, 64).reshape(size)
        for i in (0, 1)
        for kind, size in (("A", (4, 64)), ("B", (64, 4)))
    }
    safetensors.write(path / "adapter_model.safetensors", tensors)
    return path


def places(x, path=()):
    """Yield the paths of all values within a JSON value, of long lists and objects the first ones."""
    if path:
        yield path
    for key, value in list(x.items() if isinstance(x, dict) else enumerate(x) if isinstance(x, list) else ())[:40]:
        yield from places(value, (*path, key))


def changed(x, path, value):
    """Return ``x`` with the ``value`` at ``path``."""
    if not path:
        return value
    out = copy.copy(x)
    out[path[0]] = changed(x[path[0]], path[1:], value)
    return out


def check(name, folder, count):
    """Read ``count`` of the mutated files, or all of them."""
    file, content, read = READERS[name]
    path = folder / file
    before = path.read_bytes() if path.exists() else None
    whole = content(folder)
    cases = [(place, value) for place in [(), *places(whole)] for value in VALUES]
    chosen = cases if count is None else random.Random(name).sample(cases, min(count, len(cases)))
    try:
        for place, value in chosen:
            path.write_text(json.dumps(changed(whole, place, value)))
            try:
                read(folder)
            except ValueError as error:
                assert type(error) is ValueError and len(str(error)) < 4200, (place, value)
                said = str(error)
                assert said.isprintable() and (folder.name in said or said.startswith("--")), (place, value, said)
    finally:
        path.unlink() if before is None else path.write_bytes(before)


@pytest.mark.parametrize("name", READERS)
def test_values_of_other_types(folder, name):
    check(name, folder, SAMPLE if "tokenizer's" not in name else 6)


@pytest.mark.slow
@pytest.mark.parametrize("name", READERS)
def test_all_values_of_other_types(folder, name):
    check(name, folder, None if "tokenizer's" not in name else 300)
