"""The pieces of a decoder: norm, rotary embedding, documents, SwiGLU, loss.

Every function takes ``[... t d]`` with any leading dims and is made of plain tensor operations, so that vmap, grad,
grad of grad, jvp and make_fx go through all of them. (Attention and the norm, which need more for that, are
models/attention.py and models/norm.py.)
Numerics follow transformers' eager Llama: norms and softmax in float32 (in float64 for float64 input), cast back to
the stream's dtype.

*Packed documents.* Several documents may lie one after another in a sequence. ``segments`` numbers them: a document is
a run of equal numbers. A token sees the tokens of its own document up to itself, and its position is the number of
tokens it sees, less one; so positions restart at every document.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor

from .config import Config
from .swiglu import gated

IGNORE = -100  # a target that does not count, as everywhere in torch


def runs(tokens: Tensor, segments: Tensor) -> Tensor:
    """Packed documents, numbered from 0 as they come: segments int ``[... t]`` -> int64 ``[... t]``."""
    if segments.shape != tokens.shape:
        raise ValueError(f"segments: shape {tuple(segments.shape)}, want the tokens' {tuple(tokens.shape)}")
    return _begins(segments).cumsum(-1)


def positions(tokens: Tensor, runs: Tensor | None = None) -> Tensor:
    """The place of every token in its document: int64 ``[t]``, or ``[... t]`` with the ``runs`` of :func:`runs`."""
    place = torch.arange(tokens.shape[-1], device=tokens.device)
    if runs is None:
        return place
    return place - torch.where(_begins(runs), place, 0).cummax(-1).values


def _begins(segments: Tensor) -> Tensor:
    """Where another document begins than the first: bool ``[... t]``."""
    return F.pad(segments[..., 1:] != segments[..., :-1], (1, 0))


def rope(positions: Tensor, cfg: Config) -> tuple[Tensor, Tensor]:
    """Cosine and sine of the rotary angles: positions int ``[... t]`` -> two f32 ``[... t head_dim]`` (Su et al. 2021).

    The angles of the first half are repeated in the second, as transformers lays out a head.
    """
    even = torch.arange(0, cfg.head_dim, 2, dtype=torch.float32, device=positions.device)
    frequency = _scaled(1.0 / cfg.rope_theta ** (even / cfg.head_dim), cfg)
    angle = positions[..., None].to(torch.float32) * frequency
    angle = torch.cat([angle, angle], -1)
    return angle.cos(), angle.sin()


def _scaled(frequency: Tensor, cfg: Config) -> Tensor:
    scaling = cfg.rope_scaling
    if scaling is None:
        return frequency
    if scaling.kind == "linear":
        return frequency / scaling.factor
    assert scaling.low_freq_factor and scaling.high_freq_factor and scaling.original_max_position  # see RopeScaling
    turns = scaling.original_max_position / (2 * math.pi / frequency)  # rotations within the original context
    blend = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    blend = blend.clamp(0, 1)
    return (1 - blend) * frequency / scaling.factor + blend * frequency


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply the rotary embedding: x ``[... t heads head_dim]``, cos and sin ``[... t head_dim]``; x's dtype."""
    cos, sin = (rearrange(c, "... t e -> ... t 1 e").to(x.dtype) for c in (cos, sin))
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat([-second, first], -1) * sin


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """``silu(gate) * up`` (Shazeer 2020), both ``[... f]``."""
    return gated(gate, up)


def cross_entropy(logits: Tensor, targets: Tensor, count: Tensor | float | None = None) -> Tensor:
    """Negative log likelihood of the targets, summed and divided by ``count``: logits ``[... t vocab]``, targets int
    ``[... t]`` -> a float32 scalar, in nats.

    Targets of -100 are ignored. ``count`` is the number of targets of the whole global batch; the default is the
    number counted here (at least 1), which is right only where there is one micro-batch on one process.
    """
    if logits.shape[:-1] != targets.shape:
        raise ValueError(f"targets: shape {tuple(targets.shape)}, want the logits' {tuple(logits.shape[:-1])}")
    counted = targets != IGNORE
    wide = _wide(logits)
    chosen = wide.gather(-1, torch.where(counted, targets, 0)[..., None]).squeeze(-1)
    nll = torch.where(counted, wide.logsumexp(-1) - chosen, 0.0).sum()
    return nll / (counted.sum().clamp(min=1) if count is None else count)


def _wide(x: Tensor) -> Tensor:
    """At least float32."""
    return x.to(torch.promote_types(x.dtype, torch.float32))
