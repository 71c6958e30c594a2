"""silu and its derivative: every bf16 and f16 against float64 with counted roundings, and the ops in torch.

The exact results are x s and s + x s (1 - s) in float64, with s and 1 - s the logistic functions of x and -x. The error
has three parts. The first is a number of float32 units of the sum of the magnitudes of the terms. The second is the
loss of a denormal exponential, and the third one rounding to a narrower dtype.
"""

import math

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.func import grad, jvp, vjp, vmap
from torch.fx.experimental.proxy_tensor import make_fx

from fquant.kernels import cpu, reference
from fquant.kernels.ops.pointwise import pointwise
from fquant.kernels.ops.pointwise_program import OWN, Program, Step
from fquant.kernels.ops.silu import OPS, silu, silu_derivative
from tests.helpers.arrays import named, rng
from tests.helpers.formats import CARD, ISAS, alike, built, forced, own, shifted, strided
from tests.helpers.kernels.threads import num_threads
from tests.helpers.live_memory import Peak

KERNELS = (*ISAS, CARD)
BACKENDS = ("reference", *KERNELS)
F32, BF16, F16, F64 = torch.float32, torch.bfloat16, torch.float16, torch.float64
UNITS = {"silu": 4, "silu_derivative": 5}  # of float32, as fquant/kernels/ops/silu.py promises
OFTEN = {"silu": 6, "silu_derivative": 24}  # torch subtracts from 1, and has no s below e^-88
SPECIAL = torch.tensor(
    [0.0, -0.0, 1e-45, -1e-45, 1e-40, -1e-40, 87.3, -87.3, 88.8, -88.8, -103.9, -104, 3.4e38, -3.4e38]
)
INFINITE = torch.tensor([math.inf, -math.inf, math.nan, -math.nan])


def every(dtype):
    """Return all values of 16 bits."""
    return torch.arange(-(2**15), 2**15, dtype=torch.int16).view(dtype)


def some():
    """Return float32 numbers of all sizes, around the zero of the derivative, and where silu is not constant."""
    sizes = torch.exp2(torch.randint(-130, 120, (200_000,), generator=rng(1)))
    near = -1.2784645 + 1e-3 * torch.randn(50_000, generator=rng(2))
    large = 30 * torch.randn(200_000, generator=rng(3))
    return torch.cat(
        [SPECIAL, torch.randn(200_000, generator=rng(0)) * sizes, near, large, torch.linspace(-110, 110, 300_001)]
    )


def exact(name, x):
    """Return the values in float64, and the sum of the magnitudes of their terms."""
    t = x.double()
    s, other = t.sigmoid(), (-t).sigmoid()
    return (t * s, (t * s).abs()) if name == "silu" else (s + t * s * other, s + (t * s * other).abs())


def assert_right(name, x, got, units, lost):
    """Check ``got``, where ``lost`` bounds the loss of the exponential."""
    true, size = exact(name, x)
    assert got.dtype is x.dtype and got.shape == x.shape and got.is_contiguous()
    assert bool((got.isnan() == true.isnan()).all()) and alike(got[true.isinf()], true[true.isinf()].to(x.dtype))
    if name == "silu":
        assert bool((got.signbit() == x.signbit())[~true.isnan()].all())
    unit = torch.exp2(size.clamp(min=2.0**-126).log2().floor() - 23)
    error = units * unit + torch.where(x.double() < -87, lost, 0.0)
    if x.dtype is not F32:
        kind = torch.finfo(x.dtype)
        error = error + kind.eps / 2 * (true.abs() + error).clamp(min=kind.smallest_normal)
    off = ((got.double() - true).abs() - error)[true.isfinite()]
    assert bool((off <= 0).all()), (x[true.isfinite()][off.argmax()], float(off.max()))


def assert_right_on(device, name, backend, x):
    """Check the results of a backend for numbers on ``device``."""
    units, lost = (OFTEN, 2.0**-121) if backend == "reference" else (UNITS, 2.0**-142)
    with forced(backend):
        assert_right(name, x, OPS[name](x.to(device)).cpu(), units[name], lost)


@named("dtype", [BF16, F16])
@named("backend", BACKENDS)
@named("name", OWN)
def test_of_every_number_of_16_bits(name, backend, dtype, device):
    assert_right_on(device, name, backend, every(dtype))


