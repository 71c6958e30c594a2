"""The decoder of the Llama, Mistral, Mixtral, Qwen, Gemma and Phi families as a function of its parameters.

A family is a choice of switches of ``models.config.Config``; nothing here asks for a family by name.

Weights are ``[out in]``, those of experts ``[experts out in]``, each a Tensor, a Packed or an Adapted. A block may also
be a Loadable, whose content a Comm gathers (see ``fquant.communication``); column-parallel weights sit between
``comm.enter`` and ``comm.exit``.

A block gets every tensor as an argument. ``comm.wrap`` may differentiate the block by hand, and then a tensor that the
block closed over would silently get no gradient.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor

from fquant import random, tree
from fquant.communication import LOCAL, Comm, Loadable
from fquant.kernels.reference.causal_attention import capped
from fquant.packed_linear import embedding, linear, scaled_outputs
from fquant.scan_layers import scan

from . import blocks, experts, fused_cross_entropy
from .attention import attention
from .config import Config
from .dims import dims as dims
from .norm import rms_norm, rms_norm_wide
from .rope import rope, rotate

INIT_STD = 0.02  # of every matrix, as in LlamaForCausalLM
Dtype = torch.dtype | None
Attend = Callable[..., tuple[Tensor, Any]]  # see layers


@tree.node
class Layer:
    """One decoder layer; the config says which biases, norms and fused weights are present."""

    attn_norm: Any  # [dim]
    q: Any = None  # [num_heads * head_dim, dim]
    k: Any = None  # [num_kv_heads * head_dim, dim]
    v: Any = None  # [num_kv_heads * head_dim, dim]
    o: Any = None  # [dim, num_heads * head_dim]
    mlp_norm: Any = None  # [dim]
    gate: Any = None  # [hidden, dim]
    up: Any = None  # [hidden, dim]
    down: Any = None  # [dim, hidden], of experts [experts, dim, width]
    q_bias: Any = None
    k_bias: Any = None
    v_bias: Any = None
    o_bias: Any = None
    gate_bias: Any = None
    up_bias: Any = None
    down_bias: Any = None
    q_norm: Any = None  # [head_dim]
    k_norm: Any = None  # [head_dim]
    qkv: Any = None  # the rows of q, k and v
    gate_up: Any = None  # the rows of gate and up, of experts [experts, 2 * width, dim]
    attn_post_norm: Any = None  # [dim]
    mlp_post_norm: Any = None  # [dim]
    router: Any = None  # [experts, dim]
    router_bias: Any = None
    gate_up_bias: Any = None
    sinks: Any = None  # [num_heads]


tree.add_later_fields(Layer, "qkv")


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
    params: Params, tokens: Tensor, cfg: Config, comm: Comm = LOCAL, segments: Tensor | None = None,
    dtype: Dtype = None, inputs_embeds: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Compute the logits of the next token: int64 or int32 tokens ``[... t]`` -> ``[... t vocab]``.

    ``segments [... t]`` marks packed documents (see ``models.blocks``). ``dtype`` is that of the residual stream, of
    all products and of the logits; None is the embedding's. Raises ValueError for shapes, devices or a number of layers
    that do not fit, and beyond ``cfg.longest``; TypeError for other tokens; IndexError beyond the vocabulary.

    ``inputs_embeds`` f[... p d] are vectors before the tokens, such as a soft prompt; ``t`` is then p + the tokens, of
    which there may be none, [... 0]. They enter as they are: Gemma scales the rows of its table, and not these.
    """
    return logits(_hidden(params, tokens, cfg, comm, segments, dtype, inputs_embeds), params, cfg, comm)


def logits(x: Tensor, params: Params, cfg: Config, comm: Comm = LOCAL) -> Tensor:
    """Compute the logits ``[... vocab]`` of the output ``[... d]`` of the last layer."""
    return comm.wrap(_final)(x, params.final, params.embed if cfg.tied else None, cfg, comm)


