"""Attention and its gradients in Triton, against the formula in float64 with counted roundings."""

# pyright: reportInvalidTypeForm=false

from importlib import import_module
from importlib.util import find_spec

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.func import grad, jvp, vmap

from fquant.kernels import dispatch, reference
from fquant.kernels.reference.causal_attention import dense
from models.attention import attention as differentiable
from tests.helpers.arrays import named, rng
from tests.helpers.formats import alike
from tests.helpers.kernels.ahead_of_time import TARGETS
from tests.helpers.kernels.attention import (
    DTYPES,
    PLACES,
    RUNS,
    assert_bad_values_stay,
    assert_right,
    assert_scores_of_any_size,
    assert_sink_is_a_key,
    both,
    calls,
    drawn,
    planned,
)
from tests.helpers.kernels.interpreter import interpreted, interpreter  # noqa: F401

if find_spec("triton") is None:
    pytest.skip("triton is not installed; pip install triton", allow_module_level=True)
from fquant.kernels.triton.attention_tiles import tanh, tl, triton  # noqa: E402

pytestmark = pytest.mark.xdist_group("interpreter")
F32, BF16, F16 = DTYPES
MOST = (64, 128, 256)  # elements of a head, in the tables of plans
SMALL = (  # pairs of queries and keys of a tile: forward, of keys, of queries
    ((16, 16), (16, 16), (16, 16)),
    ((32, 16), (16, 32), (16, 16)),
    ((16, 64), (32, 16), (64, 16)),
)


def module(name):
    return import_module(f"fquant.kernels.triton.{name}")


def small(sizes, tma):
    """Return a plan of small tiles, so that few tokens are many of them."""
    tiles = module("attention_tiles")
    return tiles.Plan(*(tiles.Tiles(*size, 4, 1) for size in sizes), tma)


# --- values -----------------------------------------------------------------------------------------------------------


@interpreted
def test_any_call(device):
    """Draw shapes, dtypes, documents, windows, caps, scales, sinks, strides and tiles."""
    on_host = device.type == "cpu"
    heads = st.sampled_from([1, 8, 16, 24, 33] if on_host else [16, 24])

    @settings(max_examples=16 if on_host else 12, deadline=None)
    @given(
        call=calls(device, st.integers(0, 50), heads, 2), sizes=st.sampled_from(SMALL if on_host else SMALL[1:2]),
        tma=st.booleans(),
    )  # fmt: skip
    def check(call, sizes, tma):
        assert_right(*call[0], both=planned(small(sizes, tma)), **call[1])

    check()


@named("dtype", DTYPES)
@interpreted
def test_lengths_around_the_borders_of_tiles(device, dtype):
    """By the plan of the op: tiles of 128 queries, or 32 of float32."""
    border = 32 if dtype is F32 else 128
    for t, options in (
        (1, {}), (border - 1, {"causal": False}), (border, {"window": border - 1}), (border + 1, {"window": 2}),
        (2 * border, {"causal": False, "cap": 20.0}), (2 * border + 1, {"window": border + 1}),
    ):  # fmt: skip
        assert_right(*drawn(1, 1, 2, t, 16, dtype, t, device=device), **options)


@named("e", [1, 8, 17, 40, 64, 65, 80, 96, 128, 160, 192, 255, 256])
@interpreted
def test_heads(device, e):
    """Sizes of heads that are powers of two and others, and so with and without a mask of elements."""
    for dtype in (F32, BF16, F16) if e <= 64 else (BF16, F16):
        assert_right(*drawn(1, 1, 2, 33, e, dtype, device=device), runs=None, cap=30.0 if e % 16 else None)


@interpreted
def test_larger_heads_are_the_references(device):
    for e, dtype in ((257, BF16), (65, F32)):
        given = drawn(1, 1, 2, 20, e, dtype, device=device)
        y, lse = reference.attention(*given[:3])
        wanted = y, lse, *reference.attention_backward(given[3], y, lse, *given[:3])
        assert all(map(alike, both(*given), wanted))


