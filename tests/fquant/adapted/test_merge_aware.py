"""Merge-aware products: bytes of the merge, derivatives of the straight-through estimator, memory, refusals.

The oracle of derivatives is ``x · (C + s · b · a)ᵀ`` in float64, where the constant C makes the value that of the
merged weight. So its derivatives of every order are those of an identity in place of quantisation.
"""

from dataclasses import replace

import pytest
import torch
from torch.func import grad, grad_and_value, jvp, vmap
from torch.fx.experimental.proxy_tensor import make_fx

from fquant import embedding, grouped_linear, jit, linear, lora, optim, quantize, random, tree
from fquant.adapted import merge_aware
from fquant.format import AQ_2X8, DYNAMIC8, FP4, FP8, INT4, INT4_ZERO, INT8, MXFP4, NF4, NF4_DQ
from fquant.lora import Lora
from fquant.packed import Packed, dequantize
from fquant.packed_linear import scaling
from tests.helpers.arrays import assert_equal
from tests.helpers.live_memory import Live

FORMATS = {f.name: f for f in (NF4, NF4_DQ, FP4, INT8, INT4, INT4_ZERO, MXFP4, FP8)}
FORMATS |= {"flat": replace(NF4_DQ, flat=True), "centred": replace(NF4, name="centred", center=True)}
FORMATS |= {"int4_zero in 8 bits": replace(INT4_ZERO, block=32, scale=DYNAMIC8)}
formats = pytest.mark.parametrize("format", FORMATS.values(), ids=FORMATS)
OUT, IN = 24, 100


def draw(name, *shape, dtype=torch.float64):
    return random.normal(random.fold(random.key(11), name), shape, torch.float64).to(dtype)


def packed(seed, *shape, format=NF4, dtype=torch.float32):
    w = draw(f"w{seed}", *shape, dtype=dtype)
    return (
        quantize(w, format) if w.ndim == 2 else tree.map(lambda *t: torch.stack(t), *[quantize(m, format) for m in w])
    )


def adapter(seed, *stack, dtype=torch.float64, size=0.1, **options):
    a, b = draw(f"a{seed}", *stack, 3, IN, dtype=dtype), size * draw(f"b{seed}", *stack, OUT, 3, dtype=dtype)
    return Lora(a, b, alpha=6.0, **options)


def wave(y):
    return (y * torch.linspace(0.2, 1.5, y.numel(), dtype=y.dtype).reshape(y.shape)).sin().sum()


def multiply(x, w):
    return linear(x, w)


def look_up(x, w):
    return embedding(torch.tensor([[3, 0], [7, 7]]), w).to(x.dtype) @ x.mT


def group(x, w):
    return grouped_linear(x, w, torch.tensor([1, 0, 4]))


VERBS = {"linear": (multiply, ()), "embedding": (look_up, ()), "grouped": (group, (3,))}


def constant(base, part):
    """Return the C of the module's docstring, which makes the value that of the merge."""
    merged = lora.merge_packed({"w": base}, {"w": part})[0]["w"]
    return dequantize(merged).double() - scaling(part) * part.b @ part.a


def mine(verb, part, x, base):
    return wave(VERBS[verb][0](x, lora.attach({"w": base}, {"w": part}, merge_aware=True)["w"]))


def oracle(verb, part, x, c):
    return wave(VERBS[verb][0](x, c + scaling(part) * part.b @ part.a))


def dot(a, b):
    return sum((s * t).sum() for s, t in zip(tree.leaves(a), tree.leaves(b), strict=True))


DERIVATIVES = {  # of f(part, x, rest), along v
    "grad": lambda f, v, p, x, w: grad_and_value(f, (0, 1))(p, x, w),
    "jvp": lambda f, v, p, x, w: jvp(lambda p, x: f(p, x, w), (p, x), v),
    "jvp of x": lambda f, v, p, x, w: jvp(lambda x: f(p, x, w), (x,), v[1:]),
    "grad of grad": lambda f, v, p, x, w: grad(lambda *a: dot(grad(f, (0, 1))(*a, w), v), (0, 1))(p, x),
    "jvp of grad": lambda f, v, p, x, w: jvp(lambda *a: grad(f, (0, 1))(*a, w), (p, x), v),
    "grad of jvp": lambda f, v, p, x, w: grad(lambda *a: jvp(lambda *b: f(*b, w), a, v)[1], (0, 1))(p, x),
    "make_fx": lambda f, v, p, x, w: make_fx(grad(f, (0, 1)), tracing_mode="fake")(p, x, w)(p, x, w),
}
MAPPED = {"x": (None, 0, None), "adapters": (0, None, None), "weights": (None, None, 0), "all": (0, 0, 0)}


