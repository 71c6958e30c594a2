"""hf: logits equal transformers' in both directions, the table of names, lazy reading (faults: test_hf_faults.py)."""

import dataclasses
import os
from typing import Any

import pytest
import safetensors.torch
import torch
import transformers

from fquant import random, tree
from fquant.lazy import Lazy
from models import decoder, hf
from models.config import Config, RopeScaling, to_hf

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
TOKENS = torch.randint(0, 96, (2, 100), generator=torch.Generator().manual_seed(0))


def random_params(cfg, dtype=torch.float32):
    """Wide enough that logits are of order one, and no norm or bias at its special value."""
    key = random.key(2)

    def leaf(path, like):
        x = random.normal(random.fold(key, path), tuple(like.shape))
        return ((0.15 if like.dim() == 2 else 0.3) * x + path.endswith("norm")).to(dtype)

    return tree.map_with_path(leaf, decoder.shapes(cfg))


def theirs(folder, dtype: Any = torch.float32):
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="eager")
    return model.eval()


def architecture(cfg):
    """The class and the configuration in transformers."""
    if cfg.qk_norm:
        return transformers.Qwen3ForCausalLM, transformers.Qwen3Config
    return transformers.LlamaForCausalLM, transformers.LlamaConfig


def logits_of(model):
    with torch.no_grad():
        return model(TOKENS).logits


@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("name", CONFIGS)
def test_transformers_reads_ours(name, sharded, tmp_path):
    cfg, params = CONFIGS[name], random_params(CONFIGS[name])
    hf.save(tmp_path, cfg, params, max_shard_bytes=60_000 if sharded else 5 << 30)
    assert (tmp_path / hf.INDEX).exists() == sharded and (tmp_path / hf.SINGLE).exists() != sharded
    model = theirs(tmp_path)
    ours, wanted = decoder.forward(params, TOKENS, cfg), logits_of(model)
    assert isinstance(model, architecture(cfg)[0])
    assert wanted.std() > 0.5
    torch.testing.assert_close(ours, wanted, rtol=0, atol=2e-5)
    again, loaded = hf.load(tmp_path)
    assert again == cfg
    assert tree.structure(loaded) == tree.structure(params)
    assert all(torch.equal(a, b) for a, b in zip(tree.leaves(loaded), tree.leaves(params), strict=True))


@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("name", CONFIGS)
def test_ours_reads_transformers(name, sharded, tmp_path):
    cfg = CONFIGS[name]
    config: Any = {**to_hf(cfg), "attn_implementation": "eager"}
    model_of, config_of = architecture(cfg)
    model = model_of(config_of(**config)).eval()
    generator = torch.Generator().manual_seed(3)
    for p in model.parameters():
        p.data = (0.15 if p.dim() == 2 else 0.3) * torch.randn(p.shape, generator=generator) + (p.dim() == 1)
    model.save_pretrained(tmp_path, max_shard_size="60KB" if sharded else "1GB")
    assert (tmp_path / hf.INDEX).exists() == sharded
    got, params = hf.load(tmp_path)
    assert got == cfg
    wanted = logits_of(model)
    assert wanted.std() > 0.5
    torch.testing.assert_close(decoder.forward(params, TOKENS, cfg), wanted, rtol=0, atol=2e-5)


def test_dtypes(tmp_path):
    params = random_params(GQA, torch.bfloat16)
    hf.save(tmp_path, GQA, params, extra={"eos_token_id": 7})
    assert theirs(tmp_path, "auto").dtype == torch.bfloat16 and theirs(tmp_path).config.eos_token_id == 7
    for dtype, wanted in ((None, torch.bfloat16), (torch.float32, torch.float32)):
        loaded = hf.load(tmp_path, dtype)[1]
        assert {leaf.dtype for leaf in tree.leaves(loaded)} == {wanted}
        assert all(torch.equal(a, b.to(wanted)) for a, b in zip(tree.leaves(loaded), tree.leaves(params), strict=True))


def test_lazy_reads_no_weights(tmp_path):
    """The data are cut off after opening: it still opens, and only reading finds out."""
    params = random_params(GQA)
    hf.save(tmp_path, GQA, params)
    cfg, lazy = hf.lazy(tmp_path)
    assert all(isinstance(leaf, Lazy) and leaf.like.is_meta for leaf in tree.leaves(lazy))
    assert [tuple(leaf.like.shape) for leaf in tree.leaves(lazy)] == [tuple(t.shape) for t in tree.leaves(params)]
    assert torch.equal(lazy.layers[1].q.read(), params.layers[1].q)
    size = (tmp_path / hf.SINGLE).stat().st_size
    os.truncate(tmp_path / hf.SINGLE, size - 8)
    with pytest.raises(ValueError, match="bytes too few"):
        for leaf in tree.leaves(lazy):
            leaf.read()


@pytest.mark.parametrize("name", ["biases", "qwen3, everything"])
def test_names(name):
    cfg = dataclasses.replace(CONFIGS[name], tied=False)
    model_of, config_of = architecture(cfg)
    model = model_of(config_of(**to_hf(cfg)))
    assert sorted(map(hf.tensor_name, tree.paths(decoder.shapes(cfg)))) == sorted(model.state_dict())
    modules = {name for name, _ in model.named_modules()}
    for path in tree.paths(decoder.shapes(GQA)):
        assert hf.module_name(path) in modules
        assert hf.path_of(hf.module_name(path)) == path
    for name in ("model.layers.0.self_attn", "model.layers.x.self_attn.q_proj", "model.layers.0.q", "model", ""):
        assert hf.path_of(name) is None
    for path in ("layers.0.q_bias", "layers.x.q", "layers.0", "head"):
        with pytest.raises(ValueError, match="is no weight of a decoder; want one of embed, final.norm"):
            hf.module_name(path)


def test_ignorable_tensors(tmp_path):
    """Older files hold rotary frequencies, and a head beside a tied embedding."""
    cfg = CONFIGS["full heads, tied"]
    hf.save(tmp_path, cfg, random_params(cfg))
    tensors = safetensors.torch.load_file(tmp_path / hf.SINGLE)
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(8)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    safetensors.torch.save_file(tensors, tmp_path / hf.SINGLE, {"format": "pt"})
    assert tree.paths(hf.load(tmp_path)[1]) == tree.paths(decoder.shapes(cfg))
