"""Tests of fquant.io.peft against PEFT and transformers: logits of our files, tensors of theirs."""

import dataclasses
import json
import os
import re
import shutil

import peft as hf
import pytest
import safetensors.torch
import torch
import transformers

from fquant import random, tree
from fquant.io import peft
from fquant.packed_linear import Lora

# PEFT 0.21 asks transformers 5 for a property by its former name.
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")

HIDDEN, KV, INNER = 16, 8, 24
SHAPES = {"q": (HIDDEN, HIDDEN), "k": (KV, HIDDEN), "v": (KV, HIDDEN), "down": (HIDDEN, INNER)}  # [out in]


def module_name(path):
    layers, i, name = path.split(".")
    return f"model.{layers}.{i}.{'mlp' if name == 'down' else 'self_attn'}.{name}_proj"


def path_of(module):
    found = re.fullmatch(r"model\.(layers\.\d+)\.(?:mlp|self_attn)\.(\w+)_proj", module)
    return f"{found[1]}.{found[2]}" if found else None


def llama():
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=HIDDEN, intermediate_size=INNER, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=32, initializer_range=0.2, tie_word_embeddings=False,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config).eval()


TOKENS = torch.arange(20).reshape(2, 10) * 3 % 64


def logits(model):
    with torch.no_grad():
        return model(TOKENS).logits


def make(paths, rank=lambda path: 4, alpha=lambda path: 8.0, dora=False, dtype=torch.float32, **static):
    def one(path):
        key, (out, width) = random.fold(random.key(1), path), SHAPES[path.split(".")[2]]
        draw = lambda name, *shape: (random.normal(random.fold(key, name), shape) * 0.3).to(dtype)
        magnitude = draw("m", out).abs() + 1 if dora else None
        return Lora(draw("a", rank(path), width), draw("b", out, rank(path)), magnitude, alpha(path), **static)

    return {path: one(path) for path in paths}


def merge(model, adapters):
    """Return W + s B A, or its rows scaled to the magnitude, in float64."""
    for path, lora in adapters.items():
        weight = model.get_submodule(module_name(path)).weight.data
        rank = lora.a.shape[0]
        scale = lora.alpha / (rank**0.5 if lora.rank_stabilised else rank)
        w = weight.double() + scale * lora.b.double() @ lora.a.double()
        if lora.magnitude is not None:
            w = lora.magnitude.double()[:, None] * w / w.norm(dim=1, keepdim=True)
        weight.copy_(w)
    return model


ALL = [f"layers.{i}.{name}" for i in range(2) for name in SHAPES]
RANKS = {"layers.0.q": 2, "layers.1.q": 6, "layers.1.down": 1}
ALPHAS = {"layers.0.v": 3.0, "layers.1.q": 1.5, "layers.1.down": 32.0}
ADAPTERS = {
    "lora": make(ALL),
    "one layer": make(["layers.1.q"], alpha=lambda path: 2.5),
    "rank-stabilised": make(ALL, rank_stabilised=True),
    "dora": make(ALL, dora=True),
    "dora rank-stabilised": make(ALL, dora=True, rank_stabilised=True, rank=lambda path: RANKS.get(path, 4)),
    "ranks": make(ALL, rank=lambda path: RANKS.get(path, 4)),
    "alphas": make(ALL, alpha=lambda path: ALPHAS.get(path, 8.0)),
    "both": make(ALL, lambda path: RANKS.get(path, 3), lambda path: ALPHAS.get(path, 16.0), dropout=0.1),
    "bfloat16": make(ALL, dtype=torch.bfloat16),
}
adapters = pytest.mark.parametrize("adapters", ADAPTERS.values(), ids=ADAPTERS)


def equal(a, b):
    assert a.keys() == b.keys()
    for path in a:
        for field in dataclasses.fields(Lora):
            x, y = getattr(a[path], field.name), getattr(b[path], field.name)
            assert torch.equal(x, y) if isinstance(x, torch.Tensor) else x == y, (path, field.name)


def widen(adapters):
    return tree.map(lambda t: t.float(), adapters)


@adapters
def test_an_adapter_saved_here_gives_the_same_logits_in_peft(tmp_path, adapters):
    peft.save(tmp_path, adapters, module_name, "a/base")
    want = logits(merge(llama(), adapters))
    theirs = hf.PeftModel.from_pretrained(llama(), tmp_path).eval()
    torch.testing.assert_close(logits(theirs), want, atol=1e-5, rtol=0)
    assert (logits(llama()) - want).abs().max() > 1e-2  # the adapter does something
    assert sorted(os.listdir(tmp_path)) == ["adapter_config.json", "adapter_model.safetensors"]
    config = theirs.peft_config["default"]
    assert config.task_type == "CAUSAL_LM" and config.base_model_name_or_path == "a/base"
    assert config.target_modules == {module_name(path) for path in adapters}


