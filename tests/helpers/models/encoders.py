"""Small encoder configs of every kind that Hugging Face folders hold, and random parameters for them."""

import dataclasses
from typing import Any

import torch
import transformers

from fquant import random, tree
from models import encoder
from models.encoder import EncoderConfig

BERT = EncoderConfig(96, 32, 2, 4, 48, 40, pooler=True)
_ROBERTA = EncoderConfig(96, 32, 2, 4, 48, 44, norm_eps=1e-5, padding=1, classifier="tanh", family="roberta")
_DISTILBERT = EncoderConfig(96, 32, 2, 4, 48, 40, num_types=0, classifier="relu", family="distilbert")
_ELECTRA = EncoderConfig(96, 32, 2, 4, 48, 40, classifier="gelu", family="electra", embed_dim=24)
_TANH: dict[str, Any] = {"activation": "gelu_tanh", "head_activation": "gelu_tanh"}
CONFIGS = {
    "bert": BERT,
    "bert without a pooler": dataclasses.replace(BERT, pooler=False, activation="relu", head_activation="relu"),
    "bert, masked_lm": dataclasses.replace(BERT, pooler=False, masked_lm=True, **_TANH),
    "bert, masked_lm, untied": dataclasses.replace(BERT, pooler=False, masked_lm=True, tied=False, num_types=3),
    "bert, pretraining": dataclasses.replace(BERT, masked_lm=True, next_sentence=True),
    "bert, next sentence": dataclasses.replace(BERT, next_sentence=True, norm_eps=0.1),
    "bert, labels": dataclasses.replace(BERT, num_labels=3),
    "roberta": dataclasses.replace(_ROBERTA, pooler=True),
    "roberta, masked_lm": dataclasses.replace(_ROBERTA, masked_lm=True, activation="silu", num_types=1),
    "roberta, labels": dataclasses.replace(_ROBERTA, num_labels=2, padding=0),
    "xlm-roberta, masked_lm, untied": dataclasses.replace(_ROBERTA, family="xlm-roberta", masked_lm=True, tied=False),
    "electra": _ELECTRA,
    "electra, masked_lm": dataclasses.replace(_ELECTRA, masked_lm=True, activation="relu"),
    "electra, masked_lm, untied": dataclasses.replace(_ELECTRA, masked_lm=True, tied=False, embed_dim=None),
    "electra, discriminator": dataclasses.replace(_ELECTRA, discriminator=True, activation="gelu_tanh"),
    "electra, labels": dataclasses.replace(_ELECTRA, num_labels=3),
    "distilbert": _DISTILBERT,
    "distilbert, masked_lm": dataclasses.replace(_DISTILBERT, masked_lm=True, **_TANH),
    "distilbert, labels": dataclasses.replace(_DISTILBERT, num_labels=5),
}
GENERATOR = torch.Generator().manual_seed(0)
TOKENS = torch.randint(2, 96, (2, 36), generator=GENERATOR)
TYPES = torch.randint(0, 2, (2, 36), generator=GENERATOR)
MASK = torch.ones(2, 36, dtype=torch.long)
MASK[0, 20:], MASK[1, 30:] = 0, 0


def random_params(cfg, dtype=torch.float32):
    """Draw parameters with results of order one, and no norm or bias at its special value."""
    key = random.key(2)

    def leaf(path, like):
        x = random.normal(random.fold(key, path), tuple(like.shape))
        return ((0.2 if like.dim() == 2 else 0.3) * x + path.endswith("norm")).to(dtype)

    return tree.map_with_path(leaf, encoder.shapes(cfg))


def shaken(model):
    """Draw the parameters of a model of transformers."""
    generator = torch.Generator().manual_seed(3)
    for p in model.parameters():
        p.data = (0.2 if p.dim() == 2 else 0.3) * torch.randn(p.shape, generator=generator)
        p.data += p.dim() == 1
    return model


def theirs(folder, dtype: Any = torch.float32) -> Any:
    """Load a folder with the class that its config names."""
    config = transformers.AutoConfig.from_pretrained(folder)
    cls = getattr(transformers, (config.architectures or [""])[0])
    return cls.from_pretrained(folder, dtype=dtype, attn_implementation="eager").eval()


def their_results(model, tokens, mask=None, types=None, **options):
    """Return hidden states, and what else there is, by the names of ours."""
    given = {"attention_mask": mask, **options} | ({} if types is None else {"token_type_ids": types})
    out = model(tokens, output_hidden_states=True, **given)
    found = {"hidden": out.hidden_states[-1], "pooled": getattr(out, "pooler_output", None)}
    kind = type(model).__name__
    if kind.endswith("ForMaskedLM"):
        found["masked_lm"] = out.logits
    elif kind == "ElectraForPreTraining":
        found["discriminate"] = out.logits[..., None]
    elif kind.endswith("ForPreTraining"):
        found |= {"masked_lm": out.prediction_logits, "next_sentence": out.seq_relationship_logits}
    elif kind.endswith("ForNextSentencePrediction"):
        found["next_sentence"] = out.logits
    elif kind.endswith("ForSequenceClassification"):
        found["classify"] = out.logits
    return {name: t for name, t in found.items() if t is not None}


def our_results(cfg, params, tokens, mask=None, types=None, dtype=None):
    """Return the same results of ours."""
    x = encoder.forward(params, tokens, cfg, segments=mask, types=types, dtype=dtype)
    out = {"hidden": x}
    for name, present in (
        ("pooled", cfg.pooler), ("masked_lm", cfg.masked_lm), ("next_sentence", cfg.next_sentence),
        ("classify", cfg.num_labels), ("discriminate", cfg.discriminator),
    ):  # fmt: skip
        if present:
            result = getattr(encoder, name)(params, x, cfg)
            out[name] = result[..., None] if name == "discriminate" else result
    return out
