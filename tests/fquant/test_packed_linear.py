"""Tests of fquant.linear and embedding: values, errors, residuals. Transforms are in test_transforms."""

from dataclasses import replace

import pytest
import torch
from torch.func import grad, jvp, vjp, vmap

from fquant import jit, lora, random, tree
from fquant.communication import AfterLoad, LookedUpRows
from fquant.format import AQ_2X8, AQ_3X8, DYNAMIC8, INT4_ZERO, INT8, NF4, NF4_DQ
from fquant.packed import dequantize, quantize
from fquant.packed_linear import Adapted, Lora, embedding, linear, scaling
from tests.helpers.formats import KNOWN
from tests.helpers.kernels.rounding import assert_product
from tests.helpers.live_memory import Live

FORMATS = KNOWN | {
    "int8 in blocks": replace(INT8, block=32),
    "flat": replace(NF4_DQ, flat=True),
    "centred": replace(NF4, name="centred", center=True),
    "of five buffers": replace(NF4_DQ, name="flat_centred", flat=True, center=True),
    "nested twice": replace(NF4, name="scale_twice", scale=replace(DYNAMIC8, name="dynamic8_dq", scale=DYNAMIC8)),
    "aq_3x8 in blocks": replace(AQ_3X8, block=32),
    "int4_zero in blocks": replace(INT4_ZERO, block=32),
    "int4_zero by rows": replace(INT4_ZERO, block=None, scale=DYNAMIC8),
}
PICKED = {name: f for name, f in FORMATS.items() if not (f.flat or f.scale or f.vectors)}  # whose buffers have rows
formats = pytest.mark.parametrize("format", FORMATS.values(), ids=FORMATS)
KINDS = ("nf4_dq", "int8", "aq_2x8", "of five buffers", "int4_zero")  # of which each has other buffers
of_each_kind = pytest.mark.parametrize(
    "format", [pytest.param(f, id=name, marks=[pytest.mark.slow] * (name not in KINDS)) for name, f in FORMATS.items()]
)


def draw(name, *shape, dtype=torch.float32):
    return random.normal(random.fold(random.key(3), name), shape).to(dtype)


def a_lora(out, width, rank=3, magnitude=False, **options):
    m = draw("m", out).abs() + 0.5 if magnitude else None
    return Lora(draw("a", rank, width), draw("b", out, rank), m, **options)


# --- values -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("shape", [(100,), (3, 100), (2, 3, 100), (0, 100)], ids=str)
@formats
def test_linear_is_a_product_with_the_decoded_weight(format, shape, dtype):
    w, x, bias = (
        quantize(draw("w", 24, 100, dtype=torch.bfloat16), format),
        draw("x", *shape, dtype=dtype),
        draw("v", 24),
    )
    y, dense = linear(x, w), dequantize(w).to(dtype)
    assert torch.equal(linear(x, dequantize(w)), x @ dense.T)
    if dtype == torch.float64:
        assert torch.equal(y, x @ dense.T)
    assert y.shape == (*shape[:-1], 24)
    assert_product(y.reshape(-1, 24), x.reshape(-1, 100), dense.T)
    for weight in (w, dequantize(w)):
        assert torch.equal(linear(x, weight, bias), linear(x, weight) + bias.to(dtype))


@pytest.mark.parametrize("tokens", [torch.tensor(5), torch.tensor([0, 23, 5, 5]), torch.zeros(2, 0, dtype=torch.int64)])
@formats
def test_embedding_decodes_rows(format, tokens):
    w = quantize(draw("w", 24, 100, dtype=torch.bfloat16), format)
    if format.flat:
        with pytest.raises(
            ValueError, match=rf"{format.name}'s blocks straddle rows, so no row can be read; dequantize"
        ):
            embedding(tokens, w)
        return
    assert torch.equal(embedding(tokens, w), dequantize(w)[tokens])
    assert torch.equal(embedding(tokens, dequantize(w)), dequantize(w)[tokens])


