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
    "qwen3": dataclasses.replace(GQA, qk_norm=True, norm_eps=1e-6, rope_theta=1e6),
    "qwen3, heads beside dim, tied": dataclasses.replace(GQA, num_heads=6, num_kv_heads=3, qk_norm=True, tied=True),
    "qwen3, everything": dataclasses.replace(
        GQA, num_heads=5, num_kv_heads=1, attention_bias=True, tied=True, rope_scaling=LLAMA3, qk_norm=True
    ),
}


def random_params(cfg, dtype=torch.float32):
    """Draw parameters with logits of order one, and no norm or bias at its special value."""
    key = random.key(2)

    def leaf(path, like):
        x = random.normal(random.fold(key, path), tuple(like.shape))
        return ((0.15 if like.dim() == 2 else 0.3) * x + path.endswith("norm")).to(dtype)

    return tree.map_with_path(leaf, decoder.shapes(cfg))
