"""Batched products in fast layouts: torch's product under every transform, and no product of few columns."""

import itertools

import pytest
import torch
from torch.func import grad, hessian, jacfwd, jvp, vjp, vmap

from fquant import jit
from fquant.adapted.batched_product import FEW, batched_linear
from tests.helpers.arrays import normal

plain = lambda x, w: x @ w.mT
SHAPES = [(3, 5, 40, 4), (2, 20, 4, 40), (1, 1, 7, 3), (4, 32, 17, 16), (2, 3, 5, 2)]  # n, rows, in, out
loss = lambda f: lambda x, w: (f(x, w).sin() * f(x, w)).sum()
TRANSFORMS = {
    "grad": lambda f: grad(loss(f), (0, 1)),
    "of grad": lambda f: grad(lambda x, w: sum(g.cos().sum() for g in grad(loss(f), (0, 1))(x, w)), (0, 1)),
    "jvp": lambda f: lambda x, w: jvp(f, (x, w), (w.sum() * x, 2 * w)),
    "jvp of one": lambda f: lambda x, w: jvp(lambda w: f(x, w), (w,), (w.cos(),)),
    "jvp of jvp": lambda f: lambda x, w: jvp(lambda x: jvp(lambda w: f(x * x, w), (w,), (w,))[1], (x,), (x.cos(),)),
    "jvp of grad": lambda f: lambda x, w: jvp(lambda x, w: grad(loss(f), 1)(x, w), (x, w), (x.cos(), w.sin())),
    "vjp": lambda f: lambda x, w: vjp(f, x, w)[1](f(x, w)),
    "hessian": lambda f: lambda x, w: hessian(lambda a: loss(f)(x * a, w * a))(torch.ones((), dtype=x.dtype)),
    "jacfwd": lambda f: lambda x, w: jacfwd(lambda a: f(x, w * a))(torch.ones(2, 1, 1, dtype=x.dtype)[0]),
}


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("transform", TRANSFORMS.values(), ids=TRANSFORMS)
def test_every_transform_is_that_of_torch_s_product(transform, shape):
    n, rows, width, out = shape
    x, w = normal(n, rows, width), normal(n, out, width, seed=1)
    got, want = transform(batched_linear), transform(plain)
    torch.testing.assert_close(got(x, w), want(x, w))
    torch.testing.assert_close(jit(got)(x, w), got(x, w), atol=0, rtol=0)


@pytest.mark.parametrize("dims", [d for d in itertools.product([None, 0, 1, -1], repeat=2) if d != (None, None)])
def test_vmap(dims):
    sizes = [3 if dim is None else (2, 3) for dim in dims]
    shape = lambda size, *rest: (size, *rest) if isinstance(size, int) else (*size, *rest)
    x, w = normal(*shape(sizes[0], 5, 7)), normal(*shape(sizes[1], 4, 7), seed=1)
    x, w = (t if dim is None else t.movedim(0, dim) for t, dim in zip((x, w), dims, strict=True))
    for f in (lambda f: f, lambda f: grad(loss(f), (0, 1)), lambda f: lambda x, w: jvp(f, (x, w), (x, w))):
        torch.testing.assert_close(vmap(f(batched_linear), dims)(x, w), vmap(f(plain), dims)(x, w))


def test_with_torch_compile():
    f = lambda f: grad(lambda w: loss(f)(x, w))
    x, w = normal(3, 5, 7), normal(3, 4, 7, seed=1)
    compiled = torch.compile(f(batched_linear), backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(w), f(plain)(w))


def test_no_product_has_few_columns():
    """And the gradient of an adapter's a, which has few rows, is contiguous."""
    x, a, b = torch.randn(3, 32, 64), torch.randn(3, 4, 64), torch.randn(3, 48, 4)

    def f(x, a, b):
        return grad(lambda *args: batched_linear(batched_linear(*args[:2]), args[2]).square().sum(), (0, 1, 2))(x, a, b)

    captured = jit(f)
    _, of_a, of_b = captured(x, a, b)
    assert of_a.is_contiguous() and of_b.mT.is_contiguous()
    (traced,) = captured.traced.values()
    products = traced.module.graph.find_nodes(op="call_function", target=torch.ops.aten.bmm.default)
    assert len(products) == 6 and min(node.meta["val"].shape[-1] for node in products) >= FEW