@adapters
def test_an_adapter_saved_here_loads_here(tmp_path, adapters):
    peft.save(tmp_path / "new" / "folder", adapters, module_name)
    equal(peft.load(tmp_path / "new" / "folder", path_of), widen(adapters))


THEIRS = {
    "list": {"r": 4, "lora_alpha": 12, "target_modules": ["q_proj", "down_proj"]},
    "defaults": {"target_modules": ["v_proj"]},
    "expression": {"r": 2, "target_modules": r".*\.1\.self_attn\.[qv]_proj"},
    "rslora": {"r": 4, "target_modules": ["k_proj"], "use_rslora": True, "lora_dropout": 0.25},
    "dora": {"r": 4, "target_modules": ["k_proj", "down_proj"], "use_dora": True},
    "patterns": {
        "r": 4, "lora_alpha": 6, "target_modules": ["q_proj", "v_proj", "k_proj"],
        "rank_pattern": {"layers.0.self_attn.q_proj": 2, "v_proj": 5, r"^model.*\.1\..*k_proj": 3},
        "alpha_pattern": {"1.self_attn.q_proj": 2.5, "q_proj": 7},
    },
    "one layer": {"target_modules": ["q_proj"], "layers_to_transform": [1], "layers_pattern": "layers"},
    "excluded": {"target_modules": ["q_proj"], "exclude_modules": r".*\.0\..*"},
    "all": {"target_modules": "all-linear", "exclude_modules": ["o_proj", "gate_proj", "up_proj"], "r": 2},
    "gaussian": {"target_modules": ["q_proj"], "init_lora_weights": "gaussian"},
}  # fmt: skip


@pytest.mark.parametrize("options", THEIRS.values(), ids=THEIRS)
def test_an_adapter_saved_by_peft_loads_with_its_tensors_and_alphas(tmp_path, options):
    model = hf.get_peft_model(llama(), hf.LoraConfig(task_type="CAUSAL_LM", **options)).eval()
    torch.manual_seed(1)
    for name, p in model.named_parameters():
        if "lora_" in name:
            p.data += torch.randn_like(p) * 0.2
    model.save_pretrained(tmp_path)
    got = peft.load(tmp_path, path_of)
    layers = {n: m for n, m in model.base_model.model.named_modules() if isinstance(m, hf.tuners.lora.LoraLayer)}
    assert {module_name(path) for path in got} == layers.keys()
    for path, lora in got.items():
        layer = layers[module_name(path)]
        assert torch.equal(lora.a, layer.lora_A["default"].weight)
        assert torch.equal(lora.b, layer.lora_B["default"].weight)
        assert lora.alpha == layer.lora_alpha["default"] and type(lora.alpha) is float
        assert lora.rank_stabilised == options.get("use_rslora", False)
        assert lora.dropout == options.get("lora_dropout", 0.0)
        if options.get("use_dora"):
            assert torch.equal(lora.magnitude, layer.lora_magnitude_vector["default"].weight)
        else:
            assert lora.magnitude is None
    torch.testing.assert_close(logits(merge(llama(), got)), logits(model), atol=1e-5, rtol=0)


def test_names_that_end_in_one_another_keep_their_own_rank(tmp_path):
    def chain(**ranks):
        return {k: Lora(torch.ones(r, 3), torch.ones(2, r), alpha=float(r)) for k, r in ranks.items()}

    for adapters in (chain(q=1, x=2, y=2), chain(q=1, x=1, y=2), chain(q=1, x=1, y=1), chain(q=3, x=1, y=2)):
        names = {"q": "proj", "x": "deep.proj", "y": "very.deep.proj"}
        peft.save(tmp_path, adapters, names.__getitem__)
        equal(peft.load(tmp_path, {v: k for k, v in names.items()}.get), adapters)


def test_a_name_is_no_expression(tmp_path):
    adapters = {"a.b": Lora(torch.ones(1, 3), torch.ones(2, 1)), "a_b": Lora(torch.ones(2, 3), torch.ones(2, 2))}
    adapters |= {"a+b": Lora(torch.ones(2, 3), torch.ones(2, 2))}
    peft.save(tmp_path, adapters, str)
    equal(peft.load(tmp_path, str), adapters)


