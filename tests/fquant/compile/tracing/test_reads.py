"""A function under remat that reads a tensor which it is not given is refused, wherever it holds the tensor."""

from dataclasses import dataclass
from functools import cache, partial
from types import SimpleNamespace

import pytest
import torch
from torch.autograd import forward_ad
from torch.func import grad, hessian, jvp, vjp, vmap

from fquant import jit, linear, random, remat, tree

X, W, V = (random.normal(random.fold(random.key(9), name), (6, 6), torch.float64) for name in "xwv")


def same(a, b):
    for one, two in zip(tree.leaves(a), tree.leaves(b), strict=True):
        assert one.abs().max() > 0
        torch.testing.assert_close(one, two, rtol=1e-12, atol=1e-12)


@dataclass
class Holder:
    """An object, a bound method of it and a callable that hold a tensor."""

    w: torch.Tensor

    def __call__(self, x):
        return (x @ self.w).tanh()

    def method(self, x):
        return self(x)


class Layer(torch.nn.Module):
    def __init__(self, w):
        super().__init__()
        self.w = w

    def forward(self, x):
        return (x @ self.w).tanh()


def by_default(w):
    def inner(x, w=w):
        return (x @ w).tanh()

    return inner


def by_keyword(w):
    def inner(x, *, w=w):
        return (x @ w).tanh()

    return inner


def in_a_global(w):
    globals()["_HELD"] = w
    return lambda x: (x @ _HELD).tanh()  # type: ignore[name-defined]  # noqa: F821


def in_a_cache(w):
    twice = cache(lambda: w + w)  # the first call computes it, and later ones read it
    return lambda x: (x @ twice()).tanh()


HOLDS = {  # functions of w that hold it, such as tanh(x @ w), and the name by which they read it
    "a closure": (lambda w: lambda x: (x @ w).tanh(), "w"),
    "a nested function": (lambda w: lambda x: (lambda: (x @ w).tanh())(), "w"),
    "a tree": (lambda w: (lambda held: lambda x: (x @ held["a"][0]).tanh())({"a": [w]}), "held.a.0"),
    "a partial": (lambda w: partial(lambda w, x: (x @ w).tanh(), w), "w"),
    "a default argument": (by_default, "w"),
    "a keyword": (by_keyword, "w"),
    "a dataclass": (lambda w: (lambda held: lambda x: (x @ held.w).tanh())(Holder(w)), "held.w"),
    "a namespace": (lambda w: (lambda held: lambda x: (x @ held.w).tanh())(SimpleNamespace(w=w)), "held.w"),
    "a bound method": (lambda w: Holder(w).method, "self.w"),
    "a callable": (Holder, "self.w"),
    "a module": (Layer, "self.w"),
    "a global": (in_a_global, "_HELD"),
    "a product of ours": (lambda w: lambda x: linear(x, w.mT).tanh(), "w"),
    "a vmap within": (lambda w: lambda x: vmap(lambda row: (row @ w).tanh())(x), "w"),
    "an argument too": (lambda w: lambda x: (x @ w).tanh() + 0 * w.sum(), "w"),
    "a remat within": (lambda w: lambda x: remat(lambda x: (x @ w).tanh())(x), "w"),
    "a cache": (in_a_cache, "w"),
}


def tangent(make, w):
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(make(forward_ad.make_dual(w, w))(X)).tangent


SQUARE = torch.stack([W, 2 * W])
READS = {  # what differentiates or maps w, inside and upstream of the function that ``make`` makes of it
    "grad": lambda make: grad(lambda w: make(w)(X @ w).sum())(W),
    "grad of a constant": lambda make: grad(lambda w: make(w)(X).sum())(W),
    "captured": lambda make: jit(grad(lambda w, x: make(w)(x @ w).sum()))(W, X),
    "vjp": lambda make: vjp(lambda w: make(w)(X @ w), W)[1](X),
    "jvp": lambda make: jvp(lambda w: make(w)(X @ w), (W,), (W,)),
    "grad of grad": lambda make: grad(lambda w: grad(lambda x: make(w)(x).sum())(X).square().sum())(W),
    "vmap": lambda make: vmap(lambda w: make(w)(X))(SQUARE),
    "vmap of grad": lambda make: vmap(grad(lambda w: make(w)(X @ w).sum()))(SQUARE),
    "vmap of grad of another": lambda make: vmap(lambda w: grad(lambda x: make(w)(x).sum())(X))(SQUARE),
    "grad of vmap": lambda make: grad(lambda w: vmap(lambda x: make(w)(x @ w))(X[None]).sum())(W),
    "grad of vmap of another": lambda make: grad(lambda x: vmap(lambda w: make(w)(x))(SQUARE).sum())(X),
    "forward mode": lambda make: tangent(make, W),
    "autograd": lambda make: (lambda w: make(w)(X @ w).sum().backward())(W.clone().requires_grad_()),
    "autograd of an argument": lambda make: (lambda w: make(w)(w).sum().backward())(W.clone().requires_grad_()),
}


