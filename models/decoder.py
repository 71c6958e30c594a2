"""The decoder of the Llama family, Qwen3 among it, as a function of its parameters.

    Params
      embed            [vocab dim]
      layers.N         attn_norm, q, k, v, o, mlp_norm, gate, up, down, and biases and the norms of queries and keys
                       where the config has them
      final            norm, and head unless it is tied to the embedding

Weights are ``[out in]``. Any of them may be a Tensor, a Packed or an Adapted; ``linear`` and ``embedding`` know. A
block may also still be closed, and ``comm.load`` opens it: that is the first thing a block does with its parameters. Of
the embedding ``comm.rows`` brings what the tokens need, and of the head ``comm.part`` what a loss needs. That is all
that this file knows of meshes. Column-parallel weights sit between ``comm.enter`` and ``comm.exit``.

What a block needs is passed to it. ``comm.wrap`` may differentiate a block by hand, and then a tensor that the block
had closed over would silently get no gradient.
"""

from __future__ import annotations

from typing import Any

import torch
from einops import rearrange
from torch import Tensor

from fquant import random, tree
from fquant.communication import LOCAL, Comm
from fquant.packed_linear import embedding, linear

from . import blocks, fused_cross_entropy
from .attention import attention
from .config import Config
from .norm import rms_norm

INIT_STD = 0.02  # of every matrix, as in LlamaForCausalLM


@tree.node
class Layer:
    """One decoder layer. Biases are absent unless ``cfg.attention_bias`` or ``cfg.mlp_bias``, the norms of queries and
    keys unless ``cfg.qk_norm``."""

    attn_norm: Any  # [dim]
    q: Any  # [num_heads * head_dim, dim]
    k: Any  # [num_kv_heads * head_dim, dim]
    v: Any  # [num_kv_heads * head_dim, dim]
    o: Any  # [dim, num_heads * head_dim]
    mlp_norm: Any  # [dim]
    gate: Any  # [hidden, dim]
    up: Any  # [hidden, dim]
    down: Any  # [dim, hidden]
    q_bias: Any = None
    k_bias: Any = None
    v_bias: Any = None
    o_bias: Any = None
    gate_bias: Any = None
    up_bias: Any = None
    down_bias: Any = None
    q_norm: Any = None  # [head_dim]
    k_norm: Any = None  # [head_dim]


@tree.node
class Final:
    """What follows the layers. ``head`` is absent when it is the embedding."""

    norm: Any  # [dim]
    head: Any = None  # [vocab, dim]


@tree.node
class Params:
    """Everything: the blocks ``embed``, ``layers.0`` ... and ``final``."""

    embed: Any  # [vocab, dim]
    layers: list[Any]
    final: Any