def mixed(**change):
    two = make(["layers.0.q", "layers.1.q"])
    return two | {"layers.1.q": dataclasses.replace(two["layers.1.q"], **change)}


UNSAVABLE = {
    "nothing": ({}, ValueError, "got no adapters, wanted at least one"),
    "dropout": (mixed(dropout=0.5), ValueError, "layers.1.self_attn.q_proj: got dropout 0.5, wanted 0.0 as in model"),
    "stabilised": (mixed(rank_stabilised=True), ValueError, "got rank_stabilised True, wanted False as in model"),
    "dora": (mixed(magnitude=torch.ones(HIDDEN)), ValueError, "got DoRA True, wanted False as in model.layers.0"),
    "double": (mixed(a=torch.ones(4, HIDDEN).double()), TypeError, "layers.1.q: a: got torch.float64, wanted float32"),
    "stacked": (mixed(a=torch.ones(2, 4, HIDDEN)), ValueError, "layers.1.q: got a (2, 4, 16), b (16, 4), magnitude"),
    "ranks": (mixed(a=torch.ones(3, HIDDEN)), ValueError, "layers.1.q: got a (3, 16), b (16, 4), magnitude None"),
    "magnitude": (mixed(magnitude=torch.ones(3)), ValueError, "layers.1.q: got a (4, 16), b (16, 4), magnitude (3,)"),
    "a tensor": ({"layers.0.q": torch.ones(2)}, TypeError, "layers.0.q: got Tensor, wanted a Lora"),
}


@pytest.mark.parametrize(("adapters", "error", "message"), UNSAVABLE.values(), ids=UNSAVABLE)
def test_what_peft_cannot_express_is_refused_and_nothing_is_written(tmp_path, adapters, error, message):
    with pytest.raises(error, match=re.escape(message)):
        peft.save(tmp_path / "out", adapters, module_name)
    assert os.listdir(tmp_path) == []


def test_two_paths_of_one_module_are_refused(tmp_path):
    with pytest.raises(ValueError, match=r"layers.1.q: got the module x of another adapter"):
        peft.save(tmp_path, mixed(), lambda path: "x")
    assert os.listdir(tmp_path) == []


def test_a_table_that_is_not_named_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"words: model.embed_tokens is an embedding; name the path words in embeddi"):
        peft.save(tmp_path / "out", {"words": make(["layers.0.q"])["layers.0.q"]}, lambda path: "model.embed_tokens")
    assert os.listdir(tmp_path) == []


def edit(folder, change):
    config = json.loads((folder / peft.CONFIG).read_text())
    tensors = safetensors.torch.load_file(folder / peft.WEIGHTS)
    change(config, tensors)
    (folder / peft.CONFIG).write_text(json.dumps(config))
    safetensors.torch.save_file(tensors, folder / peft.WEIGHTS)


Q0, Q1 = (f"base_model.model.model.layers.{i}.self_attn.q_proj." for i in range(2))
SETTINGS = {
    "bias": "some", "modules_to_save": "lm_head", "layer_replication": [[0, 1]], "lora_bias": True,
    "trainable_token_indices": [1], "target_parameters": "w", "peft_type": "IA3",
    "alora_invocation_tokens": [1], "use_qalora": True, "megatron_config": {"a": 1}, "init_lora_weights": "pissa",
    "loftq_config": {"bits": 4}, "use_bdlora": {"a": 1}, "of_the_future": 1, "arrow_config": {"top_k": 1},
    "r": 0, "lora_alpha": "16", "rank_pattern": {"q_proj": 1.5}, "alpha_pattern": ["q"], "lora_dropout": 1.0,
    "use_dora": 1, "use_rslora": None, "target_modules": [1],
}  # fmt: skip


@pytest.mark.parametrize("key", SETTINGS)
def test_a_setting_that_is_not_understood_is_named_with_its_value(tmp_path, key):
    peft.save(tmp_path, mixed(), module_name)
    edit(tmp_path, lambda config, tensors: config.update({key: SETTINGS[key]}))
    with pytest.raises(ValueError, match=re.escape(f"{tmp_path / peft.CONFIG}: {key}: got {SETTINGS[key]!r}, wanted")):
        peft.load(tmp_path, path_of)


