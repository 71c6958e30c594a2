"""The rotary half rotation, as the op ``turn`` and as a pattern in captured graphs, against torch's neg and cat."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import grad, vjp, vmap

from fquant import jit
from fquant.compile.trace import trace
from fquant.kernels.ops.pointwise import OP as POINTWISE
from fquant.kernels.ops.pointwise import turn
from models.config import Config
from models.rope import rope, rotate
from tests.helpers.arrays import rng, same
from tests.helpers.formats import ISAS, alike, forced, shifted, strided
from tests.helpers.kernels.pointwise import values

pytestmark = pytest.mark.usefixtures("twice")

BACKENDS = ("reference", *ISAS)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def forth(x):
    first, second = x.chunk(2, -1)
    return torch.cat([-second, first], -1)


def back(x):
    first, second = x.chunk(2, -1)
    return torch.cat([second, -first], -1)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64])
@pytest.mark.parametrize("half", [1, 2, 16, 32, 64, 256])
def test_an_op_is_neg_and_cat(half, dtype, backend):
    x = values(6 * half * 7, dtype).reshape(7, 3, 2 * half)
    with forced(backend):
        for t in (x, shifted(x), strided(x), x.transpose(0, 1), x[:0], x[0, 0]):
            assert alike(turn(t, half), forth(t)) and alike(turn(t, -half), back(t))
            assert alike(turn(turn(t, half), -half), t)
        assert alike(vmap(lambda t: turn(t, half), in_dims=1)(x), forth(x.transpose(0, 1)))


def test_a_turned_value_may_be_all_that_is_left_of_it():
    """Rotate values that are not used otherwise: a program must not write the register that it still reads."""
    x, y = values(4096, torch.float32).reshape(8, 512), values(4096, torch.float32, 1).reshape(8, 512)
    f = lambda x, y: forth(back(forth(x * y) + y) * x) - forth(y)
    assert same(f, x, y)


def test_malformed_calls_raise():
    x = torch.ones(3, 4)
    for bad in (3, 1, 4, 0):
        with pytest.raises(ValueError, match=rf"turn got x \(3, 4\) and a half of {bad}; wanted half of its last dim"):
            turn(x, bad)
    for odd in (torch.ones(3, 6), torch.ones(3, 6).double()):
        with pytest.raises(ValueError, match="by which 512 can be divided"):
            turn(odd, 3)
    with pytest.raises(ValueError, match=r"x \(\) and"):
        turn(x[0, 0], 1)
    with pytest.raises(TypeError, match=r"int64 \(3, 4\); wanted f32"):
        turn(x.long(), 2)
    with pytest.raises(TypeError, match="a gradient through turn"):
        turn(x.clone().requires_grad_(), 2)


def test_fake_tensors_have_the_shapes_of_real_ones():
    with FakeTensorMode():
        x = torch.empty(4, 5, 8, dtype=torch.bfloat16).transpose(0, 1)
        assert (turn(x, 4).shape, turn(x, 4).dtype, turn(x, 4).is_contiguous()) == (x.shape, x.dtype, True)


def steps(f, *args):
    """Return the number of rotations in programs of ``f`` captured, of programs, and the unfused ops of the pattern."""
    calls = [n for n in trace(lambda a: f(*a), args).module.graph.nodes if n.op == "call_function"]
    texts = [str(n.args[2]) for n in calls if n.target is POINTWISE]
    others = {"cat", "neg", "turn"} & {getattr(n.target, "_opname", "") for n in calls}
    return sum(text.count("turn.") for text in texts), len(texts), others


HALVES = {  # spellings of the rotation
    "chunk": forth,
    "split": lambda x: torch.cat([-x.split(4, -1)[1], x.split(4, -1)[0]], -1),
    "slices": lambda x: torch.cat((-x[..., 4:], x[..., :4]), dim=x.ndim - 1),
    "back": back,
    "tensor_split": lambda x: torch.cat([x.tensor_split(2, -1)[1], x.tensor_split(2, -1)[0].neg()], -1),
    "of strides": lambda x: forth(x.transpose(0, 1)),
    "its gradient": lambda x: vjp(forth, x)[1](x * 2)[0],
}


@pytest.mark.each_value
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", HALVES)
def test_halves_are_found(name, dtype):
    x, halves = values(160, dtype).reshape(4, 5, 8), HALVES[name]
    for f, wanted in ((lambda x: halves(x) * 2 + 1, (1, 1, set())), (halves, (0, 0, {"turn"}))):
        if f is not halves or "gradient" not in name:  # which multiplies before
            assert steps(f, x) == wanted
        assert same(f, x)


OTHERS = {  # concatenations that are no rotation
    "both": lambda x: torch.cat([-x[..., 4:], -x[..., :4]], -1),
    "neither": lambda x: torch.cat([x[..., 4:], x[..., :4]], -1),
    "in order": lambda x: torch.cat([-x[..., :4], x[..., 4:]], -1),
    "twice": lambda x: torch.cat([-x[..., 4:], x[..., 4:]], -1),
    "of two": lambda x: torch.cat([-x[..., 4:], (x + 1)[..., :4]], -1),
    "unequal": lambda x: torch.cat([-x[..., 3:], x[..., :3]], -1),
    "another dim": lambda x: torch.cat([-x[:, 3:], x[:, :3]], 1),
    "every other": lambda x: torch.cat([-x[..., 1::2], x[..., ::2]], -1),
    "overlapping": lambda x: torch.cat([-x[..., 2:6], x[..., :4]], -1),
    "three": lambda x: torch.cat([-x[..., 4:6], x[..., :4], -x[..., 6:]], -1),
    "of a wider": lambda x: torch.cat([-x[..., 2:4], x[..., :2]], -1),
    "that divide nothing": lambda x: forth(torch.cat([x, x, x], -1)),
    "of integers": lambda x: forth((x * 9).long()),
    "of float64": lambda x: forth(x.double()),
}


def test_roots_in_float64_are_found():
    """A root between casts from and to float32 joins its chain; any other stays, and values stay what they were."""
    x, call = values(4000, torch.float32).abs(), lambda f: trace(lambda a: f(*a), (x,)).module.graph.nodes
    texts = lambda f: [str(n.args[2]) for n in call(f) if n.target is POINTWISE]
    found = lambda x: 1 / ((x * 2).double().sqrt().float() + 1)
    assert [text.count("root.float32") for text in texts(found)] == [1]
    others = (lambda x: x.sqrt() + 1, lambda x: x.double().sqrt() + 1, lambda x: x.double().sqrt().bfloat16() * 2)
    for f in (found, *others, lambda x: (x.double() + 1).sqrt().float() * 2, lambda x: x.double().exp().float() * 2):
        assert same(f, x)
        assert f is found or not any("root" in text for text in texts(f))


@pytest.mark.parametrize("name", OTHERS)
def test_what_is_something_else_is_left(name):
    x, f = torch.randn(4, 6, 8, generator=rng(0)), OTHERS[name]
    assert steps(lambda x: f(x) * 2 + 1, x)[0] == 0
    assert same(lambda x: f(x) * 2 + 1, x)


def test_what_is_written_between_is_read_before():
    def f(x, w):
        a = x @ w
        first, second = a.chunk(2, -1)
        minus = -second
        a.mul_(2.0)
        return torch.cat([minus, first], -1) + 1

    x, w = torch.randn(6, 8, generator=rng(0)), torch.randn(8, 8, generator=rng(1))
    assert steps(f, x, w)[0] == 0 and same(f, x, w)


@pytest.mark.parametrize("backend", ISAS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_rotary_embedding_is_a_program_each_way(dtype, backend):
    cfg = Config(vocab=8, dim=64, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=32, hidden=8)
    x, g = values(2 * 40 * 64, dtype, 2).reshape(2, 40, 2, 32), values(2 * 40 * 64, dtype, 4).reshape(2, 40, 2, 32)
    cos, sin = rope(torch.arange(40), cfg)

    def f(x, g, cos, sin):
        y, pull, *_ = vjp(lambda x: rotate(x, cos, sin), x)
        return y, *pull(g)

    with forced(backend):
        found, _, others = steps(f, x, g, cos, sin)
        assert found == 2 and not others
        assert same(f, x, g, cos, sin)


def test_a_gradient_through_it_is_captured():
    x = torch.randn(3, 8, generator=rng(0))
    first = grad(lambda x: (forth(x.sin()) * x).sum())
    second = grad(lambda x: (first(x) * x).sum())
    assert alike(jit(first)(x), first(x)) and alike(jit(second)(x), second(x))
