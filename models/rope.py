"""Rotary position embedding (Su et al. 2021), with the scalings of its frequencies for long contexts.

    cos, sin = rope(positions(tokens), cfg)
    q = rotate(q, cos, sin)

The recipes and their names are those of transformers (``modeling_rope_utils.py``). Frequencies and angles are float32.

    linear      every frequency is divided by ``factor`` (Chen et al. 2023)
    dynamic     the base grows with the length of the batch beyond ``max_positions`` (NTK-aware scaling)
    llama3      only low frequencies are divided, with a blend between two wavelengths (Llama 3.1)
    yarn        a ramp over dims between kept and divided frequencies, and an attention factor (Peng et al. 2023)
    longrope    a divisor for each frequency, one list up to the original length and one beyond (Ding et al. 2024)

*Dynamic* and *longrope* depend on the length, which is the largest position of the whole batch plus one. One long row
therefore changes all rows of a batch, as in transformers.
"""

import math

import torch
from einops import rearrange
from torch import Tensor

from .config import Config, RopeScaling


def rope(positions: Tensor, cfg: Config, windowed: bool = False) -> tuple[Tensor, Tensor]:
    """Compute cosine and sine of the rotary angles: int ``[... t]`` -> two f32 ``[... t rotary_dim]``.

    ``windowed`` selects the table of layers with a sliding window, if the config has one of its own. The angles of the
    first half are repeated in the second, which is transformers' layout of a head.
    """
    local = windowed and cfg.window_rope_theta is not None
    theta, scaling = (cfg.window_rope_theta or 0.0, None) if local else (cfg.rope_theta, cfg.rope_scaling)
    dim, factor = cfg.rotary_dim or cfg.head_dim, 1.0
    even = torch.arange(0, dim, 2, dtype=torch.float32, device=positions.device)
    frequency = 1.0 / theta ** (even / dim)
    if scaling is not None:
        frequency, factor = _scaled(frequency, scaling, theta, dim, positions, cfg.max_positions)
    angle = positions[..., None].to(torch.float32) * frequency
    angle = torch.cat([angle, angle], -1)
    return angle.cos() * factor, angle.sin() * factor


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply the rotary embedding: x ``[... t heads head_dim]``, cos and sin ``[... t rotary_dim]``; x's dtype.

    Elements of a head from ``rotary_dim`` on are left as they are.
    """
    cos, sin = (rearrange(c, "... t e -> ... t 1 e").to(x.dtype) for c in (cos, sin))
    turned, kept = x.split([cos.shape[-1], x.shape[-1] - cos.shape[-1]], -1) if cos.shape[-1] < x.shape[-1] else (x, x)
    first, second = turned.chunk(2, -1)
    y = turned * cos + torch.cat([-second, first], -1) * sin
    return y if cos.shape[-1] == x.shape[-1] else torch.cat([y, kept], -1)


def _scaled(
    frequency: Tensor, scaling: RopeScaling, theta: float, dim: int, positions: Tensor, max_positions: int
) -> tuple[Tensor, float]:
    """Return the scaled frequencies f32[dim / 2], and the factor of cosine and sine."""
    match scaling.kind:
        case "linear":
            return frequency / scaling.factor, 1.0
        case "dynamic":
            length = (positions.amax() + 1).clamp(min=max_positions).to(torch.float32)
            growth = scaling.factor * length / max_positions - (scaling.factor - 1)
            even = torch.arange(0, dim, 2, dtype=torch.float32, device=positions.device)
            return 1.0 / (theta * growth ** (dim / (dim - 2))) ** (even / dim), 1.0
        case "llama3":
            low, high, length = scaling.low_freq_factor, scaling.high_freq_factor, scaling.original_max_position
            assert low and high and length  # see RopeScaling
            turns = length / (2 * math.pi / frequency)  # rotations within the original context
            blend = ((turns - low) / (high - low)).clamp(0, 1)
            return (1 - blend) * frequency / scaling.factor + blend * frequency, 1.0
        case "yarn":
            return _yarn(frequency, scaling, theta, dim, scaling.original_max_position or max_positions)
    short, long = (
        torch.tensor(divisors, dtype=torch.float32, device=frequency.device)
        for divisors in (scaling.short_factor, scaling.long_factor)
    )
    original = scaling.original_max_position or max_positions
    divisors = torch.where(positions.amax() + 1 > original, long, short)
    if scaling.attention_factor is not None:
        factor = scaling.attention_factor
    else:
        factor = math.sqrt(1 + math.log(scaling.factor) / math.log(original)) if scaling.factor > 1 else 1.0
    return frequency / divisors, factor


def _yarn(frequency: Tensor, scaling: RopeScaling, theta: float, dim: int, original: int) -> tuple[Tensor, float]:
    """Return frequencies that are kept below one dim, divided above another, and ramped between."""
    turning = lambda turns: dim * math.log(original / (2 * math.pi * turns)) / (2 * math.log(theta))
    low, high = turning(scaling.beta_fast), turning(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    high = high + 0.001 if low == high else high
    place = torch.arange(dim // 2, dtype=torch.float32, device=frequency.device)
    ramp = ((place - low) / (high - low)).clamp(0, 1)
    blended = frequency / scaling.factor * ramp + frequency * (1 - ramp)
    if scaling.attention_factor is not None:
        return blended, scaling.attention_factor
    grown = lambda times: 0.1 * times * math.log(scaling.factor) + 1 if scaling.factor > 1 else 1.0
    if scaling.mscale and scaling.mscale_all_dim:
        return blended, grown(scaling.mscale) / grown(scaling.mscale_all_dim)
    return blended, grown(1.0)