@named("most", MOST)
@named("target", TARGETS)
@interpreted
def test_each_plan(device, target, most):
    """A plan of the tables, with several tiles of queries and keys."""
    tiles = module("attention_tiles")
    given = drawn(1, 1, 1, 140, most, BF16, device=device)
    if device.type == "cuda" and tiles.generation(device) != target:
        pytest.skip(f"a plan of sm_{target}, and not of this card")
    runs = RUNS["documents"](1, 140, rng(2)).to(device)
    for options in ({"cap": 20.0}, {"runs": runs, "window": 100}):
        assert_right(*given, both=planned(tiles.PLANS[target][most]), **options)


@interpreted
def test_long_sequences(device):
    """Tiles that no query sees, those that all see whole, and those between."""
    computed = planned(small(((32, 32), (32, 32), (32, 32)), True))
    for kind in ("one", "documents", "again"):
        for options in ({}, {"window": 70}, {"causal": False}):
            given, runs = drawn(1, 1, 1, 200, 16, BF16, device=device), RUNS[kind](1, 200, rng(1))
            runs = None if runs is None else runs.to(device)
            assert_right(*given, both=computed, runs=runs, **options)


@interpreted
def test_scores_of_any_size(device):
    assert_scores_of_any_size(device)


@named("bad", [torch.nan, torch.inf])
@interpreted
def test_what_is_not_finite_stays_with_who_sees_it(device, bad):
    assert_bad_values_stay(device, bad)


@named("causal", [True, False])
@interpreted
def test_a_sink_is_a_key_whose_value_is_zero(device, causal):
    assert_sink_is_a_key(device, causal)


@interpreted
def test_nothing(device):
    for shape in ((0, 2, 5, 8), (2, 2, 0, 8)):
        q = torch.empty(shape, device=device)
        got = both(q, q, q, q, runs=torch.empty(shape[0], shape[2], dtype=torch.int64, device=device))
        assert [t.shape for t in got] == [q.shape, q.shape[:3], q.shape, q.shape, q.shape]


@interpreted
def test_float64_is_the_references(device):
    given = tuple(x.double() for x in drawn(t=20, device=device))
    y, lse = reference.attention(*given[:3])
    wanted = y, lse, *reference.attention_backward(given[3], y, lse, *given[:3])
    assert all(map(alike, both(*given), wanted))


# --- bits -------------------------------------------------------------------------------------------------------------


@named("tma", [True, False])
@named("dtype", DTYPES)
@interpreted
def test_bits_depend_on_nothing_but_the_numbers(device, dtype, tma):
    """The bits do not depend on the call, strides, other examples, or on later tokens."""
    computed = planned(small(SMALL[1], tma))
    given, runs = drawn(2, 1, 2, 37, 24, dtype, device=device), RUNS["documents"](2, 37, rng(2)).to(device)
    wanted = computed(*given, runs=runs)
    for place in PLACES[not tma :: 2]:
        assert all(map(alike, computed(*map(place, given), runs=runs), wanted))
    one = computed(*(x[1:2] for x in given), runs=runs[1:2])
    assert all(alike(a, b[1:2]) for a, b in zip(one, wanted, strict=True))
    some = computed(*(x[:, :, :20] for x in given), runs=runs[:, :20])
    assert alike(some[0], wanted[0][:, :, :20]) and alike(some[1], wanted[1][:, :, :20])


@interpreted
def test_a_window_of_all_tokens_is_none(device):
    given = drawn(t=40, dtype=BF16, device=device)
    assert all(map(alike, both(*given, window=40), both(*given)))


# --- parts ------------------------------------------------------------------------------------------------------------


@interpreted
def test_spans_of_documents(device):
    """Compare with a loop over tiles, with documents in order and not, in one pass of comparisons and in several."""
    tiles = module("attention_tiles")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiles, "SCAN", 32)
        for t, size in ((1, 16), (31, 16), (100, 16), (129, 64)):
            for kind in ("documents", "short", "each", "again"):
                runs = RUNS[kind](2, t, rng(t)).contiguous()
                for row, got in zip(runs.tolist(), tiles.spans(runs.to(device), size).tolist(), strict=True):
                    assert got == [span(row, first, size) for first in range(0, t, size)]


