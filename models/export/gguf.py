"""A decoder as a GGUF file for llama.cpp: Llama, Mistral, Qwen2 and Qwen3, in any kind of ``fquant.io.gguf_blocks``.

    gguf.save("model.gguf", cfg, params, kind="q4_k", tokenizer="checkpoints/Llama-3.2-1B")

Matrices are written in ``kind``, norms, biases and rotary factors in f32. Under ``q4_k`` the head, or the embedding
that is the head, is ``q6_k``, as llama.cpp's own quantisation does. A tied head is left out. A packed or lazy weight is
read, decoded and quantised on its own, so memory is that of one weight.

llama.cpp rotates neighbouring elements of a head in the architecture ``llama``, and halves in the others. So rows of
the query and key projections of ``llama`` are written in the order 0, e/2, 1, e/2 + 1 and so on. The scaling of Llama
3.1 is a tensor ``rope_freqs.weight`` that divides frequencies.

Names and keys: ``gguf-py/gguf/constants.py`` and ``convert_hf_to_gguf.py`` of github.com/ggml-org/llama.cpp. Other
families are refused, and so is a field of the config that the family's architecture does not express, unless it has its
default: llama.cpp knows no windows of a Mistral or Qwen.
"""

import dataclasses
import itertools
import math
from pathlib import Path
from typing import Any

import torch
from einops import rearrange
from torch import Tensor

from fquant import lazy
from fquant.device import HOST
from fquant.io import gguf, gguf_writer
from fquant.lazy import Lazy
from fquant.tree import expect

from ..config import Config
from .folder import Done
from .gguf_tokenizer import tokenizer_values
from .leaves import checked, dense, refuse_experts

MODEL = {"embed": "token_embd", "final.norm": "output_norm", "final.head": "output"}
LAYER = {
    "attn_norm": "attn_norm", "q": "attn_q", "k": "attn_k", "v": "attn_v", "o": "attn_output",
    "q_norm": "attn_q_norm", "k_norm": "attn_k_norm",
    "mlp_norm": "ffn_norm", "gate": "ffn_gate", "up": "ffn_up", "down": "ffn_down",
}  # fmt: skip
ROPE_FACTORS = "rope_freqs.weight"
HEADS = {"q4_k": "q6_k"}  # the kind of the head, where it is another
FILE_TYPES = {"f32": 0, "f16": 1, "q4_0": 2, "q8_0": 7, "q4_k": 14, "q6_k": 18, "bf16": 32}  # llama.cpp's LLAMA_FTYPE
SIZES = """vocab dim num_layers num_heads num_kv_heads head_dim hidden norm_eps rope_theta rope_scaling max_positions
tied family"""


@dataclasses.dataclass(frozen=True)
class Architecture:
    """An architecture of llama.cpp: what it expresses of a config, and if it rotates neighbours."""

    name: str
    fields: str
    scalings: tuple[str, ...] = ("linear",)
    rotates_neighbours: bool = False


LLAMA = Architecture("llama", "attention_bias mlp_bias", ("linear", "llama3"), rotates_neighbours=True)
ARCHITECTURES = {  # the family of a config -> its architecture
    "llama": LLAMA,
    "mistral": LLAMA,
    "qwen2": Architecture("qwen2", "qkv_bias"),
    "qwen3": Architecture("qwen3", "qk_norm"),
}


def save(
    path: str | Path,
    cfg: Config,
    params: Any,
    kind: str = "q4_k",
    tokenizer: str | Path | None = None,
    done: Done = lambda finished, total: None,
    resume: bool = False,
) -> None:
    """Write the decoder to ``path``; ``done(finished, total)`` is called after each tensor.

    ``tokenizer`` is the Hugging Face folder whose tokenizer goes into the file; without one the file has no vocabulary,
    and llama.cpp loads it for its tensors only. Leaves are tensors, Packed or Lazy. An interrupted call leaves a file
    ``PATH.part``, which a call with ``resume`` continues. Raises ValueError for an existing file, an unknown kind, and
    a width that is no multiple of its blocks. Raises ValueError for a tokenizer or a field of the config that a GGUF
    cannot express. Raises the errors of ``leaves.checked`` and ``fquant.io.gguf_writer.write``.
    """
    path = Path(path)
    expect(not path.exists(), f"{path}: there is such a file already; choose another")
    expect(kind in FILE_TYPES, f"kind = {kind!r}, want one of {', '.join(FILE_TYPES)}")
    values = _values(cfg, kind)
    if tokenizer is not None:
        values |= tokenizer_values(tokenizer, cfg.vocab)
    found, finished = sources(cfg, params, kind), itertools.count(1)
    gguf_writer.write(path, values, found, lambda name: done(next(finished), len(found)), resume)


