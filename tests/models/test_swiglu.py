"""SwiGLU's gate: every transform against plain torch in float64, and captured against eager steps."""

import pytest
import torch
import torch.nn.functional as F
from torch.func import grad, hessian, jacfwd, jacrev, jvp, vjp, vmap
from torch.fx.experimental.proxy_tensor import make_fx

from fquant import cost, jit, remat, tree
from fquant.kernels.ops.silu import silu, silu_derivative
from models import swiglu
from models.swiglu import gated
from tests.helpers.arrays import named, rng
from tests.helpers.formats import ISAS, alike, forced

F64 = torch.float64


def draw(*shape, seed=0):
    return 2 * torch.randn(shape, generator=rng(seed), dtype=F64)


def plain(gate, up):
    return gate / (1 + torch.exp(-gate)) * up


def wave(y):
    """Return a scalar with derivatives of every order, different for each element."""
    return (y * torch.linspace(0.2, 1.5, y.numel(), dtype=y.dtype).reshape(y.shape)).sin().sum()


def along(f, tangents):
    return lambda *args: jvp(f, args, tangents)[1]


def inner(f, tangents):
    return lambda *args: sum((g * t).sum() for g, t in zip(grad(f, (0, 1))(*args), tangents, strict=True))


G, U, V = draw(3, 4), draw(3, 4, seed=1), (draw(3, 4, seed=2), draw(3, 4, seed=3))
TRANSFORMS = {  # each of a function of gate and up to their product
    "itself": lambda f: f(G, U),
    "grad": lambda f: grad(lambda *a: wave(f(*a)), (0, 1))(G, U),
    "grad of the gate": lambda f: grad(lambda g: wave(f(g, U)))(G),
    "grad of up": lambda f: grad(lambda u: wave(f(G, u)))(U),
    "grad of both as one": lambda f: grad(lambda x: wave(f(x, x * x)))(G),
    "vjp": lambda f: vjp(f, G, U)[1](V[0]),
    "jvp": lambda f: jvp(f, (G, U), V),
    "jvp of the gate": lambda f: jvp(lambda g: f(g, U), (G,), V[:1]),
    "jvp of up": lambda f: jvp(lambda u: f(G, u), (U,), V[:1]),
    "jacrev": lambda f: jacrev(f, (0, 1))(G, U),
    "jacfwd": lambda f: jacfwd(f, (0, 1))(G, U),
    "vmap": lambda f: vmap(f)(G, U),
    "vmap, of a column": lambda f: vmap(f, (1, 0), 1)(G, U.mT.contiguous()),
    "vmap of the gate": lambda f: vmap(f, (0, None))(G, U[0]),
    "vmap of up, twice": lambda f: vmap(vmap(f, (None, 0)), (0, None))(G, draw(5, 4, seed=4)),
    "vmap of a grad": lambda f: vmap(grad(lambda *a: wave(f(*a)), (0, 1)), (0, None))(G, U[0]),
    "grad of a vmap": lambda f: grad(lambda g, u: wave(vmap(f, (None, 0))(g, u)), (0, 1))(G[0], U),
    "vmap of a jvp": lambda f: vmap(lambda *a: jvp(f, a[:2], a[2:]))(G, U, *V),
    "hessian": lambda f: hessian(lambda *a: wave(f(*a)), (0, 1))(G, U),
    "grad of grad": lambda f: grad(inner(lambda *a: wave(f(*a)), V), (0, 1))(G, U),
    "jvp of grad": lambda f: jvp(grad(lambda *a: wave(f(*a)), (0, 1)), (G, U), V),
    "grad of jvp": lambda f: grad(along(lambda *a: wave(f(*a)), V), (0, 1))(G, U),
    "jvp of jvp": lambda f: jvp(along(f, V), (G, U), V[::-1]),
    "jacfwd, thrice": lambda f: jacfwd(jacfwd(jacfwd(lambda *a: wave(f(*a)))))(G[0], U[0]),
    "vmap of jvp of jvp": lambda f: vmap(lambda *a: jvp(along(f, a[2:]), a[:2], a[:1:-1])[1])(G, U, *V),
    "grad of jvp of jvp": lambda f: grad(lambda *a: wave(jvp(along(f, V), a, V)[1]))(G, U),
    "thrice": lambda f: grad(inner(inner(lambda *a: wave(f(*a)), V), V[::-1]), (0, 1))(G, U),
    "four times": lambda f: grad(inner(along(inner(lambda *a: wave(f(*a)), V), V), V), (0, 1))(G, U),
    "autograd": lambda f: torch.autograd.grad(wave(f(g := G.clone().requires_grad_(), U)), g),
    "remat": lambda f: grad(lambda *a: wave(remat(lambda g, u: f(g, u))(*a)), (0, 1))(G, U),
    "remat, twice": lambda f: grad(inner(lambda *a: wave(remat(lambda g, u: f(g, u), 2)(*a)), V), (0, 1))(G, U),
    "make_fx": lambda f: make_fx(grad(lambda *a: wave(f(*a)), (0, 1)), tracing_mode="fake")(G, U)(G, U),
    "make_fx of grad of grad": lambda f: make_fx(grad(inner(lambda *a: wave(f(*a)), V), (0, 1)))(G, U)(G, U),
}


