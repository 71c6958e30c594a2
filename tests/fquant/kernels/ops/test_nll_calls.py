"""The ops of the negative log likelihood in torch: vmap, capture, compile, errors; and the fused loss of models."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.func import grad, grad_and_value, jvp, vjp, vmap
from torch.fx.experimental.proxy_tensor import make_fx

from fquant.device import HOST
from fquant.kernels.ops.nll import nll, nll_backward
from models import fused_cross_entropy
from tests.helpers.arrays import named, rng
from tests.helpers.devices.placing import on
from tests.helpers.formats import CARD, ISAS, alike, forced, own
from tests.helpers.kernels.calls import all_alike, away, nodes
from tests.helpers.kernels.losses import BACKENDS, DTYPES, IGNORE, PLACES, drawn

X, TARGETS = torch.stack([drawn(4, 19, seed=i)[0] for i in range(3)]), torch.randint(19, (3, 4), generator=rng(5))
FACTOR = torch.randn(3, 4, generator=rng(6))


def test_mapped_rows_are_more_rows(device):
    x, t, g = given = on(device, (X, TARGETS, FACTOR))
    f = lambda x, t, g: nll_backward(x, t, IGNORE, g)
    stacked = tuple(map(torch.stack, zip(*map(f, *given), strict=True)))
    assert all_alike(vmap(f)(x, t, g), stacked)
    assert all_alike(vmap(f, (2, 1, 0))(x.movedim(0, 2), t.mT, g), stacked)
    assert all_alike(vmap(vmap(lambda x, t, g: f(x[None], t[None], g[None])))(x, t, g), vmap(vmap(
        lambda value, slope: (value[None], slope[None])))(*stacked))  # fmt: skip
    assert alike(vmap(lambda x, t: nll(x, t, IGNORE))(x, t), stacked[0])
    one = torch.stack([f(x[0], targets, g[0])[1] for targets in t])
    assert alike(vmap(f, (None, 0, None))(x[0], t, g[0])[1], one)
    assert alike(vmap(lambda x: nll_backward(x, t[0], IGNORE)[1])(x)[2], nll_backward(x[2], t[0], IGNORE)[1])
    assert alike(vmap(lambda g: nll_backward(x[1], t[1], IGNORE, g)[1])(g)[1], stacked[1][1])
    assert vmap(f)(x[:, :0], t[:, :0], g[:, :0])[1].shape == (3, 0, 19)


OPS = {
    "nll": lambda x, t, f: nll(x, t, IGNORE).sum(),
    "nll_backward": lambda x, t, f: nll_backward(x, t, IGNORE)[0].sum(),
    "nll_backward of a factor": lambda x, t, f: nll_backward(x.detach(), t, IGNORE, f)[1].sum(),
}
FIX = r"it computes values only: differentiate fquant.kernels.reference.nll, the same in plain torch, or call"


@pytest.mark.parametrize("name", OPS)
@named("backend", ["reference", *ISAS[-1:], CARD])
def test_an_op_has_no_derivative_and_says_so(name, backend, device):
    x, targets, factor = on(device, (X[0], TARGETS[0], FACTOR[0]))
    at = int(name.endswith("factor"))
    put = lambda t: OPS[name](x if at else t, targets, t if at else factor)
    t, op = (x, factor)[at], name.partition(" ")[0]
    with forced(backend):
        with pytest.raises(TypeError, match=f"a gradient through {op} was asked for; {FIX}"):
            put(t.clone().requires_grad_())
        with torch.no_grad():
            assert put(t.clone().requires_grad_()).isfinite()
        for f in (grad(put), lambda t: vjp(put, t), lambda t: vmap(grad(put))(t[None])):
            with pytest.raises(TypeError, match=f"a gradient through {op} was asked for; {FIX}"):
                f(t)
        with pytest.raises(TypeError, match=f"a tangent through {op} was asked for; {FIX}"):
            jvp(put, (t,), (t,))


def test_a_call_is_a_node(device):
    (x, y), (t, other) = on(device, [list(rows[:2]) for rows in (X, TARGETS)])
    f = lambda x, t: nll_backward(x, t, IGNORE)
    assert nodes(lambda x, t: nll(x, t, IGNORE), x, t) == ["fquant.nll"]
    assert nodes(f, x, t)[0] == "fquant.nll_backward"
    assert nodes(vmap(f), *on(device, (X, TARGETS))).count("fquant.nll_backward") == 1
    assert all_alike(make_fx(f, tracing_mode="fake")(x, t)(y, other), f(y, other))


@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled(dynamic, device):
    torch._dynamo.reset()
    given = on(device, (X[0], TARGETS[0], FACTOR[0]))
    f = lambda x, t, g: (nll(2 * x, t, IGNORE), *nll_backward(2 * x, t, IGNORE, g))
    compiled = torch.compile(f, backend="aot_eager", fullgraph=True, dynamic=dynamic)
    for c in (4, 3):
        rows = [t[:c] for t in given]
        assert all_alike(compiled(*rows), f(*rows))


def test_schemas_and_fake_results_are_true(device):
    """torch's own check of schemas, and of shapes, dtypes and strides of fake results."""
    ops, every = torch.ops.fquant, ("test_schema", "test_faketensor", "test_aot_dispatch_dynamic")
    check = lambda op, *args: torch.library.opcheck(op.default, args, test_utils=every)
    for i, dtype in enumerate((*DTYPES, torch.float64)):
        x, targets = drawn(i, 9, dtype, device=device)
        x = PLACES[-1 - i](x)
        with forced(("reference", *own(device))[-1 if i % 2 else 0]):
            check(ops.nll, x, targets, IGNORE)
            check(ops.nll_backward, x, targets, IGNORE, torch.ones_like(nll(x, targets, IGNORE)))
            check(ops.nll_backward, x, targets, IGNORE)


