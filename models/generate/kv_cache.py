"""The cache of keys and values of a decoder: one node, passed and returned, of a fixed size.

    layer without a window   slot p holds the token at position p
    layer with a window w    slot p % w holds the token at position p, the last of those with this remainder

Keys are rotated already. Each row of a batch has its own length, so prompts are padded on the right: the token at
index i of a row has position i, no shift of positions is needed, and causal attention never sees the padding.

Its size does not change from step to step. So one captured graph serves all of them, and writes into the memory of a
donated cache. ``Cache`` of ``n`` slots takes ``2 · layers · batch · n · kv_heads · head_dim`` elements.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fquant import tree
from fquant.kernels.ops import decoding
from fquant.kernels.reference import decoding as reference

from ..config import Config
from ..reference_gradient import Implementations, KernelWithReferenceGradient


@tree.node
class Cache:
    """Keys and values of each layer f[batch slots kv_heads head_dim], and the tokens of each row so far i64[batch].

    ``seen`` bool[batch vocab] says which tokens a row has; it is bool[batch 0] if nothing asks for that.
    """

    keys: list[Tensor]
    values: list[Tensor]
    lengths: Tensor
    seen: Tensor


def slots(cfg: Config, layer: int, longest: int) -> int:
    """Return the slots of a layer, by its index, for sequences of at most ``longest`` tokens."""
    return min(cfg.window_of(layer) or longest, longest)


def from_sequence(
    keys: Sequence[Tensor], values: Sequence[Tensor], lengths: Tensor, cfg: Config, longest: int, seen: Tensor
) -> Cache:
    """Return the cache of right-padded sequences: keys and values of each layer f[b t k e], lengths i64[b]."""
    kept = lambda xs: [_kept(x, lengths, slots(cfg, i, longest)) for i, x in enumerate(xs)]
    return Cache(kept(keys), kept(values), lengths, seen)


def tokens_of(tokens: Tensor, lengths: Tensor, vocab: int) -> Tensor:
    """Return the tokens that each row i64[b t] has below its length, as bool[b vocab]; ``vocab`` 0 for nothing."""
    seen = torch.zeros(len(tokens), vocab + 1, dtype=torch.bool, device=tokens.device)  # the last takes the padding
    if vocab:
        inside = torch.arange(tokens.shape[1], device=tokens.device) < lengths[:, None]
        seen = seen.scatter(1, torch.where(inside, tokens, vocab), True)
    return seen[:, :vocab]


def _kept(x: Tensor, lengths: Tensor, size: int) -> Tensor:
    """Return the slots f[b size k e] of x f[b t k e]: of the tokens below each length, the last for each slot."""
    t = x.shape[1]
    if size >= t:
        return F.pad(x, (0, 0, 0, 0, 0, size - t))
    slot = torch.arange(size, device=x.device)
    newest = lengths[:, None] - 1
    position = (newest - (newest - slot) % size).clamp(min=0)  # [b size]; a slot that is still empty holds anything
    return x.gather(1, position[..., None, None].expand(-1, -1, *x.shape[2:]))


def write(x: Tensor, new: Tensor, position: Tensor, window: int | None) -> Tensor:
    """Return the slots x f[b s k e] with the token ``new`` f[b 1 k e] at ``position`` i64[b] of each row.

    Raises IndexError if there is no slot for a position.
    """
    slot = position % window if window else position
    return x.index_put((torch.arange(len(x), device=x.device), slot), new[:, 0])


def attend(
    q: Tensor, keys: Tensor, values: Tensor, position: Tensor, scale: float | None, cap: float | None,
    sinks: Tensor | None,
) -> Tensor:  # fmt: skip
    """Compute the attention of one token of each row, q f[b 1 h e], to the slots f[b s k e] -> f[b 1 h e].

    Slots up to ``position`` i64[b] are seen, all of them once a window is full (``fquant.kernels.ops.decoding``).
    ``sinks`` are f[h]. Derivatives are those of the formula in plain torch.
    """
    inputs = [q[:, 0], keys, values, position]
    if sinks is not None:
        inputs.append(sinks.to(torch.promote_types(q.dtype, torch.float32)).expand(len(q), -1))
    computed, formula = (partial(_call, f, scale, cap) for f in (decoding.cached_attention, reference.cached_attention))
    (y,) = KernelWithReferenceGradient.apply(Implementations(computed, formula, len(inputs)), *inputs)
    return y[:, None]


def _call(f: Any, scale: float | None, cap: float | None, *tensors: Tensor) -> tuple[Tensor]:
    q, keys, values, position, *sinks = tensors
    return (f(q, keys, values, position, scale, cap, *sinks),)