@named("backend", BACKENDS)
@named("name", OWN)
def test_of_float32(name, backend, device):
    assert_right_on(device, name, backend, torch.cat([some(), INFINITE, every(BF16).float()]))


def test_the_reference_is_that_of_torch():
    for dtype in (F32, BF16, F16, F64):
        x = some()[:5000].to(dtype)
        assert alike(reference.silu(x), F.silu(x)) and reference.silu_derivative(x).dtype is dtype
    t = some().double()
    assert alike(reference.silu_derivative(t), torch.autograd.grad(F.silu(u := t.clone().requires_grad_()).sum(), u)[0])
    torch.testing.assert_close(reference.silu_derivative(t), exact("silu_derivative", t)[0], rtol=1e-12, atol=1e-15)


@named("backend", BACKENDS)
def test_what_is_infinite_comes_out_as_of_torch(backend, device):
    for dtype in (F32, BF16, F16, F64):
        x = INFINITE.to(device, dtype)
        with forced(backend):
            assert alike(silu(x), F.silu(x)) and silu_derivative(x).isnan().all()
        assert F.silu(x).isnan().tolist() == [False, True, True, True] and F.silu(x)[0] == math.inf


@built
@named("name", OWN)
def test_instruction_sets_with_fused_products_have_the_same_bits(name):
    """For bf16, those without have the same bits too."""
    found = {}
    for isa in cpu.isas():
        with forced(f"cpu:{isa}"):
            found[isa] = OPS[name](some()), OPS[name](every(BF16))
    portable, *fused = found.values()
    assert all(alike(a, b) for other in fused[1:] for a, b in zip(fused[0], other, strict=True))
    assert all(alike(portable[1], narrow) for _, narrow in fused)


@named("dtype", [F32, BF16, F16])
@named("backend", KERNELS)
@named("name", OWN)
def test_an_element_depends_on_nothing_but_itself(name, backend, dtype, device):
    """A result depends neither on strides, nor on the number of elements, nor on other elements."""
    x = torch.cat([SPECIAL, INFINITE, 8 * torch.randn(3000, generator=rng(4))]).to(device, dtype)
    with forced(backend):
        whole = OPS[name](x)
        alone = torch.cat([OPS[name](one[None]) for one in x[:40]])
        assert alike(alone, whole[:40])
        for start, stop in ((0, 1), (0, 511), (1, 514), (500, 1013), (7, 3001), (5, 5), (17, 40)):
            assert alike(OPS[name](x[start:stop]), whole[start:stop])
        for place in (shifted, strided, lambda t: t.flip(0).flip(0), lambda t: t.expand(3, -1)[1]):
            assert alike(OPS[name](place(x)), whole)
        square, back = x[:2744].view(14, 14, 14), tuple(reversed(range(7)))
        assert alike(OPS[name](square.mT), whole[:2744].view(14, 14, 14).mT.contiguous())
        cube, wanted = (t[:128].view((2,) * 7).permute(back) for t in (x, whole))
        assert alike(OPS[name](cube), wanted.contiguous())
        assert alike(OPS[name](x[3]), whole[3]) and OPS[name](x[:0].view(0, 5)).shape == (0, 5)
        assert alike(OPS[name](x[5].expand(600)), whole[5].expand(600))


@named("threads", [1, 2])
@named("backend", ISAS)
def test_large_tensors_are_shared_out(threads, backend):
    x = 4 * torch.randn(300, 1001, generator=rng(5))
    with num_threads(threads), forced(backend):
        for name in OWN:
            assert alike(OPS[name](x), torch.stack([OPS[name](row) for row in x]))


@named("dtype", [F32, BF16, F16])
@named("backend", BACKENDS)
def test_a_step_between_others_has_the_bits_of_the_op(backend, dtype, device):
    """Tensors broadcast, and the program also uses its argument and overwrites it."""
    x, y = 4 * torch.randn(40, 300, generator=rng(6)), torch.randn(300, generator=rng(7))
    x, y = strided(x.to(device, dtype)), y.to(device, dtype)
    steps = (
        Step("mul", dtype, (0, 1)), Step("silu", dtype, (2,)), Step("silu_derivative", dtype, (2,)),
        Step("silu", dtype, (4,)), Step("mul", dtype, (3, 5)), Step("silu", F32, (2,)),
    )  # fmt: skip
    with forced(backend):
        got = pointwise([x, y], [], Program(steps, (3, 4, 5, 6, 7), ()))
        a = x * y
        b, c = silu(a), silu_derivative(a)
        wanted = [b, c, silu(c), b * silu(c), silu(a.float())]
        assert all(map(alike, got, wanted))
        over = y.clone()
        pointwise([over], [over], Program((Step("silu", dtype, (0,)),), (), (1,)))
        assert alike(over, silu(y))