@pytest.mark.parametrize("order", [1, 2])
@pytest.mark.parametrize("holds", HOLDS)
@pytest.mark.parametrize("reads", READS)
def test_a_tensor_that_is_read_and_not_given_is_refused(reads, holds, order):
    make, name = HOLDS[holds]
    what = f"the tensor '{name}',"
    what = f"({what}|a tensor)" if holds == "a cache" else what  # its content has no name
    fault = rf"remat\(\S+\) reads {what} float64\[.*, whose gradient would silently be zero; pass it as"
    with pytest.raises(TypeError, match=fault):
        READS[reads](lambda w: remat(make(w), order))


WITHIN = {  # transforms within the function of the tensor that it holds, which torch cannot wrap again
    "vmap": lambda w: lambda x: vmap(lambda w: (x @ w).tanh())(w),
    "grad": lambda w: lambda x: grad(lambda w: (x @ w).tanh().sum())(w),
    "jvp": lambda w: lambda x: jvp(lambda w: (x @ w).tanh(), (w,), (x,))[1],
}


@pytest.mark.parametrize("within", WITHIN)
@pytest.mark.parametrize("reads", ["grad", "captured", "vjp", "jvp", "vmap of grad", "grad of vmap", "autograd"])
def test_a_tensor_that_is_transformed_within_and_not_given_is_refused(reads, within):
    with pytest.raises(TypeError, match=r"remat\(<lambda>\) reads the tensor 'w', float64\[.*; pass it as an argument"):
        READS[reads](lambda w: remat(WITHIN[within](w)))


@pytest.mark.parametrize("reads", READS)
def test_a_tensor_that_is_returned_and_not_given_is_refused(reads):
    with pytest.raises(TypeError, match=r"remat\(<lambda>\) reads a tensor float64\[.*; pass it as an argument"):
        READS[reads](lambda w: lambda x: remat(lambda x: {"x": x.sin(), "w": [w]})(x)["w"][0])


TAKES = {
    "grad": lambda f: grad(f)(V),
    "jvp": lambda f: jvp(f, (V,), (X,)),
    "vmap of grad": lambda f: vmap(grad(f))(SQUARE),
    "grad of vmap": lambda f: grad(lambda x: vmap(f)(x[None] * SQUARE).sum())(V),
}


@pytest.mark.parametrize("holds", HOLDS)
@pytest.mark.parametrize("transform", TAKES)
def test_a_constant_that_is_read_is_not(transform, holds):
    f = HOLDS[holds][0](W)
    loss = lambda f: TAKES[transform](lambda x: f(x @ x).sum())
    same(loss(remat(f)), loss(f))


@pytest.mark.parametrize("transform", TAKES)
def test_an_argument_may_be_returned(transform):
    f = lambda x: (x, x.sin(), x)
    loss = lambda f: TAKES[transform](lambda x: sum(y.square().sum() for y in f(x @ x)))
    same(loss(remat(f)), loss(f))


@pytest.mark.parametrize("within", [vmap, grad, hessian], ids=lambda f: f.__name__)
def test_transforms_within_are_not_taken_for_those_around(within):
    """Their levels are those of transforms around the call, outside of which torch runs the forward."""
    f = lambda x: within(lambda row: (row.sin() * row).prod())(x[:2, 0]) * x.sum()
    if within is vmap:
        f = lambda x: vmap(lambda row: (row.sin() * row).prod())(x)
    for around in TAKES.values():
        same(around(lambda x: remat(f, 2)(x).sum()), around(lambda x: f(x).sum()))
