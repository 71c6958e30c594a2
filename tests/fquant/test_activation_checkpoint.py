"""Tests of fquant.remat: equal derivatives, less memory, errors by name. Verbs under it are in test_transforms."""

import threading
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch.func import grad, hessian, jacrev, jvp, vjp, vmap
from torch.fx.experimental.proxy_tensor import make_fx

from fquant import jit, random, tree
from fquant.activation_checkpoint import remat
from tests.helpers.live_memory import Live


def draw(name, *shape):
    return random.normal(random.fold(random.key(9), name), shape, torch.float64)


X, W, V = draw("x", 5, 6), draw("w", 6, 6), draw("v", 5, 6)


def block(x, w):
    return (x @ w).tanh() @ w.mT


def gated(x, w):
    return F.silu(x @ w) @ w.mT


def composed(f):
    """Apply two blocks, so that the cotangent of the first comes from the second."""
    return lambda x, w: f(f(x, w), w).square().sum()


def same(a, b):
    assert tree.structure(a) == tree.structure(b)
    for one, two in zip(tree.leaves(a), tree.leaves(b), strict=True):
        assert one.abs().max() > 0
        torch.testing.assert_close(one, two, rtol=1e-12, atol=1e-12)


orders = pytest.mark.parametrize("order", [1, 2])

FIRST = {
    "value": lambda f: f(X, W),
    "grad": lambda f: grad(f, (0, 1))(X, W),
    "grad of one": lambda f: grad(f, 1)(X, W),
    "vmap": lambda f: vmap(f, (0, None))(X[:, None], W),
    "vmap of grad": lambda f: vmap(grad(f, 1), (0, None))(X[:, None], W),
    "vmap of both": lambda f: vmap(grad(f, (0, 1)))(X[:, None], W.expand(5, 6, 6)),
    "jvp": lambda f: jvp(f, (X, W), (V, W)),
    "jvp of one": lambda f: jvp(lambda w: f(X, w), (W,), (W,)),
    "grad of jvp": lambda f: grad(lambda w: jvp(lambda x: f(x, w), (X,), (V,))[1])(W),
    "jacrev": lambda f: jacrev(lambda w: f(X, w))(W),
    "make_fx": lambda f: make_fx(grad(f, (0, 1)), tracing_mode="fake")(X, W)(X, W),
    "make_fx of vmap": lambda f: make_fx(vmap(grad(f, 1), (0, None)), tracing_mode="fake")(X[:, None], W)(
        X[:, None], W
    ),
}
SECOND = {
    "grad of grad": lambda f: grad(lambda w: grad(f, 1)(X, w).square().sum())(W),
    "jvp of grad": lambda f: jvp(grad(lambda w: f(X, w)), (W,), (W,)),
    "hessian": lambda f: hessian(lambda w: f(X[:2], w))(W),
    "vmap of grad of grad": lambda f: vmap(grad(lambda x: grad(f, 1)(x, W).square().sum()))(X[:, None]),
}


@orders
@pytest.mark.parametrize("transform", FIRST.values(), ids=FIRST)
def test_first_derivatives(transform, order):
    same(transform(composed(remat(block, order))), transform(composed(block)))


@pytest.mark.parametrize("f", [block, gated])
@pytest.mark.parametrize("transform", SECOND.values(), ids=SECOND)
def test_second_derivatives(transform, f):
    same(transform(composed(remat(f, 2))), transform(composed(f)))
    fault = rf"remat\({f.__name__}\) gives first derivatives only and was .* twice; use remat\(f, o"
    with pytest.raises(RuntimeError, match=fault):
        transform(composed(remat(f)))


@orders
def test_bits_of_an_op_of_two_formulas(order):
    """They are those of plain autograd at order 1, and those of torch.func.grad at order 2."""
    x, w = (t.clone().requires_grad_() for t in (X, W))
    loss = lambda f: lambda x, w: f(x, w).square().sum()
    one, two = torch.autograd.grad(loss(gated)(x, w), (x, w)), grad(loss(gated), (0, 1))(X, W)
    assert not all(map(torch.equal, one, two))
    for transform in (lambda f: f, jit):
        got = transform(grad(loss(remat(gated, order)), (0, 1)))(X, W)
        assert all(map(torch.equal, got, one if order == 1 else two))


