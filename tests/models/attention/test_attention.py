"""Attention against a loop over queries and heads, whole and in chunks; its derivatives and its memory."""

import math
from functools import cache
from typing import Any

import pytest
import torch
from torch.func import grad, hessian, jvp, vjp, vmap

from fquant import jit, random
from fquant.kernels.reference import causal_attention
from models.attention import attention
from tests.bench import timing
from tests.helpers.arrays import named, normal
from tests.helpers.cases import slow_after
from tests.helpers.formats import ISAS, forced

RUNS = torch.tensor([[0, 0, 0, 1, 1, 2, 2], [0, 0, 0, 0, 0, 0, 0]])
WAYS = {"whole": 2**23, "a query at a time": 1, "three queries at a time": 3 * 2 * 7 * 4 * 4}  # of the reference


@pytest.fixture(params=WAYS.values(), ids=WAYS)
def way(request, monkeypatch):
    monkeypatch.setattr(causal_attention, "CHUNK_BYTES", request.param)


def heads(kv_heads, batch=2, t=7, dtype=torch.float64) -> Any:
    shapes = (batch, t, 4, 6), (batch, t, kv_heads, 6), (batch, t, kv_heads, 6)
    return tuple(normal(*shape, seed=seed).to(dtype) for seed, shape in enumerate(shapes))


def dense(q, k, v, runs=None, **options):
    """Compute the dense formula on tensors with tokens before heads."""
    y, _ = causal_attention.dense(*(t.transpose(1, 2) for t in (q, k, v)), runs=runs, **options)
    return y.transpose(1, 2)


def loop(q, k, v, runs=None, window=None, scale=None, cap=None, causal=True, sinks=None):
    """Compute attention one query and one head at a time."""
    rows = []
    for b in range(q.shape[0]):
        for t in range(q.shape[1]):
            for h in range(q.shape[2]):
                kv = h // (q.shape[2] // k.shape[2])
                seen = [s for s in range(t + 1 if causal else q.shape[1]) if runs is None or runs[b, s] == runs[b, t]]
                seen = [s for s in seen if window is None or s > t - window]
                scores = torch.stack([q[b, t, h] @ k[b, s, kv] for s in seen])
                scores = scores / math.sqrt(q.shape[-1]) if scale is None else scores * scale
                scores = scores if cap is None else cap * (scores / cap).tanh()
                sink = 0 if sinks is None else sinks[h].exp()
                weights = scores.exp() / (scores.exp().sum() + sink)
                rows.append(sum(w * v[b, s, kv] for w, s in zip(weights, seen, strict=True)))
    return torch.stack(rows).reshape(q.shape)


@pytest.mark.parametrize("runs", [None, RUNS], ids=["causal", "documents"])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_it_is_the_loop_and_so_are_its_gradients(kv_heads, runs, way):
    args, cotangent = heads(kv_heads), normal(2, 7, 4, 6, seed=9)
    wanted, pull, *_ = vjp(lambda *x: loop(*x, runs=runs), *args)
    got, pulled, *_ = vjp(lambda *x: attention(*x, runs=runs), *args)
    torch.testing.assert_close(got, wanted)
    torch.testing.assert_close(pulled(cotangent), pull(cotangent))
    torch.testing.assert_close(dense(*args, runs=runs), wanted)


OPTIONS: dict[str, Any] = {
    "window": {"window": 3},
    "window of one": {"window": 1},
    "window beyond the sequence": {"window": 9},
    "scale": {"scale": 0.7},
    "cap": {"cap": 0.5},
    "documents": {"window": 2, "runs": RUNS},
    "not causal": {"causal": False},
    "not causal, documents": {"causal": False, "scale": 0.3, "cap": 0.4, "runs": RUNS},
    "all": {"window": 2, "scale": 0.3, "cap": 0.4, "runs": RUNS},
}


COTANGENT = normal(2, 7, 4, 6, seed=9)


def derivatives(f, args):
    """Return values, gradients, tangents and second derivatives."""
    value, pull, *_ = vjp(f, *args)
    tangents = tuple(normal(*t.shape, seed=20 + i).double() for i, t in enumerate(args))
    slope = lambda q: grad(lambda q: (f(q, *args[1:]) * COTANGENT).sum())(q)
    return value, pull(COTANGENT), jvp(f, args, tangents)[1], grad(lambda q: (slope(q) ** 2).sum())(args[0])


@cache
def of_the_loop(name):
    """Return the derivatives of the loop with OPTIONS, and its value for halved arguments."""
    f, args = lambda *x: loop(*x, **OPTIONS[name]), heads(2)
    return derivatives(f, args), f(*(t * 0.5 for t in args))