@pytest.mark.parametrize("tokens", [torch.tensor(5), torch.tensor([[0, 23], [5, 5]]), torch.zeros(2, 0, dtype=int)])
@pytest.mark.parametrize("format", PICKED.values(), ids=PICKED)
def test_embedding_of_rows_that_were_picked(format, tokens):
    """Picked rows give the results of the whole table, with adapters too."""
    dense = draw("w", 24, 100, dtype=torch.bfloat16)
    for w in (dense, quantize(dense, format)):
        rows = LookedUpRows(tree.map(lambda t: t[tokens.reshape(-1)] if t.ndim else t, w), 24)
        beside = lambda base, magnitude: lora.attach({"e": base}, {"e": a_lora(24, 100, magnitude=magnitude)})["e"]
        assert torch.equal(embedding(tokens, rows), embedding(tokens, w))
        for magnitude in (False, True):
            assert torch.equal(embedding(tokens, beside(rows, magnitude)), embedding(tokens, beside(w, magnitude)))
    with pytest.raises(ValueError, match=r"does not fit a weight \(24, 100\)"):
        lora.attach({"e": rows}, {"e": a_lora(25, 100)})


def test_embedding_decodes_only_the_rows_asked_for():
    w = quantize(draw("w", 1000, 64), NF4)
    seen = []

    class Watch(Live):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = super().__torch_dispatch__(func, types, args, kwargs)
            seen.extend(t.numel() for t in tree.leaves(out) if isinstance(t, torch.Tensor) and t.is_floating_point())
            return out

    with Watch():
        embedding(torch.tensor([1, 2]), w)
    assert max(seen) <= 16 * 16 * 2 + 2 * 64  # the table of pairs


@pytest.mark.parametrize("magnitude", [False, True], ids=["lora", "dora"])
@pytest.mark.parametrize("rank_stabilised", [False, True], ids=["", "rank-stabilised"])
@formats
def test_adapted(format, rank_stabilised, magnitude):
    packed = quantize(draw("w", 24, 100), format)
    item = a_lora(24, 100, alpha=6.0, rank_stabilised=rank_stabilised, magnitude=magnitude)
    s = 6.0 / 3**0.5 if rank_stabilised else 6.0 / 3
    assert scaling(item) == pytest.approx(s)
    w = dequantize(packed).double() + s * item.b.double() @ item.a.double()
    if item.magnitude is not None:
        w = w * (item.magnitude.double() / w.norm(dim=1))[:, None]
    x, bias = draw("x", 5, 100), draw("v", 24)
    for base in (packed, dequantize(packed)):
        got = linear(x, Adapted(base, item), bias)
        torch.testing.assert_close(got.double(), x.double() @ w.T + bias, rtol=1e-4, atol=1e-4)
        if not format.flat:
            got = embedding(torch.tensor([[3, 0], [7, 7]]), Adapted(base, item))
            torch.testing.assert_close(got.double(), w[torch.tensor([[3, 0], [7, 7]])], rtol=1e-4, atol=1e-4)
    half = linear(x.half(), Adapted(packed, item))
    assert half.dtype == torch.float16
    torch.testing.assert_close(half.double(), x.double() @ w.T, rtol=2e-2, atol=0.2)


@pytest.mark.parametrize("inner, outer", [(i, o) for i in (False, True) for o in (False, True)])
def test_adapters_nest(inner, outer):
    """An adapter on an adapted weight has the norms of the plain weight and its own update."""
    packed, x = quantize(draw("w", 24, 100), NF4), draw("x", 5, 100)
    one = Adapted(packed, a_lora(24, 100, magnitude=inner))
    two = Adapted(one, Lora(draw("a2", 2, 100), draw("b2", 24, 2), draw("m2", 24).abs() if outer else None))
    w = start = dequantize(packed).double()
    for item in (one.lora, two.lora):
        update = scaling(item) * item.b.double() @ item.a.double()
        w = w + update
        if item.magnitude is not None:
            w = w * (item.magnitude.double() / (start + update).norm(dim=1))[:, None]
    torch.testing.assert_close(linear(x, two).double(), x.double() @ w.T, rtol=1e-4, atol=1e-4)
    merged = lora.merge({"w": one}, {"w": two.lora})["w"]
    torch.testing.assert_close(merged.double(), w, rtol=1e-4, atol=1e-4)


