"""Tests of fquant.io.peft_tensors: every kind of tensor and setting, with the logits of PEFT's own model as oracle."""

import dataclasses
import inspect
import json
import os
import re
from functools import partial

import peft as hf
import pytest
import safetensors.torch
import torch

from fquant import linear, lora, tree
from fquant.io import peft, peft_ia3
from fquant.lora import Lora
from models import decoder
from models import hf as folders
from models import hf_encoder as encoders
from tests.helpers import peft_models as models

# PEFT 0.21 asks transformers 5 for a property by its former name.
pytestmark = [
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore:Setting `save_embedding_layers` to `True` as embedding:UserWarning"),
]

E, V = "model.embed_tokens", "self_attn.v_proj"
OPTIONS = {
    "list": (models.llama, {"target_modules": ["q_proj", "down_proj"], "lora_dropout": 0.1}),
    "expression": (models.llama, {"target_modules": r".*\.1\.self_attn\.[qv]_proj"}),
    "of a vision model": (models.llama, {"target_modules": r"^(?!.*visual).*(?:layers|h)\.\d+\..*(?:q|up)_proj.*"}),
    "all-linear": (models.llama, {"target_modules": "all-linear"}),
    "ranks": (
        models.llama,
        {
            "r": 4, "lora_alpha": 6, "target_modules": ["q_proj", "v_proj", "k_proj", "up_proj"],
            "rank_pattern": {r"layers\.0\.self_attn\.(q|k)_proj": 2, "v_proj": 5, r"^model.*\.1\..*k_proj": 3},
            "alpha_pattern": {"1.self_attn.q_proj": 2.5, r".*\d+\.self_attn.q_proj": 7},
        },
    ),
    "layers": (
        models.llama,
        {"target_modules": ["q_proj", "model.layers.0.self_attn.k_proj"], "layers_to_transform": 1},
    ),
    "layers by a pattern": (
        models.llama,
        {"target_modules": ["q_proj"], "layers_to_transform": [1], "layers_pattern": ["h", "layers"]},
    ),
    "excluded names": (models.llama, {"target_modules": ["q_proj"], "exclude_modules": ["0.self_attn.q_proj"]}),
    "excluded expression": (models.llama, {"target_modules": ".*_proj", "exclude_modules": r".*\.(0\..*|1\.mlp\.\w+)"}),
    "rank-stabilised": (models.llama, {"target_modules": ["q_proj"], "use_rslora": True, "rank_pattern": {"0.*": 3}}),
    "dora": (models.llama, {"target_modules": ["q_proj", "down_proj"], "use_dora": True}),
    "table": (models.llama, {"target_modules": ["embed_tokens", "q_proj"], "rank_pattern": {"embed_tokens": 3}}),
    "table alone": (models.llama, {"target_modules": ["embed_tokens"]}),
    "table and head": (models.llama, {"target_modules": ["embed_tokens", "lm_head"]}),
    "whole head": (models.llama, {"target_modules": ["q_proj"], "modules_to_save": ["lm_head", "embed_tokens"]}),
    "whole block": (models.llama, {"target_modules": ["q_proj", "up_proj"], "modules_to_save": ["mlp", "norm"]}),
    "biases": (models.biased, {"target_modules": ["q_proj"], "bias": "all"}),
    "own biases": (models.biased, {"target_modules": ["q_proj", "v_proj"], "bias": "lora_only"}),
    "biases and modules": (models.biased, {"target_modules": ["q_proj"], "bias": "all", "modules_to_save": ["v_proj"]}),
    "gpt2": (models.gpt2, {"target_modules": ["c_attn", "c_proj", "wte"], "fan_in_fan_out": True}),
    "experts": (models.experts, {"target_modules": [], "target_parameters": ["mlp.experts.down_proj"], "r": 3}),
    "experts, both": (
        models.experts,
        {
            "target_modules": ["q_proj"], "target_parameters": ["experts.down_proj", "experts.gate_up_proj"],
            "rank_pattern": {r"experts\.down_proj": 2},
        },
    ),
    "a matrix as parameter": (models.experts, {"target_modules": ["q_proj"], "target_parameters": ["gate.weight"]}),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:The following rank_pattern keys did not match any targeted module:RuntimeWarning")
@pytest.mark.filterwarnings("ignore:fan_in_fan_out is set to False but the target module is `Conv1D`:UserWarning")
@pytest.mark.parametrize(("make", "options"), OPTIONS.values(), ids=OPTIONS)
def test_logits_equal_both_ways(tmp_path, make, options):
    models.adapted(make(), **options).save_pretrained(tmp_path / "theirs")
    # Read again, because PEFT sorts the keys of rank_pattern and alpha_pattern when it saves them.
    want = models.logits(hf.PeftModel.from_pretrained(make(), tmp_path / "theirs").eval())
    adapters, whole = peft.load_all(tmp_path / "theirs", str, tied={})
    base = models.weights(make())
    merged = lora.merge(lora.replace_weights(base, whole), adapters)
    torch.testing.assert_close(models.logits(models.put(make(), merged)), want, atol=1e-5, rtol=1e-5)
    assert (models.logits(make()) - want).abs().max() > 1e-2  # the adapter does something

    tables = [path for path in adapters if path.endswith(("embed_tokens", "wte"))]
    peft.save(tmp_path / "ours", adapters, str, embeddings=tables, weights=whole, tied={})
    again = hf.PeftModel.from_pretrained(make(), tmp_path / "ours").eval()
    torch.testing.assert_close(models.logits(again), want, atol=1e-5, rtol=1e-5)
    second, whole_again = peft.load_all(tmp_path / "ours", str, tied={})
    assert second.keys() == adapters.keys() and whole_again.keys() == whole.keys()
    for path, x in adapters.items():
        y = second[path]
        assert torch.equal(x.a, y.a) and torch.equal(x.b, y.b)
        assert (x.alpha, x.rank_stabilised, x.dropout) == (y.alpha, y.rank_stabilised, y.dropout)
    assert all(torch.equal(x, whole_again[path]) for path, x in whole.items())
    if whole:
        with pytest.raises(ValueError, match="got a whole tensor, wanted adapters alone; call load_all and lora.rep"):
            peft.load(tmp_path / "theirs", str, tied={})


ATTACHED = {
    "table": {
        "target_modules": ["embed_tokens", "q_proj", "down_proj"],
        "use_rslora": True,
        "rank_pattern": {"q_.*": 3},
    },
    "dora": {"target_modules": "all-linear", "use_dora": True, "alpha_pattern": {"0.*": 5}},
}


@pytest.mark.parametrize("options", ATTACHED.values(), ids=ATTACHED)
def test_a_decoder_with_attached_adapters_computes_the_logits_of_peft(tmp_path, options):
    models.llama().save_pretrained(tmp_path / "base")
    models.adapted(models.llama(), **options).save_pretrained(tmp_path / "adapter")
    want = models.logits(hf.PeftModel.from_pretrained(models.llama(), tmp_path / "adapter").eval())
    cfg, base = folders.load(tmp_path / "base")
    adapters, whole = peft.load_all(tmp_path / "adapter", partial(folders.path_of, cfg=cfg), tied={})
    attached = lora.attach(lora.replace_weights(base, whole), adapters)
    torch.testing.assert_close(decoder.forward(attached, models.TOKENS, cfg), want, atol=1e-5, rtol=1e-5)


def test_a_head_and_norms_in_full_come_back_by_the_paths_of_a_decoder(tmp_path):
    options = {"target_modules": ["q_proj"], "modules_to_save": ["lm_head", "model.norm"]}
    models.llama().save_pretrained(tmp_path / "base")
    models.adapted(models.llama(), **options).save_pretrained(tmp_path / "adapter")
    want = models.logits(hf.PeftModel.from_pretrained(models.llama(), tmp_path / "adapter").eval())
    cfg, base = folders.load(tmp_path / "base")
    adapters, whole = peft.load_all(tmp_path / "adapter", partial(folders.path_of, cfg=cfg), tied={})
    assert whole.keys() == {"final.head", "final.norm"}
    merged = lora.merge(lora.replace_weights(base, whole), adapters)
    torch.testing.assert_close(decoder.forward(merged, models.TOKENS, cfg), want, atol=1e-5, rtol=1e-5)
    folders.save(tmp_path / "merged", cfg, merged)
    again = models.transformers.LlamaForCausalLM.from_pretrained(tmp_path / "merged").eval()
    torch.testing.assert_close(models.logits(again), want, atol=1e-5, rtol=1e-5)


TABLE = "base_model.model.model.embed_tokens."
Q = "base_model.model.model.layers.0.self_attn.q_proj."
EXPERTS = "base_model.model.model.layers.0.mlp.experts."
BROKEN = {
    "dora of a table": ("table", {"use_dora": True}, {}, "model.embed_tokens: got DoRA for a table, whose magnitudes"),
    "half a table": ("table", {}, {TABLE + "lora_embedding_B": None}, "embed_tokens.lora_embedding_B: got no such ten"),
    "a table's rank": ("table", {"r": 5}, {}, "model.embed_tokens: got a (4, 16), b (64, 4), magnitude None, wanted"),
    "a table and a matrix": (
        "table", {}, {TABLE + "lora_A.weight": torch.ones(4, 16)},
        "embed_tokens.lora_A.weight: got a tensor, wanted none, a module is linear or an embedding",
    ),
    "another weight": ("table", {}, {Q + "weight": torch.ones(1)}, "q_proj.weight: got an unknown tensor, wanted base"),
    "a bias": ("table", {}, {Q + "base_layer.bias": torch.ones(1)}, "q_proj.base_layer.bias: got an unknown tensor"),
    "a bias elsewhere": (
        "table", {"bias": "lora_only"}, {Q.replace("q_", "k_") + "bias": torch.ones(1)}, "k_proj.bias: got an unknown"
    ),
    "whole, lost": ("table", {"modules_to_save": ["lm_head"]}, {}, "lm_head: got no tensors, wanted some, it is in mo"),
    "inside nothing": ("table", {}, {Q + "base_layer.lora_A.weight": torch.ones(4, 16)}, "q_proj: got 2 adapters, wan"),
    "experts, dropout": ("experts", {"lora_dropout": 0.1}, {}, "down_proj: got DoRA or dropout, wanted neither"),
    "experts, ranks": ("experts", {"r": 5}, {}, "experts.down_proj: got a (8, 12), b (16, 8), magnitude None, wanted"),
    "experts, one lost": (
        "experts", {"target_parameters": ["experts.down_proj", "experts.gate_up_proj"]}, {},
        "model.layers.0.mlp.experts: got 1 adapters, wanted those of down_proj, gate_up_proj",
    ),
    "experts, unknown order": (
        "experts", {"target_parameters": ["experts.down_proj", "experts.z"]},
        {EXPERTS + f"base_layer.lora_{x}.weight": torch.ones(8, 8) for x in "AB"},
        "experts: got the parameters down_proj, z, whose order is unknown; wanted gate_up_proj, gate_up_proj_bias, dow",
    ),
    "experts, too deep": (
        "experts", {"target_parameters": ["experts.down_proj", "experts.gate_up_proj"]},
        {EXPERTS + f"base_layer.base_layer.lora_{x}.weight": torch.ones(8, 8) for x in "AB"},
        "experts: got 2 adapters with one inside another, wanted no .base_layer left out",
    ),
    "experts, none": (
        "experts", {}, {EXPERTS + "lora_A.weight": torch.ones(0, 8), EXPERTS + "lora_B.weight": torch.ones(8, 0)},
        "experts.down_proj: got a (0, 8), b (8, 0), magnitude None, wanted",
    ),
    "experts, half": (
        "experts", {}, {EXPERTS + "lora_B.weight": None}, "experts.down_proj: got .lora_A.weight, wanted .lora_A.weight"
    ),
}  # fmt: skip


@pytest.mark.parametrize(("which", "change", "tensors", "message"), BROKEN.values(), ids=BROKEN)
def test_broken_adapters_say_what_is_wrong(tmp_path, which, change, tensors, message):
    if which == "table":
        adapters = {"embed": draw_lora(64, 16), "q": draw_lora(16, 16)}
        names = {"embed": "model.embed_tokens", "q": "model.layers.0.self_attn.q_proj"}
        peft.save(tmp_path, adapters, names.__getitem__, tied={})
    else:
        adapters = lora.stack([{"x": draw_lora(16, 12, rank=2)} for _ in range(4)])
        peft.save(tmp_path, adapters, lambda path: "model.layers.0.mlp.experts.down_proj")
    content = json.loads((tmp_path / peft.CONFIG).read_text()) | change
    (tmp_path / peft.CONFIG).write_text(json.dumps(content))
    found = {**safetensors.torch.load_file(tmp_path / peft.WEIGHTS), **tensors}
    safetensors.torch.save_file({k: t for k, t in found.items() if t is not None}, tmp_path / peft.WEIGHTS)
    with pytest.raises(ValueError, match=re.escape(message)) as caught:
        peft.load_all(tmp_path, str, tied={})
    assert str(caught.value).startswith(str(tmp_path)) and "\n" not in str(caught.value)


def draw_lora(out, width, rank=4, **options):
    return Lora(torch.ones(rank, width), torch.ones(out, rank), alpha=8.0, **options)


NAMES = {"q": "q_proj", "embed": "embed_tokens", "up": "experts.up", "z": "experts.z", "head": "lm_head"}
STACK = lora.stack([{"up": draw_lora(16, 12)}] * 2)["up"]
UNSAVABLE = {
    "dora of a table": (
        {"embed": dataclasses.replace(draw_lora(64, 16), magnitude=torch.ones(64))}, {},
        "embed: got DoRA for a table, wanted none; merge it instead",
    ),
    "dropout of a stack": (
        {"up": dataclasses.replace(STACK, dropout=0.5)}, {}, "up: got dropout or DoRA for a stack of weights, wan"
    ),
    "stacks of unknown order": ({"up": STACK, "z": STACK}, {}, "experts: got stacks of up, z, whose order in PEFT is"),
    "weight of an adapter": ({"q": draw_lora(16, 16)}, {"q": torch.ones(16, 16)}, "q: got the weight of q_proj, which"),
    "no tensor": ({"q": draw_lora(16, 16)}, {"head": [1]}, "head: got list, wanted a tensor"),
    "integers": ({"q": draw_lora(16, 16)}, {"head": torch.ones(2).int()}, "head: got torch.int32, wanted float32"),
}  # fmt: skip


@pytest.mark.parametrize(("adapters", "weights", "message"), UNSAVABLE.values(), ids=UNSAVABLE)
def test_what_peft_cannot_express_is_refused_and_nothing_is_written(tmp_path, adapters, weights, message):
    with pytest.raises((ValueError, TypeError), match=re.escape(message)):
        peft.save(tmp_path / "out", adapters, NAMES.__getitem__, weights=weights, tied={})
    assert os.listdir(tmp_path) == []


KINDS = {"lora": hf.LoraConfig(r=4), "dora": hf.LoraConfig(r=4, use_dora=True), "ia3": hf.IA3Config()}


@pytest.mark.parametrize("stored", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_stored_half_precision_computes_in_float32(tmp_path, kind, stored):
    """Activations of 3.7e5 are beyond float16; PEFT casts to float32 on load, and so do we unless asked otherwise."""

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.q = torch.nn.Linear(48, 20, bias=False)

        def forward(self, x):
            return self.q(x)

    config = dataclasses.replace(KINDS[kind], target_modules=["q"])
    config = dataclasses.replace(config, feedforward_modules=[]) if kind == "ia3" else config
    theirs = hf.get_peft_model(Model(), config)
    models.shake(theirs, lambda name: "lora_" in name or "ia3" in name).to(stored).save_pretrained(tmp_path)
    base, x = Model(), 3.7e5 * torch.randn(5, 48)
    want = hf.PeftModel.from_pretrained(Model(), tmp_path).eval()(x).detach()
    load = peft_ia3.load if kind == "ia3" else peft.load
    adapters = load(tmp_path, str)
    assert {t.dtype for t in tree.leaves(adapters)} == {torch.float32}
    got = linear(x, lora.attach({"q": base.q.weight.detach()}, adapters)["q"])
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5 * want.abs().max().item())
    as_stored = load(tmp_path, str, dtype=None)
    assert {t.dtype for t in tree.leaves(as_stored)} == {stored}
    assert all(t.float().equal(wide) for t, wide in zip(tree.leaves(as_stored), tree.leaves(adapters), strict=True))
    with pytest.raises(TypeError, match="dtype: got torch.int8, wanted float32, bfloat16, float16, or None"):
        load(tmp_path, str, dtype=torch.int8)


@pytest.mark.parametrize("family", [models.transformers.Gemma2Config, models.transformers.Gemma3TextConfig])
def test_norms_of_families_with_other_names(tmp_path, family):
    """Gemma's post_attention_layernorm is no input of the MLP."""
    torch.manual_seed(0)
    model = models.transformers.AutoModelForCausalLM.from_config(
        family(num_hidden_layers=2, head_dim=4, **models.SIZES, pad_token_id=0, attn_implementation="eager")
    ).eval()
    model.save_pretrained(tmp_path / "base")
    norms = [f"{name}_layernorm" for name in ("input", "post_attention", "pre_feedforward", "post_feedforward")]
    models.adapted(model, target_modules=["q_proj"], modules_to_save=norms).save_pretrained(tmp_path / "theirs")
    model = models.transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base").eval()
    want = models.logits(hf.PeftModel.from_pretrained(model, tmp_path / "theirs").eval())
    cfg, base = folders.load(tmp_path / "base")
    path_of, module_name = partial(folders.path_of, cfg=cfg), partial(folders.module_name, cfg=cfg)
    for folder in ("theirs", "ours"):
        adapters, whole = peft.load_all(tmp_path / folder, path_of, tied=folders.tied_modules(cfg))
        assert {path.split(".")[2] for path in whole} == {"attn_norm", "mlp_norm", "attn_post_norm", "mlp_post_norm"}
        got = decoder.forward(lora.attach(lora.replace_weights(base, whole), adapters), models.TOKENS, cfg)
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
        peft.save(tmp_path / "ours", adapters, module_name, weights=whole, tied=folders.tied_modules(cfg))
    assert (decoder.forward(lora.attach(base, adapters), models.TOKENS, cfg) - want).abs().max() > 1e-2


@pytest.mark.parametrize("function", [
    *(getattr(folders, name) for name in ("module_name", "path_of", "tensor_name", "tied_modules")),
    *(getattr(encoders, name) for name in ("module_name", "path_of", "tied_modules")),
])  # fmt: skip
def test_names_need_the_config(function):
    """The names of families differ, so there is no mapping without one."""
    assert inspect.signature(function).parameters["cfg"].default is inspect.Parameter.empty
