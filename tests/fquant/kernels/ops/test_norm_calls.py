"""The ops of norms in torch: vmap, capture, compile, errors."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.func import grad, jvp, vjp, vmap
from torch.fx.experimental.proxy_tensor import make_fx

from fquant.kernels.ops.norm import rms_norm, rms_norm_backward
from tests.helpers.arrays import named
from tests.helpers.devices.placing import on
from tests.helpers.formats import CARD, ISAS, alike, forced, own
from tests.helpers.kernels.calls import all_alike, away, nodes
from tests.helpers.kernels.norms import DTYPES, EPSILON, PLACES, drawn

G, X, W = (torch.stack(parts) for parts in zip(*[drawn(4, 19, seed=i) for i in range(3)], strict=True))


def both(g, x, weight):
    """Return y, the scale and the gradient."""
    y, scale = rms_norm(x, weight, EPSILON)
    return y, scale, rms_norm_backward(g, x, weight, scale)


def stacked(each):
    return tuple(map(torch.stack, zip(*each, strict=True)))


def test_mapped_rows_are_more_rows(device):
    g, x, w = on(device, (G, X, W))
    one = stacked([both(a, b, w[0]) for a, b in zip(g, x, strict=True)])
    assert all_alike(vmap(both, (0, 0, None))(g, x, w[0]), one)
    assert all_alike(vmap(both, (2, 1, None))(g.movedim(0, 2), x.movedim(0, 1), w[0]), one)
    assert all_alike(vmap(both, (None, 0, None))(g[0], x, w[0]), stacked([both(g[0], b, w[0]) for b in x]))
    assert all_alike(vmap(both, (0, None, None))(g, x[0], w[0]), stacked([both(a, x[0], w[0]) for a in g]))
    row = vmap(vmap(lambda a, b: both(a[None], b[None], w[0])))(g, x)
    assert all_alike([t.squeeze(2) for t in row], one)
    _, scale = rms_norm(x[0], w[0], EPSILON)
    slope = lambda s: rms_norm_backward(g[0], x[0], w[0], s)
    assert alike(vmap(slope)(torch.stack([scale, 2 * scale]))[1], slope(2 * scale))
    assert vmap(both, (0, 0, None))(g[:, :0], x[:, :0], w[0])[0].shape == (3, 0, 19)


def test_mapped_weights_are_a_loop(device):
    g, x, w = on(device, (G, X, W))
    each = stacked([both(*parts) for parts in zip(g, x, w, strict=True)])
    assert all_alike(vmap(both)(g, x, w), each)
    assert all_alike(vmap(both, (0, 0, 1))(g, x, w.mT), each)
    one = stacked([both(g[0], x[0], row) for row in w])
    assert all_alike(vmap(both, (None, None, 0))(g[0], x[0], w), one)


OPS = {  # of t [4 19], g, x and a weight
    "rms_norm of x": lambda t, g, x, w: rms_norm(t, w, EPSILON)[0].sum(),
    "rms_norm of the weight": lambda t, g, x, w: rms_norm(x, t[0], EPSILON)[0].sum(),
    "rms_norm_backward of x": lambda t, g, x, w: rms_norm_backward(g, t, w, x.new_ones(4)).sum(),
    "rms_norm_backward of g": lambda t, g, x, w: rms_norm_backward(t, x, w, x.new_ones(4)).sum(),
    "rms_norm_backward of the scale": lambda t, g, x, w: rms_norm_backward(g, x, w, t[:, 0]).sum(),
}
FIX = r"it computes values only: differentiate models.norm.rms_norm, or fquant.kernels.reference.rms_norm, the same"


@pytest.mark.parametrize("name", OPS)
@named("backend", ["reference", *ISAS[-1:], CARD])
def test_an_op_has_no_derivative_and_says_so(name, backend, device):
    g, x, w = on(device, (G[0], X[0], W[0]))
    f, op, t = lambda t: OPS[name](t, g, x, w), name.partition(" ")[0], x
    with forced(backend):
        with pytest.raises(TypeError, match=f"a gradient through {op} was asked for; {FIX}"):
            f(t.clone().requires_grad_())
        with torch.no_grad():
            assert f(t.clone().requires_grad_()).isfinite()
        for transformed in (grad(f), lambda t: vjp(f, t), lambda t: vmap(grad(f))(t[None])):
            with pytest.raises(TypeError, match=f"a gradient through {op} was asked for; {FIX}"):
                transformed(t)
        with pytest.raises(TypeError, match=f"a tangent through {op} was asked for; {FIX}"):
            jvp(f, (t,), (t,))


def test_a_call_is_a_node(device):
    (g, after), (x, y), (w, other) = on(device, [list(t[:2]) for t in (G, X, W)])
    assert nodes(lambda x, w: rms_norm(x, w, EPSILON), x, w)[0] == "fquant.rms_norm"
    seen = nodes(both, g, x, w)
    assert seen.count("fquant.rms_norm") == seen.count("fquant.rms_norm_backward") == 1 and len(seen) == 4
    assert nodes(vmap(both, (0, 0, None)), *on(device, (G, X, W[0]))).count("fquant.rms_norm_backward") == 1
    assert all_alike(make_fx(both, tracing_mode="fake")(g, x, w)(after, y, other), both(after, y, other))


@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled(dynamic, device):
    torch._dynamo.reset()
    rows, f = on(device, (G[0], X[0], W[0])), lambda g, x, w: both(g, 2 * x, w)
    compiled = torch.compile(f, backend="aot_eager", fullgraph=True, dynamic=dynamic)
    for n in (4, 3):
        some = rows[0][:n], rows[1][:n], rows[2]
        assert all_alike(compiled(*some), f(*some))


def test_schemas_and_fake_results_are_true(device):
    """torch's own check of schemas, and of shapes, dtypes and strides of fake results."""
    ops, every = torch.ops.fquant, ("test_schema", "test_faketensor", "test_aot_dispatch_dynamic")
    check = lambda op, *args: torch.library.opcheck(op.default, args, test_utils=every)
    for i, dtype in enumerate((*DTYPES, torch.float64)):
        g, x, weight = drawn(i, 9, dtype, device=device)
        g, x = PLACES[i](g), PLACES[-1 - i](x)
        with forced(("reference", *own(device))[-1 if i % 2 else 0]):
            check(ops.rms_norm, x, weight, EPSILON)
            check(ops.rms_norm_backward, g, x, weight, rms_norm(x, weight, EPSILON)[1])


