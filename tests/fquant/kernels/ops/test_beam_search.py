"""The search for sums of vectors against a naive loop in float64, and sums of residuals, in every backend."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from fquant import AQ_2X8, AQ_3X8, dequantize, quantize
from fquant.kernels.ops.beam_search import beam_search, stage_sums
from tests.helpers.arrays import rng
from tests.helpers.formats import built, forced
from tests.helpers.kernels.backends import backend  # noqa: F401
from tests.helpers.kernels.threads import num_threads


def given(n, d, stages, weighted=False, seed=0):
    """Draw groups, weights or None, and vectors, each stage's smaller than the last one's."""
    g = rng(seed)
    x, size = torch.randn(n, d, generator=g), 0.5 ** torch.arange(stages)
    vectors = torch.randn(stages, 256, d, generator=g) * size[:, None, None]
    return x, torch.rand(n, d, generator=g) if weighted else None, vectors


def beam(x, near, vectors, width):
    """Return the least error of a group x [D] that a beam finds, one candidate at a time, in float64."""
    kept = [(0.0, x)]
    for stage, table in enumerate(vectors):
        found = []
        for _, left in kept:
            error = (near * (left - table).square()).sum(-1)
            found += [(error[k].item(), left - table[k]) for k in error.argsort()[:width].tolist()]
        kept = sorted(found, key=lambda one: one[0])[: width if stage < len(vectors) - 1 else 1]
    return kept[0][0]


@pytest.mark.parametrize("weighted", [False, True], ids=["", "near"])
@pytest.mark.parametrize(
    "n, d, stages, width", [(100, 8, 2, 4), (49, 8, 3, 4), (47, 5, 2, 3), (1, 8, 1, 4), (30, 4, 3, 1), (9, 16, 2, 16)]
)
@pytest.mark.usefixtures("backend")
def test_the_search_is_that_of_a_naive_loop(n, d, stages, width, weighted, device):
    x, near, vectors = given(n, d, stages, weighted)
    moved = (x.to(device), None if near is None else near.to(device), vectors.to(device))
    codes = beam_search(*moved, width).cpu()
    assert codes.dtype == torch.uint8 and codes.shape == (n, stages)
    near = torch.ones(n, d) if near is None else near
    left = x.double() - sum(vectors[i].double()[codes[:, i].long()] for i in range(stages))
    got = (near.double() * left.square()).sum(-1)
    wanted = [beam(*row, vectors.double(), width) for row in zip(x.double(), near.double(), strict=True)]
    torch.testing.assert_close(got, torch.tensor(wanted, dtype=torch.float64), rtol=1e-4, atol=1e-5)


@pytest.mark.usefixtures("backend")
def test_groups_do_not_depend_on_those_beside_them(device):
    x, near, vectors = (t.to(device) for t in given(200, 8, 2, True))
    whole = beam_search(x, near, vectors, 4)
    parts = [beam_search(x[s], near[s], vectors, 4) for s in (slice(0, 7), slice(7, 7), slice(7, 103), slice(103, 200))]
    assert torch.equal(torch.cat(parts), whole)


@pytest.mark.parametrize("each", [False, True], ids=["row", "element"])
@pytest.mark.parametrize("n, d, stages, stage", [(20000, 8, 3, 1), (90, 5, 2, 0), (7, 8, 1, 0), (0, 8, 2, 1)])
@pytest.mark.usefixtures("backend")
def test_sums_are_those_of_residuals_by_code(n, d, stages, stage, each, device):
    x, _, vectors = given(n, d, stages)
    g = rng(3)
    codes = torch.randint(256, (n, stages), generator=g, dtype=torch.uint8)
    mass = torch.rand(n, d if each else 1, generator=g)
    got = [t.cpu() for t in stage_sums(*(t.to(device) for t in (x, mass, codes, vectors)), stage)]
    others = sum(vectors[i].double()[codes[:, i].long()] for i in range(stages) if i != stage)
    left = (x.double() - others) * mass.double()
    for found, t in zip(got, (left, mass.double()), strict=True):
        wanted = torch.zeros(256, t.shape[1], dtype=torch.float64)
        for code in range(256):
            wanted[code] = t[codes[:, stage] == code].sum(0)
        assert found.dtype == torch.float64
        torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-5)


@built
def test_threads_change_no_bit():
    """The parts of a sum depend on the number of groups alone."""
    x, _, vectors = given(30000, 8, 2)
    codes, mass = torch.randint(256, (30000, 2), generator=rng(4), dtype=torch.uint8), torch.rand(30000, 1)
    found = []
    for threads in (1, 2):
        with num_threads(threads):
            found.append((beam_search(x, None, vectors, 4), *stage_sums(x, mass, codes, vectors, 1)))
    assert all(map(torch.equal, *found))


@built
@pytest.mark.parametrize("weighted", [False, True], ids=["", "importance"])
@pytest.mark.parametrize("format", [AQ_2X8, AQ_3X8], ids=["aq_2x8", "aq_3x8"])
def test_learning_is_as_good_as_that_of_the_reference(format, weighted):
    """One algorithm with sums in another order: errors differ by chance, by a few thousandths."""
    w = torch.randn(128, 512, generator=rng(5)) * torch.linspace(0.2, 2, 512)
    importance = torch.rand(512, generator=rng(6)) if weighted else None
    weight = torch.ones(512) if importance is None else importance
    error = {}
    for name in ("reference", "cpu"):
        with forced(name):
            error[name] = ((w - dequantize(quantize(w, format, importance))).square() * weight).sum().item()
    assert error["cpu"] == pytest.approx(error["reference"], rel=0.01)


def test_on_fake_tensors():
    x, near, vectors = given(12, 8, 2, True)
    with FakeTensorMode() as mode:
        x, near, vectors = (mode.from_tensor(t) for t in (x, near, vectors))
        codes = beam_search(x, near, vectors, 4)
        sums, total = stage_sums(x, near, codes, vectors, 0)
    assert codes.shape == (12, 2) and codes.dtype == torch.uint8
    assert sums.shape == total.shape == (256, 8) and sums.dtype == torch.float64


X, _, V = given(6, 8, 2)
NEAR = torch.rand(6, 8)
C, M = torch.zeros(6, 2, dtype=torch.uint8), torch.ones(6, 1)
BAD = {
    "x in f64": (lambda: beam_search(X.double(), None, V, 4), TypeError, "got x torch.float64; wanted torch.float32"),
    "other dim": (lambda: beam_search(X[:, :7], None, V, 4), ValueError, r"got x \(6, 7\) and vectors \(2, 256, 8\)"),
    "near": (lambda: beam_search(X, NEAR[:5], V, 4), ValueError, r"got near \(5, 8\); wanted \(6, 8\)"),
    "device": (lambda: beam_search(X, NEAR.to("meta"), V, 4), ValueError, "got x on cpu and near on meta; move one"),
    "width": (lambda: beam_search(X, None, V, 17), ValueError, "got width 17; wanted 1 to 16 candidates"),
    "codes": (lambda: stage_sums(X, M, C.long(), V, 0), TypeError, "got codes torch.int64; wanted torch.uint8"),
    "mass": (lambda: stage_sums(X, M.expand(6, 3), C, V, 0), ValueError, r"got mass \(6, 3\); wanted \(6, 8\)"),
    "stage": (lambda: stage_sums(X, M, C, V, 2), ValueError, "got stage 2 of 2; wanted 0 to 1"),
    "gradient": (
        lambda: beam_search(X.clone().requires_grad_(), None, V, 4), TypeError,
        "a gradient through beam_search was asked for; vectors are learned by counting",
    ),
}  # fmt: skip


@pytest.mark.parametrize("f, error, message", BAD.values(), ids=BAD)
def test_bad_arguments(f, error, message):
    with pytest.raises(error, match=message):
        f()
