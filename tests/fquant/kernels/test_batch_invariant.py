"""The bits of a row inside ``batch_invariant``: the same beside any others, under transforms, captured and not."""

import pytest
import torch
from torch.func import grad, grad_and_value, jvp, vjp, vmap

from fquant import INT8_ROW, NF4, NF4_DQ, batch_invariant, grouped_linear, jit, linear, lora, quantize, tree
from tests.helpers.arrays import randn
from tests.helpers.kernels.calls import nodes
from tests.helpers.kernels.threads import num_threads

CUTS = [(0, 1), (0, 2), (1, 4), (2, 7)]  # of seven rows


def weights(dim, dtype, kind):
    w = randn(dim, dim).div(dim**0.5)
    packed = {"dense": lambda: w.to(dtype), "nf4": lambda: quantize(w, NF4_DQ), "int8": lambda: quantize(w, INT8_ROW)}
    base = {"w": packed[kind](), "head": randn(96, dim, seed=1).to(dtype)}
    adapters = lora.init(base, "w", 8, key=0)
    return tree.map(lambda t: torch.where(t == 0, 0.02, t).to(dtype), adapters), base


def loss(adapters, base, row):
    params = lora.attach(base, adapters)
    return linear(linear(row.sin(), params["w"]).cos(), params["head"]).square().mean()


def of_rows(adapters, base, rows):
    with batch_invariant():
        return vmap(grad_and_value(loss), (None, None, 0))(adapters, base, rows)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", ["dense", "nf4", "int8"])
@pytest.mark.parametrize(("dim", "tokens"), [(64, 3), (512, 33), (1024, 5)])
@pytest.mark.parametrize("threads", [1, 2])
def test_a_row_has_the_same_bits_beside_any_others(dtype, kind, dim, tokens, threads, monkeypatch):
    """Gradients and values; with torch's own products many of these differ on AMX."""
    with num_threads(threads):
        adapters, base = weights(dim, dtype, kind)
        rows = randn(7, tokens, dim, seed=2).to(dtype)
        whole = of_rows(adapters, base, rows)
        for start, stop in CUTS:
            part = of_rows(adapters, base, rows[start:stop])
            assert all(
                torch.equal(t[start:stop], p) for t, p in zip(tree.leaves(whole), tree.leaves(part), strict=True)
            )
        captured = jit(of_rows)(adapters, base, rows)
        assert all(map(torch.equal, tree.leaves(whole), tree.leaves(captured)))


def test_derivatives_are_right():
    adapters, base = weights(64, torch.float64, "dense")
    rows = randn(3, 5, 64, seed=2).double()
    wanted = vmap(grad_and_value(loss), (None, None, 0))(adapters, base, rows)
    for got, want in zip(tree.leaves(of_rows(adapters, base, rows)), tree.leaves(wanted), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)
    narrow = of_rows(*tree.map(torch.Tensor.float, (adapters, base)), rows.float())
    for got, want in zip(tree.leaves(narrow), tree.leaves(wanted), strict=True):
        torch.testing.assert_close(got.double(), want, rtol=1e-4, atol=1e-4 * float(want.abs().max()))


PRODUCTS = {
    "mm": lambda a, b, c, v: a @ b,
    "of a vector": lambda a, b, c, v: a @ v,
    "vector first": lambda a, b, c, v: c[0] @ b.mT,
    "addmm": lambda a, b, c, v: torch.addmm(c, a, b, beta=0.5, alpha=2.0),
    "addmv": lambda a, b, c, v: torch.addmv(c[:, 0], a, v, beta=0.5, alpha=2.0),
    "without what is added": lambda a, b, c, v: torch.addmm(c * torch.nan, a, b, beta=0),
    "baddbmm": lambda a, b, c, v: torch.baddbmm(c[None], a[None], b[None], beta=3),
    "linear": lambda a, b, c, v: torch.nn.functional.linear(a, b.mT, c[0]),
    "einsum": lambda a, b, c, v: torch.einsum("ik,kj->ij", a, b),
    "stacks": lambda a, b, c, v: torch.stack([a, a + 1])[None] @ torch.stack([b, b + 1])[:, None],
}


