"""Folders of encoders against transformers both ways, adapters against peft, and faults by name."""

import dataclasses
import json
from functools import partial
from typing import Any

import peft
import pytest
import safetensors.torch
import torch
import transformers

from fquant import NF4, lora, quantize, tree
from fquant.io import peft as peft_io
from models import encoder, hf_encoder
from tests.helpers.models.encoders import (
    BERT,
    CONFIGS,
    MASK,
    TOKENS,
    TYPES,
    our_results,
    random_params,
    shaken,
    their_results,
)
from tests.helpers.models.encoders import theirs as opened


def types_for(cfg):
    return TYPES if cfg.num_types > 1 else None


def assert_equal(cfg, params, model):
    """Compare every result that both have at the tokens that the mask shows."""
    with torch.no_grad():
        wanted = their_results(model, TOKENS, MASK, types_for(cfg))
    if not cfg.pooler:
        wanted.pop("pooled", None)  # which transformers then computes with random weights
    got = our_results(cfg, params, TOKENS, MASK, types_for(cfg))
    assert wanted.keys() <= got.keys()
    for name, true in wanted.items():
        one = got[name]
        if one.ndim == 3:
            one, true = one[MASK.bool()], true[MASK.bool()]
        assert true.std() > 0.01
        torch.testing.assert_close(one, true, rtol=0, atol=2e-5, msg=name)


@pytest.mark.parametrize("name", CONFIGS)
def test_transformers_reads_ours(name, tmp_path):
    """Compare results; nothing is missing or left over there, and a second save has the same bytes."""
    cfg, params = CONFIGS[name], random_params(CONFIGS[name])
    hf_encoder.save(tmp_path / "a", cfg, params, max_shard_bytes=30_000 if "masked" in name else 5 << 30)
    model = opened(tmp_path / "a")
    _, report = type(model).from_pretrained(tmp_path / "a", output_loading_info=True)
    missing = {key for key in report["missing_keys"] if "pooler" not in key}  # which a bare encoder here may lack
    assert not missing and not report["unexpected_keys"] and not report["mismatched_keys"]
    got, loaded = hf_encoder.load(tmp_path / "a")
    assert got == cfg and tree.structure(loaded) == tree.structure(params)
    assert all(map(torch.equal, tree.leaves(loaded), tree.leaves(params)))
    assert_equal(cfg, loaded, model)
    hf_encoder.save(tmp_path / "b", got, loaded, max_shard_bytes=30_000 if "masked" in name else 5 << 30)
    files = sorted(path.name for path in (tmp_path / "a").iterdir())
    assert files == sorted(path.name for path in (tmp_path / "b").iterdir())
    assert all((tmp_path / "a" / file).read_bytes() == (tmp_path / "b" / file).read_bytes() for file in files)


@pytest.mark.parametrize("name", CONFIGS)
def test_ours_reads_transformers(name, tmp_path):
    cfg = CONFIGS[name]
    raw = hf_encoder.to_hf(cfg)
    cls: Any = getattr(transformers, raw["architectures"][0])
    options = {"add_pooling_layer": False} if cls is transformers.BertModel and not cfg.pooler else {}
    config: Any = transformers.CONFIG_MAPPING[cfg.family]
    model = shaken(cls(config(**raw, attn_implementation="eager"), **options).eval())
    model.save_pretrained(tmp_path)
    got, params = hf_encoder.load(tmp_path)
    assert got == cfg
    assert_equal(cfg, params, model)


def rewritten(folder, cfg, change, config=lambda raw: raw):
    """Save a random model, and change the tensors and the config of the folder."""
    params = random_params(cfg)
    hf_encoder.save(folder, cfg, params)
    state = change(safetensors.torch.load_file(folder / "model.safetensors"))
    safetensors.torch.save_file(state, folder / "model.safetensors", {"format": "pt"})
    raw = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config(raw)))
    return params


def old(name):
    return name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta")


PRETRAINING, MASKED = CONFIGS["bert, pretraining"], CONFIGS["bert, masked_lm"]
PLACES = {"bert.embeddings.position_ids": torch.arange(40)[None]}
DECODER, BIAS = "cls.predictions.decoder.weight", "cls.predictions.bias"
WORDS = "bert.embeddings.word_embeddings.weight"
READ: dict[str, Any] = {
    "old names of norms": (MASKED, lambda s: {old(name): t for name, t in s.items()}),
    "position_ids": (MASKED, lambda s: s | PLACES),
    "the tied matrix too": (MASKED, lambda s: s | {DECODER: s[WORDS].clone()}),
    "the bias twice": (MASKED, lambda s: s | {"cls.predictions.decoder.bias": s[BIAS].clone()}),
    "the bias under the other name": (
        MASKED, lambda s: {name.replace(BIAS, "cls.predictions.decoder.bias"): t for name, t in s.items()},
    ),
    "a prefix without a head": (BERT, lambda s: {f"bert.{name}": t for name, t in s.items()}),
}  # fmt: skip


@pytest.mark.parametrize("name", READ)
def test_other_spellings(name, tmp_path):
    """Read folders of other versions; transformers reads the same."""
    cfg, change = READ[name]
    params = rewritten(tmp_path, cfg, change)
    got, loaded = hf_encoder.load(tmp_path)
    assert got == cfg and all(map(torch.equal, tree.leaves(loaded), tree.leaves(params)))
    assert_equal(cfg, loaded, opened(tmp_path))


