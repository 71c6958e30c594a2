"""Model families against transformers: losses, gradients, bfloat16, and every key of a config that matters."""

import dataclasses
import json
from typing import Any

import pytest
import safetensors.torch
import torch
import transformers
from torch.func import grad_and_value

from fquant import NF4, jit, lora, quantize, tree
from models import decoder, hf
from models.hf import stacks
from models.hf.families import FAMILIES as KINDS
from tests.helpers.cases import slow_after
from tests.helpers.hf_models import CONFIGS, random_params

TOKENS = torch.randint(0, 96, (2, 60), generator=torch.Generator().manual_seed(0))
TARGETS = torch.cat([TOKENS[:, 1:], torch.full((2, 1), -100)], 1)
FAMILIES = ("mistral", "qwen2, windows", "qwen3, windows", "gemma2", "gemma3, scaled, capped", "phi3, longrope")
EXPERTS = (
    "mixtral",
    "mixtral, window, one expert",
    "qwen3_moe",
    "qwen3_moe, dense layers, windows",
    "gpt_oss",
)
FAMILIES += EXPERTS
WEIGHTS = r"layers\.\d+\.(q|k|v|o|gate|up|down|qkv|gate_up)"


def theirs(folder, dtype: Any = torch.float32) -> Any:
    options: Any = {"attn_implementation": "eager", "experts_implementation": "eager"}
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, **options).eval()


@pytest.mark.parametrize("name", slow_after(8, FAMILIES))
def test_loss_and_gradients(name, tmp_path):
    """Compare the loss and the gradient of every parameter; the captured function has the bits of the eager one."""
    cfg, params = CONFIGS[name], random_params(CONFIGS[name])
    hf.save(tmp_path, cfg, params)
    model = theirs(tmp_path)
    loss = model(TOKENS, labels=TARGETS.roll(1, 1)).loss  # which shifts labels itself
    loss.backward()
    verb = grad_and_value(lambda params, tokens, targets: decoder.loss(params, tokens, targets, cfg))
    grads, ours = verb(params, TOKENS, TARGETS)
    torch.testing.assert_close(ours, loss, rtol=0, atol=1e-5)
    wanted = {name: p.grad for name, p in model.named_parameters()}
    for path, got in tree.items(grads):
        want = wanted[hf.tensor_name(path, cfg)]
        want = torch.zeros_like(got) if want is None else want  # of a router of one expert
        want = want.mT if stacks.is_transposed(path, cfg) else want
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4, msg=path)
    assert all(map(torch.equal, tree.leaves(jit(verb)(params, TOKENS, TARGETS)), tree.leaves((grads, ours))))


@pytest.mark.parametrize("name", FAMILIES)
def test_bfloat16(name, tmp_path):
    """Compare with float64: our logits in bfloat16 are hardly further from it than those of transformers.

    A rounded score may choose another expert, so of mixtures the token in the middle counts.
    """
    cfg, params = CONFIGS[name], random_params(CONFIGS[name], torch.bfloat16)
    hf.save(tmp_path, cfg, params)
    with torch.no_grad():
        their_logits = theirs(tmp_path, torch.bfloat16)(TOKENS).logits
    exact = decoder.forward(tree.map(lambda t: t.double(), params), TOKENS, cfg)
    by_token = lambda logits: (logits.double() - exact).square().mean(-1)
    far = lambda logits: (by_token(logits).median() if cfg.num_experts else by_token(logits).mean()).sqrt()
    got = decoder.forward(params, TOKENS, cfg)
    assert got.dtype is torch.bfloat16 and far(their_logits) > 1e-3
    assert far(got) <= 1.2 * far(their_logits)


