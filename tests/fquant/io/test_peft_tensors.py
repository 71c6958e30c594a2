"""Tests of fquant.io.peft_tensors: every kind of tensor and setting, with the logits of PEFT's own model as oracle."""

import peft as hf
import pytest
import torch

from fquant import lora
from fquant.io import peft
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
    "of a vision model": (models.llama, {"target_modules": r"^(?!.*visual).*(?:layers|h)\.\d+\..*(?:q_proj|up_proj).*"}),
    "all-linear": (models.llama, {"target_modules": "all-linear"}),
    "ranks": (
        models.llama,
        {
            "r": 4, "lora_alpha": 6, "target_modules": ["q_proj", "v_proj", "k_proj", "up_proj"],
            "rank_pattern": {r"layers\.0\.self_attn\.(q|k)_proj": 2, "v_proj": 5, r"^model.*\.1\..*k_proj": 3},
            "alpha_pattern": {"1.self_attn.q_proj": 2.5, r".*\d+\.self_attn.q_proj": 7},
        },
    ),
    "layers": (models.llama, {"target_modules": ["q_proj", "model.layers.0.self_attn.k_proj"], "layers_to_transform": 1}),
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
    adapters, whole = peft.load_all(tmp_path / "theirs", str)
    base = models.weights(make())
    merged = lora.merge(lora.replace_weights(base, whole), adapters)
    torch.testing.assert_close(models.logits(models.put(make(), merged)), want, atol=1e-5, rtol=1e-5)
    assert (models.logits(make()) - want).abs().max() > 1e-2  # the adapter does something

    tables = [path for path in adapters if path.endswith(("embed_tokens", "wte"))]
    peft.save(tmp_path / "ours", adapters, str, embeddings=tables, weights=whole)
    again = hf.PeftModel.from_pretrained(make(), tmp_path / "ours").eval()
    torch.testing.assert_close(models.logits(again), want, atol=1e-5, rtol=1e-5)
    second, whole_again = peft.load_all(tmp_path / "ours", str)
    assert second.keys() == adapters.keys() and whole_again.keys() == whole.keys()
    for path, x in adapters.items():
        y = second[path]
        assert torch.equal(x.a, y.a) and torch.equal(x.b, y.b)
        assert (x.alpha, x.rank_stabilised, x.dropout) == (y.alpha, y.rank_stabilised, y.dropout)
    assert all(torch.equal(x, whole_again[path]) for path, x in whole.items())
    if whole:
        with pytest.raises(ValueError, match="got a whole tensor, wanted adapters alone; call load_all and lora.rep"):
            peft.load(tmp_path / "theirs", str)
