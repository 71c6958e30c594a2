"""Losses against naive loops in float64: values and gradients, masks, tiles, and the sum of parts."""

from dataclasses import replace

import pytest
import torch
from torch.func import grad, hessian

from fquant import cost, random, tree, vq
from fquant.vq.codebook import rows as rows_module
from tests.helpers.cases import slow_after
from tests.helpers.live_memory import Peak

K, D = 9, 4
NAN = float("nan")


def draw(name, *shape):
    return random.normal(random.fold(random.key(51), name), shape, torch.float64)


def book(heads=None, metric="euclidean", learnable=True):
    b = vq.init(0, K, D, heads=heads, metric=metric, learnable=learnable)
    return tree.map(torch.Tensor.double, replace(b, codes=draw("codes", *b.codes.shape)))


def near(b, x, head=None):
    """Return the logits of one row by a loop."""
    codes = b.codes if head is None else b.codes[head]
    if b.metric == "cosine":
        return torch.stack([(x / x.norm()) @ (c / c.norm()) for c in codes])
    return torch.stack([-(x - c).norm() for c in codes])


def close(got, want):
    torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-9)


@pytest.fixture(params=["one tile", "many"])
def tiles(request, monkeypatch):
    if request.param == "many":
        monkeypatch.setattr(rows_module, "TILE", 4 * K * 3)


def every_order(f, g, at):
    """Compare values, gradients and second derivatives at ``at``."""
    close(f(at), g(at))
    close(grad(f)(at), grad(g)(at))
    close(hessian(f)(at), hessian(g)(at))


@pytest.mark.each_value
@pytest.mark.parametrize("metric", ["euclidean", "cosine"])
@pytest.mark.parametrize("heads", [None, 2])
def test_cross_entropy(heads, metric, tiles):
    b, x = book(heads, metric), draw("x", 3, 4, *([heads] if heads else []), D)
    codes = torch.randint(-1, K, x.shape[:-1], generator=torch.Generator().manual_seed(1))
    mask = vq.mask(torch.tensor([4, 2, 0]), 4)

    def naive(x, b=b):
        terms = []
        for i in range(3):
            for j in range(4):
                for h in range(heads or 1):
                    at = (i, j, h) if heads else (i, j)
                    if mask[i, j] and codes[at] >= 0:
                        terms.append(-near(b, x[at], h if heads else None).log_softmax(0)[codes[at]])
        return torch.stack(terms).sum() / len(terms)

    every_order(lambda x: vq.mean(vq.cross_entropy(b, x, codes, mask)), naive, x)
    close(
        grad(lambda c: vq.mean(vq.cross_entropy(replace(b, codes=c), x, codes, mask)))(b.codes),
        grad(lambda c: naive(x, replace(b, codes=c)))(b.codes),
    )
    got = vq.cross_entropy(b, x, codes, mask)
    counted = (codes >= 0) & (mask if heads is None else mask[..., None])
    assert got.count == counted.sum() and got.count.dtype == x.dtype


def test_a_row_that_is_a_code_has_a_gradient():
    """The root of the distance has no derivative at zero."""
    b = replace(book(), codes=torch.arange(1.0 * K * D, dtype=torch.float64).reshape(K, D))
    x, codes = b.codes[:4].clone(), torch.tensor([0, 1, 2, 5])
    for f in (
        lambda x: vq.mean(vq.cross_entropy(b, x, codes)),
        lambda x: vq.mean(vq.diversity(b, x, 1.0)),
        lambda x: vq.gumbel(x, b.codes[:4], b).square().sum(),
    ):
        assert grad(f)(x).isfinite().all() and hessian(f)(x).isfinite().all()


@pytest.mark.each_value
@pytest.mark.parametrize("metric", ["euclidean", "cosine"])
@pytest.mark.parametrize("heads", [None, 2])
def test_diversity(heads, metric, tiles):
    b, x = book(heads, metric), draw("x", 2, 3, 4, *([heads] if heads else []), D)  # two dims of batch, 4 positions
    mask = torch.tensor([[[1, 1, 1, 0], [1, 0, 1, 0], [1, 1, 0, 0]], [[1, 1, 0, 0], [0, 0, 0, 0], [1, 0, 0, 0]]]).bool()

    def naive(x, b=b):
        terms = []
        for n in range(3):  # the last has no rows
            likely = [
                (1.5 * near(b, x[(i, j, n, h) if heads else (i, j, n)], h if heads else None)).softmax(0)
                for i in range(2) for j in range(3) for h in range(heads or 1) if mask[i, j, n]
            ]  # fmt: skip
            p = torch.stack(likely).mean(0)
            terms.append((p * p.clamp(min=1e-5).log()).sum())
        return torch.stack(terms).mean()

    ours = lambda x, b=b: vq.mean(vq.diversity(b, x, 1.5, mask))
    every_order(ours, naive, x)
    close(grad(lambda c: ours(x, replace(b, codes=c)))(b.codes), grad(lambda c: naive(x, replace(b, codes=c)))(b.codes))
    assert vq.diversity(b, x, 1.5, mask).count == 3
    parts = [vq.diversity(b, x[i], 1.5, mask[i], psum=lambda t: t) for i in range(2)]
    whole = vq.diversity(b, x, 1.5, mask)
    assert abs(vq.mean(tree.map(torch.add, *parts)) - vq.mean(whole)) > 1e-4  # an entropy of a mean is no mean
    seen = []
    vq.diversity(b, x[0], 1.5, mask[0], psum=lambda t: seen.append(t) or t)
    other = seen[0]
    joined = vq.diversity(b, x[1], 1.5, mask[1], psum=lambda t: tree.map(torch.add, t, other))
    close(vq.mean(joined), vq.mean(whole))


