"""The norm: every transform against the formula in float64; the ops and the memory of a first derivative."""

import pytest
import torch
from torch.autograd import forward_ad
from torch.func import grad, grad_and_value, hessian, jacfwd, jacrev, jvp, vjp, vmap
from torch.fx.experimental.proxy_tensor import make_fx

from fquant import jit, remat
from fquant.kernels import reference
from models.norm import rms_norm
from tests.helpers.arrays import named
from tests.helpers.formats import alike, forced, strided
from tests.helpers.kernels.calls import all_alike, nodes
from tests.helpers.kernels.losses import EPS
from tests.helpers.kernels.norms import BACKENDS, DTYPES, EPSILON, PLACES, drawn


def norm(x, weight):
    return rms_norm(x, weight, 0.1)


def plain(x, weight):
    return reference.rms_norm(x, weight, 0.1)[0]


def scalar(f):
    """Return a scalar of the norm ``f`` with derivatives of every order, different for each element."""
    return lambda x, w: (f(x, w) * torch.linspace(0.2, 1.5, x.shape[-1], dtype=x.dtype)).sin().sum()


X, DX, _ = drawn(5, 6, torch.float64)
W, DW = drawn(2, 6, torch.float64, seed=1)[1]
XS, WS = torch.stack([X, DX, X + DX]), torch.stack([W, DW, W - DW])


def double(wrt):
    """Return grad of grad along a direction."""
    along = (DX, DW)[wrt]
    return lambda f: grad(lambda x, w: (grad(scalar(f), wrt)(x, w) * along).sum(), (0, 1))(X, W)


def pulled(f):
    """Compute the tangent of a vjp's pullback, outside of the norm's own forward pass."""
    _, pull, *_ = vjp(f, X, W)
    return jvp(pull, (DX,), (X,))


def pulled_without_func(f):
    """Compute :func:`pulled` by torch.autograd."""
    x, w = X.clone().requires_grad_(), W.clone().requires_grad_()
    y = f(x, w)
    with forward_ad.dual_level():
        found = torch.autograd.grad(y, (x, w), forward_ad.make_dual(DX, X))
        return [forward_ad.unpack_dual(t).tangent for t in found]


def backward(f):
    """Differentiate twice by torch.autograd."""
    x, w = X.clone().requires_grad_(), W.clone().requires_grad_()
    first = torch.autograd.grad(scalar(f)(x, w), (x, w), create_graph=True)
    return *first, *torch.autograd.grad((first[0] * DX).sum() + (first[1] * DW).sum(), (x, w))


