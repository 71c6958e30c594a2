"""Hugging Face folders: logits equal to transformers' both ways, merged adapters, names, lazy reading."""

import dataclasses
import json
import os
from functools import partial
from typing import Any

import pytest
import safetensors.torch
import torch
import transformers

from fquant import NF4_DQ, Packed, dequantize, lora, quantize, tree
from fquant.lazy import Lazy
from models import decoder, hf
from models.hf.config import to_hf
from tests.bench import timing
from tests.helpers.hf_models import CONFIGS, GQA, random_params

TOKENS = torch.randint(0, 96, (2, 100), generator=torch.Generator().manual_seed(0))


def theirs(folder, dtype: Any = torch.float32):
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="eager")
    return model.eval()


def architecture(cfg):
    """Return the model and config classes of transformers."""
    config = transformers.CONFIG_MAPPING[cfg.family]
    return transformers.MODEL_FOR_CAUSAL_LM_MAPPING[config], config


def logits_of(model):
    with torch.no_grad():
        return model(TOKENS).logits


@pytest.mark.each_value
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


@pytest.mark.each_value
@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("name", CONFIGS)
def test_ours_reads_transformers(name, sharded, tmp_path):
    cfg = CONFIGS[name]
    config: Any = {**to_hf(cfg), "attn_implementation": "eager"}
    model_of, config_of = architecture(cfg)
    model = model_of(config_of(**config)).eval()
    generator = torch.Generator().manual_seed(3)
    for p in model.parameters():
        p.data = (0.15 if p.dim() == 2 else 0.3) * torch.randn(p.shape, generator=generator)
        p.data += p.dim() == 1 and not cfg.norm_plus_one
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


LINEARS = r"layers\.\d+\.(q|k|v|o|gate|up|down)"


@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("name", ["grouped", "qwen3, heads beside dim, tied"])
def test_merged_adapters_are_saved_dequantised(name, sharded, tmp_path):
    """Merge adapters of some packed weights; transformers then computes our logits of the merged tree."""
    cfg = CONFIGS[name]
    base = tree.map_at(rf"embed|{LINEARS}", partial(quantize, format=NF4_DQ), random_params(cfg))
    adapters = lora.init(base, r"layers\.\d+\.(q|down)", rank=4, alpha=8, key=0)
    merged = lora.merge(base, tree.map(lambda t: t + 0.05, adapters))
    hf.save(tmp_path, cfg, merged, max_shard_bytes=60_000 if sharded else 5 << 30, dequantize=torch.float32)
    assert (tmp_path / hf.INDEX).exists() == sharded
    model, ours = theirs(tmp_path), decoder.forward(merged, TOKENS, cfg)
    assert (ours - decoder.forward(base, TOKENS, cfg)).abs().max() > 0.1  # the adapters count
    torch.testing.assert_close(ours, logits_of(model), rtol=0, atol=2e-5)


def test_dequantised_in_a_dtype(tmp_path):
    """Check that only packed leaves are cast; sizes of shards and the dtype in config.json follow."""
    packed = tree.map_at(rf"embed|{LINEARS}", partial(quantize, format=NF4_DQ), random_params(GQA))
    hf.save(tmp_path, GQA, packed, max_shard_bytes=30_000, dequantize=torch.bfloat16)
    assert theirs(tmp_path, "auto").dtype is torch.bfloat16
    _, loaded = hf.load(tmp_path)
    for path, leaf in tree.items(loaded):
        wanted = tree.get(packed, path)
        assert torch.equal(leaf, dequantize(wanted, torch.bfloat16) if isinstance(wanted, Packed) else wanted), path
    index = json.loads((tmp_path / hf.INDEX).read_text())
    assert index["metadata"]["total_size"] == tree.nbytes(loaded)
    assert all((tmp_path / file).stat().st_size < 35_000 for file in index["weight_map"].values())


def test_saving_holds_few_dequantised_weights(tmp_path):
    """Save 20 packed layers: a few weights at a time are dense, so the peak is far below the dense model."""
    cfg = dataclasses.replace(GQA, num_layers=20)
    packed = tree.map_at(LINEARS, partial(quantize, format=NF4_DQ), random_params(cfg))
    extra = timing.extra_bytes(lambda: hf.save(tmp_path, cfg, packed, dequantize=torch.float32) or ())
    largest = 4 * cfg.hidden * cfg.dim
    assert largest <= extra <= 4 * largest < tree.nbytes(hf.load(tmp_path)[1]) / 20


def test_lazy_reads_no_weights(tmp_path):
    """Cut the data off: opening succeeds, and reading a leaf raises."""
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
    assert sorted(hf.tensor_name(path, cfg) for path in tree.paths(decoder.shapes(cfg))) == sorted(model.state_dict())
    modules = {name for name, _ in model.named_modules()}
    for path in tree.paths(decoder.shapes(GQA)):
        assert hf.module_name(path, cfg) in modules
        assert hf.path_of(hf.module_name(path, cfg), cfg) == path
    for name in ("model.layers.0.self_attn", "model.layers.x.self_attn.q_proj", "model.layers.0.q", "model", ""):
        assert hf.path_of(name, cfg) is None
    for path in ("layers.0.q_bias", "layers.x.q", "layers.0", "head"):
        with pytest.raises(ValueError, match="is no weight of a decoder; want one of embed, final.norm"):
            hf.module_name(path, cfg)


def test_ignorable_tensors(tmp_path):
    """Ignore rotary frequencies, and a head beside a tied embedding, which older files hold."""
    cfg = CONFIGS["full heads, tied"]
    hf.save(tmp_path, cfg, random_params(cfg))
    tensors = safetensors.torch.load_file(tmp_path / hf.SINGLE)
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(8)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    safetensors.torch.save_file(tensors, tmp_path / hf.SINGLE, {"format": "pt"})
    assert tree.paths(hf.load(tmp_path)[1]) == tree.paths(decoder.shapes(cfg))


def test_another_head_beside_a_tied_embedding(tmp_path):
    """Refuse a head that differs from the embedding to which the config ties it: transformers would use it."""
    cfg = CONFIGS["full heads, tied"]
    hf.save(tmp_path, cfg, random_params(cfg))
    tensors = safetensors.torch.load_file(tmp_path / hf.SINGLE)
    head = tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    for change in (lambda: head[95].add_(1), lambda: tensors.update({"lm_head.weight": head[:90].clone()})):
        change()
        safetensors.torch.save_file(tensors, tmp_path / hf.SINGLE, {"format": "pt"})
        _, params = hf.lazy(tmp_path)
        with pytest.raises(ValueError, match=r"lm_head.weight in .* differs from model.embed_tokens.weight, to which"):
            params.embed.read()
