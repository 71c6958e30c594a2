"""Tests of models.export.gguf: the gguf package and transformers read our files; logits are those of the weights."""

import dataclasses

import gguf as package
import numpy as np
import pytest
import torch
from gguf import quants
from transformers import AutoModelForCausalLM, LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from fquant import NF4, dequantize, lora, quantize, random, tree
from fquant.io.gguf_blocks import KINDS, encode
from models import decoder, hf
from models.export import gguf
from tests.helpers.hf_models import CONFIGS, GQA, random_params
from tests.helpers.models.gguf_files import back

WIDE = dataclasses.replace(GQA, dim=256, hidden=512, head_dim=64, vocab=100)  # for blocks of 256
EXPORTED = {
    name: cfg
    for name, cfg in CONFIGS.items()
    if cfg.family in gguf.ARCHITECTURES
    and name != "qwen3, everything"
    and not cfg.window
    and (cfg.rope_scaling is None or cfg.rope_scaling.kind in ("linear", "llama3"))
}


@pytest.mark.parametrize("cfg", EXPORTED.values(), ids=EXPORTED)
def test_the_package_reads_the_weights(tmp_path, cfg):
    params = random_params(cfg)
    gguf.save(tmp_path / "a.gguf", cfg, params, "f32")
    read, found = back(tmp_path / "a.gguf", cfg, params)
    for path, w in tree.items(params):
        assert torch.equal(tree.get(read, path), w), path
    extra = {"rope_freqs.weight"} if cfg.rope_scaling and cfg.rope_scaling.kind == "llama3" else set()
    assert found.keys() == {gguf.tensor_name(path) for path in tree.paths(params)} | extra
    assert ("output.weight" in found) == (not cfg.tied)


@pytest.mark.parametrize("kind", gguf.FILE_TYPES)
def test_logits_are_those_of_the_quantised_weights(tmp_path, kind):
    params = random_params(WIDE)
    gguf.save(tmp_path / "a.gguf", WIDE, params, kind)
    read, found = back(tmp_path / "a.gguf", WIDE, params)
    its = {name: KINDS_OF[t.tensor_type] for name, t in found.items()}
    assert its.pop("output.weight") == {"q4_k": "q6_k"}.get(kind, kind)
    assert {its[name] for name, t in found.items() if name in its and len(t.shape) > 1} == {kind}
    assert {its[name] for name, t in found.items() if len(t.shape) == 1} == {"f32"}

    def quantised(path, w):
        name = gguf.tensor_name(path)
        type = found[name].tensor_type
        # Rows are whole blocks, so their order and the quantisation commute.
        rows = encode(w, KINDS_OF[type]) if w.dim() > 1 else w
        return w if w.dim() == 1 else torch.from_numpy(quants.dequantize(rows.numpy(), type))

    tokens = torch.arange(12)[None]
    with torch.no_grad():
        got, wanted = (decoder.forward(p, tokens, WIDE) for p in (read, tree.map_with_path(quantised, params)))
        exact = decoder.forward(params, tokens, WIDE)
    assert (got - wanted).abs().max() < 1e-5
    assert torch.equal(got, exact) == (kind == "f32")


KINDS_OF = {kind.code: name for name, kind in KINDS.items()}
HF = {
    "llama": GQA,
    "llama, tied": CONFIGS["full heads, tied"],
    "llama, wide heads": CONFIGS["wide heads, tied"],
    "mistral": CONFIGS["mistral without a window"],
    "qwen2": CONFIGS["qwen2"],
    # transformers ignores attention.key_length of a Qwen3 and assumes heads of 128.
    "qwen3": dataclasses.replace(CONFIGS["qwen3"], head_dim=128, num_heads=2, num_kv_heads=1),
    "qwen3, tied": dataclasses.replace(CONFIGS["qwen3"], head_dim=128, num_heads=2, num_kv_heads=2, tied=True),
}


