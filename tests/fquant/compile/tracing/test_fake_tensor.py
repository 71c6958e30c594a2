"""Corrected fake tensors have the layout and dtype of the real results of each op."""

from functools import cache
from itertools import product

import pytest
import torch
import torch.nn.functional as F
from torch.func import grad, jvp, vmap

from fquant import jit
from fquant.compile.tracing.fake_tensor import _RULES, _VIEWS, Fake
from tests.helpers.cases import slow_after
from tests.helpers.formats import alike

pytestmark = pytest.mark.usefixtures("twice")
aten = torch.ops.aten

LAYOUTS = {
    "rows": lambda t: t,
    "columns": lambda t: t.transpose(0, -1).contiguous().transpose(0, -1),
    "one row": lambda t: t[:1].expand(t.shape),
    "one number": lambda t: t.flatten()[0].expand(t.shape),
    "gaps": lambda t: torch.stack([t, t], -1)[..., 0],
}
TWO = lambda *more, **described: lambda op, x, y: op(x, y, *more, **described)
SLOPE = lambda *more: lambda op, x, y: op(x[(0,) * x.dim()], x, y, *more)
SCALAR = "add sub mul div rsub fmod remainder copysign eq ne ge gt le lt"
ONE = """
    neg abs isnan relu relu6 hardsigmoid nan_to_num deg2rad rad2deg softplus leaky_relu tril triu empty_like zeros_like
    ones_like"""
CALLS = {
    aten.add.Tensor: TWO(), aten.sub.Tensor: TWO(), aten.mul.Tensor: TWO(), aten.div.Tensor: TWO(),
    aten.div.Tensor_mode: TWO(rounding_mode="floor"), aten.copysign.Tensor: TWO(), aten.xlogy.Tensor: TWO(),
    **{getattr(aten, name).default: TWO() for name in "logaddexp logaddexp2 special_xlog1py silu_backward".split()},
    **{getattr(aten, name).Scalar: lambda op, x, y: op(x, 0.5) for name in SCALAR.split()},
    **{getattr(aten, name).default: lambda op, x, y: op(x) for name in ONE.split()},
    **{getattr(aten, name).default: lambda op, x, y: op(x, 0.5) for name in "hardshrink clamp_min clamp_max".split()},
    aten.xlogy.Scalar_Self: lambda op, x, y: op(0.5, x), aten.xlogy.Scalar_Other: lambda op, x, y: op(x, 0.5),
    aten.heaviside.default: TWO(), aten.logit_backward.default: TWO(), aten.hardtanh.default: lambda op, x, y: op(x),
    aten.threshold.default: lambda op, x, y: op(x, 0.5, 2), aten.threshold_backward.default: TWO(0),
    aten.where.self: lambda op, x, y: op(x > 0.3, x, y), aten.addcmul.default: lambda op, x, y: op(x, y, y),
    aten.lerp.Scalar: TWO(0.3), aten.index_put.default: lambda op, x, y: op(x, [torch.tensor([0])], x[:1]),
    aten.clamp.default: lambda op, x, y: op(x, 0, 1), aten.full_like.default: lambda op, x, y: op(x, 2.0),
    aten.flip.default: lambda op, x, y: op(x, [0]), aten._log_softmax.default: lambda op, x, y: op(x, -1, False),
    aten.masked_fill.Scalar: lambda op, x, y: op(x, x > 0.5, 2.0),
    aten.masked_fill.Tensor: lambda op, x, y: op(x, x > 0.5, torch.tensor(2.0)),
    aten.index_add.default: lambda op, x, y: op(x, 0, torch.tensor([0]), x[:1]),
    aten.pow.Tensor_Scalar: lambda op, x, y: op(x, 2),
    aten.elu_backward.default: lambda op, x, y: op(x, 1.0, 1.0, 1.0, False, y),
    aten.hardtanh_backward.default: TWO(0, 6), aten.hardswish_backward.default: TWO(),
    aten.softplus_backward.default: TWO(1, 20),
    aten.binary_cross_entropy.default: TWO(None, 0), aten.huber_loss.default: TWO(0),
    aten.soft_margin_loss.default: TWO(0),
    aten.soft_margin_loss_backward.default: SLOPE(1), aten.binary_cross_entropy_backward.default: SLOPE(None, 1),
    aten.mse_loss_backward.default: SLOPE(1), aten.smooth_l1_loss_backward.default: SLOPE(1, 1.0),
    aten.huber_loss_backward.default: SLOPE(1, 1.0),
}  # fmt: skip
OF_ONE_DTYPE = (  # which torch, or torch 2.11, refuses of two, or says wrongly there
    aten.binary_cross_entropy.default, aten.binary_cross_entropy_backward.default,
    aten.huber_loss_backward.default, aten.hardtanh_backward.default, aten.heaviside.default,
    aten.threshold_backward.default, aten.lerp.Scalar,
    *((aten.mse_loss_backward.default,) if torch.__version__ < "2.12" else ()),
)  # fmt: skip
MODE = Fake()
SAME_LAYOUT = (aten.soft_margin_loss_backward.default,)  # elsewhere the first replay copies it