def test_a_fake_loss_is_fake(device):
    mode = FakeTensorMode()
    x, t = (mode.from_tensor(t) for t in on(device, (X[0].bfloat16(), TARGETS[0])))
    value, slope = nll_backward(x, t, IGNORE)
    assert type(value) is type(slope) is FakeTensor and value.dtype is torch.float32 and slope.dtype is torch.bfloat16
    assert nll(X[0].to("meta"), TARGETS[0].to("meta"), IGNORE).is_meta


# --- the head ---------------------------------------------------------------------------------------------------------


@named("backend", [*BACKENDS, CARD])
@named("dtype", DTYPES)
def test_the_head_computes_with_them(backend, dtype, device):
    """A loss and its gradients equal those in float64; the graph holds one op for each chunk."""
    x, w = torch.randn(2, 30, 16, generator=rng(1)), torch.randn(200, 16, generator=rng(2)) / 4
    x, w, targets = x.to(dtype), w.to(dtype), drawn(60, 200, seed=3)[1].reshape(2, 30)
    loss = lambda x, w, t: fused_cross_entropy.cross_entropy(x, w, t, chunk=25)
    true, value = grad_and_value(loss, (0, 1))(x.double(), w.double(), targets)
    x, w, targets = on(device, (x, w, targets))
    with forced(backend):
        got, near = grad_and_value(loss, (0, 1))(x, w, targets)
        assert alike(near, loss(x, w, targets))
    rounding = torch.finfo(dtype).eps
    torch.testing.assert_close(near.cpu().double(), value, rtol=rounding, atol=0)
    for mine, exact in zip(on(HOST, got), true, strict=True):
        assert (mine - exact).norm() < 3 * rounding * exact.norm()
    assert nodes(loss, x, w, targets).count("fquant.nll") == 3
    seen = nodes(grad(loss, (0, 1)), x, w, targets)
    assert seen.count("fquant.nll_backward") == 6 and not {"aten._softmax", "aten.logsumexp", "aten.gather"} & {*seen}


