"""Attention and its gradients on every backend, against the formula in float64 with counted roundings."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import grad, vmap
from torch.fx.experimental.proxy_tensor import make_fx

from fquant.device import HOST
from fquant.kernels.ops.attention import attention, attention_backward
from tests.helpers.arrays import named, rng
from tests.helpers.cases import slow_after
from tests.helpers.formats import ISAS, alike, forced
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
    exact,
)
from tests.helpers.kernels.threads import num_threads

BACKENDS = ("reference", *ISAS)


@named("backend", slow_after(1, BACKENDS))
@given(call=calls(), threads=st.integers(1, 3))
@settings(max_examples=40)
def test_any_call(backend, call, threads):
    with num_threads(threads), forced(backend):
        assert_right(*call[0], **call[1])


@pytest.mark.each_value
@named("backend", BACKENDS)
@named("dtype", DTYPES)
def test_long_sequences(backend, dtype):
    """Sequences of many tiles, where tiles that no query sees are skipped."""
    with forced(backend):
        for kind in ("one", "documents"):
            for options in ({}, {"window": 200}, {"causal": False}):
                assert_right(*drawn(1, 1, 2, 700, 40, dtype), runs=RUNS[kind](1, 700, rng(1)), **options)


@named("backend", ISAS)
@named("dtype", DTYPES)
def test_bits_depend_on_nothing_but_the_numbers(backend, dtype):
    """The bits do not depend on threads, strides, or other examples."""
    given, runs = drawn(3, 2, 2, 150, 24, dtype), RUNS["documents"](3, 150, rng(2))
    with forced(backend):
        wanted = both(*given, runs=runs)
        for threads in (1, 2, 5):
            with num_threads(threads):
                assert all(map(alike, both(*given, runs=runs), wanted))
        for place in PLACES:
            assert all(map(alike, both(*map(place, given), runs=runs), wanted))
        one = both(*(x[1:2] for x in given), runs=runs[1:2])
        assert all(alike(a, b[1:2]) for a, b in zip(one, wanted, strict=True))
        some = both(*(x[:, :, :77] for x in given), runs=runs[:, :77])
        assert alike(some[0], wanted[0][:, :, :77]) and alike(some[1], wanted[1][:, :, :77])


@named("backend", BACKENDS)
def test_scores_of_any_size(backend):
    with forced(backend):
        assert_scores_of_any_size(HOST)


@named("backend", BACKENDS)
@named("bad", [torch.nan, torch.inf])
def test_what_is_not_finite_stays_with_who_sees_it(backend, bad):
    with forced(backend):
        assert_bad_values_stay(HOST, bad)


@named("backend", BACKENDS)
@named("causal", [True, False])
def test_a_sink_is_a_key_whose_value_is_zero(backend, causal):
    with forced(backend):
        assert_sink_is_a_key(HOST, causal)


@named("backend", BACKENDS)
def test_float64_is_computed_in_float64(backend):
    given = tuple(x.double() for x in drawn(t=20))
    with forced(backend):
        got, (wanted, *_) = both(*given), exact(*given)
    for one, true in zip(got, wanted, strict=True):
        assert one.dtype is torch.float64
        torch.testing.assert_close(one, true)


# --- as torch sees them -----------------------------------------------------------------------------------------------


@named("runs", ["one", "documents"])
def test_mapped_examples_are_more_of_them(runs):
    given, runs = drawn(6, t=20), RUNS[runs](6, 20, rng(3))
    wanted, fold = both(*given, runs=runs), lambda x: x if x is None else x.unflatten(0, (3, 2))
    got = vmap(both, (0, 0, 0, 0, None if runs is None else 0))(*map(fold, (*given, runs)))
    assert all(alike(a.flatten(0, 1), b) for a, b in zip(got, wanted, strict=True))
    last = vmap(lambda q, k: attention(q, k, given[2][:2])[0], (4, None), 4)(
        torch.stack([given[0][:2], given[0][2:4]], -1), given[1][:2]
    )
    assert alike(last[..., 1].contiguous(), attention(given[0][2:4], given[1][:2], given[2][:2])[0].contiguous())


def test_an_op_has_no_derivative_and_says_so():
    q, k, v, g = drawn(t=5)
    y, lse = attention(q, k, v)
    fix = "it computes values only: differentiate fquant.kernels.reference.causal_attention.dense"
    with pytest.raises(TypeError, match=f"a gradient through attention was asked for; {fix}"):
        attention(q, k.clone().requires_grad_(), v)
    with pytest.raises(TypeError, match=f"a gradient through attention_backward was asked for; {fix}"):
        grad(lambda q: attention_backward(g, y, lse, q, k, v)[0].sum())(q)


def test_a_trace_has_one_node_and_knows_what_it_gives():
    given = drawn(t=9, dtype=torch.bfloat16)
    traced = make_fx(lambda q, k, v, g: both(q, k, v, g))(*given)
    called = [str(node.target) for node in traced.graph.nodes if node.op == "call_function"]
    assert [name for name in called if "getitem" not in name] == [
        "fquant.attention.default",
        "fquant.attention_backward.default",
    ]
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fake = both(*(mode.from_tensor(x) for x in given))
    for one, real in zip(fake, both(*given), strict=True):
        assert (one.shape, one.stride(), one.dtype) == (real.shape, real.stride(), real.dtype)


Q, K, V, G = drawn(2, 2, 2, 5, 6)
Y, LSE = attention(Q, K, V)
WRONG = {
    "dtype": (TypeError, "q torch.int64 .*; wanted f32", lambda: attention(Q.long(), K, V)),
    "dtypes": (TypeError, "v torch.float16 beside q torch.float32", lambda: attention(Q, K, V.half())),
    "dims": (ValueError, r"q \(2, 4, 5, 6\) and k \(2, 5, 6\); wanted", lambda: attention(Q, K[:, 0], V)),
    "heads": (ValueError, "h a multiple of k", lambda: attention(Q[:, :3], K, V)),
    "no heads": (ValueError, "h a multiple of k", lambda: attention(Q, K[:, :0], V[:, :0])),
    "no elements": (ValueError, "wanted", lambda: attention(Q[..., :0], K[..., :0], V[..., :0])),
    "tokens": (ValueError, r"k \(2, 2, 4, 6\) and q \(2, 4, 5, 6\)", lambda: attention(Q, K[:, :, :4], V)),
    "values": (ValueError, r"v \(2, 2, 5, 5\) and", lambda: attention(Q, K, V[..., :5])),
    "batch": (ValueError, r"k \(1, 2, 5, 6\) and", lambda: attention(Q, K[:1], V)),
    "runs": (ValueError, r"runs \(2, 4\) and", lambda: attention(Q, K, V, torch.zeros(2, 4, dtype=torch.long))),
    "runs' dtype": (TypeError, "runs torch.int32", lambda: attention(Q, K, V, torch.zeros(2, 5, dtype=torch.int32))),
    "device": (ValueError, "q on cpu and k on meta", lambda: attention(Q, K.to("meta"), V)),
    "sinks": (ValueError, r"sinks \(4,\) and", lambda: attention(Q, K, V, sinks=torch.zeros(4))),
    "sinks' dtype": (TypeError, "sinks torch.float64", lambda: attention(Q, K, V, sinks=torch.zeros(2, 4).double())),
    "window": (ValueError, "window 3 and causal False", lambda: attention(Q, K, V, window=3, causal=False)),
    "g": (ValueError, r"g \(2, 4, 4, 6\) and", lambda: attention_backward(G[:, :, :4], Y, LSE, Q, K, V)),
    "y": (TypeError, "y torch.bfloat16 beside", lambda: attention_backward(G, Y.bfloat16(), LSE, Q, K, V)),
    "lse": (ValueError, r"lse \(2, 4\) and", lambda: attention_backward(G, Y, LSE[..., 0], Q, K, V)),
    "lse's dtype": (TypeError, "lse torch.float64", lambda: attention_backward(G, Y, LSE.double(), Q, K, V)),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_malformed_call_is_refused(name):
    error, message, call = WRONG[name]
    with pytest.raises(error, match=message):
        call()