def strides(t):
    return [step for step, size in zip(t.stride(), t.shape, strict=True) if size > 1]


@cache
def drawn(layout, shape, dtype):
    """Return a tensor and its fake one, cached because making them is slow."""
    t = LAYOUTS[layout](torch.rand(shape).to(dtype))
    return t, MODE.from_tensor(t)


def described(op, *fakes):
    with MODE:
        return CALLS[op](op, *fakes)


@pytest.mark.parametrize("op", CALLS, ids=str)
def test_layouts_and_dtypes_are_those_of_the_op(op):
    assert set(CALLS) == set(_RULES)
    one, two = (torch.float32,) * 2, ((torch.bfloat16, torch.float32), (torch.float32, torch.float64))
    kinds = product([((2, 3, 5), dtypes) for dtypes in two], zip(LAYOUTS, [*LAYOUTS][::-1], strict=True))
    pairs = product([((4, 6), one), ((2, 3, 5), one)], product(LAYOUTS, LAYOUTS))
    for (shape, (of, other)), (first, second) in (*pairs, *kinds):
        (x, a), (y, b) = drawn(first, shape, of), drawn(second, shape, of if op in OF_ONE_DTYPE else other)
        said, given = described(op, a, b), CALLS[op](op, x, y)
        assert said.dtype == given.dtype and said.shape == given.shape
        assert strides(said) == strides(given) or op in SAME_LAYOUT


CONDITIONS = LAYOUTS | {
    "leading dims": lambda t: t[..., :1].expand(t.shape),
    "last dim": lambda t: t[:1, :1].expand(t.shape),
}


@pytest.mark.parametrize("condition", slow_after(2, CONDITIONS))
def test_a_condition_is_not_cast(condition):
    """So its strides of zero stay, and the order of dims is that of the next operand."""
    of, mask = torch.rand(2, 3, 5), CONDITIONS[condition](torch.rand(2, 3, 5) > 0.5)
    layouts = LAYOUTS | {"channels last": lambda t: t.transpose(0, 1).contiguous().transpose(0, 1)}
    for first, second in product(layouts, layouts):
        for dtypes in product((torch.float32, torch.bfloat16), repeat=2):
            x, y = (layouts[name](of).to(dtype) for name, dtype in zip((first, second), dtypes, strict=True))
            for other in (y, y[0, 0, 0]):
                real = torch.where(mask, x, other)
                with MODE:
                    fake = torch.where(*map(MODE.from_tensor, (mask, x, other)))
                assert (strides(fake), fake.dtype) == (strides(real), real.dtype), (first, second, dtypes)


@pytest.mark.parametrize("op", [op for op in _RULES if "loss" not in str(op) and "cross" not in str(op)], ids=str)
def test_strides_of_dims_of_one(op):
    """Strides of dims of size one are right too: matmul chooses its algorithm, and so the last bits, by them."""
    for shape in ((17, 1, 8), (1, 8), (8, 1), (1, 1, 5), (2, 1, 3, 1)):
        size = torch.Size(shape).numel()
        lies = [torch.empty(shape).stride(), torch.empty(shape).mT.contiguous().mT.stride()]
        lies.append(tuple(size if n == 1 else step for n, step in zip(shape, lies[0], strict=True)))
        pairs = [(t, MODE.from_tensor(t)) for t in (torch.empty_strided(shape, lie).fill_(0.5) for lie in lies)]
        for (x, a), (y, b) in product(pairs, pairs):
            assert described(op, a, b).stride() == CALLS[op](op, x, y).stride(), (shape, x.stride(), y.stride())
            if str(op).endswith(("add.Tensor", "sub.Tensor", "mul.Tensor", "div.Tensor")):
                with MODE:
                    said = op(a, 0.5)
                assert said.stride() == op(x, 0.5).stride(), (shape, x.stride())


@pytest.mark.parametrize("view", _VIEWS, ids=str)
def test_views_of_one_row_have_the_strides_of_the_op(view):
    for shape, lies in (((4, 1, 5), (5, 1, 1)), ((1, 3, 2), (7, 2, 1)), ((3, 4), (4, 1)), ((5, 1), (1, 9))):
        mode, t = Fake(), torch.empty_strided(shape, lies)
        fake = mode.from_tensor(t)
        with mode:
            said = view(fake, shape)
        assert said.stride() == view(t, shape).stride()