def loss(
    params: Params, tokens: Tensor, targets: Tensor, cfg: Config, comm: Comm = LOCAL, segments: Tensor | None = None,
    dtype: Dtype = None, count: Tensor | float | None = None, inputs_embeds: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Compute ``blocks.cross_entropy(forward(...), targets, count)``, a scalar in nats, without whole logits.

    Targets are int64 or int32 ``[... t]``; those of -100 are ignored. ``count`` is the number of targets of the global
    batch, by default of this micro-batch on all ranks of ``comm``. Under a vmap over targets but not over ``params`` it
    is the number of each example. Raises the errors of :func:`forward` and of ``fused_cross_entropy.cross_entropy``.
    """
    losses = token_losses(params, tokens, targets, cfg, comm, segments, dtype, inputs_embeds)
    return losses.sum() / (blocks.num_targets(targets, params, comm) if count is None else count)


def token_losses(
    params: Params, tokens: Tensor, targets: Tensor, cfg: Config, comm: Comm = LOCAL, segments: Tensor | None = None,
    dtype: Dtype = None, inputs_embeds: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Compute the negative log likelihood of each target, f32[... t] in nats, 0 of an ignored one; see :func:`loss`."""
    blocks.check_ids("targets", targets, "the tokens'", tokens.device, _places(tokens, inputs_embeds).shape)
    x, weight = normed(params, tokens, cfg, comm, segments, dtype, inputs_embeds)
    return fused_cross_entropy.token_losses(x, weight, targets, cap=cfg.final_cap)


def normed(
    params: Params, tokens: Tensor, cfg: Config, comm: Comm = LOCAL, segments: Tensor | None = None,
    dtype: Dtype = None, inputs_embeds: Tensor | None = None,
) -> tuple[Tensor, Any]:  # fmt: skip
    """Return the head's input f[... t d] and the head [vocab d], or a VocabShard of it; see :func:`forward`."""
    x = _hidden(params, tokens, cfg, comm, segments, dtype, inputs_embeds)
    # The head is not recomputed, because the loss makes the gradient of x in the same pass. The larger block is asked
    # for first, so that on a mesh its collective comes first.
    tied = comm.part(params.embed, x) if cfg.tied else None
    final = comm.load(params.final) if cfg.tied else comm.part(params.final, x, "head")
    return comm.enter(_norm(x, final.norm, cfg)), final.head if tied is None else tied


def _places(tokens: Tensor, inputs_embeds: Tensor | None) -> Tensor:
    """Return ``tokens [... t]`` with a zero in front for each of the vectors f[... p d]: ``[... p + t]``."""
    return tokens if inputs_embeds is None else F.pad(tokens, (inputs_embeds.shape[-2], 0))


def _hidden(
    params: Params, tokens: Tensor, cfg: Config, comm: Comm, segments: Tensor | None, dtype: Dtype,
    inputs_embeds: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Compute the output of the last layer: tokens ``[... t]`` -> ``[... t d]``; see :func:`forward`."""
    places = _places(tokens, inputs_embeds)
    check(params, tokens, cfg, places.shape[-1] if places.ndim else 0)
    runs = None if segments is None else blocks.runs(places, segments)  # [... t]
    positions = blocks.positions(places, runs)  # [t] or [... t]
    x, _ = layers(params, tokens, positions, [runs] * cfg.num_layers, _attend, cfg, comm, dtype, inputs_embeds)
    return x


def check(params: Params, tokens: Tensor, cfg: Config, length: int) -> None:
    """Raise the errors of :func:`forward` for parameters of another config, and for tokens in ``length`` places."""
    if len(params.layers) != cfg.num_layers:
        raise ValueError(f"layers: {len(params.layers)} of them, want num_layers = {cfg.num_layers}")
    if not tokens.ndim:
        raise ValueError("tokens: shape (), want [... t]; use tokens[None]")
    is_open = not isinstance(params.embed, Loadable)  # else the Comm checks, on every rank alike
    device = tree.leaves(params.embed)[0].device if is_open else tokens.device
    blocks.check_ids("tokens", tokens, "the embedding's", device, tokens.shape)
    if length > cfg.longest:
        raise ValueError(f"tokens: {length} in a sequence, want at most max_positions = {cfg.longest}; cut them")
    if is_open:
        blocks.check_range("tokens", tokens, cfg.vocab)


def layers(
    params: Params, tokens: Tensor, positions: Tensor, held: Sequence[Any], attend: Attend, cfg: Config, comm: Comm,
    dtype: Dtype = None, inputs_embeds: Tensor | None = None,
) -> tuple[Tensor, list[Any]]:  # fmt: skip
    """Compute the output ``[... t d]`` of the last layer, and what ``attend`` returns beside its result in each layer.

    ``attend(q, k, v, held[i], window, sinks, cfg)`` computes the attention of layer i from rotated queries and keys,
    ``[... t h e]``. Training, prefill and decode (``models.generate``) differ in this function alone. Tokens are
    ``[... t]``, positions ``[t]`` or ``[... t]``; both have been checked.
    """
    angles = rope(positions, cfg)  # cosine and sine [t e] or [... t e]
    windowed_angles = rope(positions, cfg, windowed=True) if cfg.window_rope_theta else angles
    x = embedding(tokens, comm.rows(params.embed, tokens)).to(dtype=dtype)  # [... t d]
    if cfg.scaled_embedding:
        x = x * torch.tensor(cfg.dim**0.5, dtype=x.dtype, device=x.device)
    if inputs_embeds is not None:
        x = torch.cat([inputs_embeds.to(x.dtype).expand(*x.shape[:-2], -1, -1), x], -2)
    angles, windowed_angles = ([t.to(x.dtype) for t in each] for each in (angles, windowed_angles))  # once for all
    windows = map(cfg.window_of, range(cfg.num_layers))
    each = [
        (layer, *(windowed_angles if window else angles), held[i], window)
        for i, (layer, window) in enumerate(zip(params.layers, windows, strict=True))
    ]
    return scan(comm.wrap(_block), x, each, attend, cfg, comm)


def _attend(q: Tensor, k: Tensor, v: Tensor, runs: Any, window: Any, sinks: Any, cfg: Config) -> tuple[Tensor, Any]:
    return attention(q, k, v, runs, window, cfg.attention_scale, cfg.attention_cap, sinks=sinks), ()  # keeps nothing


def _block(x: Tensor, own: tuple[Any, ...], attend: Attend, cfg: Config, comm: Comm) -> tuple[Tensor, Any]:
    layer, cos, sin, held, window = own
    layer = comm.load(layer)
    q, k, v = _heads(comm.enter(_norm(x, layer.attn_norm, cfg)), layer, cfg)
    if cfg.qk_norm:
        q, k = (_norm(h, w, cfg) for h, w in ((q, layer.q_norm), (k, layer.k_norm)))
    sinks = layer.sinks if cfg.sinks else None
    y, kept = attend(rotate(q, cos, sin), rotate(k, cos, sin), v, held, window, sinks, cfg)
    y = _row_parallel(rearrange(y, "... t h e -> ... t (h e)"), layer.o, layer.o_bias, comm)
    x = x + (_norm(y, layer.attn_post_norm, cfg) if cfg.post_norms else y)
    y = comm.enter(_norm(x, layer.mlp_norm, cfg))
    if layer.router is not None:
        y = comm.exit(experts.mixture(y, layer, cfg))
    else:
        gate, up = _gate_and_up(y, layer, cfg)
        y = blocks.swiglu(gate, up) if cfg.activation == "silu" else blocks.geglu(gate, up)
        y = _row_parallel(y, layer.down, layer.down_bias, comm)
    return x + (_norm(y, layer.mlp_post_norm, cfg) if cfg.post_norms else y), kept


def _norm(x: Tensor, weight: Tensor, cfg: Config) -> Tensor:
    if cfg.wide_norm:
        return rms_norm_wide(x, weight, cfg.norm_eps, cfg.norm_plus_one)
    return rms_norm(x, weight, cfg.norm_eps)


def _heads(y: Tensor, layer: Any, cfg: Config) -> list[Tensor]:
    """Return queries, keys and values: ``[... t d]`` -> three ``[... t h e]``."""
    if cfg.fused:
        kv = cfg.num_kv_heads * cfg.head_dim
        found = linear(y, layer.qkv).split([cfg.num_heads * cfg.head_dim, kv, kv], -1)
    else:
        weights = (layer.q, layer.q_bias), (layer.k, layer.k_bias), (layer.v, layer.v_bias)
        found = [linear(y, w, b) for w, b in weights]
    return [rearrange(t, "... t (h e) -> ... t h e", e=cfg.head_dim) for t in found]


def _gate_and_up(y: Tensor, layer: Any, cfg: Config) -> Sequence[Tensor]:
    if cfg.fused:
        return linear(y, layer.gate_up).chunk(2, -1)
    return linear(y, layer.gate, layer.gate_bias), linear(y, layer.up, layer.up_bias)


def _row_parallel(x: Tensor, weight: Any, bias: Tensor | None, comm: Comm) -> Tensor:
    y = comm.exit(linear(x, weight))  # a sum over ranks, so the bias comes after it
    return y if bias is None else y + scaled_outputs(bias, weight).to(y.dtype)


def _final(x: Tensor, final: Any, embed: Any, cfg: Config, comm: Comm) -> Tensor:
    tied = comm.load(embed) if cfg.tied else None
    final = comm.load(final)
    scores = linear(comm.enter(_norm(x, final.norm, cfg)), final.head if tied is None else tied)
    return capped(scores, cfg.final_cap)


def shapes(cfg: Config, dtype: torch.dtype = torch.float32) -> Params:
    """Return the parameter tree of ``cfg`` with meta tensors as leaves."""
    sizes = {"vocab": cfg.vocab, "embed": cfg.dim, "ffn": cfg.hidden, "head": cfg.head_dim}
    sizes |= {"heads": cfg.num_heads * cfg.head_dim, "kv_heads": cfg.num_kv_heads * cfg.head_dim}
    sizes |= {"qkv": sizes["heads"] + 2 * sizes["kv_heads"], "gate_up": 2 * cfg.hidden, "experts": cfg.num_experts}
    width = cfg.expert_hidden or cfg.hidden
    sizes |= {"expert_ffn": width, "expert_gate_up": 2 * width, "num_heads": cfg.num_heads}
    empty = lambda names: torch.empty([sizes[dim] for dim in names.split()], dtype=dtype, device="meta")
    embed, *layers, final = (tree.map(empty, named) for named in dims(cfg).values())
    return Params(embed[""], [Layer(**layer) for layer in layers], Final(**final))


def init(cfg: Config, key: Tensor, dtype: torch.dtype = torch.float32) -> Params:
    """Draw parameters from a key as LlamaForCausalLM does: matrices normal with std 0.02, norms 1, biases and sinks 0.

    Norms that multiply by one more than their weight begin at 0.
    """

    def leaf(path: str, like: Tensor) -> Tensor:
        if like.dim() > 1 and not path.endswith("bias"):
            return (INIT_STD * random.normal(random.fold(key, path), tuple(like.shape))).to(dtype)
        one = path.endswith("norm") and not cfg.norm_plus_one
        return torch.full(like.shape, 1.0 if one else 0.0, dtype=dtype, device=key.device)

    return tree.map_with_path(leaf, shapes(cfg, dtype))
