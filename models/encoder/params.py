"""The parameters of an encoder: their tree, shapes, named dims and initial values."""

from typing import Any

import torch
from torch import Tensor

from fquant import random, tree

from .config import EncoderConfig

INIT_STD = 0.02  # of every matrix, as in BertForMaskedLM


@tree.node
class EncoderEmbeddings:
    """The tables that are added, and the norm of their sum."""

    tokens: Any  # [vocab, embed_dim]
    positions: Any  # [max_positions, embed_dim]
    norm: Any  # [embed_dim]
    norm_bias: Any
    types: Any = None  # [num_types, embed_dim]
    project: Any = None  # [dim, embed_dim], if these differ
    project_bias: Any = None


@tree.node
class EncoderLayer:
    """One encoder layer."""

    q: Any  # [dim, dim]
    q_bias: Any
    k: Any
    k_bias: Any
    v: Any
    v_bias: Any
    o: Any  # [dim, dim]
    o_bias: Any
    attn_norm: Any  # [dim], behind the attention
    attn_norm_bias: Any
    up: Any  # [hidden, dim]
    up_bias: Any
    down: Any  # [dim, hidden]
    down_bias: Any
    mlp_norm: Any  # [dim], behind the MLP
    mlp_norm_bias: Any


@tree.node
class EncoderHeads:
    """The layers behind the encoder that the config says it has."""

    pooler: Any = None  # [dim, dim]
    pooler_bias: Any = None
    transform: Any = None  # [embed_dim, dim], the first layer of masked_lm
    transform_bias: Any = None
    transform_norm: Any = None  # [embed_dim]
    transform_norm_bias: Any = None
    decoder: Any = None  # [vocab, embed_dim]; absent if it is tied to the embedding
    decoder_bias: Any = None
    next_sentence: Any = None  # [2, dim]
    next_sentence_bias: Any = None
    class_dense: Any = None  # [dim, dim]
    class_dense_bias: Any = None
    classifier: Any = None  # [num_labels, dim]
    classifier_bias: Any = None
    discriminator_dense: Any = None  # [dim, dim]
    discriminator_dense_bias: Any = None
    discriminator: Any = None  # [1, dim]
    discriminator_bias: Any = None


@tree.node
class EncoderParams:
    """All parameters: the blocks ``embed``, ``layers.0`` ... and, if there is any head, ``heads``."""

    embed: Any
    layers: list[Any]
    heads: Any = None


def shapes(cfg: EncoderConfig, dtype: torch.dtype = torch.float32) -> EncoderParams:
    """Return the parameter tree of ``cfg`` with meta tensors as leaves."""
    sizes = {"vocab": cfg.vocab, "embed": cfg.dim, "ffn": cfg.hidden, "heads": cfg.dim, "place": cfg.max_positions}
    sizes |= {"type": cfg.num_types, "label": cfg.num_labels, "next": 2, "one": 1}
    sizes |= {"table": cfg.embed_dim or cfg.dim}
    empty = lambda names: torch.empty([sizes[dim] for dim in names.split()], dtype=dtype, device="meta")
    made = {path: tree.map(empty, named) for path, named in dims(cfg).items()}
    layers = [EncoderLayer(**made[f"layers.{i}"]) for i in range(cfg.num_layers)]
    return EncoderParams(
        EncoderEmbeddings(**made["embed"]), layers, EncoderHeads(**made["heads"]) if "heads" in made else None
    )


def dims(cfg: EncoderConfig) -> dict[str, dict[str, str]]:
    """Return the named dims of every tensor, as ``decoder.dims`` does.

    The names are vocab, embed, heads, ffn, place, type, label, next, one, and table, the width of the embeddings.
    """
    biased = lambda **named: named | {f"{name}_bias": of.split()[0] for name, of in named.items()}
    embed = biased(norm="table") | {"tokens": "vocab table", "positions": "place table"}
    if cfg.num_types:
        embed |= {"types": "type table"}
    if cfg.embed_dim is not None:
        embed |= biased(project="embed table")
    layer = biased(q="heads embed", k="heads embed", v="heads embed", o="embed heads", attn_norm="embed")
    layer |= biased(up="ffn embed", down="embed ffn", mlp_norm="embed")
    heads = biased(pooler="embed embed") if cfg.pooler else {}
    if cfg.masked_lm:
        heads |= biased(transform="table embed", transform_norm="table") | {"decoder_bias": "vocab"}
        heads |= {} if cfg.tied else {"decoder": "vocab table"}
    if cfg.next_sentence:
        heads |= biased(next_sentence="next embed")
    if cfg.num_labels:
        heads |= biased(class_dense="embed embed") if cfg.classifier != "pooler" else {}
        heads |= biased(classifier="label embed")
    if cfg.discriminator:
        heads |= biased(discriminator_dense="embed embed", discriminator="one embed")
    out = {"embed": embed, **{f"layers.{i}": dict(layer) for i in range(cfg.num_layers)}}
    return out | {"heads": heads} if heads else out


def init(cfg: EncoderConfig, key: Tensor, dtype: torch.dtype = torch.float32) -> EncoderParams:
    """Draw parameters from a key as BertForMaskedLM does: matrices normal with std 0.02, norms 1, biases 0."""

    def leaf(path: str, like: Tensor) -> Tensor:
        if like.dim() == 2:
            return (INIT_STD * random.normal(random.fold(key, path), tuple(like.shape))).to(dtype)
        return torch.full(like.shape, 1.0 if path.endswith("norm") else 0.0, dtype=dtype, device=key.device)

    return tree.map_with_path(leaf, shapes(cfg, dtype))