# --- errors -----------------------------------------------------------------------------------------------------------

W = quantize(draw("w", 24, 64), NF4)
DEEP = DYNAMIC8
for _ in range(3):
    DEEP = replace(DYNAMIC8, scale=DEEP)
DEEP = quantize(draw("w", 24, 64), replace(NF4, name="deep", scale=DEEP))
BAD = {
    "width": (lambda: linear(draw("x", 3, 65), W), ValueError, r"x \(3, 65\) and a weight \(24, 64\); x's last dim mu"),
    "dense width": (lambda: linear(draw("x", 63), draw("w", 24, 64)), ValueError, "x's last dim must be 64"),
    "scalar": (lambda: linear(torch.tensor(1.0), W), ValueError, "x's last dim must be 64"),
    "integers": (lambda: linear(torch.ones(64, dtype=torch.int64), W), TypeError, "got x of torch.int64; wanted a f"),
    "vector": (lambda: linear(draw("x", 24), draw("w", 24)), ValueError, r"weight of shape \(24,\); wanted \[out in\]"),
    "stack": (lambda: linear(draw("x", 4), quantize(draw("w", 2, 3, 4), NF4)), ValueError, r"shape \(2, 3, 4\); want"),
    "buffers": (
        lambda: grad(lambda x: linear(x, DEEP).sum())(draw("x", 64)), ValueError,
        "weight of 10 buffers; wanted at most 8, nest scales less",
    ),
    "bias": (lambda: linear(draw("x", 64), W, draw("v", 5)), ValueError, r"bias \(5,\); wanted \(24,\), the rows"),
    "bias of one": (lambda: linear(draw("x", 64), draw("w", 24, 64), draw("v", 1)), ValueError, r"got a bias \(1,\);"),
    "token": (lambda: embedding(torch.tensor([[3, 24]]), W), IndexError, "got token 24; wanted 0 to 23, check the to"),
    "dense token": (lambda: embedding(torch.tensor(24), draw("w", 24, 64)), IndexError, "got token 24; wanted 0 to 23"),
    "negative token": (lambda: embedding(torch.tensor([3, -1]), W), IndexError, "got token -1; wanted 0 to 23"),
    "adapted token": (
        lambda: embedding(torch.tensor([99]), Adapted(W, a_lora(24, 64))), IndexError, "got token 99; wanted 0 to 23",
    ),
    "float tokens": (lambda: embedding(torch.ones(3), W), TypeError, "tokens of torch.float32; wanted int64 or int32"),
    "byte tokens": (lambda: embedding(torch.ones(3).byte(), W), TypeError, "tokens of torch.uint8; wanted int64 or i"),
    "a list": (lambda: embedding([1, 2], W), TypeError, "tokens of list; wanted int64 or int32, use tokens.long"),
    "table": (lambda: embedding(torch.tensor(1), draw("w", 24)), ValueError, r"shape \(24,\); wanted \[vocab dim\]"),
    "kind": (lambda: linear(draw("x", 4), {"w": 1}), TypeError, "weight of type dict; wanted Tensor, Packed or"),
    "embedding": (lambda: embedding(torch.tensor(1), [1]), TypeError, "embedding got a weight of type list; wanted"),
}  # fmt: skip


@pytest.mark.parametrize("call, error, message", BAD.values(), ids=BAD)
def test_bad_input(call, error, message):
    with pytest.raises(error, match=message):
        call()


