"""Folders of encoders against transformers both ways, every key of a config that matters, and faults by name."""

import dataclasses
import json
from typing import Any

import pytest
import safetensors.torch
import torch
import transformers

from fquant import NF4, quantize, tree
from models import encoder, hf_encoder
from models.encoder import EncoderConfig
from tests.helpers.models.encoders import BERT, CONFIGS, MASK, TOKENS, TYPES, our_results, random_params, their_results
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
    config: Any = cls.config_class(**raw, attn_implementation="eager")
    model = shaken(cls(config, **options).eval())
    model.save_pretrained(tmp_path)
    got, params = hf_encoder.load(tmp_path)
    assert got == cfg
    assert_equal(cfg, params, model)


def shaken(model):
    generator = torch.Generator().manual_seed(3)
    for p in model.parameters():
        p.data = (0.2 if p.dim() == 2 else 0.3) * torch.randn(p.shape, generator=generator)
        p.data += p.dim() == 1
    return model


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
    from models.hf_encoder.names import module_name, path_of

    for cfg in CONFIGS.values():
        for path in tree.paths(encoder.shapes(cfg)):
            weight = path.removesuffix("_bias")
            if weight != "heads.decoder":
                assert path_of(module_name(weight, cfg), cfg) == weight
        assert path_of("encoder.layer.x.y", cfg) is None


# --- every key: read as transformers reads it, or refused -------------------------------------------------------------

ACTS = ["gelu_new", "gelu_fast", "gelu_python", "gelu_pytorch_tanh", "gelu_python_tanh", "gelu_accurate", "relu"]
ACTS += [
    "silu",
    "swish",
    "quick_gelu",
    "gelu_10",
    "mish",
    "tanh",
    "linear",
    "relu2",
    "hardswish",
    "laplace",
    "nonsense",
]
KEYS: dict[str, list[Any]] = {
    "hidden_act": [*ACTS, None], "activation": [*ACTS, None], "layer_norm_eps": [0.1, None], "type_vocab_size": [3, 1],
    "tie_word_embeddings": [False, True, None], "pad_token_id": [5, 0, None], "max_position_embeddings": [50, 8],
    "is_decoder": [True, False], "add_cross_attention": [True], "is_encoder_decoder": [True],
    "position_embedding_type": ["absolute", "relative_key"], "pruned_heads": [{"0": [1]}],
    "hidden_dropout_prob": [0.5], "attention_probs_dropout_prob": [0.5], "classifier_dropout": [0.5, None],
    "dropout": [0.5], "attention_dropout": [0.5], "qa_dropout": [0.5], "seq_classif_dropout": [0.5],
    "sinusoidal_pos_embds": [True], "gradient_checkpointing": [False], "initializer_range": [3.0], "use_cache": [False],
    "chunk_size_feed_forward": [6], "bos_token_id": [5], "eos_token_id": [5], "torch_dtype": ["float32"],
    "directionality": ["bidi"], "pooler_type": ["first"], "output_past": [True], "transformers_version": ["4.1.0"],
    "num_labels": [2], "problem_type": ["regression"], "embedding_size": [16], "unheard_of": [1], "head_dim": [4],
    "attention_bias": [False], "rope_theta": [2.0],
}  # fmt: skip
SIZES = {
    "bert": {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48},
    "distilbert": {"dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 48},
}  # fmt: skip
PADDED = torch.where(MASK.bool(), TOKENS, 1)  # so that a padding token matters where it does


@pytest.mark.parametrize("kind", ["bert", "roberta", "distilbert"])
def test_each_key_is_read_or_refused(kind, tmp_path):
    """Change one key at a time: logits equal those of transformers for the same folder, or the folder is refused."""
    sizes = SIZES.get(kind, SIZES["bert"])
    name = {"bert": "Bert", "roberta": "Roberta", "distilbert": "DistilBert"}[kind]
    base = {"architectures": [f"{name}ForMaskedLM"], "model_type": kind, "vocab_size": 96, **sizes}
    base |= {"max_position_embeddings": 44}
    outcomes = {}
    for key, values in {"": [None], **KEYS}.items():
        for i, value in enumerate(values):
            folder = tmp_path / f"{key}-{i}"
            folder.mkdir()
            outcomes[key, str(value)] = outcome(folder, {k: v for k, v in {**base, key: value}.items() if k})
    assert outcomes["", "None"] == "equal"
    assert not {at: found for at, found in outcomes.items() if found not in ("equal", "refused", "refused by both")}
    read = {at for at, found in outcomes.items() if found == "equal"}
    key = "activation" if kind == "distilbert" else "hidden_act"
    assert {(key, act) for act in ACTS[:9]} <= read and len(read) > 30
    assert outcomes[key, "quick_gelu"] == outcomes["unheard_of", "1"] == outcomes["is_decoder", "True"] == "refused"


def outcome(folder, config):
    """Return "equal", "refused" or a difference, for a folder with the config and random weights of its model."""
    (folder / "config.json").write_text(json.dumps(config))
    fault: Any = None
    try:
        loaded = transformers.AutoConfig.from_pretrained(folder)
        model = transformers.AutoModelForMaskedLM.from_config(loaded, attn_implementation="eager").eval()
        wanted = None
        shaken(model).save_pretrained(folder)
        (folder / "config.json").write_text(json.dumps(config))
        with torch.no_grad():
            wanted = model(PADDED, attention_mask=MASK).logits[MASK.bool()]
    except Exception as error:
        wanted, fault = None, error
    try:
        cfg, params = hf_encoder.load(folder)
        got = encoder.masked_lm(params, encoder.forward(params, PADDED, cfg, segments=MASK), cfg)[MASK.bool()]
    except ValueError:
        return "refused" if wanted is not None else "refused by both"
    if wanted is None:
        return f"only transformers refuses: {fault}"
    return "equal" if (got - wanted).abs().max() < 2e-5 else f"off by {(got - wanted).abs().max():.1e}"


def test_config_alone():
    """A config without weights has the heads of its architecture."""
    for cfg in CONFIGS.values():
        if cfg != CONFIGS["bert without a pooler"]:
            assert hf_encoder.from_hf(hf_encoder.to_hf(cfg)) == cfg
    with pytest.raises(ValueError, match="pooler = False beside a head that reads it"):
        EncoderConfig(9, 8, 1, 2, 8, 9, next_sentence=True)