@pytest.mark.parametrize("name", PRODUCTS)
def test_every_product_is_in_order(name):
    """It is near torch's own, has a row's bits alone, and no product of torch is left."""
    a, b, c, v = randn(9, 600), randn(600, 40, seed=1), randn(9, 40, seed=2), randn(600, seed=3)
    f = PRODUCTS[name]

    def inside(*args):
        with batch_invariant():
            return f(*args)

    wanted = f(*(t.double() for t in (a, b, c, v)))
    torch.testing.assert_close(inside(a, b, c, v).double(), wanted, rtol=1e-4, atol=1e-3)
    left = {"aten.mm", "aten.bmm", "aten.mv", "aten.addmm", "aten.addmv", "aten.baddbmm"}
    assert not left & set(nodes(inside, a, b, c, v)) and left & set(nodes(f, a, b, c, v))
    primal, tangent = jvp(inside, (a, b, c, v), (a, b, c, v))[:2]
    torch.testing.assert_close(primal, inside(a, b, c, v))
    assert tangent.shape == primal.shape


@pytest.mark.parametrize("few", [1, 2, 6, 8, 9])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("format", [NF4_DQ, NF4, INT8_ROW], ids=lambda f: f.name)
@pytest.mark.parametrize("width", [256, 100])
def test_few_rows_of_packed_products(format, dtype, few, width):
    """Few rows have a kernel of their own. Blocks that straddle rows are multiplied a tile at a time."""
    w, x = quantize(randn(70, width), format), randn(40, width, seed=1).to(dtype)

    def both(x):
        y, pullback = vjp(lambda x: linear(x, w), x)[:2]
        return y, *pullback(y)

    with batch_invariant():
        whole, back = both(x)
        y, g = both(x[3 : 3 + few])
        assert torch.equal(y, whole[3 : 3 + few]) and torch.equal(g, back[3 : 3 + few])
        assert linear(x[:0], w).shape == (0, 70)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", ["dense", "nf4"])
def test_rows_of_experts(kind, dtype):
    """Rows that a router sends to an expert beside others: with 1 to 40 rows of an expert."""
    w = randn(3, 48, 512).div(20)
    w = w.to(dtype) if kind == "dense" else tree.map(lambda *t: torch.stack(t), *(quantize(x, NF4_DQ) for x in w))
    x = randn(60, 512, seed=1).to(dtype)

    def both(x, counts):
        with batch_invariant():
            y, pullback = vjp(lambda x: grouped_linear(x, w, counts), x)[:2]
            return y, *pullback(y)

    whole = both(x, torch.tensor([40, 3, 17]))
    for first, second, third in ((1, 1, 1), (7, 2, 9), (30, 0, 16)):
        rows = torch.cat([torch.arange(first), 40 + torch.arange(second), 43 + torch.arange(third)])
        for part, all_rows in zip(both(x[rows], torch.tensor([first, second, third])), whole, strict=True):
            assert torch.equal(part, all_rows[rows])


REDUCTIONS = {
    "sum": torch.sum, "mean": torch.mean, "prod": lambda x: (1 + x / 1000).prod(), "var": torch.var,
    "norm": torch.linalg.vector_norm, "logsumexp": lambda x: x.flatten().logsumexp(0),
    "of dims": lambda x: x.sum((0, -1), keepdim=True), "widened": lambda x: x.sum(dtype=torch.float64),
    "rows": lambda x: x.sum(0), "columns": lambda x: x.mean(-1),
}  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", REDUCTIONS)
def test_reductions(name, dtype):
    """torch divides the sum of all elements of a single row among its threads."""
    f = REDUCTIONS[name]
    with num_threads(2):
        x = randn(3, 300, 300).to(dtype)

        def both(x):
            with batch_invariant():
                return vmap(f)(x), vmap(grad(lambda row: f(row).float().square().sum()))(x)

        for whole, *parts in zip(both(x), both(x[1:2]), both(x[1:]), jit(both)(x[1:2]), strict=True):
            for part in parts:
                assert torch.equal(whole[1 : 1 + len(part)], part)
        torch.testing.assert_close(both(x)[0], vmap(f)(x))


def test_others_are_left():
    """Integers, and what no product of floats is."""
    with batch_invariant():
        assert torch.equal(torch.ones(2, 3).long() @ torch.ones(3, 2).long(), torch.full((2, 2), 3))
        assert torch.equal(torch.ones(2, 3).sum(0), torch.full((3,), 2.0))


def test_a_captured_function_is_refused_inside():
    f = jit(lambda x: x @ x)
    f(torch.ones(2, 2))
    with (
        batch_invariant(),
        pytest.raises(RuntimeError, match=r"called inside batch_invariant\(\), .*; enter it inside"),
    ):
        f(torch.ones(2, 2))