def test_a_fake_norm_is_fake(device):
    mode = FakeTensorMode()
    y, scale, dx = both(*(mode.from_tensor(t) for t in on(device, (G[0].bfloat16(), X[0].bfloat16(), W[0]))))
    assert type(y) is type(scale) is type(dx) is FakeTensor
    assert y.dtype is dx.dtype is torch.bfloat16 and scale.dtype is torch.float32
    assert all(t.is_meta for t in both(*(t.to("meta") for t in (G[0], X[0], W[0]))))


# --- what is refused --------------------------------------------------------------------------------------------------

slope, FLOATS = rms_norm_backward, "wanted f32, bf16, f16 or f64"
MALFORMED = {
    "integers": (lambda g, x, w, s: rms_norm(x.int(), w, 0), TypeError, f"rms_norm got x torch.int32 .*; {FLOATS}"),
    "one row": (lambda g, x, w, s: rms_norm(x[0], w, 0), ValueError, r"rms_norm got x \(19,\); wanted \[n d\]"),
    "three dims": (lambda g, x, w, s: slope(g, x[None], w, s), ValueError, r"x \(1, 4, 19\); wanted \[n d"),
    "a weight of integers": (lambda g, x, w, s: rms_norm(x, w.int(), 0), TypeError, f"weight torch.int32 .*; {FLOATS}"),
    "a short weight": (lambda g, x, w, s: rms_norm(x, w[1:], 0), ValueError, r"\(18,\) and x \(4, 19\); wanted weight"),
    "a long weight": (lambda g, x, w, s: slope(g, x[:, 1:], w, s), ValueError, r"weight \(19,\) and x \(4, 1"),
    "a weight a row": (lambda g, x, w, s: rms_norm(x, x, 0), ValueError, r"got weight \(4, 19\) and x \(4, 19\); want"),
    "a narrow g": (lambda g, x, w, s: slope(g.half(), x, w, s), TypeError, "got g torch.float16 .*float32"),
    "a wide g": (lambda g, x, w, s: slope(g, x.half(), w, s), TypeError, "got g .*; wanted torch.float16"),
    "few of g": (lambda g, x, w, s: slope(g[1:], x, w, s), ValueError, r"g \(3, 19\) and x \(4, 19\); wanted g"),
    "few scales": (lambda g, x, w, s: slope(g, x, w, s[1:]), ValueError, r"scale \(3,\) .*; wanted scale \(4,"),
    "a column": (lambda g, x, w, s: slope(g, x, w, s[:, None]), ValueError, r"scale \(4, 1\) and x \(4, 19\)"),
    "a wide scale": (lambda g, x, w, s: slope(g, x, w, s.double()), TypeError, "scale torch.float64 .*float32"),
    "of f64": (lambda g, x, w, s: slope(g.double(), x.double(), w, s), TypeError, "scale .*torch.float64"),
    "a weight elsewhere": (lambda g, x, w, s: rms_norm(x, away(w), 0), ValueError, "and weight on (cpu|meta); move"),
    "a g elsewhere": (lambda g, x, w, s: slope(away(g), x, w, s), ValueError, "and g on (cpu|meta); move one"),
    "scales elsewhere": (lambda g, x, w, s: slope(g, x, w, away(s)), ValueError, "and scale on (cpu|meta); mov"),
}  # fmt: skip


@named("device", ["cpu", "meta"])
@pytest.mark.parametrize("call, error, message", MALFORMED.values(), ids=MALFORMED)
def test_malformed(call, error, message, device, no_kernel):
    with pytest.raises(error, match=message):
        call(*(t.to(device) for t in (G[0], X[0], W[0], torch.ones(4))))