LOSSES = {
    "mse": F.mse_loss, "smooth": F.smooth_l1_loss, "margin": F.soft_margin_loss,
    "huber": lambda x, y: F.huber_loss(x, y.to(x.dtype)), "huber of two": F.huber_loss,
}  # fmt: skip


@pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES)
@pytest.mark.parametrize("other", [torch.float32, torch.float64, torch.float16], ids=str)
def test_gradients_of_losses_of_two_dtypes(loss, other):
    if loss is F.mse_loss and torch.__version__ < "2.12":
        pytest.skip("torch 2.11 has no gradient of mse_loss of two dtypes")
    x, y = torch.randn(6, 8).bfloat16(), torch.randn(6, 8).to(other)
    if loss is F.huber_loss:
        wanted, got = loss(x, y), jit(loss)(x, y)
    else:
        f = grad(lambda x, y: loss(x.mT, y.mT).float() * 3)
        wanted, got = f(x, y), jit(f)(x, y)
    assert alike(got, wanted) and got.stride() == wanted.stride()


def test_gradients_of_sums_of_what_is_transposed():
    """The gradient of a sum is an expanded number; its product with a transposed tensor is transposed."""
    f = grad(lambda x, w: ((x.mT @ w).mT * x[:6]).sum() + (x.mT * w.mT).sum())
    x, w = torch.randn(8, 6), torch.randn(6, 8).mT
    got, wanted = jit(f)(x, w), f(x, w)
    assert alike(got, wanted) and got.stride() == wanted.stride()


def test_products_of_one_row_are_those_of_blas():
    """BLAS multiplies differently if a dim of size one has other strides."""
    f = grad(lambda v: (v @ v.mT).abs().neg().sum())
    v = torch.randn(64, 33, 1)
    assert alike(jit(f)(v), f(v)) and alike(jit(vmap(f))(v[:, None]), vmap(f)(v[:, None]))


def test_zeros_that_are_nowhere():
    """Zero tangents without memory are not confused with tensors of their shape by torch's cache of descriptions."""

    def f(x, w):
        inner = lambda x, w: jvp(lambda t: t.sin() * w, (x,), (x,))[1]
        return jvp(inner, (x, w), (torch.ones_like(x), w.cos()))

    captured, given = jit(f), (torch.randn(2, 3), torch.randn(3))
    for _ in range(2):
        assert all(map(alike, captured(*given), f(*given)))
    with Fake():
        plain, nowhere = torch.empty(7), torch._efficientzerotensor((7,))
        assert [aten.alias.default(t)._is_zerotensor() for t in (plain, nowhere, plain)] == [False, True, False]


def test_tangents_of_what_is_part_of_a_memory():
    """Storage sizes are compared anew for each pair of tensors, and not by torch's cache."""
    f = lambda x, dx: jvp(lambda t: (t.mT.sin() * 2, t[1:].view(-1)), (x,), (dx,))
    whole, part = torch.randn(4, 6), torch.randn(9, 6)[2:6]
    for x, dx in ((whole, whole + 1), (part, part + 1), (whole, part), (part, whole)):
        captured = jit(f)
        for _ in range(2):
            got, wanted = captured(x, dx), f(x, dx)
            assert all(map(alike, (*got[0], *got[1]), (*wanted[0], *wanted[1])))
    own, within = torch.empty(4, 6), torch.empty(9, 6)
    mode = Fake()
    own, within = mode.from_tensor(own), mode.from_tensor(within)
    with mode:
        pairs = (own, own), (own, within[2:6]), (within[2:6], own), (own, own)
        same = [aten._has_same_storage_numel.default(a, b) for a, b in pairs]
        sizes = [aten._new_zeros_with_same_feature_meta.default(*pair).untyped_storage().nbytes() for pair in pairs]
    assert same == [True, False, False, True] and sizes == [96, 216, 96, 96]


LENGTHS = {  # calls in turn, each with another length by a float
    "end": lambda n: lambda x: torch.arange(n) * x.sum(),
    "step": lambda n: lambda x: torch.arange(0.0, 8.0, n / 4) * x.sum(),
    "new": lambda n: lambda x: torch.arange(n, dtype=torch.float64, device=x.device) + x.sum(),
    "factor": lambda n: lambda x: F.interpolate(x[None, None], scale_factor=n / 2, mode="linear"),
    "factors": lambda n: lambda x: F.interpolate(x.expand(1, 1, 4, 4), scale_factor=(n / 2, 1.5), mode="bilinear"),
    "size": lambda n: lambda x: F.interpolate(x[None, None], size=int(n)),
}


@pytest.mark.parametrize("name", LENGTHS)
def test_lengths_that_are_floats(name):
    x = torch.arange(4.0)
    for n in (9.0, 4.0, 6.0, 9.0):
        f = LENGTHS[name](n)
        assert torch.equal(jit(f)(x), f(x)) and jit(f)(x).shape == f(x).shape
