"""Gradient estimators: values, first and second derivatives against their definitions, also where the peer errs."""

from functools import partial

import pytest
import torch
from torch.func import grad, hessian, jacfwd, jacrev, jvp, vmap

from fquant import random, vq
from fquant.vq.codebook import rows as rows_module
from fquant.vq.codebook.rows import unit

D = 5


def draw(name, *shape):
    return random.normal(random.fold(random.key(41), name), shape, torch.float64)


X, Q, V = draw("x", D), draw("q", D), draw("v", D)
ZERO = torch.zeros(D, dtype=torch.float64)


def rotation_matrix(x, q):
    """Return the rotation from x's direction to q's in the plane of both, times the ratio of their lengths."""
    u, v = x / x.norm(), q / q.norm()
    cos = u @ v
    across = v - cos * u
    if across.norm() < 1e-12:
        return (q.norm() / x.norm()) * torch.eye(D, dtype=x.dtype) * (1 if cos > 0 else torch.nan)
    w = across / across.norm()
    sin = across.norm()
    plane = torch.stack([u, w], 1)
    turn = torch.tensor([[cos, -sin], [sin, cos]], dtype=x.dtype) - torch.eye(2, dtype=x.dtype)
    return (q.norm() / x.norm()) * (torch.eye(D, dtype=x.dtype) + plane @ turn @ plane.T)


@pytest.mark.parametrize("seed", range(4))
def test_rotation_is_the_rotation_of_the_plane(seed):
    x, q = draw(f"x{seed}", D), draw(f"q{seed}", D)
    matrix = rotation_matrix(x, q)
    torch.testing.assert_close(matrix @ x, q)
    torch.testing.assert_close(jacrev(vq.rotation)(x, q), matrix)
    torch.testing.assert_close(jacfwd(vq.rotation)(x, q), matrix)
    assert torch.equal(vq.rotation(x, q), q)


def test_rotation_of_what_points_the_other_way():
    """Opposite vectors give a reflection, which keeps the length of q and is an isometry up to the scale."""
    q = -2.5 * X
    matrix = jacrev(vq.rotation)(X, q)
    torch.testing.assert_close(matrix @ X, q)
    torch.testing.assert_close(matrix @ matrix.T, 6.25 * torch.eye(D, dtype=X.dtype))
    torch.testing.assert_close(jacrev(vq.rotation)(X, 3 * X), 3 * torch.eye(D, dtype=X.dtype))


def test_rotation_of_a_row_that_is_zero_is_its_code():
    """vector-quantize-pytorch returns zero."""
    x = torch.stack([X, ZERO, 1e-9 * X])
    q = torch.stack([Q, Q, Q])
    assert torch.equal(vq.rotation(x, q), q)
    jac = vmap(jacrev(vq.rotation))(x, q)
    torch.testing.assert_close(jac[0], rotation_matrix(X, Q))
    assert torch.equal(jac[1], torch.eye(D, dtype=X.dtype)) and torch.equal(jac[2], jac[1])
    assert not jacrev(vq.rotation)(X, ZERO).any()  # times the length of q
    assert torch.equal(vq.rotation(ZERO, ZERO), ZERO)
    for one in (x, q):
        assert hessian(lambda t: (vq.rotation(t, q) ** 2).sum())(one).isfinite().all()


def test_straight_through_and_direct():
    assert torch.equal(vq.straight_through(X, Q), Q) and vq.direct(X, Q) is Q
    assert torch.equal(jacrev(vq.straight_through)(X, Q), torch.eye(D, dtype=X.dtype))
    assert not jacrev(vq.straight_through, 1)(X, Q).any() and not jacrev(vq.rotation, 1)(X, Q).any()
    assert not jacrev(vq.direct)(X, Q).any() and jacrev(vq.direct, 1)(X, Q).trace() == D


@pytest.mark.parametrize("variance", [0.0, 5e-3, 0.5])
def test_directional_is_its_formula(variance):
    key = random.key(3)
    f = partial(vq.directional, key=key, variance=variance)
    noise = variance**0.5 * random.normal(key, (D,), torch.float64)
    u = (Q - X + noise) / (Q - X + noise).norm()
    torch.testing.assert_close(f(X, Q), X + u * (Q - X).norm())
    away = (X - Q) / (X - Q).norm()  # the derivative of the distance
    torch.testing.assert_close(jacrev(f)(X, Q), torch.eye(D, dtype=X.dtype) + torch.outer(u, away))
    torch.testing.assert_close(jacrev(f, 1)(X, Q), -torch.outer(u, away))
    assert torch.equal(f(X, X), X) and torch.equal(jacrev(f)(X, X), torch.eye(D, dtype=X.dtype))
    assert hessian(lambda x: f(x, X).sum())(X).isfinite().all()


def test_directional_gives_every_row_noise_of_its_own():
    x, q, key = draw("rows", 40, D), draw("codes", 40, D), random.key(1)
    each = random.fold(key, torch.arange(40))
    whole = vq.directional(x, q, key=each)
    assert torch.equal(vq.directional(x[30:], q[30:], key=each[30:]), whole[30:])
    torch.testing.assert_close((whole - x).norm(dim=-1), (q - x).norm(dim=-1))
    off = (whole - q).norm(dim=-1) / (q - x).norm(dim=-1)
    assert 0 < off.min() and off.max() < 0.5