def verify(path: str | Path, cfg: Config, params: Any, kind: str, count: int = 4, rows: int = 16) -> int:
    """Compare up to ``rows`` rows of ``count`` tensors of a file with their sources; return the number of rows.

    Raises ValueError that names the tensor, if the file has other bytes or other tensors.
    """
    header, found = gguf.header(path), sources(cfg, params, kind)
    ours = {name: (source.kind, source.shape) for name, source in found.items()}
    fits = ours == {name: (entry.kind, entry.shape) for name, entry in header.tensors.items()}
    expect(fits, f"{path}: got other tensors than this export writes; export again")
    compared = 0
    for name in list(found)[:: -(-len(found) // count)]:
        some, wanted = gguf_writer.sample(found[name], rows)
        same = wanted.equal(gguf.read_bytes(header, name, some))
        expect(same, f"{path}: {name} has other values than its source; export again")
        compared += len(wanted)
    return compared


def architecture(cfg: Config) -> Architecture:
    """Return llama.cpp's architecture of ``cfg``; raise ValueError for a config that it does not have."""
    refuse_experts(cfg, "GGUF files")
    if (its := ARCHITECTURES.get(cfg.family)) is None:
        known = ", ".join(ARCHITECTURES)
        raise ValueError(f"family = {cfg.family!r}, a GGUF is written for {known}; export a folder instead")
    known = f"{SIZES} {its.fields}".split()
    for field in dataclasses.fields(cfg):
        fault = f"{field.name} = {getattr(cfg, field.name)!r:.80} has no place in a GGUF of llama.cpp's {its.name}"
        expect(field.name in known or getattr(cfg, field.name) == field.default, f"{fault}; export a folder instead")
    if (scaling := cfg.rope_scaling) is not None:
        fault = f"rope_scaling: kind {scaling.kind!r}, llama.cpp's {its.name} has {' and '.join(its.scalings)}"
        expect(scaling.kind in its.scalings, f"{fault}; export a folder instead")
    return its


def tensor_name(path: str) -> str:
    """Name the tensor at ``path`` in a file: "layers.0.q_bias" -> "blk.0.attn_q.bias"."""
    weight = path.removesuffix("_bias")
    end = ".weight" if weight == path else ".bias"
    if path in MODEL:
        return MODEL[path] + end
    match weight.split("."):
        case ["layers", n, field] if n.isdecimal() and field in LAYER:
            return f"blk.{n}.{LAYER[field]}{end}"
    raise ValueError(f"{path!r} is no weight of a decoder; want one of {', '.join(MODEL)}, layers.N.{'|'.join(LAYER)}")


def sources(cfg: Config, params: Any, kind: str) -> dict[str, gguf_writer.Source]:
    """Return the tensors of the file by name; each reads its weight when it is written."""
    its = architecture(cfg)
    out: dict[str, gguf_writer.Source] = {}
    for path, leaf in checked(cfg, params).items():
        head = "embed" if cfg.tied else "final.head"
        is_matrix = len(leaf.like.shape) > 1
        its_kind = (HEADS.get(kind, kind) if path == head else kind) if is_matrix else "f32"
        if its.rotates_neighbours and path.removesuffix("_bias").endswith((".q", ".k")):
            num_heads = cfg.num_kv_heads if ".k" in path else cfg.num_heads
            leaf = lazy.map(lambda w, num_heads=num_heads: neighbours(w, num_heads), dense(leaf))
        out[tensor_name(path)] = _source(its_kind, dense(leaf))
    if cfg.rope_scaling is not None and cfg.rope_scaling.kind == "llama3":
        factors = rope_factors(cfg)
        out[ROPE_FACTORS] = gguf_writer.Source("f32", tuple(factors.shape), lambda: factors)
    return out


def neighbours(w: Tensor, num_heads: int) -> Tensor:
    """Reorder the rows of a query or key projection, or its bias, for a rotation of neighbouring elements.

    ``w`` is ``[heads * head_dim, ...]``; elements e and e + head_dim / 2 of a head become 2e and 2e + 1.
    """
    return rearrange(w, "(h half e) ... -> (h e half) ...", h=num_heads, half=2)


def rope_factors(cfg: Config) -> Tensor:
    """Return the numbers f32[head_dim / 2] by which llama.cpp divides the rotary frequencies of Llama 3.1."""
    scaling = cfg.rope_scaling
    assert scaling and scaling.low_freq_factor and scaling.high_freq_factor and scaling.original_max_position
    even = torch.arange(0, cfg.head_dim, 2, dtype=torch.float32, device=HOST)
    turns = scaling.original_max_position / (2 * math.pi * cfg.rope_theta ** (even / cfg.head_dim))
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    blend = ((turns - low) / (high - low)).clamp(0, 1)
    return 1 / ((1 - blend) / scaling.factor + blend)


def _source(kind: str, leaf: Lazy) -> gguf_writer.Source:
    return gguf_writer.Source(kind, tuple(leaf.like.shape), leaf.read)


def _values(cfg: Config, kind: str) -> dict[str, gguf_writer.Value]:
    """Return the keys of the file that describe the model."""
    name = architecture(cfg).name
    values: dict[str, gguf_writer.Value] = {
        "context_length": cfg.max_positions, "embedding_length": cfg.dim, "block_count": cfg.num_layers,
        "feed_forward_length": cfg.hidden, "attention.head_count": cfg.num_heads,
        "attention.head_count_kv": cfg.num_kv_heads, "attention.layer_norm_rms_epsilon": cfg.norm_eps,
        "attention.key_length": cfg.head_dim, "attention.value_length": cfg.head_dim,
        "rope.freq_base": float(cfg.rope_theta), "rope.dimension_count": cfg.head_dim, "vocab_size": cfg.vocab,
    }  # fmt: skip
    if cfg.rope_scaling is not None and cfg.rope_scaling.kind == "linear":
        values |= {"rope.scaling.type": "linear", "rope.scaling.factor": float(cfg.rope_scaling.factor)}
    general: dict[str, gguf_writer.Value] = {"architecture": name, "type": "model", "file_type": FILE_TYPES[kind]}
    if kind.startswith("q"):
        general["quantization_version"] = 2  # of ggml's block formats
    return {f"general.{key}": item for key, item in general.items()} | {
        f"{name}.{key}": item for key, item in values.items()
    }