@named("backend", BACKENDS)
@named("name", OWN)
def test_float64_is_computed_in_float64(name, backend, device):
    x = some()[:5000].double()
    with forced(backend):
        got = OPS[name](x.to(device).view(2, -1).mT)
    assert got.is_contiguous()
    torch.testing.assert_close(got.cpu(), exact(name, x.view(2, -1).mT)[0], rtol=1e-12, atol=1e-15)


@built
def test_nothing_is_made_beside_the_result():
    x = torch.randn(100, 1000, generator=rng(8)).bfloat16()
    for op in OPS.values():
        with Peak() as peak:
            op(x)
        assert peak.most == x.nbytes


# --- as torch sees them -----------------------------------------------------------------------------------------------

X = 3 * torch.randn(3, 4, 5, generator=rng(9))


@named("name", OWN)
def test_mapped_it_is_itself(name, device):
    op, x = OPS[name], X.to(device)
    assert alike(vmap(op)(x), op(x)) and alike(vmap(vmap(op, 1), 2)(x), op(x.permute(2, 1, 0)))
    assert alike(vmap(op, 2, 2)(x), op(x)) and vmap(op)(x[:, :0]).shape == (3, 0, 5)


@named("backend", ["reference", *ISAS[-1:], CARD])
@named("name", OWN)
def test_an_op_has_no_derivative_and_says_so(name, backend, device):
    put, fix = lambda t: OPS[name](t).sum(), "it computes values only: differentiate torch.nn.functional.silu, or call"
    x = X.to(device)
    with forced(backend):
        with pytest.raises(TypeError, match=f"a gradient through {name} was asked for; {fix}"):
            put(x.clone().requires_grad_())
        with torch.no_grad():
            assert put(x.clone().requires_grad_()).isfinite()
        for f in (grad(put), lambda t: vjp(put, t), vmap(grad(put))):
            with pytest.raises(TypeError, match=f"a gradient through {name} was asked for; {fix}"):
                f(x)
        with pytest.raises(TypeError, match=f"a tangent through {name} was asked for; {fix}"):
            jvp(put, (x,), (x,))


@named("name", OWN)
def test_a_call_is_a_node(name, device):
    x = X.to(device)
    traced = make_fx(OPS[name], tracing_mode="fake")(x)
    assert [str(node.target) for node in traced.graph.nodes if node.op == "call_function"] == [f"fquant.{name}.default"]
    assert alike(traced(2 * x), OPS[name](2 * x))


@named("dynamic", [False, True])
def test_compiled(dynamic, device):
    torch._dynamo.reset()
    x, f = X.to(device), lambda x: (silu(2 * x), silu_derivative(2 * x))
    compiled = torch.compile(f, backend="aot_eager", fullgraph=True, dynamic=dynamic)
    for c in (3, 2):
        assert all(map(alike, compiled(x[:c]), f(x[:c])))


def test_schemas_and_fake_results_are_true(device):
    """torch's own check of schemas, and of shapes, dtypes and strides of fake results."""
    every = ("test_schema", "test_faketensor", "test_aot_dispatch_dynamic")
    for i, dtype in enumerate((F32, BF16, F16, F64)):
        with forced(("reference", *own(device))[-1 if i % 2 else 0]):
            for op in OPS.values():
                torch.library.opcheck(op, (X.to(device, dtype).mT[i % 3 :],), test_utils=every)
    assert all(torch.Tag.pointwise in op.tags for op in OPS.values())


def test_a_fake_result_is_fake(device):
    x = FakeTensorMode().from_tensor(X.to(device).bfloat16().mT)
    for op in OPS.values():
        assert type(op(x)) is FakeTensor and op(x).dtype is BF16 and op(x).is_contiguous()
        assert op(X.to("meta")).is_meta


@named("device", ["cpu", "meta"])
@named("name", OWN)
def test_malformed(name, device):
    for dtype in (torch.int32, torch.bool, torch.complex64):
        with pytest.raises(TypeError, match=rf"{name} got x {dtype} \(3, 4, 5\); wanted f32, bf16, f16 or f64"):
            OPS[name](X.to(device, dtype))