@pytest.mark.parametrize("name", OPTIONS)
def test_options(name, way):
    """Compare values, gradients, tangents, second derivatives and a vmap with those of the loop."""
    options, args, (wanted, halved) = OPTIONS[name], heads(2), of_the_loop(name)
    f = lambda *x: attention(*x, **options)
    got = derivatives(f, args)
    torch.testing.assert_close(got, wanted)
    assert (wanted[0] - loop(*args)).abs().max() > 1e-2 or name == "window beyond the sequence"
    if "runs" not in options:  # which a captured function takes as an argument
        torch.testing.assert_close(vmap(f)(*(torch.stack([t, t * 0.5]) for t in args))[1], halved)
        torch.testing.assert_close(jit(f)(*args), got[0], rtol=0, atol=0)


@pytest.mark.parametrize("options", [{"window": 0}, {"cap": 0.0}, {"cap": -1.0}], ids=str)
def test_options_that_are_not_positive(options):
    with pytest.raises(ValueError, match=r"attention got window .* and cap .*; wanted positive numbers or None"):
        attention(*heads(2), **options)


@pytest.mark.parametrize("runs", [None, RUNS], ids=["causal", "documents"])
def test_every_order_and_every_mode(runs, way):
    """Check that higher orders and forward mode equal those of the formula, however they are nested."""
    args, tangents = heads(2), tuple(normal(*t.shape, seed=7) for t in heads(2))
    f, wave = (lambda *x: attention(*x, runs=runs)), lambda *x: attention(*x, runs=runs).sin().sum()
    plain = lambda *x: dense(*x, runs=runs).sin().sum()
    torch.testing.assert_close(jvp(f, args, tangents), jvp(lambda *x: dense(*x, runs=runs), args, tangents))
    second = lambda f: grad(
        lambda *x: sum((g * t).sum() for g, t in zip(grad(f, (0, 1, 2))(*x), tangents, strict=True))
    )
    torch.testing.assert_close(second(wave)(*args), second(plain)(*args))
    torch.testing.assert_close(jvp(grad(wave, (0, 1, 2)), args, tangents), jvp(grad(plain, (0, 1, 2)), args, tangents))
    one = tuple(t[:1, :2] for t in args)
    some = None if runs is None else runs[:1, :2]
    torch.testing.assert_close(
        hessian(lambda *x: attention(*x, runs=some).sin().sum())(*one),
        hessian(lambda *x: dense(*x, runs=some).sin().sum())(*one),
    )


@pytest.mark.parametrize("runs", slow_after(1, [None, RUNS[:1, 2:5]]), ids=["causal", "documents"])
def test_finite_differences(runs):
    args = tuple(t[:1, 2:5].requires_grad_() for t in heads(2))
    f = lambda *x: attention(*x, runs=runs)
    assert torch.autograd.gradcheck(f, args, check_forward_ad=True)
    assert torch.autograd.gradgradcheck(f, args)


def test_mapped_it_has_one_more_dim(way):
    q, k, v = (torch.stack([t, 2 * t, -t]) for t in heads(2))
    runs = torch.stack([RUNS, RUNS.flip(0), RUNS])
    f = grad(lambda q, k, v, runs: attention(q, k, v, runs).sin().sum(), (0, 1, 2))
    for given, dims in (((q, k[0], v, runs), (0, None, 0, 0)), ((q, k, v[0], RUNS), (0, 0, None, None))):
        one = [[t if dim is None else t[i] for t, dim in zip(given, dims, strict=True)] for i in range(3)]
        each = [torch.stack(parts) for parts in zip(*(f(*x) for x in one), strict=True)]
        torch.testing.assert_close(list(vmap(f, in_dims=dims)(*given)), each)
        torch.testing.assert_close(vmap(attention, in_dims=dims)(*given), torch.stack([attention(*x) for x in one]))


def test_without_leading_dims(way):
    q, k, v = heads(2)
    torch.testing.assert_close(attention(q[0], k[0], v[0], RUNS[0]), attention(q, k, v, RUNS)[0])
    torch.testing.assert_close(attention(q[:, None], k[:, None], v[:, None])[:, 0], attention(q, k, v))


