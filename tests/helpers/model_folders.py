"""A tiny Llama folder with the tokenizer of the shipped model."""

import shutil

import torch
from tokenizers import Tokenizer

from examples.qlora.options import SHIPPED
from fquant import random
from models import decoder, hf
from models.config import Config

TINY = Config(
    vocab=4096, dim=64, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=16, hidden=128, norm_eps=1e-5,
    rope_theta=10000.0, rope_scaling=None, max_positions=64, tied=True, attention_bias=False, mlp_bias=False,
)  # fmt: skip


def tiny_model(folder, cfg=TINY):
    eos = Tokenizer.from_file(str(SHIPPED / "tokenizer.json")).token_to_id("<|endoftext|>")
    hf.save(folder, cfg, decoder.init(cfg, random.key(0), torch.bfloat16), extra={"eos_token_id": eos})
    shutil.copy(SHIPPED / "tokenizer.json", folder)
    return folder