def span(numbers, first, size):
    """Return the bounds of tokens that may share a document with a tile, and of those that surely share all of its."""
    own = numbers[first : first + size]
    near = [i for i, n in enumerate(numbers) if min(own) <= n <= max(own)]
    if len(set(own)) > 1:
        return [near[0], near[-1] + 1, len(numbers), 0]
    foreign = [i for i, n in enumerate(numbers) if n != own[0]]
    inner, outer = [i + 1 for i in foreign if i < first], [i for i in foreign if i >= first]
    return [near[0], near[-1] + 1, max(inner, default=0), min(outer, default=len(numbers))]


@interpreted
def test_tanh(device):
    """Of all numbers of float16, within the error that caps are documented to have."""
    x = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(F16)
    x = x.where(x.isfinite(), 0.0).float()
    got, true = torch.empty_like(x, device=device), x.double().tanh()
    _tanh[(1,)](x.to(device), got, len(x))
    assert ((got.cpu().double() - true).abs() <= 4e-7 * true.abs()).all()


@triton.jit
def _tanh(x, y, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(y + i, tanh(tl.load(x + i)))


# --- under torch's transforms -----------------------------------------------------------------------------------------


def wave(y):
    """Return a scalar whose derivatives of every order differ between elements."""
    return (y * torch.linspace(0.2, 1.5, y.numel(), dtype=y.dtype, device=y.device).view(y.shape)).sin().sum()


TRANSFORMS = {  # of a loss of q, k and v, these three, stacked, and directions
    "vmap": lambda f, x, v: vmap(f)(*x),
    "grad": lambda f, x, v: grad(f, (0, 1, 2))(*(t[0] for t in x)),
    "vmap of grad": lambda f, x, v: vmap(grad(f, (0, 1, 2)))(*x),
    "vmap of one": lambda f, x, v: vmap(grad(f, 1), (None, 0, None))(x[0][1], x[1], x[2][0]),
    "jvp": lambda f, x, v: jvp(f, tuple(t[0] for t in x), tuple(t[0] for t in v))[1],
    "vmap of jvp": lambda f, x, v: vmap(lambda x, v: jvp(f, x, v)[1])(x, v),
    "grad of grad": lambda f, x, v: grad(lambda k: (v[0][0] * grad(f)(x[0][0], k, x[2][0])).sum())(x[1][0]),
    "jvp of grad": lambda f, x, v: jvp(lambda q: grad(f)(q, x[1][0], x[2][0]), (x[0][0],), (v[0][0],))[1],
}


@named("name", TRANSFORMS)
@interpreted
def test_transforms(device, name):
    """As of the formula in float64; the gradients of first order are the kernels'."""
    *x, _ = (t.transpose(1, 2)[:, None] for t in drawn(2, 1, 2, 20, 8, device=device))  # [2 1 t h e]
    v = tuple(t.flip(0) for t in x)
    runs = (torch.arange(20, device=device) > 8).long()[None]
    options = {"window": 7, "cap": 5.0}
    loss = lambda *qkv: wave(differentiable(*qkv, runs, **options))
    heads = lambda t: t.transpose(1, 2)
    formula = lambda *qkv: wave(heads(dense(*map(heads, qkv), runs.cpu(), **options)[0]))
    own, seen = dispatch.backend(device.type)[1], []
    backward = own.attention_backward
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(own, "attention_backward", lambda *args: seen.append(args) or backward(*args))
        got = TRANSFORMS[name](loss, tuple(x), v)
    exact = lambda tensors: tuple(t.cpu().double() for t in tensors)
    wanted = TRANSFORMS[name](formula, exact(x), exact(v))
    assert bool(seen) == ("grad" in name or name == "vmap of one")
    for a, b in zip(*(t if isinstance(t, tuple) else (t,) for t in (got, wanted)), strict=True):
        torch.testing.assert_close(a.cpu().double(), b, rtol=1e-4, atol=1e-4 * b.abs().max().item())