BROKEN = {
    "no A": (lambda c, t: t.pop(Q1 + "lora_A.weight"), Q1 + "lora_A.weight: got no such tensor"),
    "no B": (lambda c, t: t.pop(Q0 + "lora_B.weight"), Q0 + "lora_B.weight: got no such tensor"),
    "no magnitude": (lambda c, t: c.update(use_dora=True), Q0 + "lora_magnitude_vector: got no such tensor"),
    "magnitude": (
        lambda c, t: t.update({Q0 + "lora_magnitude_vector": torch.ones(16)}),
        Q0 + "lora_magnitude_vector: got a magnitude, wanted none, use_dora of adapter_config.json is false",
    ),
    "rank": (
        lambda c, t: c.update(r=8),
        "model.layers.0.self_attn.q_proj: got a (4, 16), b (16, 4), magnitude None, wanted a [rank in]",
    ),
    "shape": (lambda c, t: t.update({Q0 + "lora_B.weight": torch.ones(4)}), "q_proj: got a (4, 16), b (4,)"),
    "dtype": (lambda c, t: t.update({Q0 + "lora_B.weight": torch.ones(16, 4).long()}), "q_proj: b: got torch.int64"),
    "embedding": (
        lambda c, t: t.update({"base_model.model.model.embed_tokens.lora_embedding_A": torch.ones(2)}),
        "model.embed_tokens: got tensors of it, wanted none, target_modules of adapter_config.json does not have it",
    ),
    "prefix": (lambda c, t: t.update({"q.lora_A.weight": torch.ones(2)}), "q.lora_A.weight: got an unknown tensor"),
    "untargeted": (
        lambda c, t: c.update(target_modules=["k_proj", "0.self_attn.q_proj"]),
        "model.layers.1.self_attn.q_proj: got tensors of it, wanted none",
    ),
    "unmatched": (lambda c, t: c.update(target_modules=".*k"), "model.layers.0.self_attn.q_proj: got tensors of it"),
    "module lost": (
        lambda c, t: [t.pop(Q1 + x) for x in ("lora_A.weight", "lora_B.weight")],
        "model.layers.1.self_attn.q_proj: got no tensors, wanted some, it is in target_modules",
    ),
    "empty": (lambda c, t: t.clear(), "got no tensors, wanted those of at least one module"),
    "expression": (lambda c, t: c.update(rank_pattern={"(": 3}), "rank_pattern: (: got a missing ')' at character 1"),
}


@pytest.mark.parametrize(("change", "message"), BROKEN.values(), ids=BROKEN)
def test_a_broken_adapter_says_what_is_wrong(tmp_path, change, message):
    peft.save(tmp_path, mixed(), module_name)
    edit(tmp_path, change)
    with pytest.raises(ValueError, match=re.escape(str(tmp_path)) + ".*" + re.escape(message)):
        peft.load(tmp_path, path_of, tied={})


def test_unknown_settings_that_say_nothing_are_fine(tmp_path):
    peft.save(tmp_path, mixed(), module_name)
    nothing = {"new": None, "newer": False, "newest": [], "last": {}, "text": ""}
    edit(tmp_path, lambda config, tensors: config.update(nothing))
    equal(peft.load(tmp_path, path_of), mixed())


def test_the_smallest_settings_load(tmp_path):
    peft.save(tmp_path, make(["layers.0.q"], rank=lambda path: 8), module_name)
    (tmp_path / peft.CONFIG).write_text('{"peft_type": "LORA", "target_modules": ["q_proj"]}')
    equal(peft.load(tmp_path, path_of), make(["layers.0.q"], rank=lambda path: 8))


def test_a_module_without_a_path_or_with_anothers(tmp_path):
    peft.save(tmp_path, mixed(), module_name)
    with pytest.raises(ValueError, match=r"model.layers.0.self_attn.q_proj: got no path, wanted one of its own; is"):
        peft.load(tmp_path, lambda module: None)
    with pytest.raises(ValueError, match=r"model.layers.1.self_attn.q_proj: got the path x of another module"):
        peft.load(tmp_path, lambda module: "x")


def test_missing_files_are_named(tmp_path):
    with pytest.raises(ValueError, match=r"adapter_config.json: got no such file"):
        peft.load(tmp_path, path_of)
    peft.save(tmp_path, mixed(), module_name)
    shutil.move(tmp_path / peft.WEIGHTS, tmp_path / "adapter_model.bin")
    with pytest.raises(ValueError, match=r"got adapter_model.bin, wanted adapter_model.safetensors; save it with"):
        peft.load(tmp_path, path_of)
    os.remove(tmp_path / "adapter_model.bin")
    with pytest.raises(ValueError, match=r"adapter_model.safetensors: got no such file"):
        peft.load(tmp_path, path_of)
    (tmp_path / peft.CONFIG).write_text("{")
    with pytest.raises(ValueError, match=r"adapter_config.json: got no JSON"):
        peft.load(tmp_path, path_of)