@pytest.mark.parametrize("metric", ["euclidean", "cosine"])
@pytest.mark.parametrize("heads", [None, 2])
def test_orthogonal(heads, metric):
    b = book(heads, metric)
    among = torch.arange(K) % 3 != 1

    def naive(codes, which):
        codes = codes if heads else codes[None]
        unit = [[c / c.norm() for c, keep in zip(one, which, strict=True) if keep] for one in codes]
        terms = [(u @ v).square() for one in unit for u in one for v in one]
        return torch.stack(terms).mean() - 1 / int(which.sum())

    for which, given in ((torch.ones(K).bool(), None), (among, among)):
        f = lambda c, given=given: vq.mean(vq.orthogonal(replace(b, codes=c), given))
        every_order(f, lambda c, which=which: naive(c, which), b.codes)
    assert not grad(lambda c: vq.mean(vq.orthogonal(replace(b, codes=c, learnable=False))))(b.codes).any()


@pytest.mark.parametrize("learnable", [False, True])
def test_commitment(learnable):
    b = book(learnable=learnable)
    x, mask = draw("x", 3, 4, D), vq.mask(torch.tensor([4, 1, 0]), 4)

    def naive(x, codes):
        terms = [(x[i, j] - codes[int((x[i, j] - codes).norm(dim=-1).argmin())]).square().sum()
                 for i in range(3) for j in range(4) if mask[i, j]]  # fmt: skip
        return torch.stack(terms).sum() / (len(terms) * D)

    ours = lambda x, codes: vq.mean(vq.apply(replace(b, codes=codes), x, mask=mask).losses["commitment"])
    close(ours(x, b.codes), naive(x, b.codes))
    dx, dcodes = grad(ours, (0, 1))(x, b.codes)
    want_x, want_codes = grad(naive, (0, 1))(x, b.codes)
    close(dx, want_x)
    close(dcodes, want_codes if learnable else 0 * want_codes)


def test_cosine_and_a_mask_compare_rows_of_unit_length():
    """vector-quantize-pytorch compares codes with unnormalised rows: 27.2 for 0.10."""
    b = book(metric="cosine", learnable=False)
    b = replace(b, codes=b.codes / b.codes.norm(dim=-1, keepdim=True))
    x = 20 * draw("x", 6, D)
    plain, masked = (vq.apply(b, x, mask=mask).losses["commitment"] for mask in (None, torch.ones(6).bool()))
    close(vq.mean(plain), vq.mean(masked))
    unit = x / x.norm(dim=-1, keepdim=True)
    close(vq.mean(masked), (unit - b.codes[(unit @ b.codes.T).argmax(-1)]).square().mean())


def test_losses_of_parts_add_up():
    b, x = book(), draw("x", 10, D)
    names = ("commitment", "cross_entropy")
    of = lambda x: vq.apply(b, x, losses=names).losses
    parts = tree.map(lambda *t: sum(t), of(x[:3]), of(x[3:3]), of(x[3:]))
    for name in names:
        close(vq.mean(parts[name]), vq.mean(of(x)[name]))
        assert vq.mean(of(x[:0])[name]) == 0


@pytest.mark.parametrize("name", slow_after(1, ["cross_entropy", "gumbel"]))
def test_the_distances_are_not_kept_for_the_backward(name, monkeypatch):
    b, x = vq.init(0, 512, 8), draw("x", 1024, 8).float()
    of = {
        "cross_entropy": lambda x, b: vq.mean(vq.cross_entropy(b, x, vq.encode(b, x))),
        "gumbel": lambda x, b: vq.gumbel(x, x, b).square().sum(),
    }[name]
    captured, peaks = [], []
    for tile in (1 << 30, 4 * 512 * 64):
        monkeypatch.setattr(rows_module, "TILE", tile)
        captured.append(cost(grad(of), x, b).peak)
        with Peak() as peak:
            torch.autograd.grad(of(y := x.clone().requires_grad_(), b), y)
        peaks.append(peak.most)
    whole = 4 * 1024 * 512
    for all_at_once, in_tiles in (captured, peaks):
        assert all_at_once > 3 * whole and in_tiles < whole


BAD = {
    "among of floats": (lambda: vq.orthogonal(book(), torch.ones(K)), r"among: got torch.float32 \(9,\); wanted bool"),
    "among of another size": (lambda: vq.orthogonal(book(), torch.ones(3).bool()), r"among: got torch.bool \(3,\)"),
    "codes of some": (
        lambda: vq.cross_entropy(book(), draw("x", 3, D), torch.zeros(2).long()),
        r"codes: got torch.int64 \(2,\) for x \(3, 4\); wanted int64, one for each row",
    ),
    "narrow codes": (lambda: vq.cross_entropy(book(), draw("x", 3, D), torch.zeros(3).int()), "codes: got torch.int32"),
    "last dim": (lambda: vq.diversity(book(), draw("x", 3, 5)), r"x: got shape \(3, 5\)"),
}


@pytest.mark.parametrize("f, message", BAD.values(), ids=BAD)
def test_bad_arguments(f, message):
    with pytest.raises(ValueError, match=message):
        f()
