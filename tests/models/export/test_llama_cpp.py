"""Logits of llama.cpp itself for our files. Its Python package is built from C++, so it is no dependency of the tests.

llama.cpp rounds the inputs of a product to the kind of its weights, and to 8 bits beside quantised ones. So f32 files
are compared closely. For other kinds the distance to the logits of the file's weights must be at most that which
quantisation made between the logits.
"""

import dataclasses

import numpy as np
import pytest
import torch

from models import decoder
from models.config import RopeScaling
from models.export import gguf
from models.export.gguf_tokenizer import SPLITTERS
from tests.helpers import tokenizers
from tests.helpers.gguf_files import back
from tests.helpers.hf_models import GQA, LLAMA3, random_params

llama_cpp = pytest.importorskip("llama_cpp", reason="pip install llama-cpp-python, which builds C++ for minutes")
pytestmark = pytest.mark.slow

WIDE = dataclasses.replace(GQA, dim=256, hidden=512, head_dim=64, vocab=320)
MODELS = {
    "llama": WIDE,
    "llama, tied, wide heads": dataclasses.replace(WIDE, tied=True, head_dim=128, num_kv_heads=1),
    "llama, linear scaling": dataclasses.replace(WIDE, rope_scaling=RopeScaling("linear", 4.0)),
    "llama, llama3 scaling": dataclasses.replace(WIDE, rope_theta=5e5, rope_scaling=LLAMA3),
    "llama, biases": dataclasses.replace(WIDE, attention_bias=True),
    "mistral": dataclasses.replace(WIDE, family="mistral"),
    "qwen2": dataclasses.replace(WIDE, family="qwen2", qkv_bias=True, tied=True),
    "qwen3": dataclasses.replace(WIDE, family="qwen3", qk_norm=True, norm_eps=1e-6),
}
TOKENS = torch.arange(60) * 7 % 320


def logits_of(path):
    model = llama_cpp.Llama(
        str(path), n_ctx=64, n_batch=64, logits_all=True, verbose=False, n_threads=1, type_k=0, type_v=0
    )  # the cache of keys and values in f32
    model.eval(TOKENS.tolist())
    return torch.from_numpy(np.array(model.scores[: len(TOKENS)]))


@pytest.mark.parametrize("kind", gguf.FILE_TYPES)
@pytest.mark.parametrize("name", MODELS)
def test_logits(tmp_path, name, kind):
    cfg, params = MODELS[name], random_params(MODELS[name])
    folder = tokenizers.write(tmp_path / "hf", tokenizers.byte_level(next(iter(SPLITTERS))), bos_token="<|end|>")
    gguf.save(tmp_path / "a.gguf", cfg, params, kind, folder)
    read, _ = back(tmp_path / "a.gguf", cfg, params)
    got = logits_of(tmp_path / "a.gguf")
    with torch.no_grad():
        wanted, exact = (decoder.forward(p, TOKENS, cfg) for p in (read, params))
    assert wanted.std() > 0.5
    error = (got - wanted).norm() / wanted.norm()
    lost = (wanted - exact).norm() / exact.norm()
    assert error < (2e-5 if kind == "f32" else 1.1 * lost)
    assert error < 0.1
