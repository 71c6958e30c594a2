"""The number and the sum of the rows of each code against a naive loop, in every bit."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import jvp, vmap
from torch.fx.experimental.proxy_tensor import make_fx

from fquant.device import HOST
from fquant.kernels.ops.sums_by_code import sums_by_code
from tests.helpers.arrays import named, rng
from tests.helpers.kernels.backends import backend  # noqa: F401
from tests.helpers.kernels.threads import num_threads

pytestmark = pytest.mark.usefixtures("backend")


def given(s=2, n=50, k=7, d=5, seed=0, dtype=torch.float32, device=HOST):
    """Draw rows of very unlike sizes, so that their order matters, and codes, of which some are negative."""
    g = rng(seed)
    x = torch.randn(s, n, d, generator=g) * 10.0 ** torch.randint(-4, 5, (s, n, 1), generator=g)
    return x.to(device, dtype), torch.randint(-1, k, (s, n), generator=g).to(device), k


def oracle(x, codes, num_codes):
    counts, sums = x.new_zeros(len(x), num_codes), x.new_zeros(len(x), num_codes, x.shape[2])
    for i, each in enumerate(codes.tolist()):
        for row, code in zip(x[i], each, strict=True):
            if code >= 0:
                counts[i, code] += 1
                sums[i, code] += row
    return counts, sums


def same(got, wanted):
    return all(torch.equal(a, b) and a.dtype == b.dtype for a, b in zip(got, wanted, strict=True))


@named("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("s, n, k, d", [(1, 1, 1, 1), (2, 50, 7, 5), (3, 90, 40, 16), (1, 200, 3, 70), (2, 40, 5, 200)])
def test_rows_are_added_in_their_order(s, n, k, d, dtype, device):
    args = given(s, n, k, d, dtype=dtype)
    got = [t.cpu() for t in sums_by_code(*(t.to(device) for t in args[:2]), k)]
    wanted = oracle(*args)
    if device.type == "cpu":
        assert same(got, wanted)
    else:
        assert torch.equal(got[0], wanted[0])
        torch.testing.assert_close(got[1], wanted[1], rtol=1e-5, atol=0.1)


@pytest.mark.parametrize("shape", [(0, 4, 3), (2, 0, 3), (2, 4, 0)], ids=str)
def test_of_nothing(shape, device):
    codes = torch.ones(shape[:2], dtype=torch.int64, device=device)
    counts, sums = sums_by_code(torch.ones(shape, device=device), codes, 5)
    assert counts.shape == (shape[0], 5) and sums.shape == (shape[0], 5, shape[2])
    assert counts.sum() == codes.numel() and counts.sum() == counts[:, 1].sum() and not sums.any()


def test_threads_change_no_bit():
    args = given(2, 500, 7, 300)
    wanted = oracle(*args)
    for threads in (1, 2, 5):
        with num_threads(threads):
            assert same(sums_by_code(*args), wanted)


def test_views(device):
    x, codes, k = given(device=device)
    wanted = sums_by_code(x, codes, k)
    doubled = x.repeat_interleave(2, 1)[:, ::2], codes.repeat_interleave(2, 1)[:, ::2], k
    assert not doubled[0].is_contiguous() and same(sums_by_code(*doubled), wanted)


def test_a_row_that_is_not_finite_reaches_its_code_alone(device):
    x, codes, k = given(device=device)
    clean = sums_by_code(x, codes, k)[1]
    codes[0, 3], x[0, 3, 2] = 4, torch.nan
    broken = sums_by_code(x, codes, k)[1]
    assert broken[0, 4, 2].isnan() and broken.isnan().sum() == 1
    assert torch.equal(broken[:, :4], sums_by_code(x.nan_to_num(), codes, k)[1][:, :4]) and clean.isfinite().all()


@pytest.mark.parametrize("place", [(0, 0), (1, 49)])
def test_a_code_beyond_all_fails(place):
    x, codes, k = given()
    codes[place] = k
    with pytest.raises(IndexError):
        sums_by_code(x, codes, k)


def test_more_rows_of_a_code_than_float32_counts_one_by_one(device):
    n = (1 << 24) + 6
    x, codes = torch.empty(1, n, 0, device=device), torch.zeros(1, dtype=torch.int64, device=device).expand(1, n)
    assert sums_by_code(x, codes, 2)[0].tolist() == [[n, 0]]


def test_mapped(device):
    xs, codes, _ = zip(*(given(seed=i, device=device) for i in range(3)), strict=True)
    xs, codes = torch.stack(xs), torch.stack(codes)
    f = lambda x, c: sums_by_code(x, c, 7)
    each = lambda xs, cs: [torch.stack(t) for t in zip(*map(f, xs, cs), strict=True)]
    assert same(vmap(f)(xs, codes), each(xs, codes))
    assert same(vmap(f, (2, None))(xs.movedim(0, 2), codes[1]), each(xs, codes[1].expand_as(codes)))
    assert same(vmap(f, (None, 0))(xs[1], codes), each(xs[1].expand_as(xs), codes))
    twice = vmap(vmap(f, (0, None)), (None, 0))(xs, codes)
    assert same([t[2, 1] for t in twice], f(xs[1], codes[2]))


def test_captured():
    args = given()
    graph = make_fx(lambda x, codes: sums_by_code(x, codes, 7), tracing_mode="fake")(*args[:2])
    targets = [str(n.target) for n in graph.graph.nodes if n.op == "call_function"]
    assert targets.count("fquant.sums_by_code.default") == 1 and same(graph(*args[:2]), sums_by_code(*args))
    with FakeTensorMode():
        counts, sums = sums_by_code(torch.empty(2, 3, 4), torch.empty(2, 3, dtype=torch.int64), 9)
    assert counts.shape == (2, 9) and sums.shape == (2, 9, 4)


def test_it_has_no_derivative_and_says_so():
    x, codes, k = given()
    with pytest.raises(TypeError, match="a gradient through sums_by_code was asked for; .* detach the rows"):
        sums_by_code(x.clone().requires_grad_(), codes, k)
    with pytest.raises(TypeError, match="a tangent through sums_by_code was asked for"):
        jvp(lambda x: sums_by_code(x, codes, k)[1], (x,), (x,))


X, C, K = given()
BAD = {
    "x in bf16": ((X.bfloat16(), C, K), TypeError, "got x torch.bfloat16 and codes torch.int64; wanted f32 or f64"),
    "codes in i32": ((X, C.int(), K), TypeError, "codes torch.int32; wanted f32 or f64, and i64"),
    "dims": ((X[0], C, K), ValueError, r"got x \(50, 5\), codes \(2, 50\); wanted \[s n d\] and \[s n\]"),
    "other rows": ((X[:, 1:], C, K), ValueError, r"got x \(2, 49, 5\), codes \(2, 50\)"),
    "no codes": ((X, C, 0), ValueError, "got 0 codes; wanted at least 1"),
    "devices": ((X, C.to("meta"), K), ValueError, "got x on cpu, codes on meta; move one"),
}


@pytest.mark.parametrize("args, error, message", BAD.values(), ids=BAD)
def test_bad_arguments(args, error, message):
    with pytest.raises(error, match=message):
        sums_by_code(*args)