@pytest.mark.parametrize("name", TRANSFORMS)
def test_transforms(name):
    transform = TRANSFORMS[name]
    torch.testing.assert_close(transform(gated), transform(plain))


@named("backend", ["aot_eager", "eager"])
def test_compiled(backend):
    torch._dynamo.reset()
    compiled = lambda f: torch.compile(f, backend=backend, fullgraph=True)
    torch.testing.assert_close(compiled(gated)(G, U), plain(G, U))
    f = grad(lambda g, u: wave(gated(g, u)), (0, 1))
    torch.testing.assert_close(compiled(f)(G, U), f(G, U))


@named("dtype", [torch.float32, torch.bfloat16, torch.float16])
@named("backend", ["reference", *ISAS])
def test_of_narrow_dtypes(backend, dtype):
    """Compare with products of the ops; the second derivative is rounded once before its product."""
    g, u, v = (t.to(dtype) for t in (8 * G, U, V[0]))
    with forced(backend):
        assert alike(gated(g, u), silu(g) * u)
        dg, du = vjp(gated, g, u)[1](v)
        assert alike(dg, v * (u * silu_derivative(g))) and alike(du, v * silu(g))
        assert alike(jvp(gated, (g, u), (v, u))[1], v * (u * silu_derivative(g)) + u * silu(g))
        second = grad(lambda g: grad(lambda g: gated(g, torch.ones_like(g)).sum())(g).sum())(g)
    s = g.double().sigmoid()
    exact = s * (1 - s) * (2 + g.double() * (1 - 2 * s))
    assert second.dtype is dtype
    torch.testing.assert_close(second.double(), exact, rtol=2 * torch.finfo(dtype).eps, atol=1e-6)


def test_nothing_is_computed_for_what_nobody_differentiates():
    seen = lambda f: {node.target._opname for node in make_fx(f)(G, U).graph.nodes if node.op == "call_function"}
    assert "silu_derivative" not in seen(lambda g, u: grad(lambda u: gated(g, u).sum())(u))
    assert seen(lambda g, u: gated(g, u)) == {"silu", "mul"}
    assert "silu_derivative" in seen(lambda g, u: grad(lambda g: gated(g, u).sum())(g))


def layers(trained, x, down):
    """Compute gated layers, one behind the other."""
    for (a, b), c in zip(trained, down, strict=True):
        x = x + gated(x @ a, x @ b) @ c
    return x.square().sum()


@named("recompute", [False, True])
def test_a_step_holds_the_two_products_and_nothing_made_of_them(recompute):
    x, random = 0.3 * torch.randn(64, 8, generator=rng(5)), rng(6)
    down = [0.2 * torch.randn(256, 8, generator=random) for _ in range(6)]
    args = [0.2 * torch.randn(2, 8, 256, generator=random) for _ in range(6)], x, down
    f = grad(layers)
    assert all(map(alike, tree.leaves(jit(f, recompute=recompute)(*args)), tree.leaves(f(*args))))
    held = cost(f, *args, recompute=recompute).holding
    assert sum(each.nbytes == 64 * 256 * 4 for each in held) <= 2 * len(down) + 2


MALFORMED = {
    "shapes": (lambda: gated(G, U[0]), ValueError, r"got gate \(3, 4\) and up \(4,\); wanted one shape"),
    "integers": (lambda: gated(G.long(), U.long()), TypeError, r"silu got x torch.int64 \(3, 4\); wanted f32"),
}


@pytest.mark.parametrize("call, error, message", MALFORMED.values(), ids=MALFORMED)
def test_malformed(call, error, message):
    with pytest.raises(error, match=message):
        call()


def test_where_torch_compiles_it_is_that_of_torch(monkeypatch):
    """Use F.silu in torch.compile, which refuses a Function with a jvp."""
    monkeypatch.setattr(torch.compiler, "is_dynamo_compiling", lambda: True)
    assert alike(swiglu.gated(G, U), F.silu(G) * U)