def test_every_head_of_every_row_draws_for_itself():
    """Heads with the same codes and rows, and equal rows, get different noise."""
    book = vq.init(0, 7, D, heads=3)
    codes = draw("heads", 7, D).float().expand(3, 7, D).clone()
    book = vq.Book(codes, book.counts, codes.clone())
    x = draw("alike", D).float().expand(50, 3, D)
    got = vq.apply(book, x, random.key(2), gradient=vq.directional)
    assert len({tuple(row) for row in got.x.reshape(-1, D).tolist()}) == 150
    drawn = vq.sample(book, x, random.key(2), temperature=5.0)
    share = [(drawn[:, i] == drawn[:, j]).float().mean() for i, j in ((0, 1), (0, 2), (1, 2))]
    assert max(share) < 0.5  # seven codes are about equally likely
    assert max((drawn[1:, i] == drawn[:-1, j]).float().mean() for i in range(3) for j in range(3)) < 0.5


@pytest.mark.parametrize("learnable", [False, True])
@pytest.mark.parametrize("heads, metric", [(None, "euclidean"), (None, "cosine"), (2, "euclidean")])
def test_gumbel_is_the_softmax_of_all_codes(heads, metric, learnable, monkeypatch):
    book = vq.init(0, 7, D, heads=heads, metric=metric, learnable=learnable)
    book = vq.Book(draw("book", *book.codes.shape), book.counts, book.sums, metric, learnable)
    x = draw("x", 6, *([heads] if heads else []), D)
    codes = vq.encode(book, x)

    def soft(x, codes, fixed):
        table = unit(codes) if metric == "cosine" and learnable else codes
        fixed = unit(fixed) if metric == "cosine" and learnable else fixed
        inner = torch.einsum("n...d,...kd->n...k", x, table)
        if metric == "euclidean":
            square = (x[..., None, :] - table).square().sum(-1)
            inner = -square.sqrt()
        return torch.einsum("n...k,...kd->n...d", (inner / 0.5).softmax(-1), fixed)

    def ours(x, table):
        b = vq.Book(table, book.counts, book.sums, metric, learnable)
        return vq.gumbel(x, vq.decode(b, codes), b, temperature=0.5)

    assert torch.equal(ours(x, book.codes), vq.decode(book, codes))
    g = draw("g", *x.shape)
    for tile in (None, 4 * 7 * 2):
        if tile:
            monkeypatch.setattr(rows_module, "TILE", tile)
        got = grad(lambda x: (g * ours(x, book.codes)).sum())(x)
        want = grad(lambda x: (g * soft(x, book.codes, book.codes)).sum())(x)
        torch.testing.assert_close(got, want)
        twice = grad(lambda x: (draw("v", *x.shape) * grad(lambda x: (g * ours(x, book.codes)).sum())(x)).sum())(x)
        wanted = grad(
            lambda x: (draw("v", *x.shape) * grad(lambda x: (g * soft(x, book.codes, book.codes)).sum())(x)).sum()
        )(x)
        torch.testing.assert_close(twice, wanted)
        dcodes = grad(lambda c: (g * ours(x, c)).sum())(book.codes)
        if not learnable:
            assert not dcodes.any()
            continue
        through = grad(lambda c: (g * soft(x, c, book.codes)).sum())(book.codes)
        hard = grad(lambda c: (g * vq.decode(vq.Book(c, book.counts, book.sums, metric, True), codes)).sum())(
            book.codes
        )
        torch.testing.assert_close(dcodes, through + hard)


PATHS = {
    "direct": vq.direct,
    "straight-through": vq.straight_through,
    "rotation": vq.rotation,
    "directional": partial(vq.directional, key=random.key(2)),
}


@pytest.mark.parametrize("name", PATHS)
def test_derivatives_of_every_kind_agree(name):
    f = PATHS[name]
    h = lambda x, q: (f(x, q).sin() * torch.linspace(1, 2, D)).sum()
    torch.testing.assert_close(jvp(lambda x: h(x, Q), (X,), (V,))[1], grad(h)(X, Q) @ V)
    both = lambda z: h(*z.split(D))
    z = torch.cat([X, Q])
    forward_over, reverse_over = hessian(both)(z), jacrev(jacrev(both))(z)
    torch.testing.assert_close(forward_over, reverse_over)
    torch.testing.assert_close(vmap(grad(h))(X[None], Q[None])[0], grad(h)(X, Q))
    if name in ("straight-through", "rotation"):  # linear in x for derivatives: R' h'' R
        jac = jacrev(f)(X, Q)
        inner = torch.diag(-Q.sin() * torch.linspace(1, 2, D))
        torch.testing.assert_close(hessian(h)(X, Q), jac.T @ inner @ jac)


def test_directional_has_the_second_derivative_of_its_formula():
    key = random.key(2)
    u = Q - X + 5e-3**0.5 * random.normal(key, (D,), torch.float64)
    u = u / u.norm()
    h = lambda z: (vq.directional(*z.split(D), key=key).sin()).sum()
    plain = lambda z: (z[:D] + u * (z[D:] - z[:D]).norm()).sin().sum()
    z = torch.cat([X, Q])
    torch.testing.assert_close(hessian(h)(z), hessian(plain)(z))


BAD = {
    "no key": (lambda: vq.directional(X, Q), "directional: got no key for a variance of 0.005; give one"),
    "variance": (lambda: vq.directional(X, Q, variance=-1.0), "variance is -1.0; wanted at least 0"),
    "no book": (lambda: vq.gumbel(X, Q), "gumbel: got no book"),
    "temperature": (
        lambda: vq.gumbel(X, Q, vq.init(0, 3, D), temperature=0.0),
        "temperature is 0.0; wanted one above 0",
    ),
    "apply without a key": (
        lambda: vq.apply(vq.init(0, 3, D), X[None].float(), gradient=vq.directional),
        "directional: got no key",
    ),
}


@pytest.mark.parametrize("f, message", BAD.values(), ids=BAD)
def test_bad_arguments(f, message):
    with pytest.raises(ValueError, match=message):
        f()