def test_tokens_are_not_looked_at_in_a_capture():
    captured = jit(lambda tokens, w: embedding(tokens, w))
    for tokens in (torch.tensor([3, 23]), torch.tensor([3, 23]).int()):
        assert torch.equal(captured(tokens, W), dequantize(W)[tokens])
        assert torch.equal(vmap(embedding, (0, None))(tokens, W), dequantize(W)[tokens])


# --- a packed weight is a constant ------------------------------------------------------------------------------------

BUFFERS = {
    "scale": NF4,
    "row scale": INT8,
    "nested scale": NF4_DQ,
    "offset": NF4_DQ,
    "vectors": AQ_2X8,
    "zero": INT4_ZERO,
}


def with_buffer(p, which, t):
    if "nested" in which:
        return replace(p, scale=replace(p.scale, scale=t))
    if which in ("vectors", "zero"):
        return replace(p, **{which: t})
    return replace(p, scale=replace(p.scale, offset=t)) if which == "offset" else replace(p, scale=t)


@pytest.mark.parametrize("which, format", BUFFERS.items(), ids=BUFFERS)
def test_derivatives_of_a_scale_raise(which, format):
    p, x = quantize(draw("w", 8, 64), format), draw("x", 3, 64)
    t = {"offset": lambda: p.scale.offset, "nested scale": lambda: p.scale.scale, "vectors": lambda: p.vectors}
    t |= {"zero": lambda: p.zero}
    t = t.get(which, lambda: p.scale)()
    f = lambda t, x: linear(x, with_buffer(p, which, t)).sum()
    fix = r"train a Lora beside it \(fquant.lora.init, attach\) or dequantize it first"
    with pytest.raises(TypeError, match=f"the gradient of a packed weight was asked for, .* {fix}"):
        grad(f)(t, x)
    with pytest.raises(TypeError, match="the gradient of a packed weight was asked for"):
        grad(f, (0, 1))(t, x)
    with pytest.raises(TypeError, match="the gradient of a packed weight was asked for"):
        vmap(grad(f), (None, 0))(t, x)
    with pytest.raises(TypeError, match=f"the tangent of a packed weight was asked for, .* {fix}"):
        jvp(f, (t, x), (torch.ones_like(t), x))
    with pytest.raises(TypeError, match="the tangent of a packed weight was asked for"):
        jvp(lambda t: f(t, x), (t,), (torch.ones_like(t),))
    assert grad(f, 1)(t, x).abs().max() > 0


@formats
def test_square_weights_are_not_transposed(format):
    """torchao's NF4Tensor computes g · Wᵀ instead of g · W here under torch.func.grad."""
    p, x, g = quantize(draw("w", 64, 64), format), draw("x", 5, 64), draw("g", 5, 64)
    w = dequantize(p)
    assert (g @ w - g @ w.T).abs().max() > 1
    got = grad(lambda x: (linear(x, p) * g).sum())(x)
    torch.testing.assert_close(got, g @ w, rtol=1e-5, atol=1e-4)
    leaf = x.clone().requires_grad_()
    (linear(leaf, p) * g).sum().backward()
    torch.testing.assert_close(leaf.grad, g @ w, rtol=1e-5, atol=1e-4)
    _, y, *_ = jvp(lambda x: linear(x, p), (x,), (g,))
    torch.testing.assert_close(y, g @ w.T, rtol=1e-5, atol=1e-4)


# --- residuals --------------------------------------------------------------------------------------------------------

T, WIDTH, OUT, RANK = 3, 512, 256, 4
DENSE = OUT * WIDTH * 4


@of_each_kind
def test_autograd_saves_the_packed_buffers_and_nothing_else(format):
    p, x = quantize(draw("w", OUT, WIDTH), format), draw("x", T, WIDTH).requires_grad_()
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        linear(x, p).sum()
    ours = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tree.leaves(p)}
    theirs = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in saved}
    assert theirs == ours and sum(theirs.values()) == tree.nbytes(p) < DENSE / 3


def stacked_linears(p, q):
    return lambda x: linear(linear(x, p).tanh(), q)