TRANSFORMS = {
    "value": lambda f: f(X, W),
    "grad": lambda f: grad(scalar(f), (0, 1))(X, W),
    "grad of grad, x": double(0),
    "grad of grad, the weight": double(1),
    "third order": lambda f: grad(lambda x: double_of(f, x))(X),
    "backward twice": backward,
    "jvp": lambda f: jvp(f, (X, W), (DX, DW)),
    "jvp of x": lambda f: jvp(lambda x: f(x, W), (X,), (DX,)),
    "jvp of the weight": lambda f: jvp(lambda w: f(X, w), (W,), (DW,)),
    "jvp of jvp": lambda f: jvp(lambda x: jvp(lambda x: f(x, W), (x,), (DX,))[1], (X,), (DX,)),
    "jvp of grad": lambda f: jvp(grad(scalar(f), (0, 1)), (X, W), (DX, DW)),
    "grad of jvp": lambda f: grad(lambda *at: jvp(scalar(f), at, (DX, DW))[1], (0, 1))(X, W),
    "jvp of a pull": pulled,
    "jvp of a pull, without torch.func": pulled_without_func,
    "jacfwd": lambda f: jacfwd(f, (0, 1))(X, W),
    "jacrev": lambda f: jacrev(f, (0, 1))(X, W),
    "hessian": lambda f: hessian(scalar(f), (0, 1))(X, W),
    "vmap": lambda f: vmap(f, (0, None))(XS, W),
    "vmap of the weight": lambda f: vmap(f, (None, 0))(X, WS),
    "vmap of both": lambda f: vmap(f, (1, 0))(XS.movedim(0, 1), WS),
    "vmap of vmap": lambda f: vmap(vmap(f, (0, None)), (None, 0))(XS, WS),
    "of each example": lambda f: vmap(grad(scalar(f), (0, 1)), (0, None))(XS, W),
    "of each weight": lambda f: vmap(grad(scalar(f), (0, 1)), (None, 0))(X, WS),
    "of each pair": lambda f: vmap(grad(scalar(f), (0, 1)))(XS, WS),
    "grad of vmap": lambda f: grad(lambda x, w: vmap(scalar(f), (0, None))(x, w).sum(), (0, 1))(XS, W),
    "grad of vmap of the weight": lambda f: grad(lambda x, w: vmap(scalar(f), (None, 0))(x, w).sum(), (0, 1))(X, WS),
    "vmap of grad of grad": lambda f: vmap(lambda x: grad(lambda x: double_of(f, x))(x))(XS),
    "vmap of jvp": lambda f: vmap(lambda dx: jvp(scalar(f), (X, W), (dx, DW))[1])(XS),
    "remat": lambda f: grad(lambda x, w: scalar(remat(f))(x, w), (0, 1))(X, W),
    "remat, second order": lambda f: double(0)(remat(f, order=2)),
    "remat of each example": lambda f: vmap(grad(scalar(remat(f)), (0, 1)), (0, None))(XS, W),
    "make_fx": lambda f: make_fx(grad(scalar(f), (0, 1)), tracing_mode="fake")(DX, DW)(X, W),
    "make_fx of second order": lambda f: make_fx(hessian(scalar(f)), tracing_mode="fake")(DX, DW)(X, W),
    "compile": lambda f: torch.compile(f, backend="aot_eager", fullgraph=True)(X, W),
    "compile of grad": lambda f: torch.compile(grad(scalar(f)), backend="aot_eager", fullgraph=True)(X, W),
    "compile of make_fx": lambda f: torch.compile(make_fx(grad(scalar(f)))(X, W), backend="aot_eager")(X, W),
}  # fmt: skip


def double_of(f, x):
    return (grad(scalar(f), 1)(x, W) * DW).sum() + (grad(scalar(f))(x, W) * DX).square().sum()


@pytest.mark.parametrize("name", TRANSFORMS)
def test_transforms(name):
    torch._dynamo.reset()
    torch.testing.assert_close(TRANSFORMS[name](norm), TRANSFORMS[name](plain), rtol=1e-11, atol=1e-12)


# --- a first derivative -----------------------------------------------------------------------------------------------


@named("backend", BACKENDS)
@named("dtype", DTYPES)
def test_gradients_are_near_those_of_float64(backend, dtype):
    """Bound errors by the roundings of y, of one product and of the result; many rows are summed in float32."""
    g, x, w = drawn(3000, 40, dtype)
    loss = lambda f: lambda x, w, g: (f(x, w) * g).sum(dtype=torch.promote_types(x.dtype, torch.float32))
    exact = grad(loss(plain), (0, 1))(x.double(), w.double(), g.double())
    with forced(backend):
        got = grad(loss(norm), (0, 1))(x, w, g)
    rounding = torch.finfo(dtype).eps
    assert [t.dtype for t in got] == [dtype, dtype]
    for mine, true in zip(got, exact, strict=True):
        assert (mine - true).norm() < 3 * rounding * true.norm()


def test_a_wide_weight_has_a_wide_gradient():
    """Sum exact products of bf16 in float32."""
    g, x, w = drawn(3000, 40, torch.bfloat16)
    got = grad(lambda w: (norm(x, w) * g).sum(dtype=torch.float32))(w.float())
    parts = norm(x, torch.ones(40)).double() * g.double()
    assert got.dtype is torch.float32
    assert ((got - parts.sum(0)).abs() < 12 * EPS * parts.abs().sum(0)).all()


@named("dtype", DTYPES)
def test_second_order_of_narrow_floats_is_that_of_wide_ones(dtype):
    x, w = X.to(dtype), W.to(dtype)
    curve = lambda f, w: lambda x: grad(lambda x: _wide(f(x, w)).sin().sum())(x)
    slope = lambda f, w: grad(lambda x: _wide(curve(f, w)(x)).square().sum())
    got, wanted = slope(norm, w)(x), slope(plain, w.double())(x.double())
    assert got.dtype is dtype and (got - wanted).norm() < 8 * torch.finfo(dtype).eps * wanted.norm()


