"""Small decoder configs of every kind that Hugging Face folders hold, and random parameters for them."""

import dataclasses

import torch

from fquant import random, tree
from models import decoder
from models.config import Config, RopeScaling

GQA = Config(96, 64, 2, 4, 2, 16, 96, norm_eps=1e-5, rope_theta=1e4, max_positions=128)
LLAMA3 = RopeScaling("llama3", 8.0, 1.0, 4.0, 32)
CONFIGS = {
    "grouped": GQA,
    "one key head": dataclasses.replace(GQA, num_kv_heads=1, norm_eps=1e-6),
    "full heads, tied": dataclasses.replace(GQA, num_kv_heads=4, tied=True),
    "llama3 scaling": dataclasses.replace(GQA, rope_theta=5e5, rope_scaling=LLAMA3),
    "linear scaling": dataclasses.replace(GQA, rope_scaling=RopeScaling("linear", 4.0)),
    "biases": dataclasses.replace(GQA, attention_bias=True, mlp_bias=True),
    "wide heads, tied": dataclasses.replace(GQA, head_dim=32, tied=True, num_layers=3),
    "everything": dataclasses.replace(
        GQA, head_dim=8, num_kv_heads=1, attention_bias=True, mlp_bias=True, tied=True, rope_scaling=LLAMA3
    ),
}
_QWEN3 = dataclasses.replace(GQA, qk_norm=True, family="qwen3", norm_eps=1e-6)
_GEMMA2 = dataclasses.replace(
    GQA, family="gemma2", activation="gelu_tanh", wide_norm=True, norm_plus_one=True, post_norms=True,
    scaled_embedding=True, window=20, full_layers=(1,), attention_cap=5.0, final_cap=3.0, attention_scale=24**-0.5,
    tied=True, norm_eps=1e-6,
)  # fmt: skip
_GEMMA3 = dataclasses.replace(
    _GEMMA2, family="gemma3_text", qk_norm=True, attention_cap=None, final_cap=None, window_rope_theta=1e3,
    rope_theta=1e6, num_layers=3, full_layers=(2,), attention_scale=None,
)  # fmt: skip
_PHI3 = dataclasses.replace(GQA, family="phi3", fused=True)
_MIXTRAL = dataclasses.replace(
    GQA, family="mixtral", num_experts=5, experts_per_token=2, routing="renormalised_wide", rope_theta=1e6
)
_QWEN3_MOE = dataclasses.replace(
    GQA, family="qwen3_moe", qk_norm=True, num_experts=6, experts_per_token=3, expert_hidden=40, norm_eps=1e-6
)
_DIVISORS = tuple(1 + 0.3 * i for i in range(8)), tuple(2 + 0.7 * i for i in range(8))
_LONG = RopeScaling("longrope", 2.0, original_max_position=64, short_factor=_DIVISORS[0], long_factor=_DIVISORS[1])
_YARN = RopeScaling("yarn", 8.0, original_max_position=32)
_YARN_OPTIONS = dataclasses.replace(
    _YARN, beta_fast=16.0, beta_slow=2.0, truncate=False, mscale=0.7, mscale_all_dim=1.3
)
CONFIGS |= {
    "dynamic scaling": dataclasses.replace(GQA, rope_scaling=RopeScaling("dynamic", 4.0), max_positions=60),
    "yarn scaling": dataclasses.replace(GQA, rope_scaling=_YARN),
    "yarn scaling, options": dataclasses.replace(GQA, rope_theta=1e6, rope_scaling=_YARN_OPTIONS),
    "yarn scaling, factor": dataclasses.replace(GQA, rope_scaling=dataclasses.replace(_YARN, attention_factor=1.2)),
    "mistral": dataclasses.replace(GQA, family="mistral", window=24, head_dim=8),
    "mistral without a window": dataclasses.replace(GQA, family="mistral", tied=True),
    "qwen2": dataclasses.replace(GQA, family="qwen2", qkv_bias=True),
    "qwen2, windows": dataclasses.replace(GQA, family="qwen2", qkv_bias=True, window=16, full_layers=(0,), tied=True),
    "qwen3": dataclasses.replace(_QWEN3, rope_theta=1e6),
    "qwen3, windows": dataclasses.replace(_QWEN3, window=16, num_layers=3, full_layers=(1,)),
    "qwen3, heads beside dim, tied": dataclasses.replace(_QWEN3, num_heads=6, num_kv_heads=3, tied=True),
    "qwen3, everything": dataclasses.replace(
        _QWEN3, num_heads=5, num_kv_heads=1, attention_bias=True, tied=True, rope_scaling=LLAMA3
    ),
    "gemma2": _GEMMA2,
    "gemma2, no caps": dataclasses.replace(
        _GEMMA2, attention_cap=None, final_cap=None, tied=False, attention_bias=True
    ),
    "gemma3": _GEMMA3,
    "gemma3, scaled, capped": dataclasses.replace(
        _GEMMA3, rope_scaling=RopeScaling("linear", 8.0), final_cap=2.0, tied=False, attention_scale=40**-0.5
    ),
    "mixtral": _MIXTRAL,
    "mixtral, window, one expert": dataclasses.replace(_MIXTRAL, window=20, experts_per_token=1, tied=True),
    "qwen3_moe": _QWEN3_MOE,
    "qwen3_moe, dense layers, windows": dataclasses.replace(
        _QWEN3_MOE, num_layers=3, dense_layers=(1,), routing="softmax", window=20, attention_bias=True
    ),
    "gpt_oss": dataclasses.replace(
        GQA,
        family="gpt_oss",
        num_layers=3,
        attention_bias=True,
        sinks=True,
        wide_norm=True,
        num_experts=5,
        experts_per_token=2,
        routing="softmax_of_chosen",
        expert_bias=True,
        interleaved=True,
        swiglu_limit=0.7,
        window=20,
        full_layers=(1,),
    ),
    "phi3": _PHI3,
    "phi3, part of the head, window": dataclasses.replace(_PHI3, rotary_dim=8, window=30, num_kv_heads=1, tied=True),
    "phi3, longrope": dataclasses.replace(_PHI3, rope_scaling=_LONG, max_positions=128),
    "phi3, longrope, short": dataclasses.replace(
        _PHI3, rope_scaling=dataclasses.replace(_LONG, original_max_position=110, attention_factor=1.3)
    ),
}


def random_params(cfg, dtype=torch.float32):
    """Draw parameters with logits of order one, and no norm or bias at its special value."""
    key, one = random.key(2), not cfg.norm_plus_one

    def leaf(path, like):
        x = random.normal(random.fold(key, path), tuple(like.shape))
        return ((0.15 if like.dim() > 1 else 0.3) * x + (path.endswith("norm") and one)).to(dtype)

    return tree.map_with_path(leaf, decoder.shapes(cfg))
