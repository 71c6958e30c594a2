"""Tests of fquant.grouped_products against a sum over all rows in float64; more transforms are in test_transforms."""

from dataclasses import replace

import pytest
import torch
from torch.func import grad, hessian, jvp, vmap

from fquant import grouped_linear, jit, lora, quantize, random, tree
from fquant.format import AQ_2X8, DYNAMIC8, FP8, INT4, INT4_ZERO, INT8, MXFP4, NF4, NF4_DQ
from fquant.grouped_products import full_shape, groups_of
from fquant.packed import dequantize
from fquant.packed_linear import Adapted, Lora
from tests.helpers.kernels.rounding import assert_product
from tests.helpers.live_memory import Peak

FORMATS = {
    "nf4": NF4, "nf4_dq": NF4_DQ, "int8": INT8, "int4": INT4, "int4_zero": replace(INT4_ZERO, block=32),
    "mxfp4": MXFP4, "fp8": FP8, "aq_2x8": AQ_2X8, "centred": replace(NF4, name="centred", center=True),
    "nested by rows": replace(NF4, name="rows", scale=replace(DYNAMIC8, name="dynamic8_rows", flat=False)),
}  # fmt: skip
COUNTS = torch.tensor([3, 0, 7, 1, 2])
ROWS, OUT, IN = 13, 24, 100


def draw(name, *shape, dtype=torch.float64):
    return random.normal(random.fold(random.key(3), name), shape).to(dtype)


def oracle(x, w, counts=COUNTS):
    """Choose the weight of each row, with the groups numbered by a loop."""
    ids = torch.tensor([e for e, n in enumerate(counts.tolist()) for _ in range(n)])
    return (x[:, None] @ w[ids].mT)[:, 0]


def stacked(w, format, how):
    """Pack a stack as one array, or each matrix by itself."""
    if how == "whole":
        return quantize(w, format)
    return tree.map(lambda *t: torch.stack(t), *[quantize(matrix, format) for matrix in w])


@pytest.mark.parametrize("how", ["whole", "each"])
@pytest.mark.parametrize("format", FORMATS.values(), ids=FORMATS)
def test_packed_stacks_equal_decoded_ones(format, how):
    p = stacked(draw("w", 5, OUT, IN, dtype=torch.bfloat16), format, how)
    dense = dequantize(p)
    assert full_shape(p) == dense.shape == (5, OUT, IN)
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        x, bias = draw("x", ROWS, IN, dtype=dtype), draw("bias", 5, OUT, dtype=torch.float32)
        y = grouped_linear(x, p, COUNTS)
        for e, rows in enumerate(COUNTS.tolist()):
            at = slice(int(COUNTS[:e].sum()), int(COUNTS[:e].sum()) + rows)
            assert_product(y[at], x[at], dense[e].to(dtype).mT)
        assert torch.equal(grouped_linear(x, p, COUNTS, bias), y + bias.to(dtype)[groups_of(COUNTS, ROWS)])
        g = draw("g", ROWS, OUT)
    f = lambda x, w: (grouped_linear(x, w, COUNTS) * g).sum()
    got = grad(f)(draw("x", ROWS, IN), p)
    torch.testing.assert_close(got, grad(lambda x: (oracle(x, dense.double()) * g).sum())(draw("x", ROWS, IN)))


def test_groups():
    for counts in ([0, 0, 4], [4, 0, 0], [1, 1, 2], [0, 4, 0]):
        wanted = torch.repeat_interleave(torch.arange(3), torch.tensor(counts))
        assert torch.equal(groups_of(torch.tensor(counts), 4), wanted)
    none = torch.zeros(3, dtype=torch.int64)
    assert groups_of(none, 0).shape == (0,)
    assert grouped_linear(draw("x", 0, IN), draw("w", 3, OUT, IN), none).shape == (0, OUT)