def _wide(x):
    return x.to(torch.promote_types(x.dtype, torch.float32))


ARITHMETIC = {"aten.pow.Tensor_Scalar", "aten.mean.dim", "aten.rsqrt", "aten.mul.Tensor", "aten.sum.dim_IntList"}


def test_one_pass_each_way():
    g, x, w = drawn(12, 6, torch.bfloat16)
    pull = lambda x, w, g: vjp(norm, x, w)[1](g)
    of_x = nodes(lambda x, w, g: vjp(lambda x: norm(x, w), x)[1](g), x.reshape(3, 4, 6), w, g.reshape(3, 4, 6))
    assert of_x.count("fquant.rms_norm") == of_x.count("fquant.rms_norm_backward") == 1
    assert not ARITHMETIC & {*of_x}
    assert not ARITHMETIC & {*nodes(norm, x, w)}
    of_both = nodes(pull, x, w, g)
    assert of_both.count("fquant.rms_norm") == of_both.count("fquant.rms_norm_backward") == 1
    of_weight = nodes(lambda x, w, g: vjp(lambda w: norm(x, w), w)[1](g), x, w, g)
    assert of_weight.count("fquant.rms_norm") == 1 and "fquant.rms_norm_backward" not in of_weight
    assert ARITHMETIC & {*of_weight}
    mapped = nodes(vmap(grad(scalar(norm)), (0, None)), x.reshape(3, 4, 6), w)
    assert mapped.count("fquant.rms_norm") == mapped.count("fquant.rms_norm_backward") == 1


def test_nothing_is_held_beside_a_number_a_row():
    _, x, w = drawn(30, 40, torch.bfloat16)
    held = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: held.append(t) or t, lambda t: t):
        norm(x.clone().requires_grad_(), w)
    assert sorted((t.dtype, tuple(t.shape)) for t in held if t.numel() > 40) == [(torch.bfloat16, (30, 40))]
    assert sum(t.nbytes for t in held) == x.nbytes + w.nbytes + 30 * 4


@named("dtype", DTYPES)
def test_captured_is_uncaptured(dtype):
    g, x, w = drawn(12, 40, dtype)
    step = grad_and_value(
        lambda p, x, g: (norm(x.reshape(3, 4, 40) * p["a"], p["w"]).flatten(0, 1) * g).sum(),
    )
    params = {"a": torch.ones(40, dtype=dtype) * 0.9, "w": w}
    got, wanted = jit(step)(params, x, g), step(params, x, g)
    assert all_alike([*got[0].values(), got[1]], [*wanted[0].values(), wanted[1]])


@pytest.mark.parametrize("backend", BACKENDS)
def test_leading_dims_are_rows(backend):
    _, x, w = drawn(60, 40, torch.bfloat16)
    with forced(backend):
        y = rms_norm(x, w, EPSILON)
        assert alike(rms_norm(x.reshape(3, 4, 5, 40), w, EPSILON), y.reshape(3, 4, 5, 40))
        assert alike(rms_norm(x[7], w, EPSILON), y[7])
        assert all(alike(rms_norm(place(x), strided(w), EPSILON), y) for place in PLACES)
        assert alike(rms_norm(x.reshape(3, 20, 40).mT.contiguous().mT, w, EPSILON), y.reshape(3, 20, 40))
    assert rms_norm(x[:0].reshape(2, 0, 40), w, EPSILON).shape == (2, 0, 40)
    assert grad(lambda w: norm(x[:0], w).sum())(w).eq(0).all()
    assert grad(lambda x: norm(x, w[:0]).sum())(x[:, :0]).shape == (60, 0)


@pytest.mark.parametrize("shape, weight", [((3, 5), (4,)), ((3, 5), (3, 5)), ((3, 5), (1,)), ((3, 5), ()), ((), ())])
def test_a_weight_of_another_shape_is_refused(shape, weight):
    message = (
        rf"weight: shape \({', '.join(map(str, weight))},?\), want the last dim of x \({', '.join(map(str, shape))}"
    )
    for f in (norm, torch.compile(norm, backend="aot_eager")):
        with pytest.raises(ValueError, match=message):
            f(torch.ones(shape), torch.ones(weight))
