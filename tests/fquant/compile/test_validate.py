"""The first replay copies a result that is not in its traced layout, and raises for a wrong dtype, shape or view."""

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensor

from fquant import jit
from fquant.compile import validate
from fquant.compile.tracing.fake_tensor import Fake
from tests.helpers.formats import alike

pytestmark = pytest.mark.usefixtures("twice")
LIBRARY = torch.library.Library("fquant_test_first", "DEF")


def liar(name, real, said, schema="(Tensor x) -> Tensor"):
    """Define an op that computes ``real``, and whose fake implementation is ``said``."""
    LIBRARY.define(name + schema)
    LIBRARY.impl(name, real, "CompositeExplicitAutograd")
    torch.library.register_fake(f"fquant_test_first::{name}", said, lib=LIBRARY)
    return getattr(torch.ops.fquant_test_first, name).default


def columns(x):
    return (x + 1).mT.contiguous().mT


lays = liar("lays", columns, lambda x: torch.empty_like(x, memory_format=torch.contiguous_format))
two = liar(
    "two",
    lambda x: (columns(x), x * 2),
    lambda x: (torch.empty_like(x), torch.empty_like(x)),
    "(Tensor x) -> (Tensor, Tensor)",
)
casts = liar("casts", lambda x: x.double(), torch.empty_like)
shapes = liar("shapes", lambda x: x[:1].clone(), torch.empty_like)
sees = liar("sees", lambda x: x.mT, lambda x: x.view(x.shape[::-1]), "(Tensor(a) x) -> Tensor(a)")


def written(x):
    y = lays(x)
    y[:1].mul_(2)
    y.view(-1)[1:].sub_(x.reshape(-1)[:-1])
    return y, y.view(-1).neg() * 2, y.mT @ y


def honest(x):
    y = (x + 1).contiguous()
    y[:1].mul_(2)
    y.view(-1)[1:].sub_(x.reshape(-1)[:-1])
    return y, y.view(-1).neg() * 2, y.mT @ y


@pytest.mark.parametrize("fuse", [True, False])
@pytest.mark.parametrize("donate", [(), ("x",)])
def test_what_lies_otherwise_is_copied(fuse, donate):
    captured = jit(written, fuse=fuse, donate=donate)
    for seed in range(4):
        x = torch.randn(5, 7, generator=torch.Generator().manual_seed(seed))
        wanted, memory = honest(x), x.data_ptr()
        got = captured(x)
        assert all(map(alike, got, wanted)) and got[0].is_contiguous()
        assert not donate or got[0].data_ptr() == memory
    assert len(captured.traced) == 1


def test_one_result_of_several():
    def f(op):
        return lambda x: [t.view(-1) * 2 for t in op(x.exp())]

    captured = jit(f(two))
    for seed in range(3):
        x = torch.randn(5, 7, generator=torch.Generator().manual_seed(seed))
        assert all(map(alike, captured(x), f(lambda x: ((x + 1), x * 2))(x)))


@pytest.mark.parametrize("op", [casts, shapes, sees], ids=str)
def test_another_dtype_shape_or_view_raises(op):
    with pytest.raises(RuntimeError, match=f"{op} gives .* and torch describes it to the trace as "):
        jit(lambda x: op(x * 2) * 3)(torch.randn(5, 7))


@pytest.mark.parametrize("op", ["mm", "bmm", "addmm", "add", "sub", "mul", "div", "neg", "abs", "sqrt", "exp", "cat"])
@pytest.mark.parametrize("fuse", [True, False])
def test_what_is_told_where_to_write_raises_for_another_dtype(op, fuse, monkeypatch):
    """An out variant would cast f64 to the f32 that torch described, without a trace of it."""
    lie, args = Fake.dispatch, {"neg": 1, "abs": 1, "sqrt": 1, "exp": 1, "addmm": 3}.get(op, 2)

    def lying(self, func, types, args=(), kwargs=None):
        made = lie(self, func, types, args, kwargs)
        return made.float() if func._overloadpacket is getattr(torch.ops.aten, op) else made

    monkeypatch.setattr(Fake, "dispatch", lying)
    xs = [torch.randn((2,) * (2 + (op == "bmm")), dtype=torch.float64).abs() for _ in range(args)]
    f = jit(lambda *xs: (torch.cat(xs) if op == "cat" else getattr(torch, op)(*xs)).mT.float().softmax(-1), fuse=fuse)
    with pytest.raises(RuntimeError, match=r"gives .*float64.* torch describes it|to have dtype double, but got float"):
        f(*xs)


def test_what_is_told_where_to_write_may_lie_otherwise(monkeypatch):
    described = Fake.dispatch

    def lying(self, func, types, args=(), kwargs=None):
        made = described(self, func, types, args, kwargs)
        if func is not torch.ops.aten.exp.default:
            return made
        return FakeTensor(self, torch.empty_strided(made.shape, (1, 5), dtype=made.dtype, device="meta"), made.device)

    monkeypatch.setattr(Fake, "dispatch", lying)
    f, x = jit(lambda x: x.exp().mT.softmax(-1), fuse=False), torch.randn(5, 7)
    for _ in range(2):
        assert alike(f(x), f.__wrapped__(x).contiguous())


def test_the_first_replay_is_in_memory_that_is_laid_out(monkeypatch):
    seen, run = [], validate.Checked.run
    monkeypatch.setattr(validate.Checked, "run", lambda self, *tensors: seen.append(self.module) or run(self, *tensors))
    f, x = jit(lambda x: ((x @ x) @ x).softmax(-1)), torch.randn(8, 8)
    assert alike(f(x), f.__wrapped__(x))
    (found,) = f.traced.values()
    assert seen == [found.placed.module]


def test_an_honest_graph_is_as_it_was_traced():
    captured = jit(lambda x: ((x @ x.mT).softmax(-1).mT.contiguous(), x.mT[1:]))
    captured(torch.randn(4, 6))
    (found,) = captured.traced.values()
    assert not [node for node in found.module.graph.nodes if "empty_strided" in str(node.target)]


def test_what_torch_is_known_to_say():
    """log_sigmoid of a transposed tensor is contiguous, and torch describes it as transposed."""
    captured, x = jit(lambda x: F.logsigmoid(x.mT).view(2, 3, 5).sum(1)), torch.randn(5, 6)
    for _ in range(3):
        assert alike(captured(x), captured.__wrapped__(x))


def test_an_error_of_an_op_is_its_own_and_the_function_goes_on():
    captured = jit(lambda x, at: x.index_select(0, at) * 2)
    x = torch.randn(4, 3)
    for _ in range(2):
        with pytest.raises((IndexError, RuntimeError), match="^((?!While executing).)*$"):
            captured(x, torch.tensor([7]))
    assert alike(captured(x, torch.tensor([2])), x[2:3] * 2) and len(captured.traced) == 1


def test_an_op_that_cannot_be_described_without_values_is_computed():
    """The kernel of index_add for meta tensors takes no empty ones."""

    def f(x, at):
        return x.new_zeros(4).index_add(0, at, x).roll(1)

    x, at = torch.zeros(0), torch.zeros(0, dtype=torch.int64)
    captured = jit(f)
    for _ in range(3):
        assert torch.equal(captured(x, at), f(x, at))
