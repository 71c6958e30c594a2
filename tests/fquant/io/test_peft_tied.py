"""Tests of adapters of a table that the head shares, with the logits of PEFT's own model as oracle."""

import json
import re
from functools import partial

import peft as hf
import pytest
import safetensors.torch
import torch

from fquant import lora, tree
from fquant.io import peft
from models import decoder
from models import hf as folders
from tests.helpers import peft_models as models

# PEFT 0.21 asks transformers 5 for a property by its former name, and warns of models that share a table.
pytestmark = [
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore:Setting `save_embedding_layers` to `True` as embedding:UserWarning"),
    pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True` and a tied layer:UserWarning"),
]

CFG = folders.from_hf(models.llama().config.to_dict())
PATH_OF, MODULE_NAME = partial(folders.path_of, cfg=CFG), partial(folders.module_name, cfg=CFG)
TIED = {"model.embed_tokens": "lm_head"}
SAME = {  # PEFT adapts both alike
    "adapter": {"target_modules": ["embed_tokens", "q_proj"]},
    "adapter, alone": {"target_modules": ["embed_tokens"]},
    "rank and alpha": {
        "target_modules": ["embed_tokens", "q_proj"], "r": 4, "rank_pattern": {"q_proj": 3},
        "alpha_pattern": {"q_proj": 5},
    },
    "stabilised": {"target_modules": ["embed_tokens", "down_proj"], "use_rslora": True},
    "of the head": {"target_modules": ["lm_head", "q_proj"]},
    "whole": {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens"]},
    "whole, both": {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens", "lm_head"]},
}  # fmt: skip


def tied():
    return models.llama(tie_word_embeddings=True)


@pytest.mark.parametrize("options", SAME.values(), ids=SAME)
def test_logits_equal_both_ways(tmp_path, options):
    tied().save_pretrained(tmp_path / "base")
    models.adapted(tied(), ensure_weight_tying=True, **options).save_pretrained(tmp_path / "theirs")
    want = models.logits(hf.PeftModel.from_pretrained(tied(), tmp_path / "theirs").eval())
    cfg, base = folders.load(tmp_path / "base")
    assert cfg.tied and folders.tied_modules(cfg) == TIED

    adapters, whole = peft.load_all(tmp_path / "theirs", PATH_OF, tied=TIED)
    assert not {path for path in adapters.keys() | whole.keys() if "head" in path}
    changed = lora.replace_weights(base, whole)
    for params in (lora.attach(changed, adapters), lora.merge(changed, adapters)):
        torch.testing.assert_close(decoder.forward(params, models.TOKENS, cfg), want, atol=1e-5, rtol=1e-5)
    assert (decoder.forward(base, models.TOKENS, cfg) - want).abs().max() > 1e-2

    peft.save(tmp_path / "ours", adapters, MODULE_NAME, weights=whole, tied=TIED)
    again = hf.PeftModel.from_pretrained(tied(), tmp_path / "ours").eval()
    torch.testing.assert_close(models.logits(again), want, atol=1e-5, rtol=1e-5)
    second = peft.load_all(tmp_path / "ours", PATH_OF, tied=TIED)
    for first, other in zip((adapters, whole), second, strict=True):
        assert first.keys() == other.keys()
        assert all(map(torch.equal, tree.leaves(first), tree.leaves(other)))


OTHER = {  # PEFT leaves one of both as it was, or adapts it otherwise
    "table": ({"target_modules": ["embed_tokens", "q_proj"]}, "model.embed_tokens: got an adapter of it alone"),
    "head": ({"target_modules": ["lm_head", "q_proj"]}, "lm_head: got an adapter of it alone, wanted one of both"),
    "both": ({"target_modules": ["lm_head", "embed_tokens"]}, "lm_head: got another adapter than that of model.embed"),
    "whole table": (
        {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens"]},
        "base_model.model.model.embed_tokens.weight: got one whole tensor, wanted one of both",
    ),
    "whole head": (
        {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]},
        "base_model.model.lm_head.weight: got one whole tensor, wanted one of both",
    ),
    "whole both": (
        {"target_modules": ["q_proj"], "modules_to_save": ["lm_head", "embed_tokens"]},
        "base_model.model.lm_head.weight: got another tensor than base_model.model.model.embed_tokens.weight",
    ),
}


@pytest.mark.parametrize(("options", "fault"), OTHER.values(), ids=OTHER)
def test_what_peft_computes_otherwise_is_refused(tmp_path, options, fault):
    """A model whose head is the table never differs from PEFT's in silence; untied, it computes PEFT's logits."""
    models.adapted(tied(), **options).save_pretrained(tmp_path / "theirs")
    with pytest.raises(ValueError, match=re.escape(fault)):
        peft.load_all(tmp_path / "theirs", PATH_OF, tied=TIED)
    want = models.logits(hf.PeftModel.from_pretrained(tied(), tmp_path / "theirs").eval())
    untied = models.put(
        models.llama(), models.weights(tied()) | {"lm_head": models.weights(tied())["model.embed_tokens"]}
    )
    untied.save_pretrained(tmp_path / "base")
    cfg, base = folders.load(tmp_path / "base")
    adapters, whole = peft.load_all(tmp_path / "theirs", PATH_OF, tied={})
    got = decoder.forward(lora.attach(lora.replace_weights(base, whole), adapters), models.TOKENS, cfg)
    torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)


def test_a_table_needs_to_know(tmp_path):
    """Whether a head shares a table is never assumed."""
    message = re.escape("got a table, wanted to know if a head shares it; pass tied")
    for options in (SAME["adapter"], SAME["whole"]):
        models.adapted(tied(), **options).save_pretrained(tmp_path / "theirs")
        with pytest.raises(ValueError, match=message):
            peft.load_all(tmp_path / "theirs", PATH_OF)
        adapters, whole = peft.load_all(tmp_path / "theirs", PATH_OF, tied={})
        with pytest.raises(ValueError, match=message):
            peft.save(tmp_path / "ours", adapters, MODULE_NAME, weights=whole)
    assert not (tmp_path / "ours").exists()


def test_a_changed_copy_is_refused(tmp_path):
    models.adapted(tied(), ensure_weight_tying=True, **SAME["adapter"]).save_pretrained(tmp_path)
    tensors = safetensors.torch.load_file(tmp_path / peft.WEIGHTS)
    name = "base_model.model.lm_head.lora_A.weight"
    tensors[name][0, 0] += 1
    safetensors.torch.save_file(tensors, tmp_path / peft.WEIGHTS)
    with pytest.raises(ValueError, match="lm_head: got another adapter than that of model.embed_tokens"):
        peft.load_all(tmp_path, PATH_OF, tied=TIED)
    tensors = {key: t for key, t in tensors.items() if "lm_head" not in key}
    safetensors.torch.save_file(tensors, tmp_path / peft.WEIGHTS)
    with pytest.raises(ValueError, match="model.embed_tokens: got an adapter of it alone"):
        peft.load_all(tmp_path, PATH_OF, tied=TIED)
    config = json.loads((tmp_path / peft.CONFIG).read_text())
    (tmp_path / peft.CONFIG).write_text(json.dumps(config | {"ensure_weight_tying": 1}))
    with pytest.raises(ValueError, match="ensure_weight_tying: got 1, wanted true or false"):
        peft.load_all(tmp_path, PATH_OF, tied=TIED)
