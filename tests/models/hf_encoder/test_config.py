"""The keys of an encoder's config.json: read as transformers reads them, or refused; hostile values."""

import json
from typing import Any

import pytest
import torch
import transformers

from fquant import tree
from models import encoder, hf_encoder
from models.encoder import EncoderConfig
from tests.helpers.models.encoders import CONFIGS, MASK, TOKENS, random_params, shaken

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
    "num_labels": [2], "summary_type": ["last"], "problem_type": ["regression"], "embedding_size": [16, 32],
    "unheard_of": [1], "head_dim": [4], "attention_bias": [False], "rope_theta": [2.0],
}  # fmt: skip
SIZES = {
    "bert": {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48},
    "distilbert": {"dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 48},
}  # fmt: skip
PADDED = torch.where(MASK.bool(), TOKENS, 1)  # so that a padding token matters where it does


@pytest.mark.parametrize("kind", ["bert", "roberta", "distilbert", "electra"])
def test_each_key_is_read_or_refused(kind, tmp_path):
    """Change one key at a time: logits equal those of transformers for the same folder, or the folder is refused."""
    sizes = SIZES.get(kind, SIZES["bert"])
    name = {"bert": "Bert", "roberta": "Roberta", "distilbert": "DistilBert", "electra": "Electra"}[kind]
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


NASTY: list[Any] = [
    True, False, -1, 0, 1, 3, 2**31 - 1, 2**31, 2**63, 10**400, 1e308, -0.0, float("nan"), "", "x" * 100_000, "gelu\0",
    [], [1], [["BertModel"]], ["BertModel", "BertForMaskedLM"], {}, {"a": 1}, {"0": {"1": [None] * 100}},
]  # fmt: skip


def test_hostile_configs(tmp_path):
    """Each key with each nasty value gives a config that loads, or one short ValueError, and takes no memory."""
    cfg = CONFIGS["bert, masked_lm"]
    hf_encoder.save(tmp_path, cfg, random_params(cfg))
    raw = json.loads((tmp_path / "config.json").read_text())
    counts = {"loads": 0, "refused": 0}
    for key in [*raw, "id2label", "num_labels", "is_decoder", "hidden_act", "quantization_config"]:
        for value in NASTY:
            (tmp_path / "config.json").write_text(json.dumps(raw | {key: value}))
            try:
                hf_encoder.lazy(tmp_path)
                counts["loads"] += 1
            except ValueError as error:
                assert len(str(error)) < 2000 and "\n" not in str(error)
                counts["refused"] += 1
    assert counts["loads"] > 50 and counts["refused"] > 200


_BASE: dict[str, Any] = {
    "attention_probs_dropout_prob": 0.1, "hidden_act": "gelu", "hidden_dropout_prob": 0.1, "hidden_size": 768,
    "initializer_range": 0.02, "intermediate_size": 3072, "layer_norm_eps": 1e-12, "max_position_embeddings": 512,
    "model_type": "bert", "num_attention_heads": 12, "num_hidden_layers": 12, "pad_token_id": 0, "type_vocab_size": 2,
}  # fmt: skip
_OLD = {"gradient_checkpointing": False, "position_embedding_type": "absolute", "use_cache": True}
_POOLER: dict[str, Any] = {
    "directionality": "bidi", "pooler_fc_size": 768, "pooler_num_attention_heads": 12, "pooler_num_fc_layers": 3,
    "pooler_size_per_head": 128, "pooler_type": "first_token_transform",
}  # fmt: skip
_XLM = {"layer_norm_eps": 1e-5, "max_position_embeddings": 514, "model_type": "xlm-roberta", "type_vocab_size": 1}
PUBLISHED: dict[str, tuple[dict[str, Any], int, int]] = {  # configs, as published; parameters; longest sequence
    "bert-base-uncased": (_BASE | _OLD | {"architectures": ["BertForMaskedLM"], "vocab_size": 30522}, 109514298, 512),
    "bert-base-multilingual-cased": (
        _BASE | _POOLER | {"architectures": ["BertForMaskedLM"], "vocab_size": 119547}, 177974523, 512,
    ),
    "xlm-roberta-base": (
        _BASE | _XLM | {"architectures": ["XLMRobertaForMaskedLM"], "vocab_size": 250002, "pad_token_id": 1,
         "bos_token_id": 0, "eos_token_id": 2, "output_past": True}, 278295186, 512,
    ),
    "distilbert-base-uncased": ({
        "activation": "gelu", "architectures": ["DistilBertForMaskedLM"], "attention_dropout": 0.1, "dim": 768,
        "dropout": 0.1, "hidden_dim": 3072, "initializer_range": 0.02, "max_position_embeddings": 512,
        "model_type": "distilbert", "n_heads": 12, "n_layers": 6, "pad_token_id": 0, "qa_dropout": 0.1,
        "seq_classif_dropout": 0.2, "sinusoidal_pos_embds": False, "tie_weights_": True, "vocab_size": 30522,
    }, 66985530, 512),
}  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_configs(name):
    """Read configs of published models; their models have the parameters that transformers counts."""
    raw, count, longest = PUBLISHED[name]
    cfg = hf_encoder.from_hf(raw)
    ours = sum(t.numel() for t in tree.leaves(encoder.shapes(cfg)))
    loaded = transformers.CONFIG_MAPPING[cfg.family].from_dict(raw)
    with torch.device("meta"):
        model = getattr(transformers, raw["architectures"][0])(loaded)
    assert ours == model.num_parameters() == count and cfg.longest == longest


def test_config_alone():
    """A config without weights has the heads of its architecture."""
    for cfg in CONFIGS.values():
        if cfg != CONFIGS["bert without a pooler"]:
            assert hf_encoder.from_hf(hf_encoder.to_hf(cfg)) == cfg
    with pytest.raises(ValueError, match="pooler = False beside a head that reads it"):
        EncoderConfig(9, 8, 1, 2, 8, 9, next_sentence=True)
