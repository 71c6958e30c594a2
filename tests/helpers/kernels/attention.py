"""Attention beside its formula in float64: drawn arguments, documents, bounds of counted roundings, and extremes.

Arguments may be on any device; the formula is computed on the host.
"""

from functools import partial
from importlib import import_module

import torch
import torch.nn.functional as F
from hypothesis import strategies as st
from torch.func import vjp

from fquant.device import HOST
from fquant.kernels import dispatch
from fquant.kernels.ops.attention import attention, attention_backward
from fquant.kernels.reference.causal_attention import capped, dense, scores, visible, with_sinks
from tests.helpers.arrays import rng
from tests.helpers.formats import alike, shifted, strided

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

LENGTHS = st.integers(0, 12) | st.sampled_from([63, 64, 65, 96, 97, 130, 193, 257])
HEADS = st.integers(1, 20) | st.sampled_from([31, 32, 33, 48, 63, 64, 65, 80, 96, 127, 128, 130])


def drawn(b=2, kv=2, group=2, t=70, e=16, dtype=torch.float32, seed=0, size=1.0, device=HOST):
    """Draw q, k, v and g, on the host, and move them."""
    g, wide = rng(seed), (b, kv * group, t, e)
    q, k, v, out = (torch.randn(shape, generator=g) for shape in (wide, (b, kv, t, e), (b, kv, t, e), wide))
    return tuple(x.to(device, dtype) for x in (size * q, k, v, out))


@st.composite
def calls(draw, device=HOST, lengths=LENGTHS, heads=HEADS, most=3):
    """Draw the arguments of a call, on ``device``, and its options."""
    t, e = draw(lengths), draw(heads)
    b, kv, group = (draw(st.integers(1, most)) for _ in range(3))
    dtype, seed = draw(st.sampled_from(DTYPES)), draw(st.integers(0, 2**16))
    size, place = draw(st.sampled_from([0, 1e-3, 1, 8])), draw(st.sampled_from(PLACES))
    options = {
        "runs": RUNS[draw(st.sampled_from(list(RUNS)))](b, t, rng(seed)),
        "window": draw(st.none() | st.integers(1, 8) | st.sampled_from([31, 64, 97, 130, 300])),
        "scale": draw(st.none() | st.sampled_from([0.05, 0.5, -0.3])),
        "cap": draw(st.none() | st.none() | st.sampled_from([0.5, 30.0])),
        "sinks": draw(st.none() | st.sampled_from([1.0, 30.0])),
    }
    options["causal"] = options["window"] is not None or draw(st.booleans())
    if options["sinks"] is not None:
        options["sinks"] = options["sinks"] * torch.randn(b, kv * group, generator=rng(seed + 1))
    options = {name: x.to(device) if isinstance(x, torch.Tensor) else x for name, x in options.items()}
    return [place(x) for x in drawn(b, kv, group, t, e, dtype, seed, size, device)], options


def both(q, k, v, g, runs=None, sinks=None, **options):
    """Return y, lse and the gradients."""
    y, lse = attention(q, k, v, runs, sinks=sinks, **options)
    return y, lse, *attention_backward(g, y, lse, q, k, v, runs, **options)


def planned(plan):
    """Return a function that computes y, lse and the gradients in Triton, by ``plan``."""
    triton = import_module("fquant.kernels.triton")
    forward, backward = triton.attention, triton.attention_backward

    def computed(q, k, v, g, runs=None, sinks=None, **options):
        y, lse = forward(q, k, v, runs, sinks=sinks, plan=plan, **options)
        return y, lse, *backward(g, y, lse, q, k, v, runs, plan=plan, **options)

    return computed


def exact(q, k, v, g, runs=None, window=None, scale=None, cap=None, causal=True, sinks=None):
    """Return the exact results, and for each the sum of the magnitudes of its terms, which scales the roundings."""
    q, k, v, g = (x.cpu().double() for x in (q, k, v, g))
    runs, sinks = None if runs is None else runs.cpu(), None if sinks is None else sinks.cpu().double()
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
    largest = (size * seen).amax().item() if size.numel() else 0.0
    return (y, lse, *pulled), sums, largest + (0.0 if sinks is None else sinks.abs().max().item())  # of an exponent