def forward(
    params: Params,
    tokens: Tensor,
    cfg: Config,
    comm: Comm = LOCAL,
    segments: Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Logits of the next token: int tokens ``[... t]`` -> ``[... t vocab]``.

    ``segments [... t]`` marks packed documents (see ``models.blocks``). ``dtype`` is that of the residual stream, and
    so of all products and the logits; None is the embedding's. Raises ValueError when the number of layers
    is not the config's, and when the sequence is longer than ``cfg.max_positions``.
    """
    x = hidden(params, tokens, cfg, comm, segments, dtype)
    return comm.wrap(_final)(x, params.final, params.embed if cfg.tied else None, cfg, comm)


def loss(
    params: Params,
    tokens: Tensor,
    targets: Tensor,
    cfg: Config,
    comm: Comm = LOCAL,
    segments: Tensor | None = None,
    dtype: torch.dtype | None = None,
    count: Tensor | float | None = None,
) -> Tensor:
    """``blocks.cross_entropy(forward(...), targets, count)``, a scalar in nats, without the logits ever being whole.

    Targets are int ``[... t]``, those of -100 ignored. Raises what :func:`forward` and ``head.cross_entropy`` raise.
    """
    x = hidden(params, tokens, cfg, comm, segments, dtype)
    # Not recomputed: the gradient of x is made in the same pass as the loss. The larger of two is first: on a mesh it
    # then comes ahead.
    tied = comm.part(params.embed, x) if cfg.tied else None
    final = comm.load(params.final) if cfg.tied else comm.part(params.final, x, "head")
    weight = final.head if tied is None else tied
    return fused_cross_entropy.cross_entropy(comm.enter(rms_norm(x, final.norm, cfg.norm_eps)), weight, targets, count)


def hidden(
    params: Params,
    tokens: Tensor,
    cfg: Config,
    comm: Comm = LOCAL,
    segments: Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """What comes out of the last layer: int tokens ``[... t]`` -> ``[... t d]``; see :func:`forward`."""
    if len(params.layers) != cfg.num_layers:
        raise ValueError(f"layers: {len(params.layers)} of them, want num_layers = {cfg.num_layers}")
    if tokens.shape[-1] > cfg.max_positions:
        raise ValueError(
            f"tokens: {tokens.shape[-1]} in a sequence, want at most max_positions = {cfg.max_positions}; cut them"
        )
    runs = None if segments is None else blocks.runs(tokens, segments)  # [... t]
    cos, sin = blocks.rope(blocks.positions(tokens, runs), cfg)  # [t e] or [... t e]
    block = comm.wrap(_block)
    x = embedding(tokens, comm.rows(params.embed, tokens))  # [... t d]
    x = x if dtype is None else x.to(dtype)
    for layer in params.layers:
        x = block(x, layer, cos, sin, runs, cfg, comm)
    return x


def _block(x: Tensor, layer: Any, cos: Tensor, sin: Tensor, runs: Tensor | None, cfg: Config, comm: Comm) -> Tensor:
    layer = comm.load(layer)
    y = comm.enter(rms_norm(x, layer.attn_norm, cfg.norm_eps))
    q, k, v = (
        rearrange(linear(y, w, b), "... t (h e) -> ... t h e", e=cfg.head_dim)
        for w, b in ((layer.q, layer.q_bias), (layer.k, layer.k_bias), (layer.v, layer.v_bias))
    )
    if cfg.qk_norm:
        q, k = (rms_norm(h, w, cfg.norm_eps) for h, w in ((q, layer.q_norm), (k, layer.k_norm)))
    y = attention(blocks.rotate(q, cos, sin), blocks.rotate(k, cos, sin), v, runs)
    x = x + _row_parallel(rearrange(y, "... t h e -> ... t (h e)"), layer.o, layer.o_bias, comm)
    y = comm.enter(rms_norm(x, layer.mlp_norm, cfg.norm_eps))
    y = blocks.swiglu(linear(y, layer.gate, layer.gate_bias), linear(y, layer.up, layer.up_bias))
    return x + _row_parallel(y, layer.down, layer.down_bias, comm)


def _row_parallel(x: Tensor, weight: Any, bias: Tensor | None, comm: Comm) -> Tensor:
    y = comm.exit(linear(x, weight))  # a sum over ranks, so the bias comes after it
    return y if bias is None else y + bias.to(y.dtype)


def _final(x: Tensor, final: Any, embed: Any, cfg: Config, comm: Comm) -> Tensor:
    tied = comm.load(embed) if cfg.tied else None
    final = comm.load(final)
    head = final.head if tied is None else tied
    return linear(comm.enter(rms_norm(x, final.norm, cfg.norm_eps)), head)


def shapes(cfg: Config, dtype: torch.dtype = torch.float32) -> Params:
    """The tree of ``cfg`` with meta tensors for leaves."""
    sizes = {"vocab": cfg.vocab, "embed": cfg.dim, "ffn": cfg.hidden, "head": cfg.head_dim}
    sizes |= {"heads": cfg.num_heads * cfg.head_dim, "kv_heads": cfg.num_kv_heads * cfg.head_dim}

    def block(named: dict[str, str]) -> dict[str, Tensor]:
        return {
            name: torch.empty([sizes[dim] for dim in of.split()], dtype=dtype, device="meta")
            for name, of in named.items()
        }

    named = dims(cfg)
    layers = [Layer(**block(named[f"layers.{i}"])) for i in range(cfg.num_layers)]
    return Params(block(named["embed"])[""], layers, Final(**block(named["final"])))


def dims(cfg: Config) -> dict[str, dict[str, str]]:
    """The named dims of every tensor: block path -> path inside the block -> names, e.g. ``"heads embed"``.

    A block is what one ``comm.load`` loads. The names are vocab, embed, heads, kv_heads, head and ffn.
    """
    layer = {"attn_norm": "embed", "q": "heads embed", "k": "kv_heads embed", "v": "kv_heads embed", "o": "embed heads"}
    layer |= {"mlp_norm": "embed", "gate": "ffn embed", "up": "ffn embed", "down": "embed ffn"}
    if cfg.attention_bias:
        layer |= {"q_bias": "heads", "k_bias": "kv_heads", "v_bias": "kv_heads", "o_bias": "embed"}
    if cfg.mlp_bias:
        layer |= {"gate_bias": "ffn", "up_bias": "ffn", "down_bias": "embed"}
    if cfg.qk_norm:
        layer |= {"q_norm": "head", "k_norm": "head"}  # one for all heads
    final = {"norm": "embed"} if cfg.tied else {"norm": "embed", "head": "vocab embed"}
    return {"embed": {"": "vocab embed"}, **{f"layers.{i}": dict(layer) for i in range(cfg.num_layers)}, "final": final}


def init(cfg: Config, key: Tensor, dtype: torch.dtype = torch.float32) -> Params:
    """Random parameters from a key: matrices normal with std 0.02, norms 1, biases 0, as LlamaForCausalLM starts."""

    def leaf(path: str, like: Tensor) -> Tensor:
        if like.dim() == 2:
            return (INIT_STD * random.normal(random.fold(key, path), tuple(like.shape))).to(dtype)
        return torch.full(like.shape, 1.0 if path.endswith("norm") else 0.0, dtype=dtype, device=key.device)

    return tree.map_with_path(leaf, shapes(cfg, dtype))
