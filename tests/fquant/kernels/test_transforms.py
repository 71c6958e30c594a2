"""The ops under transforms: no derivatives, vmap, one node in a trace, and the same on the reference."""

from dataclasses import replace
from typing import ClassVar

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.func import grad, jvp, vjp, vmap
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from fquant import dequantize, kernels, linear, quantize
from fquant.format import DYNAMIC8, FP4, INT4_ZERO, INT8, NF4, NF4_DQ
from fquant.kernels import packed_ops
from fquant.kernels.spec import Spec
from tests.helpers import transform_table
from tests.helpers.arrays import named
from tests.helpers.formats import ISAS, KINDS, alike, draw, forced

OPS = torch.ops.fquant
SPEC = Spec(NF4_DQ, (24, 128), torch.bfloat16)
BUFFERS = draw(SPEC)
X = {"matmul": torch.ones(3, 128), "matmul_t": torch.ones(3, 24)}


def weight(format=NF4_DQ, out=24, width=128):
    return quantize(torch.randn(out, width, generator=torch.Generator().manual_seed(0)), format)


FLOAT_BUFFERS = {  # a format, and the packed array of which one float buffer is t
    "scale": (NF4, lambda p, t: replace(p, scale=t), lambda p: p.scale),
    "row scale": (INT8, lambda p, t: replace(p, scale=t), lambda p: p.scale),
    "nested scale": (NF4_DQ, lambda p, t: replace(p, scale=replace(p.scale, scale=t)), lambda p: p.scale.scale),
    "nested offset": (NF4_DQ, lambda p, t: replace(p, scale=replace(p.scale, offset=t)), lambda p: p.scale.offset),
    "offset": (replace(NF4, center=True), lambda p, t: replace(p, offset=t), lambda p: p.offset),
    "zero": (INT4_ZERO, lambda p, t: replace(p, zero=t), lambda p: p.zero),
}
FIX = r"a Packed is a constant: train a Lora beside it \(fquant.lora.init, attach\) or a dense weight, .* fquant.linear"


@named("backend", ["reference", *ISAS[-1:]])
@pytest.mark.parametrize("format, put, get", FLOAT_BUFFERS.values(), ids=FLOAT_BUFFERS)
def test_an_op_has_no_derivative_and_says_so(format, put, get, backend):
    p = weight(format)
    t = get(p)
    f = lambda t: dequantize(put(p, t)).sum()
    with forced(backend):
        with pytest.raises(TypeError, match=f"a gradient through decode was asked for; {FIX}"):
            f(t.clone().requires_grad_())
        with torch.no_grad():
            f(t.clone().requires_grad_())
        with pytest.raises(TypeError, match=f"a gradient through decode was asked for; {FIX}"):
            grad(f)(t)
        with pytest.raises(TypeError, match="a gradient through decode was asked for"):
            vjp(f, t)
        with pytest.raises(TypeError, match=f"a tangent through decode was asked for; {FIX}"):
            jvp(f, (t,), (t,))
        with pytest.raises(TypeError, match="a gradient through decode was asked for"):
            vmap(grad(f))(torch.stack([t, t]))


@named("op", X)
def test_a_product_itself_has_no_derivative(op):
    f, x = lambda x: getattr(kernels, op)(x, BUFFERS, SPEC).sum(), X[op]
    with pytest.raises(TypeError, match=f"a gradient through {op} was asked for; {FIX}"):
        f(x.clone().requires_grad_())
    with pytest.raises(TypeError, match=f"a gradient through {op} was asked for; {FIX}"):
        grad(f)(x)
    with pytest.raises(TypeError, match=f"a tangent through {op} was asked for; {FIX}"):
        jvp(f, (x,), (x,))


def test_encode_has_no_derivative():
    f, x = lambda x: packed_ops.encode(x, NF4)[1].sum(), torch.ones(2, 64)
    with pytest.raises(TypeError, match="a gradient through encode was asked for"):
        f(x.clone().requires_grad_())
    with pytest.raises(TypeError, match="a gradient through encode was asked for"):
        grad(f)(x)
    with pytest.raises(TypeError, match="a tangent through encode was asked for"):
        jvp(f, (x,), (x,))


@named("format", KINDS)
def test_vmap_of_decode(format):
    """Mapped buffers become a stack, along any dim; the others are shared."""
    spec = Spec(format, (4, 70), torch.bfloat16)
    decode = lambda *buffers: packed_ops.decode(buffers, spec, torch.float16)
    stack = draw(spec, (3, 2))
    wanted = torch.stack([torch.stack([decode(*[b[i, k] for b in stack]) for k in range(2)]) for i in range(3)])
    assert alike(vmap(vmap(decode))(*stack), wanted)
    assert alike(vmap(vmap(decode), 1, 1)(*stack), wanted)
    codes, *rest = (b[0] for b in stack)
    shared = vmap(decode, (None, *[0] * len(rest)))(codes[0], *rest)
    assert alike(shared[0], wanted[0, 0]) and alike(shared[1], decode(codes[0], *[b[1] for b in rest]))


class Dispatched(TorchDispatchMode):
    """The names of all ops that are dispatched."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen.append(func.name())
        return func(*args, **(kwargs or {}))


class Called(TorchFunctionMode):
    """The names of all functions and ops that are called."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.seen.append(func.name() if isinstance(func, torch._ops.OpOverload) else "")
        return func(*args, **(kwargs or {}))


