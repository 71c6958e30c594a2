"""What the trace says that an op gives is what it gives, where torch's own fake tensors say otherwise."""

from itertools import product

import pytest
import torch
import torch.nn.functional as F
from torch.func import grad, jvp, vmap

from fquant import jit
from fquant.fake import _KNOWN, _VIEWS, Fake

from .formats import alike

pytestmark = pytest.mark.usefixtures("twice")
aten = torch.ops.aten

LAYOUTS = {
    "rows": lambda t: t,
    "columns": lambda t: t.transpose(0, -1).contiguous().transpose(0, -1),
    "one row": lambda t: t[:1].expand(t.shape),
    "one number": lambda t: t.flatten()[0].expand(t.shape),
    "gaps": lambda t: torch.stack([t, t], -1)[..., 0],
}
TWO = lambda *more, **told: lambda op, x, y: op(x, y, *more, **told)
SLOPE = lambda *more: lambda op, x, y: op(x[(0,) * x.dim()], x, y, *more)
CALLS = {
    aten.add.Tensor: TWO(), aten.sub.Tensor: TWO(), aten.mul.Tensor: TWO(), aten.div.Tensor: TWO(),
    aten.div.Tensor_mode: TWO(rounding_mode="floor"), aten.copysign.Tensor: TWO(), aten.xlogy.Tensor: TWO(),
    **{getattr(aten, name).Scalar: lambda op, x, y: op(x, 0.5) for name in "mul rsub eq ne ge gt le lt".split()},
    aten.pow.Tensor_Scalar: lambda op, x, y: op(x, 2), aten.neg.default: lambda op, x, y: op(x),
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
    aten.huber_loss_backward.default, aten.hardtanh_backward.default,
    *((aten.mse_loss_backward.default,) if torch.__version__ < "2.12" else ()),
)  # fmt: skip
SAME_LAYOUT = (aten.soft_margin_loss_backward.default,)  # elsewhere the first replay copies it


def strides(t):
    return [step for step, size in zip(t.stride(), t.shape, strict=True) if size > 1]


def told(op, *tensors):
    mode = Fake()
    fakes = [mode.from_tensor(t) for t in tensors]
    with mode:
        return CALLS[op](op, *fakes)


@pytest.mark.parametrize("op", CALLS, ids=str)
def test_layouts_and_dtypes_are_those_of_the_op(op):
    assert set(CALLS) == set(_KNOWN)
    dtypes = ((torch.float32,) * 2, (torch.bfloat16, torch.float32), (torch.float32, torch.float64))
    for first, second, shape, (of, other) in product(LAYOUTS.values(), LAYOUTS.values(), ((4, 6), (2, 3, 5)), dtypes):
        x, y = first(torch.rand(shape).to(of)), second(torch.rand(shape).to(of if op in OF_ONE_DTYPE else other))
        said, given = told(op, x, y), CALLS[op](op, x, y)
        assert said.dtype == given.dtype and said.shape == given.shape
        assert strides(said) == strides(given) or op in SAME_LAYOUT


@pytest.mark.parametrize("op", [op for op, rule in _KNOWN.items() if "of_two" in rule.__name__], ids=str)
def test_strides_of_dims_of_one(op):
    """By which torch's matmul chooses how to multiply, and so the last bits of a product."""
    for shape in ((17, 1, 8), (1, 8), (8, 1), (1, 1, 5), (2, 1, 3, 1)):
        size = torch.Size(shape).numel()
        lies = [torch.empty(shape).stride(), torch.empty(shape).mT.contiguous().mT.stride()]
        lies.append(tuple(size if n == 1 else step for n, step in zip(shape, lies[0], strict=True)))
        for first, second in product(lies, lies):
            x, y = (torch.empty_strided(shape, strides).fill_(0.5) for strides in (first, second))
            assert told(op, x, y).stride() == CALLS[op](op, x, y).stride(), (shape, first, second)
            if str(op).endswith(("add.Tensor", "sub.Tensor", "mul.Tensor", "div.Tensor")):
                mode = Fake()
                with mode:
                    said = op(mode.from_tensor(x), 0.5)
                assert said.stride() == op(x, 0.5).stride(), (shape, first)


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
    """A sum's gradient is one number, expanded; its product with a transposed tensor is transposed."""
    f = grad(lambda x, w: ((x.mT @ w).mT * x[:6]).sum() + (x.mT * w.mT).sum())
    x, w = torch.randn(8, 6), torch.randn(6, 8).mT
    got, wanted = jit(f)(x, w), f(x, w)
    assert alike(got, wanted) and got.stride() == wanted.stride()


def test_products_of_one_row_are_those_of_blas():
    """It multiplies otherwise where a dim of one element has other strides."""
    f = grad(lambda v: (v @ v.mT).abs().neg().sum())
    v = torch.randn(64, 33, 1)
    assert alike(jit(f)(v), f(v)) and alike(jit(vmap(f))(v[:, None]), vmap(f)(v[:, None]))


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")  # at the first use of jvp
def test_zeros_that_are_nowhere():
    """What is constant to the inner of two jvps has a tangent of zeros that are nowhere. Torch remembers what it said
    of a view of another tensor of that shape, and says it of theirs."""

    def f(x, w):
        inner = lambda x, w: jvp(lambda t: t.sin() * w, (x,), (x,))[1]
        return jvp(inner, (x, w), (torch.ones_like(x), w.cos()))

    captured, given = jit(f), (torch.randn(2, 3), torch.randn(3))
    for _ in range(2):
        assert all(map(alike, captured(*given), f(*given)))
    with Fake():
        plain, nowhere = torch.empty(7), torch._efficientzerotensor((7,))
        assert [aten.alias.default(t)._is_zerotensor() for t in (plain, nowhere, plain)] == [False, True, False]


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")  # at the first use of jvp
def test_tangents_of_what_is_part_of_a_memory():
    """Torch asks whether two tensors have memory of one size, and remembers the answer for others of their shape."""
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
