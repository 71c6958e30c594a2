"""The decoder of the Llama family, Qwen3 included, as a function of its parameters.

Weights are ``[out in]``, each a Tensor, a Packed or an Adapted. A block may also be a Loadable, whose content a Comm
gathers (see ``fquant.communication``); column-parallel weights sit between ``comm.enter`` and ``comm.exit``.

A block gets every tensor as an argument. ``comm.wrap`` may differentiate the block by hand, and then a tensor that the
block closed over would silently get no gradient.
"""

from typing import Any

import torch
from einops import rearrange
from torch import Tensor

from fquant import random, tree
from fquant.communication import LOCAL, Comm, Loadable
from fquant.packed_linear import embedding, linear

from . import blocks, fused_cross_entropy
from .attention import attention
from .config import Config
from .norm import rms_norm

INIT_STD = 0.02  # of every matrix, as in LlamaForCausalLM
Dtype = torch.dtype | None


@tree.node
class Layer:
    """One decoder layer; the config says which biases and norms of queries and keys are present."""

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
    """The norm and the head behind the layers; ``head`` is absent if it is tied to the embedding."""

    norm: Any  # [dim]
    head: Any = None  # [vocab, dim]


@tree.node
class Params:
    """All parameters: the blocks ``embed``, ``layers.0`` ... and ``final``."""

    embed: Any  # [vocab, dim]
    layers: list[Any]
    final: Any


def forward(
    params: Params, tokens: Tensor, cfg: Config, comm: Comm = LOCAL, segments: Tensor | None = None, dtype: Dtype = None
) -> Tensor:
    """Compute the logits of the next token: int64 or int32 tokens ``[... t]`` -> ``[... t vocab]``.

    ``segments [... t]`` marks packed documents (see ``models.blocks``). ``dtype`` is that of the residual stream, of
    all products and of the logits; None is the embedding's. Raises ValueError for shapes, devices or a number of layers
    that do not fit, and beyond ``cfg.max_positions``; TypeError for other tokens; IndexError beyond the vocabulary.
    """
    x = _hidden(params, tokens, cfg, comm, segments, dtype)
    return comm.wrap(_final)(x, params.final, params.embed if cfg.tied else None, cfg, comm)


def loss(
    params: Params,
    tokens: Tensor,
    targets: Tensor,
    cfg: Config,
    comm: Comm = LOCAL,
    segments: Tensor | None = None,
    dtype: Dtype = None,
    count: Tensor | float | None = None,
) -> Tensor:
    """Compute ``blocks.cross_entropy(forward(...), targets, count)``, a scalar in nats, without whole logits.

    Targets are int64 or int32 ``[... t]``; those of -100 are ignored. Raises the errors of :func:`forward` and of
    ``fused_cross_entropy.cross_entropy``.
    """
    blocks.check_ids("targets", targets, "the tokens'", tokens.device, tokens.shape)
    x = _hidden(params, tokens, cfg, comm, segments, dtype)
    # The head is not recomputed, because the loss makes the gradient of x in the same pass. The larger block is asked
    # for first, so that on a mesh its collective comes first.
    tied = comm.part(params.embed, x) if cfg.tied else None
    final = comm.load(params.final) if cfg.tied else comm.part(params.final, x, "head")
    weight = final.head if tied is None else tied
    return fused_cross_entropy.cross_entropy(comm.enter(rms_norm(x, final.norm, cfg.norm_eps)), weight, targets, count)


def _hidden(params: Params, tokens: Tensor, cfg: Config, comm: Comm, segments: Tensor | None, dtype: Dtype) -> Tensor:
    """Compute the output of the last layer: tokens ``[... t]`` -> ``[... t d]``; see :func:`forward`."""
    if len(params.layers) != cfg.num_layers:
        raise ValueError(f"layers: {len(params.layers)} of them, want num_layers = {cfg.num_layers}")
    if not tokens.ndim:
        raise ValueError("tokens: shape (), want [... t]; use tokens[None]")
    is_open = not isinstance(params.embed, Loadable)  # else the Comm checks, on every rank alike
    device = tree.leaves(params.embed)[0].device if is_open else tokens.device
    blocks.check_ids("tokens", tokens, "the embedding's", device, tokens.shape)
    if (length := tokens.shape[-1]) > cfg.max_positions:
        raise ValueError(f"tokens: {length} in a sequence, want at most max_positions = {cfg.max_positions}; cut them")
    if is_open:
        blocks.check_range("tokens", tokens, cfg.vocab)
    runs = None if segments is None else blocks.runs(tokens, segments)  # [... t]
    cos, sin = blocks.rope(blocks.positions(tokens, runs), cfg)  # [t e] or [... t e]
    block = comm.wrap(_block)
    x = embedding(tokens, comm.rows(params.embed, tokens)).to(dtype=dtype)  # [... t d]
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
    return linear(comm.enter(rms_norm(x, final.norm, cfg.norm_eps)), final.head if tied is None else tied)


def shapes(cfg: Config, dtype: torch.dtype = torch.float32) -> Params:
    """Return the parameter tree of ``cfg`` with meta tensors as leaves."""
    sizes = {"vocab": cfg.vocab, "embed": cfg.dim, "ffn": cfg.hidden, "head": cfg.head_dim}
    sizes |= {"heads": cfg.num_heads * cfg.head_dim, "kv_heads": cfg.num_kv_heads * cfg.head_dim}
    empty = lambda names: torch.empty([sizes[dim] for dim in names.split()], dtype=dtype, device="meta")
    embed, *layers, final = (tree.map(empty, named) for named in dims(cfg).values())
    return Params(embed[""], [Layer(**layer) for layer in layers], Final(**final))


def dims(cfg: Config) -> dict[str, dict[str, str]]:
    """Return the named dims of every tensor: block path -> path inside the block -> names, e.g. ``"heads embed"``.

    A block is the unit of one ``comm.load``. The names are vocab, embed, heads, kv_heads, head and ffn.
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
    """Draw parameters from a key as LlamaForCausalLM does: matrices normal with std 0.02, norms 1, biases 0."""

    def leaf(path: str, like: Tensor) -> Tensor:
        if like.dim() == 2:
            return (INIT_STD * random.normal(random.fold(key, path), tuple(like.shape))).to(dtype)
        return torch.full(like.shape, 1.0 if path.endswith("norm") else 0.0, dtype=dtype, device=key.device)

    return tree.map_with_path(leaf, shapes(cfg, dtype))