MALFORMED = {
    "integers": (lambda x, t, f: nll(x.int(), t, 0), TypeError, "nll got logits torch.int32 .*; wanted f32, bf16, f16"),
    "one row": (lambda x, t, f: nll(x[0], t, 0), ValueError, r"nll got logits \(19,\); wanted \[c v\]"),
    "three dims": (lambda x, t, f: nll_backward(x[None], t, 0), ValueError, r"got logits \(1, 4, 19\); wanted \[c v\]"),
    "no columns": (lambda x, t, f: nll(x[:, :0], t, 0), ValueError, r"logits \(4, 0\); wanted \[c v\], v being"),
    "int32": (lambda x, t, f: nll(x, t.int(), 0), TypeError, "targets torch.int32 beside .*; wanted torch.int64"),
    "float": (lambda x, t, f: nll_backward(x, t.float(), 0), TypeError, "targets torch.float32 .*; wanted torch.int64"),
    "few targets": (lambda x, t, f: nll(x, t[1:], 0), ValueError, r"\(3,\) and logits \(4, 19\); wanted targets"),
    "a column": (lambda x, t, f: nll_backward(x, t[:, None], 0), ValueError, r"targets \(4, 1\) and logits \(4, 19\)"),
    "a number": (lambda x, t, f: nll_backward(x, t, 0, f[0]), ValueError, r"factor \(\) and logits \(4, 19\); wanted"),
    "a narrow factor": (lambda x, t, f: nll_backward(x, t, 0, f.half()), TypeError, "got factor torch.float16 beside"),
    "a wide factor": (lambda x, t, f: nll_backward(x, t, 0, f.double()), TypeError, "factor .*; wanted torch.float32"),
    "of f64": (lambda x, t, f: nll_backward(x.double(), t, 0, f), TypeError, "torch.float32 .*; wanted torch.float64"),
    "elsewhere": (lambda x, t, f: nll(x, away(t), 0), ValueError, r"got logits on (cpu|meta) and targets on .*; move"),
    "a factor elsewhere": (lambda x, t, f: nll_backward(x, t, 0, away(f)), ValueError, "factor on (cpu|meta); move"),
}  # fmt: skip
VALUES = {
    "above": (lambda x, t, f: nll(x, t + 19, -3), r"target \d+ in row 0; wanted one in \[0, 19\), or -3 to ignore it"),
    "below": (lambda x, t, f: nll_backward(x, t - 99, -3, f), r"nll_backward got target -\d+ in row 0; wanted one in"),
    "one": (lambda x, t, f: nll(x, torch.tensor([0, 18, -3, 19]), -3), "nll got target 19 in row 3; wanted"),
    "the usual one": (lambda x, t, f: nll(x, torch.tensor([0, -100, 3, 4]), -1), "got target -100 in row 1; wanted"),
    "least": (lambda x, t, f: nll(x, torch.tensor([0, 1, -(2**63), 4]), -1), "target -9223372036854775808 in row 2"),
    "f64": (lambda x, t, f: nll_backward(x.double(), t + 19, -3), "nll_backward got target"),
}


def refused(call, error, message, device, dtype):
    with pytest.raises(error, match=message):
        call(X[0].to(device, dtype), TARGETS[0].to(device), FACTOR[0].to(device))


@named("device", ["cpu", "meta"])
@pytest.mark.parametrize("call, error, message", MALFORMED.values(), ids=MALFORMED)
def test_malformed(call, error, message, device, no_kernel):
    refused(call, error, message, device, torch.float32)


@named("backend", ["reference", *ISAS[-1:]])
@named("dtype", DTYPES)
@pytest.mark.parametrize("call, message", VALUES.values(), ids=VALUES)
def test_targets_that_are_not_there(call, message, dtype, backend, no_kernel):
    with forced(backend):
        refused(call, IndexError, message, "cpu", dtype)