@orders
def test_autograd(order):
    for f in (remat(block, order), block):
        x, w = X.clone().requires_grad_(), W.clone().requires_grad_()
        composed(f)(x, w).backward()
        same((x.grad, w.grad), grad(composed(block), (0, 1))(X, W))
    w = W.clone().requires_grad_()
    (first,) = torch.autograd.grad(composed(remat(block, order))(X, w), w, create_graph=True)
    if order == 2:
        first.square().sum().backward()
        same(w.grad, SECOND["grad of grad"](composed(block)))
    else:
        with pytest.raises(RuntimeError, match=r"remat\(block\) gives first derivatives only"):
            first.square().sum().backward()


@orders
def test_trees_in_and_out(order):
    """Use nested arguments with strings, numbers, None and integer tensors, and nested results."""

    def f(params, tokens, options, scale, bias):
        assert options == {"mode": "wide", "none": None} and bias is None and scale == 2.0
        x = params["embed"][tokens]
        return {"y": (x @ params["w"][0]).tanh() * scale, "parts": (x.sum(), [x.sin()])}

    def loss(params, tokens, f):
        out = f(params, tokens, {"mode": "wide", "none": None}, 2.0, None)
        assert list(out) == ["y", "parts"]
        return out["y"].sum() + out["parts"][0] ** 2 + out["parts"][1][0].prod()

    params, tokens = {"embed": X, "w": [W]}, torch.tensor([[0, 4, 4], [1, 2, 0]])
    same(grad(loss)(params, tokens, remat(f, order)), grad(loss)(params, tokens, f))
    each = lambda g: vmap(grad(loss), (None, 0, None))(params, tokens, g)
    same(each(remat(f, order)), each(f))