DENSE = {
    "grad": lambda f, x, w: grad(f, (0, 1))(x, w),
    "grad of grad": lambda f, x, w: grad(lambda x, w: sum(t.sin().sum() for t in grad(f, (0, 1))(x, w)), (0, 1))(x, w),
    "jvp": lambda f, x, w: jvp(f, (x, w), (x.cos(), w.cos())),
    "jvp of grad": lambda f, x, w: jvp(grad(f, (0, 1)), (x, w), (x.cos(), w.cos())),
    "jvp of jvp": lambda f, x, w: jvp(lambda x: jvp(f, (x, w), (x.cos(), w.cos()))[1], (x,), (x.sin(),)),
    "grad of jvp": lambda f, x, w: grad(lambda x, w: jvp(f, (x, w), (x.cos(), w.cos()))[1], (0, 1))(x, w),
    "hessian": lambda f, x, w: hessian(f)(x, w),
    "vmap x": lambda f, x, w: vmap(grad(f, (0, 1)), (0, None))(torch.stack([x, x.cos()]), w),
    "vmap w": lambda f, x, w: vmap(grad(f, (0, 1)), (None, 1))(x, torch.stack([w, w.cos()], 1)),
    "vmap both": lambda f, x, w: vmap(grad(f, (0, 1)))(torch.stack([x, x.cos()]), torch.stack([w, w.cos()])),
    "vmap vmap": lambda f, x, w: vmap(vmap(grad(f, (0, 1)), (0, None)), (None, 0))(
        torch.stack([x, x.cos()]), torch.stack([w, w.cos()])
    ),
}  # fmt: skip


@pytest.mark.parametrize("transform", DENSE.values(), ids=DENSE)
def test_derivatives_of_dense_weights(transform):
    x, w = draw("x", ROWS, 3), draw("w", 5, 2, 3)
    of = lambda product: transform(lambda x, w: product(x, w).sin().sum(), x, w)
    got, wanted = of(lambda x, w: grouped_linear(x, w, COUNTS)), of(oracle)
    for a, b in zip(tree.leaves(got), tree.leaves(wanted), strict=True):
        torch.testing.assert_close(a, b)
    captured = jit(lambda x, w, c: transform(lambda x, w: grouped_linear(x, w, c).sin().sum(), x, w))
    assert all(map(torch.equal, tree.leaves(captured(x, w, COUNTS)), tree.leaves(got)))


@pytest.mark.parametrize("mapped", ["all", "packed weights", "counts"])
def test_vmap_of_counts(mapped):
    """Examples with other counts, with one weight and with one each, equal a loop."""
    x, counts = draw("x", 3, ROWS, IN), torch.stack([COUNTS, COUNTS.flip(0), COUNTS.roll(2)])
    for p in (stacked(draw("w", 5, OUT, IN).float(), NF4_DQ, how) for how in ("whole", "each")):
        many = tree.map(lambda t: torch.stack([t, t, t]), p)
        f = lambda x, p, counts: grad(lambda x: grouped_linear(x, p, counts).sin().sum())(x)
        dims = {"all": (0, 0, 0), "packed weights": (None, 0, None), "counts": (None, None, 0)}[mapped]
        args = [a if d == 0 else b for a, b, d in zip((x, many, counts), (x[0], p, COUNTS), dims, strict=True)]
        pick = lambda i, args=args, dims=dims: [
            tree.map(lambda t: t[i], a) if d == 0 else a for a, d in zip(args, dims, strict=True)
        ]
        got = vmap(f, dims)(*args)
        torch.testing.assert_close(got, torch.stack([f(*pick(i)) for i in range(3)]))


@pytest.mark.parametrize("many", [((5,), (5,)), ((), ()), ((), (5,))], ids=["each", "shared", "shared a"])
def test_adapters(many):
    """An adapter of each group, or shared: values and gradients of all factors."""
    w, x = draw("w", 5, OUT, IN), draw("x", ROWS, IN)
    a, b = draw("a", *many[0], 3, IN), draw("b", *many[1], OUT, 3)
    f = lambda a, b, x: grouped_linear(x, Adapted(w, Lora(a, b, alpha=6.0)), COUNTS)
    g = lambda a, b, x: oracle(x, w + 2 * b @ a)
    torch.testing.assert_close(f(a, b, x), g(a, b, x))
    loss = lambda f: lambda *args: f(*args).sin().sum()
    torch.testing.assert_close(grad(loss(f), (0, 1, 2))(a, b, x), grad(loss(g), (0, 1, 2))(a, b, x))
    p = quantize(w.float(), NF4)
    merged = lora.merge({"w": p}, {"w": Lora(a.float(), b.float(), alpha=6.0)})["w"]
    got = grouped_linear(x.float(), Adapted(p, Lora(a.float(), b.float(), alpha=6.0)), COUNTS)
    torch.testing.assert_close(got, grouped_linear(x.float(), merged, COUNTS), rtol=1e-3, atol=1e-3)