def test_heads_beside_the_architecture(tmp_path):
    """bert-base-uncased is a BertForMaskedLM, and its file has a pooler and the head of next sentences."""
    rewritten(tmp_path, PRETRAINING, lambda s: s, lambda raw: raw | {"architectures": ["BertForMaskedLM"]})
    cfg, params = hf_encoder.load(tmp_path)
    assert cfg == PRETRAINING
    assert_equal(cfg, params, opened(tmp_path))


WRONG: dict[str, Any] = {
    "differing tied matrix": (MASKED, lambda s: s | {DECODER: s[WORDS] + 1}, {}, f"{DECODER} .* differs from {WORDS}"),
    "both names": (MASKED, lambda s: s | {old(n): t + 0 for n, t in s.items()}, {}, "both .*LayerNorm.(beta|bias) and"),
    "missing": (MASKED, lambda s: {n: t for n, t in s.items() if n != BIAS}, {}, f"{BIAS} is missing"),
    "surplus": (MASKED, lambda s: s | {"qa_outputs.bias": torch.ones(2)}, {}, "qa_outputs.bias is not part of"),
    "shape": (MASKED, lambda s: s | {BIAS: torch.ones(3)}, {}, r"bias in .* has shape \(3,\), want \(96,\)"),
    "integers": (MASKED, lambda s: s | {BIAS: torch.ones(96).int()}, {}, "bias in .* is torch.int32, want floats"),
    "labels": (CONFIGS["bert, labels"], lambda s: s, {"id2label": {"0": "x"}}, r"classifier.* shape \(3,.*want \(1,"),
    "architecture": (MASKED, lambda s: s, {"architectures": ["BertForQuestionAnswering"]}, "architectures = .*want"),
    "other family": (MASKED, lambda s: s, {"model_type": "modernbert"}, "model_type = 'modernbert', want 'bert' or"),
    "quantised": (MASKED, lambda s: s, {"quantization_config": {}}, "already quantised"),
    "layers": (MASKED, lambda s: s, {"num_hidden_layers": 2**31}, "num_hidden_layers = 2147483648, want an integer"),
    "number of labels": (MASKED, lambda s: s, {"num_labels": 3, "id2label": {"0": "x"}}, "num_labels = 3, but"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_faults(name, tmp_path):
    cfg, change, keys, message = WRONG[name]
    rewritten(tmp_path, cfg, change, lambda raw: raw | keys)
    with pytest.raises(ValueError, match=message):
        hf_encoder.load(tmp_path)


def test_what_cannot_be_saved(tmp_path):
    params = random_params(BERT)
    with pytest.raises(ValueError, match="padding = 3, but a Bert has None; set family"):
        hf_encoder.save(tmp_path, dataclasses.replace(BERT, padding=3), params)
    with pytest.raises(ValueError, match="extra keys hidden_act change the model"):
        hf_encoder.save(tmp_path, BERT, params, extra={"hidden_act": "relu"})
    packed = tree.map_at(r"layers\.\d+\.q", lambda w: quantize(torch.cat([w, w], 1), NF4), params)
    with pytest.raises(TypeError, match=r"layers.0.q is packed \(nf4\), want a float tensor"):
        hf_encoder.save(tmp_path, BERT, packed)
    assert not list(tmp_path.iterdir())


def test_module_names_invert():
    for cfg in CONFIGS.values():
        for path in tree.paths(encoder.shapes(cfg)):
            weight = path.removesuffix("_bias")
            if weight != "heads.decoder":
                assert hf_encoder.path_of(hf_encoder.module_name(weight, cfg), cfg) == weight
        assert hf_encoder.path_of("encoder.layer.x.y", cfg) is None


ADAPTED = [
    "bert, masked_lm", "bert, labels", "roberta, masked_lm", "distilbert, masked_lm", "distilbert, labels",
    "electra, discriminator", "electra, masked_lm",
]  # fmt: skip


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
@pytest.mark.filterwarnings("ignore:Setting `save_embedding_layers` to `True` as embedding:UserWarning")
@pytest.mark.parametrize("name", ADAPTED)
def test_adapters_for_peft(name, tmp_path):
    """peft loads adapters that were saved by the names of the folder, and computes the same."""
    cfg, params = CONFIGS[name], random_params(CONFIGS[name])
    adapters = lora.init(params, r"embed\.(tokens|positions)|layers\.\d+\.(q|v|up|down)", rank=2, alpha=4, key=0)
    adapters = tree.map(lambda t: t + 0.05, adapters)
    hf_encoder.save(tmp_path / "base", cfg, params)
    names, paths = (partial(f, cfg=cfg) for f in (hf_encoder.module_name, hf_encoder.path_of))
    more = {"tied": hf_encoder.tied_modules(cfg), "embeddings": ("embed.tokens", "embed.positions"), "task_type": None}
    peft_io.save(tmp_path / "adapter", adapters, names, base_model=str(tmp_path / "base"), **more)
    model = peft.PeftModel.from_pretrained(opened(tmp_path / "base"), str(tmp_path / "adapter")).eval()
    assert_equal(cfg, lora.attach(params, adapters), model.get_base_model())
    again = peft_io.load(tmp_path / "adapter", paths, more["tied"])
    assert again.keys() == adapters.keys()
    assert all(torch.equal(tree.get(again[path], name), t) for path, x in adapters.items() for name, t in tree.items(x))
