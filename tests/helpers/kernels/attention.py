"""Attention beside its formula in float64: drawn arguments, documents, and bounds of counted roundings."""

from functools import partial

import torch
from torch.func import vjp

from fquant.kernels import dispatch
from fquant.kernels.ops.attention import attention, attention_backward
from fquant.kernels.reference.causal_attention import capped, dense, scores, visible, with_sinks
from tests.helpers.arrays import rng
from tests.helpers.formats import shifted, strided

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
by_heads, by_tokens = (lambda x: x.contiguous()), lambda x: x.transpose(1, 2).contiguous().transpose(1, 2)
PLACES = (by_heads, by_tokens, shifted, strided, lambda x: x.mT.contiguous().mT)
RUNS = {  # of b sequences of t tokens
    "one": lambda b, t, g: None,
    "documents": lambda b, t, g: (torch.rand(b, t, generator=g) < 0.1).cumsum(1),
    "short": lambda b, t, g: (torch.rand(b, t, generator=g) < 0.7).cumsum(1) - 5,
    "each": lambda b, t, g: torch.arange(t).expand(b, t),
    "again": lambda b, t, g: torch.randint(3, (b, t), generator=g) * 2**40,
}


def drawn(b=2, kv=2, group=2, t=70, e=16, dtype=torch.float32, seed=0, size=1.0):
    """Draw q, k, v and g."""
    g, wide = rng(seed), (b, kv * group, t, e)
    q, k, v, out = (torch.randn(shape, generator=g) for shape in (wide, (b, kv, t, e), (b, kv, t, e), wide))
    return tuple(x.to(dtype) for x in (size * q, k, v, out))


def both(q, k, v, g, runs=None, sinks=None, **options):
    """Return y, lse and the gradients."""
    y, lse = attention(q, k, v, runs, sinks=sinks, **options)
    return y, lse, *attention_backward(g, y, lse, q, k, v, runs, **options)


def exact(q, k, v, g, runs=None, window=None, scale=None, cap=None, causal=True, sinks=None):
    """Return the exact results, and for each the sum of the magnitudes of its terms, which scales the roundings."""
    q, k, v, g = (x.double() for x in (q, k, v, g))
    sinks = None if sinks is None else sinks.double()
    formula = partial(dense, runs=runs, window=window, scale=scale, cap=cap, causal=causal, sinks=sinks)
    y, lse = formula(q, k, v)
    pulled = vjp(lambda *x: formula(*x)[0], q, k, v)[1](g)
    group = lambda x: x.abs().unflatten(1, (k.shape[1], -1))
    over = lambda x: x.abs()[:, :, None]
    seen = visible(slice(0, q.shape[2]), q, runs, window, causal)
    size = scores(q.abs(), k.abs(), scale).abs()  # [b k g t s], the largest that scores could be
    p = capped(scores(q, k, scale), cap).masked_fill(~seen, -torch.inf)
    p = with_sinks(p, sinks).softmax(-1)[..., : k.shape[2]]
    slope = group(g) @ over(v).mT
    ds = p * (slope + (p * slope).sum(-1, keepdim=True)) * abs(q.shape[-1] ** -0.5 if scale is None else scale)
    down = lambda p, x: (p.mT @ group(x)).sum(2)
    sums = (p @ over(v)).flatten(1, 2), 1 + lse.abs(), (ds @ over(k)).flatten(1, 2), down(ds, q), down(p, g)
    return (y, lse, *pulled), sums, (size * seen).amax().item() if size.numel() else 0.0


def assert_right(*given, both=both, **options):
    """Check the results of ``both`` beside the formula in float64."""
    got, (wanted, sums, size) = both(*given, **options), exact(*given, **options)
    dtype, (_, _, t, e) = given[0].dtype, given[0].shape
    single = 2.0**-24 * (4 * (e + 4) * (1 + size) + t)  # of scores, which are exponents, and of sums of t terms
    name = dispatch.backend("cpu")[0]
    if name == "reference" or (name == "cpu" and options.get("cap") is not None):  # which C leaves to the reference
        single += 4 * torch.finfo(dtype).eps * size  # whose scores are products in the dtype
    for name, one, true, terms in zip(("y", "lse", "dq", "dk", "dv"), got, wanted, sums, strict=True):
        assert one.dtype is (torch.float32 if name == "lse" else dtype) and one.shape == true.shape
        if name != "lse":
            assert one.transpose(1, 2).is_contiguous()
        narrow = 0.0 if name == "lse" else 3 * torch.finfo(dtype).eps  # of weights, of y, of the result
        far = (one.double() - true).abs() - (single + narrow) * terms - torch.finfo(dtype).tiny
        assert far.le(0).all(), f"{name} is beyond its bound by {far.max().item():.2e}"