def test_unused_arguments_and_results():
    """Gradients of unused arguments are zero and not absent; an unused result has no cotangent."""
    f = remat(lambda x, w, unused: (x @ w, w.sin()))
    got = grad(lambda x, w, unused: f(x, w, unused)[0].sum(), (0, 1, 2))(X, W, V)
    wanted = grad(lambda x, w, unused: (x @ w).sum() + 0 * unused.sum(), (0, 1, 2))(X, W, V)
    for a, b in zip(got, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


def test_name_and_signature_stay():
    f = remat(block)
    assert f.__name__ == "block" and f.__wrapped__ is block
    with pytest.raises(ValueError, match=r"remat: order is 3; wanted 1 \(first derivatives only\) or 2 \(any\)"):
        remat(block, 3)


def test_calls_do_not_share_state():
    """Differentiate two calls of one wrapped function on trees of different structure together."""
    f = remat(lambda xs: [x.sin() for x in xs])
    loss = lambda a, b: sum(x.sum() for x in f([a, b]) + f([a]))
    same(grad(loss, (0, 1))(X, V), (2 * X.cos(), V.cos()))


# --- memory -----------------------------------------------------------------------------------------------------------


def deep(x, w):
    for _ in range(8):
        x = (x @ w).tanh()
    return x


def kept(f):
    x, w = torch.randn(64, 64), torch.randn(64, 64) / 8
    with Live() as live:
        out, pull, *_ = vjp(lambda x, w: f(f(x, w), w), x, w)
    return sum(live.sizes())


@orders
def test_only_arguments_are_kept(order):
    one = 64 * 64 * 4
    assert kept(remat(deep, order)) == 2 * one  # each block's result, the first being the second's argument
    assert kept(deep) >= 16 * one


def test_the_recomputation_is_not_kept_by_the_first_order():
    """torch.func runs backwards with create_graph=True; at first order the recomputation is still not kept."""
    x, w = torch.randn(64, 64), torch.randn(64, 64) / 8

    def peak(f):
        largest = 0

        class Peak(Live):
            def __torch_dispatch__(self, func, types, args=(), kwargs=None):
                nonlocal largest
                out = super().__torch_dispatch__(func, types, args, kwargs)
                alive = sum(size for ref, size in self.made.values() if not ref.expired())
                largest = max(largest, alive)
                return out

        def four(w):
            y = x
            for _ in range(4):
                y = f(y, w)
            return y.sum()

        with Peak():
            grad(four)(w)
        return largest

    assert peak(remat(deep)) < 0.5 * peak(remat(deep, 2)) < peak(deep)


# --- refusals ---------------------------------------------------------------------------------------------------------


def test_closures_over_other_things_are_not():
    scale = {"by": 3.0}
    f = remat(partial(lambda power, x: (x * scale["by"]) ** power, 2))
    same(grad(lambda x: f(x).sum())(X), 18 * X)


RESULTS = {
    "integers": (
        lambda x: {"y": x, "n": [x.argmax()]},
        r"remat\(<lambda>\) returned: n\.0: got int64, wanted a float tensor",
    ),
    "None": (
        lambda x: (x, None),
        r"returned: 1: got NoneType, wanted a float tensor; return the rest from outside",
    ),
    "a number": (lambda x: 3.0, r"remat\(<lambda>\) returned: got float, wanted a float tensor"),
}


@pytest.mark.parametrize("f, message", RESULTS.values(), ids=RESULTS)
def test_results_are_floats(f, message):
    with pytest.raises(TypeError, match=message):
        remat(f)(X)


GENERATOR = torch.Generator()
DRAWS = {
    "dropout": lambda x, w: F.dropout(x @ w),
    "a new tensor": lambda x, w: x @ w + torch.rand_like(x),
    "in place": lambda x, w: x @ w * torch.empty_like(x).uniform_(),
    "attention": lambda x, w: F.scaled_dot_product_attention(x @ w, x @ w, x @ w, dropout_p=0.1),
}
PURE = {
    "no dropout": lambda x, w: F.dropout(x @ w, training=False),
    "attention without dropout": lambda x, w: F.scaled_dot_product_attention(x @ w, x @ w, x @ w),
    "by a key": lambda x, w: (x @ w) * random.uniform(random.key(0), (5, 6), torch.float64),
    "its own tensor": lambda x, w: (x @ w).mul_(2),
}
WRITES = {
    "to an argument": lambda x, w: x * w.mul_(0.5).sum(),
    "to a view": lambda x, w: x * w[2:3, 1].zero_().sum(),
}
WITHIN = {
    "value": lambda f: f,
    "grad": grad,
    "vmap of grad": lambda f: lambda x, w: vmap(grad(f), (0, None), randomness="different")(x[None], w),
    "autograd": lambda f: lambda x, w: torch.autograd.grad(f(x.clone().requires_grad_(), w), w.requires_grad_(False)),
    "captured": lambda f: jit(grad(f)),
}


@orders
@pytest.mark.parametrize("within", WITHIN)
@pytest.mark.parametrize("name", [*DRAWS, *WRITES])
def test_what_a_recomputation_would_not_repeat_is_refused(name, within, order):
    f = (DRAWS | WRITES)[name]
    message = "writes to its argument 1" if name in WRITES else "draws by aten.* of torch"
    with pytest.raises(TypeError, match=rf"remat\(<lambda>\) {message}"):
        WITHIN[within](lambda x, w: remat(f, order=order)(x, w).sum())(X, W.clone())


@orders
@pytest.mark.parametrize("name", PURE)
def test_what_it_repeats_is_not(name, order):
    plain, ours = (grad(lambda x, w, f=f: f(x, w).sum(), (0, 1)) for f in (PURE[name], remat(PURE[name], order=order)))
    same(ours(X, W), plain(X, W))
    same(jit(ours)(X, W), plain(X, W))


def test_generators_are_refused():
    own = torch.Generator()
    for f in (lambda x: x * torch.rand((), generator=own), lambda x: x * torch.rand((), generator=GENERATOR)):
        with pytest.raises(TypeError, match="reads the generator '(own|GENERATOR)'; pass a key"):
            remat(f)(X)
    with pytest.raises(TypeError, match="1.gen is a generator; pass a key"):
        remat(lambda x, at: x * torch.rand((), generator=at["gen"]))(X, {"gen": own})


def test_another_thread_may_draw():
    """The state of a generator is then another, and no op of the function is to blame."""

    def f(x):
        thread = threading.Thread(target=torch.rand, args=(3,))
        thread.start()
        thread.join()
        return x.sin()

    same(grad(lambda x: remat(f)(x).sum())(X), X.cos())


def test_torch_compile_is_refused_by_name():
    torch._dynamo.reset()
    step = torch.compile(grad(composed(remat(block)), 1), backend="aot_eager", fullgraph=True)
    with pytest.raises(RuntimeError, match=r"remat\(block\) cannot be traced by torch.compile; capture the step"):
        step(X, W)
    captured = jit(grad(composed(remat(block)), 1), compile="aot_eager")  # as the message says
    same(captured(X, W), grad(composed(block), 1)(X, W))