class Seen(torch.Tensor):
    """A subclass that records the ops that it passes through."""

    seen: ClassVar[list[str]] = []

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        cls.seen.append(func.name() if isinstance(func, torch._ops.OpOverload) else "")
        return super().__torch_function__(func, types, args, kwargs or {})


def under_a_mode(mode):
    def names(f, x, buffers):
        with mode() as it:
            f(x, buffers)
        return it.seen

    return names


def under_the_profiler(f, x, buffers):
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], acc_events=True) as it:
        f(x, buffers)
    return [event.name for event in it.events() or ()]


def in_a_subclass(f, x, buffers):
    Seen.seen.clear()
    assert type(f(x.as_subclass(Seen), buffers)) is Seen
    return [*Seen.seen]


def in_a_subclass_of_a_buffer(f, x, buffers):
    Seen.seen.clear()
    f(x, [buffers[0].as_subclass(Seen), *buffers[1:]])
    return [*Seen.seen]


OBSERVERS = {
    "dispatch mode": under_a_mode(Dispatched),
    "function mode": under_a_mode(Called),
    "profiler": under_the_profiler,
    "subclass of x": in_a_subclass,
    "subclass of a buffer": in_a_subclass_of_a_buffer,
}


@named("op", X)
@pytest.mark.parametrize("observe", OBSERVERS.values(), ids=OBSERVERS)
def test_who_watches_sees_a_product(observe, op):
    assert f"fquant::{op}" in observe(lambda x, buffers: getattr(kernels, op)(x, buffers, SPEC), X[op], BUFFERS)


@named("op", X)
def test_a_product_after_its_transform(op):
    """The function of a vjp may be called after the vjp; the tensors that it keeps are still wrapped."""
    kept = []

    def f(x):
        kept.append(x)
        return x.sum()

    vjp(f, X[op])
    assert alike(getattr(kernels, op)(kept[0], BUFFERS, SPEC), getattr(kernels, op)(X[op], BUFFERS, SPEC))


@named("op", X)
def test_a_fake_product_is_fake(op):
    with FakeTensorMode() as mode:
        x, buffers = mode.from_tensor(X[op]), [mode.from_tensor(b) for b in BUFFERS]
    assert type(getattr(kernels, op)(x, buffers, SPEC)) is FakeTensor


@named("op", X)
def test_a_product_without_observers_is_not_dispatched(op, monkeypatch):
    wanted = getattr(OPS, op)(X[op], BUFFERS, SPEC.format.text, SPEC.shape, SPEC.dtype)
    monkeypatch.setitem(packed_ops._PRODUCTS, op, None)
    assert alike(getattr(kernels, op)(X[op], BUFFERS, SPEC), wanted)


def ops_of(graph):
    return [str(node.target).split(".")[1] for node in graph.nodes if "fquant." in str(node.target)]


def test_a_trace_has_one_node_an_op():
    p, x = weight(), torch.ones(2, 3, 128)
    f = lambda x: linear(x, p).square().sum()
    assert ops_of(make_fx(f, tracing_mode="fake", _allow_non_fake_inputs=True)(x).graph) == ["matmul"]
    both = make_fx(grad(f), tracing_mode="fake", _allow_non_fake_inputs=True)(x)
    assert ops_of(both.graph) == ["matmul", "matmul_t"] and alike(both(x), grad(f)(x))
    g = make_fx(lambda codes, *rest: packed_ops.decode([codes, *rest], SPEC, torch.float32))(*BUFFERS)
    assert ops_of(g.graph) == ["decode"]


@named("format", [NF4_DQ, INT8, INT4_ZERO])
def test_compile(format):
    p, x = weight(format), torch.randn(3, 128, generator=torch.Generator().manual_seed(1))
    torch._dynamo.reset()
    compiled = torch.compile(lambda x, p: (linear(x, p), dequantize(p)), backend="aot_eager", fullgraph=True)
    assert all(map(alike, compiled(x, p), (linear(x, p), dequantize(p))))


@named("format", [NF4, NF4_DQ, INT8, DYNAMIC8, replace(FP4, flat=True, block=32), INT4_ZERO])
def test_schemas_and_fake_results_are_true(format):
    """torch's own check of schemas, and of shapes, dtypes and strides of fake results."""
    spec = Spec(format, (6, 33), torch.bfloat16)
    check = lambda op, *args: torch.library.opcheck(op.default, args, test_utils=("test_schema", "test_faketensor"))
    for stack in ((), (2,)):
        buffers = draw(spec, stack)
        rest = buffers, format.text, spec.shape, spec.dtype
        check(OPS.decode, *rest, torch.float16)
        for x in (torch.ones(*stack, 3, 33), torch.ones(*stack, 33, 3).mT, torch.ones(*stack, 50, 33).half()):
            check(OPS.matmul, x, *rest)
            check(OPS.matmul_t, x[..., :6], *rest)
        for rows in (torch.ones(*stack, 4, 33), torch.ones(*stack, 33, 4).bfloat16().mT) if format.in_absmax else ():
            check(OPS.encode, rows, format.text)


REFERENCE_ROWS = [(verb, t) for verb in ("linear", "attach") for t in transform_table.TRANSFORMS if t != "compile"]


@named("verb, transform", REFERENCE_ROWS)
def test_transforms_on_the_reference(verb, transform, device):
    """The tests of the default backend pass on the reference."""
    with forced("reference"):
        transform_table.check_transform(verb, NF4_DQ, transform, device)