def test_adapters_of_stacks_begin_at_zero():
    base = {"e": quantize(draw("w", 5, OUT, IN).float(), NF4), "q": draw("q", OUT, IN).float()}
    own, shared = lora.init(base, "e|q", rank=3, key=0), lora.init(base, "e|q", rank=3, key=0, shared=True)
    assert own["e"].a.shape == (5, 3, IN) and own["e"].b.shape == (5, OUT, 3) and own["q"].a.shape == (3, IN)
    assert shared["e"].a.shape == (3, IN) and torch.equal(own["q"].a, shared["q"].a)
    x = draw("x", ROWS, IN).float()
    for adapters in (own, shared):
        attached = lora.attach(base, adapters)["e"]
        assert torch.equal(grouped_linear(x, attached, COUNTS), grouped_linear(x, base["e"], COUNTS))
    dropped = lora.attach(base, lora.init(base, "e", rank=3, dropout=0.5), random.key(1))["e"]
    moved = replace(dropped, lora=replace(dropped.lora, b=dropped.lora.b + 1))
    assert not torch.equal(grouped_linear(x, moved, COUNTS), grouped_linear(x, replace(moved, key=None), COUNTS))


def test_memory_is_a_tile():
    """No stack is decoded: at its peak the product and its gradient hold little beside their results."""
    w = quantize(draw("w", 16, 256, 512).bfloat16(), NF4)
    x, counts = draw("x", 64, 512).bfloat16(), torch.full((16,), 4)
    with Peak() as peak:
        grad(lambda x: grouped_linear(x, w, counts).float().sum())(x)
    assert peak.most < 2 * 64 * 512 * 4 + 64 * 256 * 8 + 256 * 512 * 2 < 16 * 256 * 512 * 2 / 4


W, X = draw("w", 5, OUT, IN), draw("x", ROWS, IN)
BAD = {
    "sum": (lambda: grouped_linear(X, W, COUNTS + 1), ValueError, "counts of 18 rows, .* for 13 rows; wanted counts"),
    "negative": (lambda: grouped_linear(X, W, COUNTS - torch.tensor([0, 1, -1, 0, 0])), ValueError, "the least -1"),
    "groups": (lambda: grouped_linear(X, W, COUNTS[:4]), ValueError, r"counts \(4,\) for a weight .* wanted \(5,\)"),
    "dtype of counts": (lambda: grouped_linear(X, W, COUNTS.int()), TypeError, "counts of torch.int32; wanted int64"),
    "width": (lambda: grouped_linear(X[:, 1:], W, COUNTS), ValueError, r"x \(13, 99\) and a weight .* wanted x \[rows"),
    "dims of x": (lambda: grouped_linear(X[None], W, COUNTS), ValueError, r"wanted x \[rows 100\]"),
    "dims of w": (lambda: grouped_linear(X, W[0], COUNTS), ValueError, r"shape \(24, 100\); wanted \[groups out in\]"),
    "integers": (lambda: grouped_linear(X.long(), W, COUNTS), TypeError, "x of torch.int64; wanted a float"),
    "bias": (lambda: grouped_linear(X, W, COUNTS, draw("b", OUT)), ValueError, r"bias \(24,\); wanted \(5, 24\)"),
    "kind": (lambda: grouped_linear(X, [W], COUNTS), TypeError, "weight of type list; wanted Tensor, Packed or Adap"),
    "flat": (
        lambda: grouped_linear(X, quantize(W.float(), replace(NF4, flat=True)), COUNTS), ValueError,
        "blocks straddle matrices; quantise each matrix, and stack them",
    ),
    "dora": (
        lambda: grouped_linear(X, Adapted(W, Lora(draw("a", 3, IN), draw("b", OUT, 3), draw("m", OUT))), COUNTS),
        ValueError, "DoRA, which is not implemented for stacks",
    ),
    "init of dora": (lambda: lora.init({"w": W}, "w", rank=2, dora=True), ValueError, "w: got DoRA for a stack"),
    "gradient": (
        lambda: grad(lambda s: grouped_linear(X, replace(P, scale=s), COUNTS).sum())(P.scale), TypeError,
        "the gradient of a packed weight was asked for",
    ),
    "tangent": (
        lambda: jvp(lambda s: grouped_linear(X, replace(P, scale=s), COUNTS), (P.scale,), (P.scale,)), TypeError,
        "the tangent of a packed weight was asked for",
    ),
}  # fmt: skip
P = quantize(W.float(), NF4)


@pytest.mark.parametrize("call, error, message", BAD.values(), ids=BAD)
def test_bad_input(call, error, message):
    with pytest.raises(error, match=message):
        call()
