"""Config from and to Hugging Face's config.json: both spellings of its keys, and every refusal."""

import dataclasses
import json

import pytest
import transformers

from fquant import random, tree
from fquant.io import tree_json
from models import decoder
from models.config import Config, RopeScaling
from models.hf.config import from_hf, to_hf

BASE = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 512,
}
CFG = Config(128, 64, 2, 4, 2, 16, 96, norm_eps=1e-6, max_positions=512)
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
SCALING = RopeScaling("llama3", 8.0, 1.0, 4.0, 64)

READS = {
    "defaults": ({}, CFG),
    "null is absent": ({"num_key_value_heads": None, "head_dim": None}, dataclasses.replace(CFG, num_kv_heads=4)),
    "head_dim": ({"head_dim": 32}, dataclasses.replace(CFG, head_dim=32)),
    "flags": (
        {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True},
        dataclasses.replace(CFG, tied=True, attention_bias=True, mlp_bias=True),
    ),
    "theta 4": ({"rope_theta": 5e5}, dataclasses.replace(CFG, rope_theta=5e5)),
    "theta 5": (
        {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}},
        dataclasses.replace(CFG, rope_theta=5e5),
    ),
    "llama3 4": (
        {"rope_theta": 5e5, "rope_scaling": LLAMA3},
        dataclasses.replace(CFG, rope_theta=5e5, rope_scaling=SCALING),
    ),
    "llama3 5": (
        {"rope_parameters": {**LLAMA3, "rope_theta": 5e5}},
        dataclasses.replace(CFG, rope_theta=5e5, rope_scaling=SCALING),
    ),
    "both spellings": (
        {"rope_theta": 5e5, "rope_scaling": LLAMA3, "rope_parameters": {**LLAMA3, "rope_theta": 5e5}},
        dataclasses.replace(CFG, rope_theta=5e5, rope_scaling=SCALING),
    ),
    "linear, old key": (
        {"rope_scaling": {"type": "linear", "factor": 2}},
        dataclasses.replace(CFG, rope_scaling=RopeScaling("linear", 2.0)),
    ),
    "harmless": ({"use_cache": False, "torch_dtype": "bfloat16", "eos_token_id": [1, 2], "pretraining_tp": 2}, CFG),
}


QWEN = BASE | {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "head_dim": 16}
QWEN_CFG = dataclasses.replace(CFG, qk_norm=True, family="qwen3")
READS |= {
    "qwen3": (QWEN, QWEN_CFG),
    "qwen3, flags": (
        QWEN | {"tie_word_embeddings": True, "attention_bias": True, "rope_theta": 1e6},
        dataclasses.replace(QWEN_CFG, tied=True, attention_bias=True, rope_theta=1e6),
    ),
    "qwen3, heads beside dim": (QWEN | {"num_attention_heads": 6}, dataclasses.replace(QWEN_CFG, num_heads=6)),
    "qwen3, windows unused": (
        QWEN
        | {"use_sliding_window": False, "sliding_window": 4096, "max_window_layers": 1}
        | {"layer_types": ["full_attention"] * 2},
        QWEN_CFG,
    ),
}


@pytest.mark.parametrize("name", READS)
def test_from_hf(name):
    extra, wanted = READS[name]
    assert from_hf(BASE | extra) == wanted
    assert from_hf(json.loads(json.dumps(to_hf(wanted)))) == wanted


@pytest.mark.parametrize("name", READS)
def test_transformers_agrees(name):
    _, cfg = READS[name]
    theirs = (transformers.Qwen3Config if cfg.qk_norm else transformers.LlamaConfig)(**to_hf(cfg))
    assert from_hf(json.loads(theirs.to_json_string(use_diff=True))) == cfg


