"""The nearest codes against a naive float64 oracle: ties, tiles, rows that are not finite, transforms."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import jvp, vmap
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.flop_counter import FlopCounterMode

from fquant.device import HOST
from fquant.kernels.ops.nearest import nearest
from fquant.kernels.reference import codebook_search as module
from tests.helpers.arrays import named, rng
from tests.helpers.kernels.backends import backend  # noqa: F401

pytestmark = pytest.mark.usefixtures("backend")


def given(s=2, n=50, k=37, d=5, seed=0, dtype=torch.float32, device=HOST):
    """Draw x, codes and their halved squares, on the host, and move them."""
    g = rng(seed)
    x, codes = torch.randn(s, n, d, generator=g).to(device, dtype), torch.randn(s, k, d, generator=g).to(device)
    return x, codes, codes.square().sum(-1) / 2


def oracle(x, codes, half, top):
    x, codes, half = x.cpu(), codes.cpu(), half.cpu()
    scores = torch.einsum("snd,skd->snk", x.double(), codes.double()) - half.double()[:, None]
    best = scores.sort(dim=-1, descending=True, stable=True)
    return best.indices[..., :top], best.values[..., :top]


@pytest.fixture
def small_tiles(monkeypatch):
    monkeypatch.setattr(module, "BLOCK", 4)
    monkeypatch.setattr(module, "WIDEST", 8)
    monkeypatch.setattr(module, "TILE", dict.fromkeys(module.TILE, 4 * 8 * 6))  # 6 rows of 8 codes


@named("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("top", [1, 2, 5, 37])
@pytest.mark.parametrize("tiles", ["one", "many", "wide"])
def test_nearest_is_that_of_all_scores(dtype, top, tiles, device, request, monkeypatch):
    if tiles == "many":
        request.getfixturevalue("small_tiles")
    if tiles == "wide":
        monkeypatch.setattr(module, "BLOCK", 2)  # 19 blocks, which are searched first
    args = given(dtype=dtype, device=device)
    (which, score), (wanted, values) = nearest(*args, top), oracle(*args, top)
    assert which.dtype == torch.int64 and torch.equal(which.cpu(), wanted)
    torch.testing.assert_close(score.cpu(), values.float(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("top", [1, 3])
@pytest.mark.parametrize("block", [2, 4, 64])
def test_of_equal_scores_the_lowest_index_comes_first(top, block, device, small_tiles, monkeypatch):
    monkeypatch.setattr(module, "BLOCK", block)
    monkeypatch.setattr(module, "WIDEST", 16)
    g = rng(1)
    codes = torch.randint(-1, 2, (1, 40, 2), generator=g).float().to(device)  # 9 distinct: exact ties across tiles
    x = torch.randint(-2, 3, (1, 30, 2), generator=g).float().to(device)
    half = codes.square().sum(-1) / 2
    assert torch.equal(nearest(x, codes, half, top)[0].cpu(), oracle(x, codes, half, top)[0])


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf"), 3e38])
@pytest.mark.parametrize("top", [1, 3])
def test_a_row_without_a_finite_score_has_no_code(bad, top, device, small_tiles):
    x, codes, half = given(device=device)
    wanted = nearest(x, codes, half, top)
    broken = x.clone()
    broken[1, 4, 2] = bad
    which, score = nearest(broken, codes * 10, half * 100, top)
    clean, _ = nearest(x, codes * 10, half * 100, top)
    assert (which[1, 4] == -1).all() and (score[1, 4] == -torch.inf).all()
    which[1, 4] = clean[1, 4]
    assert torch.equal(which, clean) and wanted[0].min() >= 0


@pytest.mark.parametrize("top", [1, 3])
def test_codes_that_are_not_finite(top, device):
    """An infinite bias excludes a code; a code that is NaN leaves no row with a finite score."""
    x, codes, half = given(device=device)
    half[0, 3] = torch.inf
    which, _ = nearest(x, codes, half, top)
    assert not (which[0] == 3).any() and torch.equal(which.cpu(), oracle(x, codes, half, top)[0])
    codes[1, 5, 2] = torch.nan
    which, score = nearest(x, codes, half, top)
    assert (which[1] == -1).all() and (score[1] == -torch.inf).all() and (which[0] >= 0).all()


@pytest.mark.parametrize("n, k, d", [(1, 1, 1), (47, 64, 8), (49, 65, 8), (100, 300, 8), (7, 1000, 70), (200, 256, 16)])
@pytest.mark.parametrize("top", [1, 4])
def test_sizes_beside_those_of_vectors_and_units(n, k, d, top, device):
    args = given(1, n, k, d, seed=2, device=device)
    top = min(k, top)
    (which, score), (wanted, values) = nearest(*args, top), oracle(*args, top)
    assert torch.equal(which.cpu(), wanted)
    torch.testing.assert_close(score.cpu(), values.float(), rtol=1e-5, atol=2e-5)


def test_of_no_rows(device):
    x, codes, half = given(n=0, device=device)
    which, score = nearest(x, codes, half, 2)
    assert which.shape == score.shape == (2, 0, 2)


def test_rows_do_not_depend_on_the_rows_beside_them(device, small_tiles):
    x, codes, half = given(s=1, device=device)
    whole = nearest(x, codes, half)[0]
    parts = [nearest(part, codes, half)[0] for part in x.split([7, 0, 43], 1)]
    assert torch.equal(torch.cat(parts, 1), whole)


def test_no_matrix_of_all_scores_is_made():
    from tests.bench.timing import extra_bytes

    args = given(1, 3000, 3000, 4)
    # A tile, and a few numbers a row; all scores are 36 MB.
    assert extra_bytes(lambda: nearest(*args)) < module.TILE["cpu"] + 100 * 3000


def test_mapped(device):
    xs, codes, half = zip(*(given(seed=i, device=device) for i in range(3)), strict=True)
    xs, codes, half = map(torch.stack, (xs, codes, half))
    each = lambda x, c, h: torch.stack([nearest(*t, 2)[0] for t in zip(x, c, h, strict=True)])
    f = lambda x, c, h: nearest(x, c, h, 2)[0]
    shared = [t[0].expand(3, *t.shape[1:]) for t in (xs, codes, half)]
    assert torch.equal(vmap(f)(xs, codes, half), each(xs, codes, half))
    assert torch.equal(vmap(f, (1, None, None))(xs.movedim(0, 1), codes[0], half[0]), each(xs, *shared[1:]))
    assert torch.equal(vmap(f, (None, 0, 0))(xs[0], codes, half), each(shared[0], codes, half))
    assert torch.equal(vmap(f, (0, None, 0))(xs, codes[0], half), each(xs, shared[1], half))
    assert vmap(f)(xs[:, :, :0], codes, half).shape == (3, 2, 0, 2)
    twice = vmap(vmap(f, (0, None, None)), (None, 0, 0))(xs, codes, half)
    assert torch.equal(twice[2, 1], nearest(xs[1], codes[2], half[2], 2)[0])


def test_captured_and_counted():
    args = given()
    graph = make_fx(lambda x, codes, half: nearest(x, codes, half), tracing_mode="fake")(*args)
    assert [str(n.target) for n in graph.graph.nodes if n.op == "call_function"].count("fquant.nearest.default") == 1
    assert torch.equal(graph(*args)[0], nearest(*args)[0])
    with FakeTensorMode():
        which, score = nearest(torch.empty(2, 3, 4, dtype=torch.bfloat16), torch.empty(2, 7, 4), torch.empty(2, 7), 5)
    assert (which.shape, which.dtype) == ((2, 3, 5), torch.int64) and score.dtype == torch.float32
    with FlopCounterMode(display=False) as counter:
        nearest(*args)
    assert counter.get_total_flops() == 2 * 2 * 50 * 37 * 5


def test_it_has_no_derivative_and_says_so():
    x, codes, half = given()
    with pytest.raises(TypeError, match="a gradient through nearest was asked for; .* detach its arguments"):
        nearest(x.clone().requires_grad_(), codes, half)
    with pytest.raises(TypeError, match="a tangent through nearest was asked for"):
        jvp(lambda c: nearest(x, c, half)[1], (codes,), (codes,))


X, C, H = given()
BAD = {
    "x of integers": ((X.long(), C, H), TypeError, "nearest got x torch.int64 and codes torch.float32; wanted floats"),
    "codes in bf16": (
        (X, C.bfloat16(), H.bfloat16()),
        TypeError,
        "codes torch.bfloat16; wanted floats, and codes in f32",
    ),
    "half in f64": ((X, C, H.double()), TypeError, "nearest got half torch.float64 beside codes torch.float32"),
    "dims": ((X[0], C, H), ValueError, r"got x \(50, 5\), codes \(2, 37, 5\), half \(2, 37\); wanted \[s n d\]"),
    "other dim": ((X[..., :4], C, H), ValueError, r"nearest got x \(2, 50, 4\), codes"),
    "other stack": ((X[:1], C, H), ValueError, "nearest got x"),
    "other half": ((X, C, H[:, :3]), ValueError, r"half \(2, 3\); wanted"),
    "top 0": ((X, C, H, 0), ValueError, "nearest got top 0 of 37 codes; wanted 1 to 37"),
    "top 38": ((X, C, H, 38), ValueError, "nearest got top 38 of 37 codes"),
    "devices": ((X, C.to("meta"), H), ValueError, "nearest got x on cpu, codes on meta, half on cpu; move some"),
}


@pytest.mark.parametrize("args, error, message", BAD.values(), ids=BAD)
def test_bad_arguments(args, error, message):
    with pytest.raises(error, match=message):
        nearest(*args)