@pytest.mark.filterwarnings("ignore")  # transformers warns of its own deprecations
@pytest.mark.parametrize("kind", ["q8_0", "q4_0", "f16"])
@pytest.mark.parametrize("cfg", HF.values(), ids=HF)
def test_transformers_has_the_same_logits(tmp_path, cfg, kind):
    params = random_params(cfg)
    gguf.save(tmp_path / "a.gguf", cfg, params, kind)
    read, _ = back(tmp_path / "a.gguf", cfg, params)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="a.gguf", dtype=torch.float32).eval()
    tokens = torch.arange(20)[None]
    with torch.no_grad():
        wanted, got = model(tokens).logits, decoder.forward(read, tokens, cfg)
    assert (got - wanted).abs().max() < 2e-5


def test_values(tmp_path):
    """Compare keys with those of the package's constants."""
    cfg = dataclasses.replace(CONFIGS["linear scaling"], rope_theta=5e5)
    gguf.save(tmp_path / "a.gguf", cfg, random_params(cfg), "q8_0")
    fields = package.GGUFReader(tmp_path / "a.gguf").fields
    keys = package.Keys
    wanted = {
        keys.General.ARCHITECTURE: "llama", keys.General.FILE_TYPE: package.LlamaFileType.MOSTLY_Q8_0,
        keys.General.QUANTIZATION_VERSION: package.GGML_QUANT_VERSION, keys.General.TYPE: "model",
        keys.LLM.CONTEXT_LENGTH: 128, keys.LLM.EMBEDDING_LENGTH: 64, keys.LLM.BLOCK_COUNT: 2,
        keys.LLM.FEED_FORWARD_LENGTH: 96, keys.LLM.VOCAB_SIZE: 96, keys.Attention.HEAD_COUNT: 4,
        keys.Attention.HEAD_COUNT_KV: 2, keys.Attention.LAYERNORM_RMS_EPS: np.float32(1e-5),
        keys.Attention.KEY_LENGTH: 16, keys.Attention.VALUE_LENGTH: 16, keys.Rope.FREQ_BASE: 5e5,
        keys.Rope.DIMENSION_COUNT: 16, keys.Rope.SCALING_TYPE: "linear", keys.Rope.SCALING_FACTOR: 4.0,
    }  # fmt: skip
    got = {key: field.contents() for key, field in fields.items() if not key.startswith("GGUF.")}
    assert got == {key.format(arch="llama"): item for key, item in wanted.items()}


def test_file_types_are_the_packages():
    names = {"f32": "ALL_F32", "q4_k": "MOSTLY_Q4_K_S"}
    for kind, code in gguf.FILE_TYPES.items():
        assert package.LlamaFileType[names.get(kind, f"MOSTLY_{kind.upper()}")] == code


def test_names_are_the_packages():
    its = {"mistral without a window": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "grouped": "llama"}
    for name, architecture in its.items():
        cfg, arch = CONFIGS[name], package.MODEL_ARCH[architecture.upper()]
        names = package.get_tensor_name_map(arch, 2)
        for path in tree.paths(decoder.shapes(cfg)):
            module, _, end = hf.tensor_name(path, cfg).rpartition(".")
            assert gguf.tensor_name(path) == f"{names.get_name(module)}.{end}"
        assert gguf.architecture(cfg).name == package.MODEL_ARCH_NAMES[arch]


def test_rope_factors_are_the_ratio_of_the_frequencies():
    """Compare with the inverse frequencies of transformers' Llama 3.1."""
    cfg = CONFIGS["llama3 scaling"]
    scaling = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32}
    sizes = {"hidden_size": 64, "num_attention_heads": 4, "max_position_embeddings": 128}
    scaled, plain = (
        LlamaRotaryEmbedding(LlamaConfig(**sizes, rope_parameters={"rope_theta": 5e5, **options})).inv_freq
        for options in ({"rope_type": "llama3", **scaling}, {"rope_type": "default"})
    )
    torch.testing.assert_close(plain / scaled, gguf.rope_factors(cfg), rtol=1e-6, atol=0)