WRONG = {
    "another model": ({"model_type": "mamba"}, "model_type = 'mamba', want 'llama' or 'mistral'"),
    "another family": ({"model_type": "mistral"}, r"architectures = .* want \['MistralForCausalLM'\]"),
    "no model type": ({"model_type": None}, "model_type = None, want 'llama'"),
    "another head": ({"architectures": ["LlamaForX"]}, "architectures = .'LlamaForX'., want .'LlamaForCausalLM'."),
    "activation": ({"hidden_act": "gelu"}, "hidden_act = 'gelu', want 'silu'; use a checkpoint"),
    "rope type": ({"rope_scaling": {"rope_type": "ntk", "factor": 2.0}}, "rope_type = 'ntk', want one of default, lin"),
    "rope key": ({"rope_parameters": {"beta": 2.0}}, "rope_parameters.beta = 2.0 is unknown for rope type 'default'"),
    "rope table": ({"rope_scaling": 3}, "rope_scaling = 3, want a table"),
    "rope type no name": ({"rope_scaling": {"rope_type": ["yarn"]}}, r"rope_type = \['yarn'\], want one of default"),
    "rope types": ({"rope_scaling": LLAMA3 | {"type": "linear"}}, "type = 'linear', but rope_type = 'llama3'; remove"),
    "rope layout": ({"rope_interleaved": True}, "rope_interleaved = True, want False"),
    "rope missing": ({"rope_scaling": LLAMA3 | {"factor": None}}, "factor is missing"),
    "rope order": ({"rope_scaling": LLAMA3 | {"low_freq_factor": 4.0}}, "low_freq_factor = 4.0 must be in"),
    "rope disagrees": (
        {"rope_theta": 1e4, "rope_parameters": {"rope_theta": 2e4}},
        "rope_parameters.rope_theta = 20000.0, but the older spelling says 10000.0; remove one",
    ),
    "rope part": ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "rotates 8 of head_dim = 16; a Llama rotates"),
    "missing": ({"hidden_size": None}, "hidden_size is missing"),
    "missing eps": ({"rms_norm_eps": None}, "rms_norm_eps is missing"),
    "not a number": ({"vocab_size": "128"}, "vocab_size = '128', want a positive integer"),
    "negative": ({"num_hidden_layers": -1}, "num_hidden_layers = -1, want an integer of 1"),
    "not a boolean": ({"attention_bias": 1}, "attention_bias = 1, want true or false"),
    "eps": ({"rms_norm_eps": 0}, "rms_norm_eps = 0, want a positive number"),
    "heads": ({"num_attention_heads": 5}, "hidden_size = 64 is not a multiple of num_attention_heads = 5"),
    "groups": ({"num_key_value_heads": 3}, "num_attention_heads = 4 is not a multiple of num_key_value_heads = 3"),
    "odd head": ({"head_dim": 15}, "head_dim = 15 is odd"),
    "heads beside head_dim": (
        {"num_attention_heads": 6, "head_dim": 8},
        "hidden_size = 64 is not a multiple",
    ),
    "dropout": ({"attention_dropout": 0.1}, "attention_dropout = 0.1, want 0.0; set it to 0.0"),
    "quantised": (
        {"quantization_config": {"quant_method": "hqq"}},
        "'quant_method' is 'hqq', wanted one of awq",
    ),
    "unknown": ({"sliding_window": 128}, "sliding_window = 128 is not a key of a Llama config"),
    "unknown to qwen3": (QWEN | {"window": 128}, "window = 128 is not a key of a Qwen3 config"),
    "qwen3 as llama": ({"model_type": "qwen3"}, r"architectures = \['LlamaForCausalLM'\], want \['Qwen3ForCausalLM'\]"),
    "layers of windows": (
        QWEN | {"layer_types": ["full_attention", "sliding_attention"]},
        "layer_types = .*'sliding_attention'., want .'full_attention', 'full_attention'.; set use_sliding_window",
    ),
    "qwen3 without head_dim": (QWEN | {"head_dim": None}, "head_dim is missing"),
    "qwen3 without key heads": (QWEN | {"num_key_value_heads": None}, "num_key_value_heads is missing"),
    "qwen3 with MLP biases": (QWEN | {"mlp_bias": True}, "mlp_bias = True is not a key of a Qwen3 config"),
}


@pytest.mark.parametrize("name", WRONG)
def test_refused(name):
    extra, message = WRONG[name]
    with pytest.raises(ValueError, match=message):
        from_hf(BASE | extra)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_kv_heads": 3}, "num_heads = 4 is not a multiple of num_kv_heads = 3"),
        ({"rotary_dim": 32}, "head_dim = 32 of head_dim = 16 are rotated"),
        ({"activation": "relu"}, "activation = 'relu', want one of silu, gelu_tanh"),
        ({"window": 0}, "window = 0, want a positive number or None"),
        ({"attention_bias": True, "qkv_bias": True}, "the first includes the second"),
        ({"fused": True, "mlp_bias": True}, "fused = True beside biases"),
        ({"vocab": 0}, "vocab = 0, want a positive integer"),
        ({"head_dim": 7}, "head_dim = 7 is odd"),
    ],
)
def test_config_refused(change, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(CFG, **change)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kind": "ntk", "factor": 2.0}, "rope type 'ntk' is not supported"),
        ({"kind": "longrope", "factor": 2.0, "short_factor": (1.0,)}, "as many of long_factor as of short_factor"),
        ({"kind": "llama3", "factor": 2.0}, "'llama3' wants low_freq_factor, high_freq_factor"),
        ({"kind": "linear", "factor": 0.0}, "factor = 0.0 must be positive"),
    ],
)
def test_scaling_refused(options, message):
    with pytest.raises(ValueError, match=message):
        RopeScaling(**options)


def test_is_a_registered_value():
    assert all(tree.VALUES[tree.name_of(cls)] is cls for cls in (Config, RopeScaling))
    assert hash(CFG) == hash(dataclasses.replace(CFG))


def test_values_of_older_files_load():
    """Read a Config and a layer from before they had the switches of other families."""
    cfg = dataclasses.replace(CFG, rope_scaling=SCALING)
    params = decoder.init(cfg, random.key(0))
    text, tensors = tree_json.encode({"cfg": cfg, "params": params})
    older = json.loads(text)
    parts = older["tree"]["dict"]
    config = parts["cfg"]["value"]["fields"]
    scaling = config["rope_scaling"]["fields"]
    layers = parts["params"]["fields"]["layers"]["list"]
    for fields, first in ((config, "family"), (scaling, "attention_factor"), *((x["fields"], "qkv") for x in layers)):
        for name in list(fields)[list(fields).index(first) :] if first in fields else ():
            del fields[name]
    assert "family" not in config and "beta_fast" not in scaling and "qkv" not in layers[0]["fields"]
    found = tree_json.decode(json.dumps(older), tensors.__getitem__)
    assert found["cfg"] == cfg and tree.structure(found["params"]) == tree.structure(params)
