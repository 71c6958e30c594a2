"""The encoder up to its hidden states: checks, positions, embeddings and layers."""

from typing import Any

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor

from fquant import tree
from fquant.communication import LOCAL, Comm, Loadable
from fquant.packed_linear import embedding, linear

from .. import blocks
from ..attention import attention
from ..norm import layer_norm
from .config import ACTIVATIONS, EncoderConfig
from .params import EncoderParams

Dtype = torch.dtype | None


def forward(
    params: EncoderParams, tokens: Tensor, cfg: EncoderConfig, comm: Comm = LOCAL, segments: Tensor | None = None,
    types: Tensor | None = None, dtype: Dtype = None,
) -> Tensor:  # fmt: skip
    """Compute the hidden states of the last layer: int64 or int32 tokens ``[... t]`` -> ``[... t d]``.

    ``segments [... t]`` are integers that number documents, and ``types [... t]`` are token types, 0 by default.
    ``dtype`` is that of all products; None is the embedding's. Raises ValueError for shapes, devices or a number of
    layers that do not fit, and beyond ``cfg.longest``. Raises TypeError for other integers, IndexError beyond a table.
    """
    if len(params.layers) != cfg.num_layers:
        raise ValueError(f"layers: {len(params.layers)} of them, want num_layers = {cfg.num_layers}")
    if not tokens.ndim:
        raise ValueError("tokens: shape (), want [... t]; use tokens[None]")
    is_open = not isinstance(params.embed, Loadable)  # else the Comm checks, on every rank alike
    device = tree.leaves(params.embed)[0].device if is_open else tokens.device
    blocks.check_ids("tokens", tokens, "the embedding's", device, tokens.shape)
    blocks.check_range("tokens", tokens, cfg.vocab)
    if (length := tokens.shape[-1]) > cfg.longest:
        raise ValueError(f"tokens: {length} in a sequence, want at most {cfg.longest}, see max_positions; cut them")
    if segments is not None:
        blocks.check_ids("segments", segments, "the tokens'", tokens.device, tokens.shape)
    if types is not None:
        if not cfg.num_types:
            raise ValueError("types: given, but num_types = 0, so there is no table of types; leave them out")
        blocks.check_ids("types", types, "the tokens'", tokens.device, tokens.shape)
        blocks.check_range("types", types, cfg.num_types)
    places = positions(tokens, segments, cfg.padding)
    x = comm.wrap(_embed)(tokens, places, types, params.embed, cfg, comm, dtype)  # [... t d]
    block = comm.wrap(_block)
    for layer in params.layers:
        x = block(x, layer, segments, cfg, comm)
    return x


def positions(tokens: Tensor, segments: Tensor | None = None, padding: int | None = None) -> Tensor:
    """Return each token's row in the table of positions: int64 ``[t]`` or ``[... t]``.

    They count from the first token of a document, and from 0. With ``padding``, they count tokens other than it from
    ``padding + 1``, and its own is ``padding`` (``create_position_ids_from_input_ids`` of transformers).
    """
    place = torch.arange(tokens.shape[-1], device=tokens.device)
    first = None if segments is None else _first(segments)  # [... t]
    if padding is None:
        return place if first is None else place - first
    counted = (tokens != padding).long()
    count = counted.cumsum(-1)
    if first is not None:
        count = count - (count - counted).gather(-1, first)
    return count * counted + padding


def _first(segments: Tensor) -> Tensor:
    """Return the place of the first token of each token's document: ``[... t]`` -> int64 ``[... t]``."""
    numbers, order = segments.sort(dim=-1, stable=True)
    place = torch.arange(segments.shape[-1], device=segments.device)
    begins = F.pad(numbers[..., 1:] != numbers[..., :-1], (1, 0))
    first = order.gather(-1, torch.where(begins, place, 0).cummax(-1).values)
    return torch.zeros_like(first).scatter(-1, order, first)


def _embed(
    tokens: Tensor, places: Tensor, types: Tensor | None, embed: Any, cfg: EncoderConfig, comm: Comm, dtype: Dtype
) -> Tensor:
    embed = comm.load(embed)
    x = embedding(tokens, embed.tokens).to(dtype=dtype)
    if cfg.num_types:
        x = x + embedding(torch.zeros_like(tokens) if types is None else types, embed.types).to(x.dtype)
    x = x + embedding(places, embed.positions).to(x.dtype)
    x = layer_norm(x, embed.norm, embed.norm_bias, cfg.norm_eps)
    return x if cfg.embed_dim is None else linear(x, embed.project, embed.project_bias)


def _block(x: Tensor, layer: Any, segments: Tensor | None, cfg: EncoderConfig, comm: Comm) -> Tensor:
    layer = comm.load(layer)
    y = comm.enter(x)
    weights = (layer.q, layer.q_bias), (layer.k, layer.k_bias), (layer.v, layer.v_bias)
    head = cfg.dim // cfg.num_heads
    q, k, v = (rearrange(linear(y, w, b), "... t (h e) -> ... t h e", e=head) for w, b in weights)
    y = rearrange(attention(q, k, v, segments, causal=False), "... t h e -> ... t (h e)")
    y = comm.exit(linear(y, layer.o)) + layer.o_bias.to(x.dtype)  # a sum over ranks, so the bias comes after it
    x = layer_norm(x + y, layer.attn_norm, layer.attn_norm_bias, cfg.norm_eps)
    y = ACTIVATIONS[cfg.activation](linear(comm.enter(x), layer.up, layer.up_bias))
    y = comm.exit(linear(y, layer.down)) + layer.down_bias.to(x.dtype)
    return layer_norm(x + y, layer.mlp_norm, layer.mlp_norm_bias, cfg.norm_eps)
