"""Attention to the slots of a cache beside its formula in float64: drawn arguments, and a bound of counted roundings.

Arguments may be on any device; the formula is computed on the host.
"""

import torch

from fquant.device import HOST
from fquant.kernels import dispatch
from fquant.kernels.ops.decoding import cached_attention
from fquant.kernels.reference.causal_attention import masked_scores, scores, with_sinks
from tests.helpers.arrays import randn

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
OPTIONS = ({}, {"scale": 0.3, "cap": 2.0}, {"sinks": True}, {"scale": 0.2, "cap": 1.5, "sinks": True})


def drawn(b, slots, kv, heads, e, dtype=torch.float32, device=HOST, position=None):
    """Draw q, k, v, positions (in the middle, behind the end, the first) and sinks, on the host, and move them."""
    q, k, v = randn(b, heads, e), randn(b, slots, kv, e, seed=1), randn(b, slots, kv, e, seed=2)
    position = torch.tensor([slots // 2, slots + 5, 0])[:b] if position is None else torch.tensor(position)
    return *(t.to(device, dtype) for t in (q, k, v)), position.to(device), randn(b, heads, seed=3).to(device)


def assert_right(q, k, v, position, scale=None, cap=None, sinks=None, compute=cached_attention):
    """Check ``compute`` beside the formula in float64."""
    got = compute(q, k, v, position, scale, cap, sinks)
    dtype, name = q.dtype, dispatch.backend(q.device.type)[0]
    unit = 2.0**-24 if q.device == HOST else 2.0**-22  # tensor cores cut sums off, and three tf32 lose bits
    q, k, v = (t.cpu().double() for t in (q, k, v))
    (_, _, e), slots, keys, values = q.shape, k.shape[1], k.transpose(1, 2), v.transpose(1, 2)
    seen = (torch.arange(slots) <= position.cpu()[:, None])[:, None, None, None]
    p = masked_scores(q[:, :, None], keys, seen, scale, cap)
    p = with_sinks(p, None if sinks is None else sinks.cpu().double()).softmax(-1)[..., :slots]
    y, terms = ((p @ t[:, :, None]).flatten(1, 2)[:, :, 0] for t in (values, values.abs()))
    size = scores(q[:, :, None].abs(), keys.abs(), scale).abs().amax().item() if p.numel() else 0.0
    single = unit * (4 * (e + 4) * (1 + size) + slots)
    if name == "reference" or (name == "cpu" and cap is not None):
        single += 4 * torch.finfo(dtype).eps * size  # whose scores are products in the dtype
    assert got.dtype is dtype and got.shape == y.shape and got.is_contiguous()
    far = (got.cpu().double() - y).abs() - (single + 3 * torch.finfo(dtype).eps) * terms - torch.finfo(dtype).tiny
    assert far.le(0).all(), f"beyond its bound by {far.max().item():.2e}"