def test_packed_and_lazy_leaves(tmp_path):
    """Packed weights are decoded and lazy ones read, one at a time."""
    cfg = dataclasses.replace(GQA, dim=64)
    params = random_params(cfg, torch.bfloat16)
    packed = tree.map_at(r"layers\.\d+\.(q|down)", lambda w: quantize(w, NF4), params)
    dense = dequantize(packed)
    hf.save(tmp_path / "hf", cfg, params)
    _, lazy = hf.lazy(tmp_path / "hf")
    lazy_packed = tree.map_at(r"layers\.\d+\.(q|down)", lambda w: quantize(w, NF4), lazy)
    counts = []
    for i, tree_in in enumerate((dense, packed, lazy_packed)):
        gguf.save(tmp_path / f"{i}.gguf", cfg, tree_in, "q8_0", done=lambda *count: counts.append(count))
    raw = [(tmp_path / f"{i}.gguf").read_bytes() for i in range(3)]
    assert raw[0] == raw[1] == raw[2]
    total = len(tree.paths(params))
    assert counts == [(i + 1, total) for i in range(total)] * 3
    assert gguf.verify(tmp_path / "0.gguf", cfg, lazy_packed, "q8_0") > 16
    with pytest.raises(ValueError, match=r"0.gguf: .* has other values than its source"):
        gguf.verify(tmp_path / "0.gguf", cfg, tree.map(lambda w: 2 * w, params), "q8_0")
    with pytest.raises(ValueError, match=r"0.gguf: got other tensors than this export writes"):
        gguf.verify(tmp_path / "0.gguf", cfg, params, "q4_0")


def test_refused(tmp_path):
    params = random_params(GQA)
    path = tmp_path / "a.gguf"
    attached = lora.attach(params, lora.init(params, r"layers\.0\.q", rank=2, alpha=4, key=random.key(0)))
    cases = [
        (GQA, params, "q5_k", "kind = 'q5_k', want one of f32"),
        (GQA, params, "q4_k", "token_embd.weight: width 64 is not a multiple of the 256 elements.* use q8_0 or q4_0"),
        (
            CONFIGS["qwen3, everything"],
            None,
            "f32",
            "attention_bias = True has no place in a GGUF of llama.cpp's qwen3",
        ),
        (CONFIGS["mistral"], None, "f32", "window = 24 has no place in a GGUF of llama.cpp's llama"),
        (CONFIGS["gemma2"], None, "f32", "family = 'gemma2', a GGUF is written for llama, mistral, qwen2, qwen3"),
        (CONFIGS["yarn scaling"], None, "f32", "kind 'yarn', llama.cpp's llama has linear and llama3"),
        (dataclasses.replace(GQA, vocab=7), params, "f32", r"embed: got shape \(96, 64\), wanted \(7, 64\)"),
        (dataclasses.replace(GQA, tied=True), params, "f32", "final.head: not a parameter of this config"),
        (GQA, dataclasses.replace(params, embed=params.embed.int()), "f32", "embed: got torch.int32, wanted floats"),
        (GQA, attached, "f32", "layers.0.q: got a Adapted, wanted a tensor or a Packed; merge adapters first"),
    ]
    for cfg, tree_in, kind, fault in cases:
        with pytest.raises((ValueError, TypeError), match=fault):
            gguf.save(path, cfg, tree_in, kind)
        assert not list(tmp_path.iterdir())
    path.write_text("")
    with pytest.raises(ValueError, match="a.gguf: there is such a file already"):
        gguf.save(path, GQA, params)


def test_a_field_that_is_not_known_is_refused():
    wider = dataclasses.make_dataclass("Wider", [("other", int, 0)], bases=(type(GQA),), frozen=True)
    assert gguf.architecture(wider(**dataclasses.asdict(GQA))).name == "llama"
    with pytest.raises(ValueError, match="other = 8 has no place in a GGUF of llama.cpp's llama"):
        gguf.architecture(wider(**dataclasses.asdict(GQA), other=8))