@pytest.mark.parametrize("name", FAMILIES)
def test_packed_with_adapters(name):
    """Packed weights and adapters train in every family; merged weights have the same logits."""
    cfg, params = CONFIGS[name], random_params(CONFIGS[name])
    base = tree.map_at(WEIGHTS, lambda w: quantize(w, NF4), params)
    adapters = tree.map(
        lambda t: t + 0.02, lora.init(base, r"layers\.\d+\.(v|qkv|down|gate_up|router)", rank=2, alpha=4, key=0)
    )
    loss = lambda adapters: decoder.loss(lora.attach(base, adapters), TOKENS, TARGETS, cfg)
    grads, before = grad_and_value(loss)(adapters)
    assert all(t.abs().max() > 0 for t in tree.leaves(grads))
    merged = decoder.loss(lora.merge(base, adapters), TOKENS, TARGETS, cfg)
    torch.testing.assert_close(merged, before, rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", FAMILIES)
def test_packed_documents(name):
    """Compute two documents in one sequence as each alone."""
    cfg = CONFIGS[name]
    if cfg.rope_scaling is not None and cfg.rope_scaling.kind == "longrope":  # whose divisors depend on the length
        cfg = dataclasses.replace(cfg, rope_scaling=dataclasses.replace(cfg.rope_scaling, original_max_position=100))
    params = random_params(cfg)
    segments = (torch.arange(60) >= 23).long().expand(2, 60)
    got = decoder.forward(params, TOKENS, cfg, segments=segments)
    wanted = [decoder.forward(params, part, cfg) for part in TOKENS.split([23, 37], 1)]
    torch.testing.assert_close(got, torch.cat(wanted, 1), rtol=0, atol=1e-5)


# --- every key: read as transformers reads it, or refused -------------------------------------------------------------

DIVISORS = {"short_factor": [1.0 + i / 4 for i in range(8)], "long_factor": [2.0 + i for i in range(8)]}
KEYS: dict[str, list[Any]] = {
    "rms_norm_eps": [0.1], "rope_theta": [50.0], "hidden_act": ["gelu"], "hidden_activation": ["silu"],
    "attention_bias": [True, False], "mlp_bias": [True], "tie_word_embeddings": [True, False, None],
    "num_key_value_heads": [4, 1, None], "head_dim": [8, None], "sliding_window": [5, None],
    "use_sliding_window": [True], "max_window_layers": [1],
    "layer_types": [["full_attention"] * 3, ["sliding_attention"] * 3],
    "sliding_window_pattern": [2], "rope_local_base_freq": [20.0], "use_bidirectional_attention": [True],
    "query_pre_attn_scalar": [10], "final_logit_softcapping": [0.5, None], "attn_logit_softcapping": [0.5, None],
    "partial_rotary_factor": [0.5], "original_max_position_embeddings": [30], "max_position_embeddings": [70],
    "attention_dropout": [0.5], "resid_pdrop": [0.5], "embd_pdrop": [0.5], "attn_pdrop": [0.5],
    "rope_scaling": [
        {"type": "linear", "factor": 3.0}, {"rope_type": "dynamic", "factor": 2.0},
        {"rope_type": "longrope", **DIVISORS},
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 20},
        {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
         "original_max_position_embeddings": 20},
    ],
    "rope_parameters": [
        {"rope_type": "linear", "factor": 3.0, "rope_theta": 99.0},
        {"full_attention": {"rope_type": "linear", "factor": 3.0, "rope_theta": 99.0},
         "sliding_attention": {"rope_type": "default", "rope_theta": 9.0}},
    ],
    "pretraining_tp": [2], "initializer_range": [3.0], "use_cache": [False], "auto_map": [{"AutoConfig": "x.Y"}],
    "transformers.js_config": [{"dtype": "q4"}], "cache_implementation": ["hybrid"], "torch_dtype": ["float32"],
    "bos_token_id": [5], "eos_token_id": [[1, 2]], "pad_token_id": [3], "_name_or_path": ["x"],
    "transformers_version": ["4.30.0"], "model_max_length": [9], "unheard_of": [1],
    "num_local_experts": [3], "num_experts": [3], "num_experts_per_tok": [1, 4], "norm_topk_prob": [True],
    "moe_intermediate_size": [24], "mlp_only_layers": [[1], None], "decoder_sparse_step": [2],
    "router_jitter_noise": [0.3],
    "output_router_logits": [True], "router_aux_loss_coef": [0.5], "swiglu_limit": [0.5], "swiglu_alpha": [3.0],
}  # fmt: skip
REFUSED = {
    "output_router_logits",
    "router_jitter_noise",
    "unheard_of",
    "attn_pdrop",
    "use_bidirectional_attention",
    "attention_dropout",
}


@pytest.mark.parametrize("kind", slow_after(4, KINDS))
def test_each_key_is_read_or_refused(kind, tmp_path):
    """Change one key at a time: logits equal those of transformers for the same folder, or the folder is refused."""
    base = {
        "architectures": [KINDS[kind].architecture], "model_type": kind, "vocab_size": 96,
        "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 16, "rms_norm_eps": 1e-6, "max_position_embeddings": 64,
        "pad_token_id": 0, "sliding_window": 9, "tie_word_embeddings": False,
    }  # fmt: skip
    if kind in ("mixtral", "qwen3_moe", "gpt_oss"):
        base |= {"num_local_experts" if kind != "qwen3_moe" else "num_experts": 4, "num_experts_per_tok": 2}
        base |= {"moe_intermediate_size": 40} if kind == "qwen3_moe" else {}
    if kind == "llama":
        del base["sliding_window"]  # which is refused, because transformers' cache follows it
    outcomes = {}
    for key, values in {"": [None], **KEYS}.items():
        for i, value in enumerate(values):
            folder = tmp_path / f"{key}-{i}"
            folder.mkdir()
            config = {k: v for k, v in {**base, key: value}.items() if k}
            outcomes[key, i] = outcome(folder, config)
    assert outcomes["", 0] == "equal"
    wrong = {at: found for at, found in outcomes.items() if found not in ("equal", "refused", "refused by both")}
    assert not wrong
    read = {key for (key, _), found in outcomes.items() if found == "equal"}
    assert not read & REFUSED and len(read) >= 18


def outcome(folder, config):
    """Return "equal", "refused" or a difference, for a folder with the config and random weights of its model."""
    (folder / "config.json").write_text(json.dumps(config))
    try:
        loaded = transformers.AutoConfig.from_pretrained(folder)
        model = transformers.AutoModelForCausalLM.from_config(
            loaded, attn_implementation="eager", experts_implementation="eager"
        ).eval()
        generator = torch.Generator().manual_seed(1)
        for p in model.parameters():
            p.data = 0.15 * torch.randn(p.shape, generator=generator) + (p.dim() == 1) * 0.5
        state = {name: t for name, t in model.state_dict().items() if name != "lm_head.weight" or not tied(model)}
        safetensors.torch.save_file(state, folder / "model.safetensors", {"format": "pt"})
        with torch.no_grad():
            wanted = model(TOKENS).logits
    except Exception as error:
        wanted, fault = None, error
    try:
        cfg, params = hf.load(folder)
        got = decoder.forward(params, TOKENS, cfg)
    except ValueError:
        return "refused" if wanted is not None else "refused by both"
    if wanted is None:
        return f"only transformers refuses: {fault}"
    return "equal" if (got - wanted).abs().max() < 2e-5 else f"off by {(got - wanted).abs().max():.1e}"


def tied(model):
    return model.lm_head.weight is model.model.embed_tokens.weight