@of_each_kind
def test_vjp_keeps_activations_and_no_weight(format):
    p, q = quantize(draw("w", OUT, WIDTH), format), quantize(draw("w2", WIDTH, OUT), format)
    x, g = draw("x", T, WIDTH), draw("g", T, WIDTH)
    with Live() as live:
        out, pull, *_ = vjp(stacked_linears(p, q), x)
    assert sum(live.sizes()) == T * (OUT + WIDTH) * 4  # tanh's result, and the result
    dense = lambda dtype: stacked_linears(*(dequantize(w).to(dtype) for w in (p, q)))
    wanted = vjp(dense(torch.float64), x.double())[1](g.double())[0]
    error, usual = ((got - wanted).norm() for got in (pull(g)[0], vjp(dense(torch.float32), x)[1](g)[0]))
    # Both round in float32, in another order; the usual error may be far below that of 512 sums.
    assert error <= max(2 * usual, 2**-19 * wanted.norm())


ADAPTERS = {
    "lora": dict(),
    "dora": dict(dora=True),
    "dropout": dict(dropout=0.5),
    "dora with dropout": dict(dora=True, dropout=0.5),
}


@pytest.mark.parametrize("options", ADAPTERS.values(), ids=ADAPTERS)
@pytest.mark.parametrize("format", [NF4_DQ, INT8], ids=["nf4_dq", "int8"])
def test_adapters_keep_activations_and_no_weight(format, options):
    base = {"w": quantize(draw("w", OUT, WIDTH), format), "w2": quantize(draw("w2", WIDTH, OUT), format)}
    adapters, x, key = lora.init(base, "w2?", rank=RANK, **options), draw("x", T, WIDTH), random.key(1)

    def f(adapters, x):
        layers = lora.attach(base, adapters, key)
        return linear(linear(x, layers["w"]), layers["w2"])

    with Live() as live:
        out, pull, *_ = vjp(f, adapters, x)
    sizes = live.sizes()
    assert max(sizes) <= T * WIDTH * 4  # an activation: a dropout mask is a quarter of it
    assert sum(sizes) <= 12 * T * (OUT + WIDTH) * 4 < DENSE / 4
    del out, pull
    assert live.sizes() == []


@pytest.mark.parametrize("shape", [(64,), (3, 64), (2, 3, 64)], ids=str)
def test_compiled_gradient_of_x_itself(shape):
    """torch.compile takes the argument of grad itself for a constant if a Function gets it."""
    torch._dynamo.reset()
    f, x = grad(lambda x, w: linear(x, w).sin().sum()), draw("x", *shape)
    assert torch.equal(torch.compile(f, backend="aot_eager", fullgraph=True)(x, W), f(x, W))


def test_the_count_sees_a_dense_weight():
    """The counts above would show a dense weight if linear kept it."""
    p, x = quantize(draw("w", OUT, WIDTH), NF4), draw("x", T, WIDTH)
    with Live() as live:
        out, pull, *_ = vjp(lambda x: x @ dequantize(p).T, x)
    assert max(live.sizes()) == DENSE


def test_stacks_of_another_kind_of_format():
    """vmap over flat weights, whose buffers have other ranks than the weight."""
    each = [quantize(draw(f"w{i}", 8, 33), replace(NF4, flat=True, scale=DYNAMIC8)) for i in range(3)]
    stack, x = tree.map(lambda *t: torch.stack(t), *each), draw("x", 3, 33)
    wanted = torch.stack([linear(row, w) for row, w in zip(x, each, strict=True)])
    torch.testing.assert_close(vmap(linear)(x, stack), wanted)


@pytest.mark.parametrize("verb", [linear, lambda x, w: embedding(x.long(), w), lambda x, w: w.q])
def test_a_block_that_is_not_loaded(verb):
    block = AfterLoad(torch.ones(1), (), lambda block, args: block)
    with pytest.raises((TypeError, AttributeError), match="AfterLoad.*; its block is not loaded: call comm.load on it"):
        verb(torch.ones(2, 64), block)