def arguments(verb, format, i=0):
    stack = VERBS[verb][1]
    return adapter(i, *stack), draw(f"x{i}", 5, IN), packed(i, *stack, OUT, IN, format=format)


def close(got, wanted):
    torch.testing.assert_close(tree.leaves(got), tree.leaves(wanted), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("derivative", DERIVATIVES)
@pytest.mark.parametrize("verb", VERBS)
def test_derivatives_are_straight_through(verb, derivative):
    part, x, base = arguments(verb, NF4_DQ)
    v = tree.map(lambda t: draw("v", *t.shape), (part, x))
    apply = lambda f, rest: DERIVATIVES[derivative](lambda *args: f(verb, *args), v, part, x, rest)
    wanted = apply(oracle, constant(base, part))
    close(apply(mine, base), wanted)


@formats
def test_value_and_gradient_in_every_format(format):
    part, x, base = arguments("linear", format)
    wanted = grad_and_value(oracle, (1, 2))("linear", part, x, constant(base, part))
    close(grad_and_value(mine, (1, 2))("linear", part, x, base), wanted)


@pytest.mark.parametrize("inner", ["grad", "jvp", "grad of grad"])
@pytest.mark.parametrize("mapped", MAPPED)
@pytest.mark.parametrize("verb", ["linear", "grouped", "embedding"])
def test_vmap_is_a_loop(verb, mapped, inner):
    every = [arguments(verb, NF4_DQ, i) for i in range(2)]
    v = tree.map(lambda t: draw("v", *t.shape), every[0][:2])
    f = lambda *args: DERIVATIVES[inner](lambda *a: mine(verb, *a), v, *args)
    of = lambda i: [every[i if dim == 0 else 0][k] for k, dim in enumerate(MAPPED[mapped])]
    stack = lambda *trees: tree.map(lambda *t: torch.stack(t), *trees)
    args = [stack(*(one[k] for one in every)) if dim == 0 else every[0][k] for k, dim in enumerate(MAPPED[mapped])]
    close(vmap(f, MAPPED[mapped])(*args), stack(*(f(*of(i)) for i in range(2))))


# --- bytes ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("piece", [1 << 21, 300])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@formats
def test_bytes_are_those_of_the_merge(format, dtype, piece, monkeypatch):
    """The weight that products use is ``merge_packed``'s byte for byte, for any size of its pieces."""
    base = {"w": packed(0, 96, 128, format=format, dtype=dtype), "n": torch.ones(3)}
    adapters = {"w": Lora(draw("a", 3, 128).float(), 0.05 * draw("b", 96, 3).float(), rank_stabilised=True)}
    wanted, _ = lora.merge_packed(base, adapters)
    monkeypatch.setattr(merge_aware, "PIECE", piece)
    found = merge_aware.straight_through(base["w"], adapters["w"], scaling(adapters["w"]))
    assert_equal(found.merged, wanted["w"])
    assert_equal(lora.merge_packed(base, adapters)[0], wanted)
    x = draw("x", 5, 128, dtype=dtype)
    attached = lora.attach(base, adapters, merge_aware=True)
    assert torch.equal(linear(x, attached["w"]), linear(x, wanted["w"]))


@pytest.mark.parametrize("format", [NF4, NF4_DQ, INT8, None], ids=str)
def test_training_ends_in_the_merged_weights(format):
    """Train some captured steps: the loss of the trained adapters is to the bit that of the merged tree."""
    w = draw("w", 64, 64, dtype=torch.bfloat16)
    base = {"w": quantize(w, format) if format else w, "w2": draw("w2", 32, 64, dtype=torch.bfloat16)}
    adapters = lora.dither(base, lora.init(base, "w2?", 4, key=1), key=2)
    x, y = draw("x", 32, 64, dtype=torch.bfloat16), draw("y", 32, 32, dtype=torch.bfloat16)

    def loss(adapters, base, x, y, aware=True):
        at = lora.attach(base, adapters, merge_aware=aware)
        return (linear(linear(x, at["w"]).tanh(), at["w2"]) - y).float().square().mean()

    opt = optim.adamw(3e-2)

    @jit
    def step(adapters, state, base, x, y):
        grads, value = grad_and_value(loss)(adapters, base, x, y)
        updates, state = opt.update(grads, state, adapters)
        return optim.apply_updates(adapters, updates), state, value

    state, losses = opt.init(adapters), []
    for _ in range(12):
        adapters, state, value = step(adapters, state, base, x, y)
        losses.append(float(value))
    merged, lost = lora.merge_packed(base, adapters)
    assert losses[-1] < 0.7 * losses[0] and lost.keys() == {"w", "w2"}
    last = loss(adapters, base, x, y)
    assert torch.equal(last, loss({}, merged, x, y))
    assert torch.equal(step(adapters, state, base, x, y)[2], last)


def test_a_looked_up_row_of_plain_formats():
    from fquant.communication import LookedUpRows

    table, part = packed(0, OUT, IN), adapter(0)
    tokens = torch.tensor([[3, 0], [7, 7]])
    rows = LookedUpRows(tree.map(lambda t: t[tokens.reshape(-1)], table), OUT)
    whole, some = (lora.attach({"e": e}, {"e": part}, merge_aware=True)["e"] for e in (table, rows))
    assert torch.equal(embedding(tokens, some), embedding(tokens, whole))


def test_stacks_that_share_an_adapter():
    """One adapter, or one of its factors, for all weights of a stack, against an adapter for each."""
    x, base = draw("x", 5, IN), packed(0, 3, OUT, IN, format=NF4_DQ)
    for a, b in (((), ()), ((), (3,))):
        part = Lora(draw("a", *a, 3, IN), 0.1 * draw("b", *b, OUT, 3), alpha=6.0)
        full = replace(part, a=part.a.expand(3, 3, IN), b=part.b.expand(3, OUT, 3))
        (_, dx), value = grad_and_value(mine, (1, 2))("grouped", part, x, base)
        (_, wanted), other = grad_and_value(mine, (1, 2))("grouped", full, x, base)
        assert torch.equal(value, other)
        close(dx, wanted)
        assert_equal(lora.merge_packed({"w": base}, {"w": part})[0], lora.merge_packed({"w": base}, {"w": full})[0])


# --- memory, refusals -------------------------------------------------------------------------------------------------


def test_the_residual_is_packed():
    """Keep a second packed weight for the backward, and no dense one."""
    base = quantize(draw("w", 512, 1024, dtype=torch.bfloat16), NF4)
    part = Lora(draw("a", 4, 1024).bfloat16(), draw("b", 512, 4).bfloat16())
    x = draw("x", 2, 1024, dtype=torch.bfloat16)
    with Live() as live:
        f = lambda part, x: linear(x, lora.attach({"w": base}, {"w": part}, merge_aware=True)["w"])
        _, pull, *_ = torch.func.vjp(f, part, x)
    codes = 512 * 1024 // 2
    assert live.sizes()[0] == codes and sum(size > codes // 4 for size in live.sizes()) == 1
    del pull


def test_gradients_form_no_outer_product():
    base, part, x = (
        packed(0, 512, 1024),
        Lora(draw("a", 4, 1024).float(), draw("b", 512, 4).float()),
        draw("x", 2, 1024),
    )
    graph = make_fx(grad(lambda p, x: linear(x, lora.attach({"w": base}, {"w": p}, merge_aware=True)["w"]).sum()))(
        part, x.float()
    )
    sizes = [n.meta["val"].numel() for n in graph.graph.nodes if isinstance(n.meta.get("val"), torch.Tensor)]
    assert max(sizes) <= 512 * 1024 // 2  # the codes


def test_refusals():
    base, part = {"w": packed(0, OUT, IN)}, adapter(0)
    attach = lambda base, part, key=None: lora.attach(base, {"w": part}, key, merge_aware=True)
    for part_, base_, key, fault in (
        (adapter(0, magnitude=torch.ones(OUT)), base, None, "w: merge-aware got DoRA"),
        (adapter(0, dropout=0.1), base, random.key(0), r"w: merge-aware got dropout 0\.1, which drops inputs of"),
        (part, {"w": packed(0, OUT, IN, format=AQ_2X8)}, None, "w: merge-aware got learned vectors"),
    ):
        with pytest.raises(ValueError, match=fault):
            attach(base_, part_, key)
    with pytest.raises(TypeError, match="w: merge-aware got a Adapted; merge it first"):
        attach(attach(base, part), part)
    assert attach(base, adapter(0, dropout=0.1))["w"].merge_aware  # without a key nothing is dropped
    assert isinstance(merge_aware.straight_through(base["w"], part, 2.0).merged, Packed)


@pytest.mark.parametrize("format", [NF4_DQ, INT8], ids=str)
def test_torch_compile(format):
    part, x, base = arguments("linear", format)
    torch._dynamo.reset()
    f = grad(lambda part, x, base: mine("linear", part, x, base), (0, 1))
    close(torch.compile(f, backend="aot_eager", fullgraph=True)(part, x, base), f(part, x, base))