def assert_right(*given, both=both, **options):
    """Check the results of ``both`` beside the formula in float64."""
    got, (wanted, sums, size) = both(*given, **options), exact(*given, **options)
    dtype, (_, _, t, e) = given[0].dtype, given[0].shape
    unit = 2.0**-24 if given[0].device == HOST else 2.0**-22  # tensor cores cut sums off, and three tf32 lose bits
    single = unit * (4 * (e + 4) * (1 + size) + t)  # of scores, which are exponents, and of sums of t terms
    name = dispatch.backend(given[0].device.type)[0]
    if name == "reference" or (name == "cpu" and options.get("cap") is not None):  # which C leaves to the reference
        single += 4 * torch.finfo(dtype).eps * size  # whose scores are products in the dtype
    for name, one, true, terms in zip(("y", "lse", "dq", "dk", "dv"), got, wanted, sums, strict=True):
        assert one.dtype is (torch.float32 if name == "lse" else dtype) and one.shape == true.shape
        if name != "lse":
            assert one.transpose(1, 2).is_contiguous()
        narrow = 0.0 if name == "lse" else 3 * torch.finfo(dtype).eps  # of weights, of y, of the result
        far = (one.cpu().double() - true).abs() - (single + narrow) * terms - torch.finfo(dtype).tiny
        assert far.le(0).all(), f"{name} is beyond its bound by {far.max().item():.2e}"


# --- extremes ---------------------------------------------------------------------------------------------------------


def assert_scores_of_any_size(device):
    """Check scores whose exponentials overflow float32, so that the softmax selects one token, and so its gradient."""
    q, k, v, g = drawn(1, 1, 1, 130, 8)
    k[..., 0], q = torch.randperm(130, generator=rng(7)).float(), torch.eye(8)[0].expand_as(q)
    best = k[0, 0, :, 0].cummax(0).indices
    taken = torch.zeros_like(v[0, 0]).index_add(0, best, g[0, 0])
    there = lambda *tensors: attention(*(x.to(device) for x in tensors))
    for size in (1e3, 1e8, 1e15, 1e30):
        y, lse, dq, dk, dv = (x.cpu() for x in both(*(x.to(device) for x in (size * q, k, v, g))))
        assert torch.equal(y[0, 0], v[0, 0][best]) and lse[..., 1:].isfinite().all()
        torch.testing.assert_close(dv[0, 0], taken, rtol=1e-5, atol=1e-5)
        assert dq.isfinite().all() and dk.isfinite().all()
    y, lse = there(torch.zeros_like(q), k, v)
    torch.testing.assert_close(y[0, 0].cpu(), v[0, 0].cumsum(0) / torch.arange(1, 131)[:, None])
    torch.testing.assert_close(lse[0, 0].cpu(), torch.arange(1.0, 131).log())


def assert_bad_values_stay(device, bad):
    """Check that a bad query spoils its own token, and a bad key later tokens, of its document."""
    q, k, v, _ = drawn(1, 1, 2, 400, 12, torch.bfloat16, device=device)
    y, lse = attention(q, k, v)
    wrong = q.clone()
    wrong[0, 1, 200, 3] = bad
    got, other = attention(wrong, k, v)
    assert got[0, 1, 200].isnan().all() and not other[0, 1, 200].isfinite()
    keep = torch.ones(2, 400, dtype=torch.bool, device=device)
    keep[1, 200] = False
    if dispatch.backend(device.type)[0] == "reference":
        keep[1, 199] = False  # whose products are torch's: with AMX, NaN times a padding spoils the row before
    assert alike(got[0][keep], y[0][keep]) and alike(other[0][keep], lse[0][keep])
    wrong = k.clone()
    wrong[0, 0, 250] = torch.nan
    got, other = attention(q, wrong, v)
    assert got[0, :, 250:].isnan().all() and alike(other[:, :, :250], lse[:, :, :250])
    assert alike(got[:, :, :192], y[:, :, :192])
    runs = (torch.arange(400, device=device) >= 300).long()[None]
    assert alike(attention(q, wrong, v, runs)[0][:, :, 384:], attention(q, k, v, runs)[0][:, :, 384:])


def assert_sink_is_a_key(device, causal):
    """Compare with one more key of every head, which all tokens see; a sink of -inf is none."""
    q, k, v, g = drawn(1, 2, 1, 130, 8)
    sinks = torch.tensor([[0.3, -2.0]])
    key = torch.zeros(1, 2, 1, 9)
    key[..., 8] = sinks[..., None]
    wide = torch.cat([q / 8**0.5, torch.ones(1, 2, 130, 1)], -1), torch.cat([F.pad(k, (0, 1)), key], 2)
    mask = torch.ones(130, 131, dtype=torch.bool)
    mask = mask if not causal else F.pad(mask[:, :130].tril(), (0, 1), value=True)
    p = (wide[0] @ wide[1].mT).masked_fill(~mask, -torch.inf).softmax(-1)
    q, k, there, g = (x.to(device) for x in (q, k, v, g))
    y, _ = attention(q, k, there, causal=causal, sinks=sinks.to(device))
    torch.testing.assert_close(y.cpu(), p @ F.pad(v, (0, 0, 0, 1)), rtol=0, atol=1e-5)
    none = both(q, k, there, g, causal=causal, sinks=torch.full((1, 2), -torch.inf, device=device))
    for one, other in zip(none, both(q, k, there, g, causal=causal), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-5)
