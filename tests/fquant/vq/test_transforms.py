"""Every transform of a codebook's verbs: vmap equals a loop, and capture is equal to the bit."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from torch.func import grad, grad_and_value, hessian, jacrev, jvp, vjp, vmap
from torch.fx.experimental.proxy_tensor import make_fx

from fquant import jit, random, tree, vq
from fquant.vq.codebook import rows as rows_module
from tests.helpers.arrays import assert_equal

K, D, N, E = 9, 4, 6, 3
LOSSES = ("commitment", "cross_entropy", "diversity", "orthogonal")
PATHS = {
    "direct": vq.direct,
    "straight-through": vq.straight_through,
    "rotation": vq.rotation,
    "directional": vq.directional,
    "gumbel": partial(vq.gumbel, temperature=0.5),
}
KINDS = {
    "plain": {},
    "cosine": {"metric": "cosine"},
    "learnable": {"learnable": True},
    "heads": {"heads": 2},
    "affine": {"affine": True, "learnable": True},
    "cosine, learnable heads": {"metric": "cosine", "learnable": True, "heads": 2},
}


def draw(name, *shape, dtype=torch.float32):
    return random.normal(random.fold(random.key(81), name), shape, dtype)


def book(kind="plain", seed=0, dtype=torch.float32):
    made = vq.init(seed, K, D, **KINDS[kind])
    codes = draw(f"codes{seed}", *made.codes.shape, dtype=torch.float64).float()
    made = replace(made, codes=vq.code_vectors(replace(made, codes=codes, learnable=True)))
    made = replace(made, sums=made.codes.clone(), metric=KINDS[kind].get("metric", "euclidean"))
    if made.affine is not None:
        made = vq.shift(made, vq.moments(made, 2 * draw("seen", 50, D) + 1))
    return tree.map(lambda t: t.to(dtype), made)


def rows(kind="plain", seed=0, dtype=torch.float32):
    return draw(f"x{seed}", N, *([KINDS[kind]["heads"]] if "heads" in KINDS[kind] else []), D, dtype=dtype)


def scalar(codes, x, b, key, path="rotation"):
    """Return a loss of everything that ``apply`` differentiates."""
    out = vq.apply(replace(b, codes=codes), x, key, gradient=PATHS[path], losses=LOSSES)
    wave = (out.x * torch.linspace(0.2, 1.5, out.x.numel(), dtype=x.dtype).reshape(x.shape)).sin().sum()
    return wave + sum(w * vq.mean(one) for w, one in zip((1, 0.1, 0.01, 0.5), out.losses.values(), strict=True))


def stacked(trees):
    return tree.map(lambda *leaves: torch.stack(leaves), *trees)


def close(got, want, bound=1e-9):
    assert tree.structure(got) == tree.structure(want)
    for one, other in zip(tree.leaves(got), tree.leaves(want), strict=True):
        if not other.is_floating_point():
            assert torch.equal(one, other)
        torch.testing.assert_close(one, other, rtol=bound, atol=bound)


def whole(b, x, key, mask=None):
    """Run a step with every verb and return all results."""
    if b.affine is not None:
        b = vq.shift(b, vq.moments(b, x, mask))
    out = vq.apply(b, x, key, mask=mask, draw=True, temperature=0.5, gradient=vq.directional, losses=LOSSES)
    best = vq.encode(b, x, top=2)
    b = vq.update(b, out.stats, threshold=1.5)
    return b, out, best, vq.decode(b, best[..., 0]), vq.perplexity(out.stats.counts)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("path", PATHS)
def test_derivatives_agree(kind, path):
    """Compare forward and reverse mode, first and second order, in float64."""
    b, x, key = book(kind, dtype=torch.float64), rows(kind, dtype=torch.float64), random.key(1)
    f = lambda codes, x: scalar(codes, x, b, key, path)
    v = (draw("v", *b.codes.shape, dtype=torch.float64), draw("w", *x.shape, dtype=torch.float64))
    dot = lambda a: sum((p * q).sum() for p, q in zip(a, v, strict=True))
    g = grad(f, (0, 1))(b.codes, x)
    assert g[1].any() and (b.learnable == bool(g[0].any()))
    slope = jvp(f, (b.codes, x), v)[1]
    close(slope, dot(g))
    twice = grad(lambda c, x: dot(grad(f, (0, 1))(c, x)), (0, 1))(b.codes, x)
    forward = jvp(lambda c, x: grad(f, (0, 1))(c, x), (b.codes, x), v)[1]
    close(twice, tuple(forward), 1e-8)
    close(grad(lambda c, x: jvp(f, (c, x), v)[1], (0, 1))(b.codes, x), twice, 1e-8)
    (pulled,) = vjp(lambda x: f(b.codes, x), x)[1](torch.tensor(2.0, dtype=torch.float64))
    close(pulled, 2 * g[1])


@pytest.mark.parametrize("path", ["direct", "gumbel"])
def test_what_is_differentiated_as_it_is_computed_has_its_finite_differences(path):
    """Straight-through derivatives are not those of the value; a learnable book's and the losses' are."""
    b, x, key = book("learnable", dtype=torch.float64), rows(dtype=torch.float64), random.key(1)
    f = (lambda c, x: scalar(c, x, b, key)) if path == "direct" else None
    if f is None:
        codes = vq.encode(b, x)
        f = lambda c, x: vq.mean(vq.cross_entropy(replace(b, codes=c), x, codes))
    else:
        f = lambda c, x: vq.mean(vq.apply(replace(b, codes=c), x, gradient=vq.direct).losses["commitment"])
    assert torch.autograd.gradcheck(f, (b.codes.clone().requires_grad_(), x.clone().requires_grad_()))
    assert torch.autograd.gradgradcheck(f, (b.codes.clone().requires_grad_(), x.clone().requires_grad_()))


@pytest.mark.parametrize("kind", KINDS)
def test_a_mapped_step_is_a_loop(kind):
    bs, xs = [book(kind, i) for i in range(E)], [rows(kind, i) for i in range(E)]
    keys = random.fold(random.key(0), torch.arange(E))
    masks = torch.arange(N)[None] < torch.tensor([[6], [4], [5]])
    mapped = vmap(whole)(stacked(bs), stacked(xs), keys, masks)
    close(mapped, stacked(list(map(whole, bs, xs, keys, masks))), 1e-5)
    close(vmap(whole, (None, 0, 0))(bs[0], stacked(xs), keys), stacked(map(partial(whole, bs[0]), xs, keys)), 1e-5)


@pytest.mark.parametrize("path", PATHS)
def test_mapped_gradients_are_a_loop(path):
    bs, xs = [book("learnable", i) for i in range(E)], [rows(seed=i) for i in range(E)]
    keys = random.fold(random.key(0), torch.arange(E))
    g = grad(lambda c, x, b, key: scalar(c, x, b, key, path), (0, 1))
    codes = [b.codes for b in bs]
    close(vmap(g)(stacked(codes), stacked(xs), stacked(bs), keys), stacked(list(map(g, codes, xs, bs, keys))), 1e-5)
    each = vmap(g, (None, 0, None, 0))(codes[0], stacked(xs), bs[0], keys)
    close(each, stacked([g(codes[0], x, bs[0], k) for x, k in zip(xs, keys, strict=True)]), 1e-5)


QUICK = {"cosine, learnable heads", "affine", "gumbel"}


def some(names):
    """Parametrize over ``names``, marking those that add little as slow."""
    return [pytest.param(name, marks=[] if name in QUICK else pytest.mark.slow) for name in names]


@pytest.mark.parametrize("kind", some(KINDS))
def test_a_captured_step_is_equal_to_the_bit(kind):
    b, x, key = book(kind), rows(kind), random.key(3)
    mask, broken = torch.arange(N) < 4, x.clone()
    broken.reshape(-1, D)[3] = torch.nan
    step = jit(whole)
    for given in (x, broken):
        assert_equal(step(b, given, key, mask), whole(b, given, key, mask))
    assert_equal(jit(whole, fuse=False)(b, x, key), whole(b, x, key))


@pytest.mark.parametrize("path", some(PATHS))
def test_captured_gradients_are_equal_to_the_bit(path):
    b, x, key = book("learnable"), rows(), random.key(3)
    g = lambda codes, x, b, key: grad(lambda c, x: scalar(c, x, b, key, path), (0, 1))(codes, x)
    assert_equal(jit(g)(b.codes, x, b, key), g(b.codes, x, b, key))
    each = vmap(g, (None, 0, None, None))
    two = torch.stack([x, 2 * x])
    assert_equal(jit(each)(b.codes, two, b, key), each(b.codes, two, b, key))


@pytest.mark.parametrize("kind", ["cosine", "affine", pytest.param("plain", marks=pytest.mark.slow)])
def test_a_book_that_is_written_over_has_the_gradients_of_what_it_was(kind):
    """vector-quantize-pytorch writes its average over saved tensors: the same loss, other gradients."""
    given, x, key = book(kind), rows(kind), random.key(3)
    given = replace(given, learnable=False)

    def step(book, x, key):
        def loss(x):
            out = vq.apply(book, x, key, losses=LOSSES)
            return sum((vq.mean(one) for one in out.losses.values()), out.x.sin().sum()), out

        slope, (value, out) = grad_and_value(loss, has_aux=True)(x)
        return vq.update(book, out.stats, decay=0.5), slope, value

    wanted, memory = step(given, x, key), given.codes.data_ptr()
    got = jit(step, donate=("book",))(given, x, key)
    assert_equal(got, wanted)
    assert got[0].codes.data_ptr() == memory
    with pytest.raises(RuntimeError, match="book.codes was donated to step"):
        given.codes.sum()


def test_traced_and_compiled():
    b, x, key = book(), rows(), random.key(3)
    step = lambda b, x, key: whole(b, x, key)  # make_fx takes no defaults
    assert_equal(make_fx(step, tracing_mode="fake")(b, x, key)(b, x, key), step(b, x, key))
    torch._dynamo.reset()
    encode = torch.compile(lambda b, x: vq.decode(b, vq.encode(b, x)), backend="aot_eager", fullgraph=True)
    assert_equal(encode(b, x), vq.decode(b, vq.encode(b, x)))


def test_a_tile_of_rows_changes_no_derivative(monkeypatch):
    b, x, key = book("learnable", dtype=torch.float64), rows(dtype=torch.float64), random.key(1)
    f = lambda c, x: scalar(c, x, b, key, "gumbel")
    want = f(b.codes, x), grad(f, (0, 1))(b.codes, x), hessian(f, 1)(b.codes, x)
    monkeypatch.setattr(rows_module, "TILE", 4 * K * 2)
    close((f(b.codes, x), grad(f, (0, 1))(b.codes, x), hessian(f, 1)(b.codes, x)), want)
    mapped = vmap(grad(f), (None, 0))(b.codes, torch.stack([x, 2 * x]))
    close(mapped, torch.stack([grad(f)(b.codes, x), grad(f)(b.codes, 2 * x)]))


def test_kmeans_of_many_is_a_loop():
    bs, xs = [book(seed=i) for i in range(E)], [draw(f"k{i}", 40, D) for i in range(E)]
    keys = random.fold(random.key(0), torch.arange(E))
    f = lambda b, x, key: vq.kmeans(b, x, key, 3)
    close(vmap(f)(stacked(bs), stacked(xs), keys), stacked(map(f, bs, xs, keys)), 1e-5)


def test_codes_have_no_derivative():
    b, x = book("learnable"), rows()
    codes, tangent, *_ = jvp(lambda x: vq.encode(b, x).float(), (x,), (x,))
    assert not tangent.any() and torch.equal(codes.long(), vq.encode(b, x))
    assert not jacrev(lambda x: vq.apply(b, x).stats.sums)(x).any()