@named("backend", ["reference", *ISAS])
@named("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("runs", [None, RUNS], ids=["causal", "documents"])
def test_a_narrow_dtype_is_the_formula_within_its_rounding(backend, dtype, runs):
    args = heads(2, dtype=dtype)
    with forced(backend):
        got, pull, *_ = vjp(lambda *x: attention(*x, runs=runs), *args)
        g = normal(2, 7, 4, 6, seed=9).to(dtype)
        pulled = pull(g)
    wanted, pull_wide, *_ = vjp(lambda *x: dense(*x, runs=runs), *(t.double() for t in args))
    assert got.dtype is dtype
    for a, b in zip((got, *pulled), (wanted, *pull_wide(g.double())), strict=True):
        assert a.dtype is dtype
        assert (a.double() - b).abs().max() <= 8 * torch.finfo(dtype).eps * b.abs().max()


@pytest.mark.parametrize("documents", [False, True])
@pytest.mark.parametrize("backend", [pytest.param("reference", marks=pytest.mark.slow), *ISAS[-1:]])
def test_scores_never_exist_whole(documents, backend, monkeypatch):
    """Measure the peak of a gradient: 64 heads of 512 x 512 scores are 64 MiB in float32, and the mask 1 MiB."""
    monkeypatch.setattr(causal_attention, "CHUNK_BYTES", 2**20)
    q, k, v = (normal(1, 512, 64, 8, dtype=torch.float32) for _ in range(3))
    runs = torch.arange(512)[None] // 100 if documents else None
    step = jit(grad(lambda q, k, v, runs: attention(q, k, v, runs).sum(), (0, 1, 2)))
    with forced(backend):
        step(q, k, v, runs)
        assert timing.extra_bytes(lambda: step(q, k, v, runs)) <= 18 * 2**20


def test_captured_is_one_kernel_each_way():
    q, k, v = heads(2, dtype=torch.float32)
    step = jit(grad(lambda q, k, v: attention(q, k, v).sum(), (0, 1, 2)))
    step(q, k, v)
    (captured,) = step.traced.values()
    targets = [str(node.target) for node in captured.module.graph.nodes]
    assert targets.count("fquant.attention.default") == targets.count("fquant.attention_backward.default") == 1
    assert not any("copy" in target or "clone" in target for target in targets)


def test_shapes_that_do_not_fit():
    q, k, v = heads(2)
    with pytest.raises(ValueError, match=r"q \(2, 7, 4, 6\), k \(2, 7, 2, 6\) and v \(2, 6, 2, 6\); want q"):
        attention(q, k, v[:, :6])
    with pytest.raises(ValueError, match="h a multiple of k"):
        attention(q[:, :, :3], k, v)
    with pytest.raises(ValueError, match=r"runs: shape \(7,\), want the tokens' \(2, 7\)"):
        attention(q, k, v, RUNS[0])


def test_long_sequences_of_many_documents():
    """Compare chunks of a realistic size with whole scores."""
    q, k, v = (random.normal(random.key(i), (2, 700, 4, 16), torch.float32) for i in range(3))
    lengths = torch.arange(700)
    runs = torch.stack([(lengths // 37), (lengths // 350)])
    torch.testing.assert_close(attention(q, k, v, runs), dense(q, k, v, runs))


SINKS: dict[str, Any] = {
    "alone": {},
    "documents": {"runs": RUNS},
    "window, scale and cap": {"window": 2, "scale": 0.3, "cap": 0.4},
    "not causal": {"causal": False, "runs": RUNS},
}


wave = lambda f: lambda *x: f(*x).sin().sum()
every = lambda f: grad(f, (0, 1, 2, 3))


def derivatives_with_sinks(f, args, plain=None):
    """Return values, gradients, tangents, a Hessian of sinks, and second derivatives, those of ``plain`` if given."""
    value, pull, *_ = vjp(f, *args)
    tangents = tuple(normal(*t.shape, seed=20 + i).double() for i, t in enumerate(args))
    moved = lambda f: lambda *x: sum((g * t).sum() for g, t in zip(every(wave(f))(*x), tangents, strict=True))
    curved = hessian(lambda s: wave(f)(*args[:3], s))(args[3])
    return value, pull(COTANGENT), jvp(f, args, tangents)[1], curved, every(moved(plain or f))(*args)


def with_sinks(kv_heads):
    return *heads(kv_heads), normal(4, seed=5).double()


@cache
def of_the_loop_with_sinks(name, kv_heads):
    """Return the derivatives of the loop, its gradient for negated sinks, and its value without sinks."""
    options, args = SINKS[name], with_sinks(kv_heads)
    f = lambda q, k, v, s: loop(q, k, v, sinks=s, **options)
    plain = lambda q, k, v, s: dense(q, k, v, sinks=s.expand(2, 4), **options)
    negated = grad(lambda s: wave(f)(*args[:3], s))(-args[3])
    return derivatives_with_sinks(f, args, plain), negated, loop(*args[:3], **options)


@named("kv_heads", [1, 4])
@pytest.mark.parametrize("name", SINKS)
def test_sinks(name, kv_heads, way):
    """Compare values, all gradients, tangents, second derivatives and a vmap over sinks with those of the loop."""
    options, args = SINKS[name], with_sinks(kv_heads)
    wanted, negated, without = of_the_loop_with_sinks(name, kv_heads)
    f = lambda q, k, v, s: attention(q, k, v, sinks=s, **options)
    torch.testing.assert_close(derivatives_with_sinks(f, args), wanted)
    assert (wanted[0] - without).abs().max() > 1e-2
    each = vmap(grad(lambda s: wave(f)(*args[:3], s)))(torch.stack([args[3], -args[3]]))
    torch.testing.assert_close(each[1], negated)
