"""Fused cross entropy by chunks against ``blocks.cross_entropy`` of whole logits: values, transforms, memory and work.

The oracle is in float64 unless a table says otherwise.
"""

import dataclasses
from collections import Counter

import pytest
import torch
from torch.func import grad, grad_and_value, hessian, jvp, vjp, vmap
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from fquant import NF4_DQ, jit, quantize, tree
from fquant.activation_checkpoint import remat
from fquant.lora import Adapted, Lora
from fquant.packed_linear import linear
from models import blocks, fused_cross_entropy
from tests.helpers.arrays import normal
from tests.helpers.cases import slow_after
from tests.helpers.live_memory import Live

VOCAB, DIM, RANK = 11, 64, 3


def adapter(seed=0, magnitude=False, dtype=torch.float64):
    a, b = normal(RANK, DIM, seed=seed + 20, dtype=dtype) / 8, normal(VOCAB, RANK, seed=seed + 30, dtype=dtype)
    return Lora(a, b, 1 + normal(VOCAB, seed=seed + 40, dtype=dtype).abs() if magnitude else None)


X = normal(2, 5, DIM)
TARGETS = torch.tensor([[1, 10, -100, 0, 4], [3, 3, 7, -100, -100]])
DENSE = normal(VOCAB, DIM, seed=1) / 4
PACKED = quantize(DENSE.float(), NF4_DQ)
WEIGHTS = {  # name: (what is trained, what is not, the weight made of both)
    "dense": (DENSE, (), lambda w, _: w),
    "transposed": (DENSE.mT.contiguous(), (), lambda w, _: w.mT),
    "float32": (DENSE.float(), (), lambda w, _: w),
    "packed": (None, PACKED, lambda _, p: p),
    "lora on dense": (adapter(), DENSE, lambda part, w: Adapted(w, part)),
    "lora on packed": (adapter(), PACKED, lambda part, p: Adapted(p, part)),
    "dora on packed": (adapter(magnitude=True), PACKED, lambda part, p: Adapted(p, part)),
    "lora and its base": ({"base": DENSE, "lora": adapter()}, (), lambda both, _: Adapted(**both)),
    "merge-aware": (adapter(), PACKED, lambda part, p: Adapted(p, part, merge_aware=True)),
    "lora on lora": ([adapter(), adapter(1)], PACKED, lambda two, p: Adapted(Adapted(p, two[0]), two[1])),
}
TRAINED = {name: case for name, case in WEIGHTS.items() if case[0] is not None}


def whole(x, weight, targets=TARGETS, count=None, chunk=None):
    return blocks.cross_entropy(linear(x, weight), targets, count)


def same(got, wanted, **tolerance):
    torch.testing.assert_close(got, wanted, **(tolerance or {"rtol": 1e-12, "atol": 1e-12}))


def tangent(t):
    return tree.map(lambda leaf: normal(*leaf.shape, seed=5, dtype=leaf.dtype), t)


def dot(a, b):
    return torch.stack([(s * t).sin().sum() for s, t in zip(tree.leaves(a), tree.leaves(b), strict=True)]).sum()


def of(loss, name):
    """Return ``loss`` as a function of (trained part, x, targets, frozen part)."""
    return lambda part, x, targets, base: loss(x, WEIGHTS[name][2](part, base), targets, chunk=3)


@pytest.mark.parametrize("chunk", [1, 3, 5, 10, 1000, None])
@pytest.mark.parametrize("count", [None, 20, torch.tensor(7)])
@pytest.mark.parametrize("name", WEIGHTS)
def test_value_and_gradient(name, count, chunk):
    weight = WEIGHTS[name][2](*WEIGHTS[name][:2])
    mine = lambda x: fused_cross_entropy.cross_entropy(x, weight, TARGETS, count, chunk)
    same(mine(X), whole(X, weight, count=count))
    same(grad_and_value(mine)(X), grad_and_value(lambda x: whole(x, weight, count=count))(X))


# Transforms of f(p, x, targets, base), a loss; p is what is trained, r the rest.
BOTH, ONE = (0, 1), torch.ones(())
EACH, MANY, PAIRS = (None, 0, 0, None), (0, None, None, None), (0, 0, 0, None)
TRANSFORMS = {
    "grad": lambda f, p, x, *r: grad(f)(p, x, *r),
    "grad and value": lambda f, p, x, *r: grad_and_value(f, BOTH)(p, x, *r),
    "vjp": lambda f, p, x, *r: vjp(fix(f, r), p, x)[1](torch.tensor(2.5, dtype=x.dtype)),
    "jvp": lambda f, p, x, *r: jvp(fix(f, r), (p, x), tangent((p, x))),
    "jvp of x": lambda f, p, x, *r: jvp(lambda x: f(p, x, *r), (x,), (tangent(x),)),
    "grad of grad": lambda f, p, x, *r: grad(lambda *a: dot(grad(f, BOTH)(*a, *r), tangent((p, x))), BOTH)(p, x),
    "grad of both": lambda f, p, x, *r: grad(
        lambda *a: dot(grad_and_value(f, BOTH)(*a, *r), (tangent((p, x)), ONE)), BOTH
    )(p, x),
    "grad of grad of x": lambda f, p, x, *r: grad(lambda *a: dot(grad(f, 1)(*a, *r), tangent(x)))(p, x),
    "jvp of grad": lambda f, p, x, *r: jvp(fix(grad(f, BOTH), r), (p, x), tangent((p, x))),
    "grad of jvp": lambda f, p, x, *r: grad(lambda *a: dot(jvp(fix(f, r), a, tangent((p, x))), (ONE, ONE)), BOTH)(p, x),
    "vmap": lambda f, *a: vmap(f, EACH)(*a),
    "vmap of jvp": lambda f, p, x, *r: vmap(lambda x, t: jvp(lambda x: f(p, x, t, r[1]), (x,), (x.sin(),)))(x, r[0]),
    "vmap of grad": lambda f, *a: vmap(grad(f, BOTH), EACH)(*a),
    "vmap of grad over parts": lambda f, p, *a: vmap(grad(f, BOTH), MANY)(stack(p), *a),
    "vmap of grad over both": lambda f, p, *a: vmap(grad(f, BOTH), PAIRS)(stack(p), *a),
    "vmap of vmap": lambda f, p, *a: vmap(vmap(grad(f, BOTH), EACH), MANY)(stack(p), *a),
    "vmap of grad of grad": lambda f, p, x, *r: vmap(
        lambda x, t: grad(lambda *a: dot(grad(f, BOTH)(*a, t, r[1]), (p, x)), BOTH)(p, x)
    )(x, r[0]),
    "grad of vmap": lambda f, p, x, *r: grad(lambda *a: vmap(f, EACH)(*a, *r).sin().sum(), BOTH)(p, x),
    "grad of vmap over parts": lambda f, p, x, *r: grad(lambda *a: vmap(f, MANY)(*a, *r).sin().sum(), BOTH)(
        stack(p), x
    ),
    "grad of vmap of grad": lambda f, p, x, *r: grad(lambda *a: dot(vmap(grad(f, 1), EACH)(*a, *r), x), BOTH)(p, x),
    "remat": lambda f, *a: grad(remat(f), BOTH)(*a),
    "make_fx": lambda f, *a: captured(grad_and_value(f, BOTH), *a),
    "make_fx of vmap": lambda f, p, *a: captured(vmap(grad(f, BOTH), PAIRS), stack(p), *a),
}


def fix(f, rest):
    return lambda part, x: f(part, x, *rest)


def captured(f, *args):
    return make_fx(f, tracing_mode="fake")(*args)(*args)


def stack(part):
    return tree.map(lambda leaf: torch.stack([leaf, 0.5 * leaf]), part)


@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("name", slow_after(5, TRAINED))
def test_transforms(name, transform):
    part, base, _ = TRAINED[name]
    run = lambda loss: tree.leaves(TRANSFORMS[transform](of(loss, name), part, X, TARGETS, base))
    got, wanted = run(fused_cross_entropy.cross_entropy), run(whole)
    loose = {"rtol": 1e-5, "atol": 1e-7} if name == "float32" else {}  # a float32 leaf's gradients are rounded to it
    assert len(got) == len(wanted) and any(t.any() for t in got)
    for mine, theirs in zip(got, wanted, strict=True):
        same(mine, theirs, **loose)


def test_a_packed_weight_is_a_constant_in_every_transform():
    f = lambda loss: lambda x: loss(x, PACKED, TARGETS, chunk=3)
    same(hessian(f(fused_cross_entropy.cross_entropy))(X[:, :, :]), hessian(f(whole))(X), rtol=1e-11, atol=1e-12)
    third = lambda loss: grad(lambda x: dot(jvp(grad(f(loss)), (x,), (tangent(x),)), (X, X)))(X)
    same(third(fused_cross_entropy.cross_entropy), third(whole))
    nested = lambda loss: grad(lambda x: dot(grad(lambda x: dot(grad(f(loss))(x), X))(x), tangent(X)))(X)
    same(nested(fused_cross_entropy.cross_entropy), nested(whole))
    with pytest.raises(TypeError, match="the gradient of a packed weight was asked for"):
        scale = PACKED.scale.scale
        packed = lambda s: dataclasses.replace(PACKED, scale=dataclasses.replace(PACKED.scale, scale=s))
        grad(lambda s: fused_cross_entropy.cross_entropy(X, packed(s), TARGETS))(scale)


def test_autograd_of_torch():
    def run(loss):
        x, w = X.clone().requires_grad_(), DENSE.clone().requires_grad_()
        first = torch.autograd.grad(loss(x, w, TARGETS, chunk=3), (x, w), create_graph=True)
        return first, torch.autograd.grad(dot(first, (X, DENSE)), (x, w))

    same(run(fused_cross_entropy.cross_entropy), run(whole))


SHAPES = {"a row": (1,), "no rows": (0,), "no examples": (0, 5), "no dims": (), "many": (2, 1, 3)}


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_shapes(shape):
    x, targets = normal(*shape, DIM), torch.full(shape, 2)
    mine = lambda x: fused_cross_entropy.cross_entropy(x, PACKED, targets, chunk=2)
    same(grad_and_value(mine)(x), grad_and_value(lambda x: whole(x, PACKED, targets))(x))
    same(mine(x), whole(x, PACKED, targets))


def test_all_targets_ignored():
    ignored = torch.full_like(TARGETS, blocks.IGNORE)
    (dx, dw), value = grad_and_value(lambda x, w: fused_cross_entropy.cross_entropy(x, w, ignored, chunk=3), (0, 1))(
        X, DENSE
    )
    assert value == 0 and not dx.any() and not dw.any()


def test_an_ignored_row_may_hold_anything():
    x = X.clone()
    x[0, 2] = torch.inf
    dx, value = grad_and_value(lambda x: fused_cross_entropy.cross_entropy(x, DENSE, TARGETS, chunk=3))(x)
    same(value, whole(X, DENSE))
    same(dx, grad(whole)(X, DENSE))


@pytest.mark.parametrize("dtype, rounding", [(torch.float32, 2e-6), (torch.bfloat16, 2e-2), (torch.float16, 3e-3)])
@pytest.mark.parametrize("sure", [False, True])
@pytest.mark.parametrize("name", TRAINED)
def test_dtypes(name, sure, dtype, rounding):
    """Compare a narrow dtype with float64: value and gradients to a few roundings, none more than the oracle's.

    ``rounding`` bounds the relative error of a gradient in the Euclidean norm. A prediction that is sure of its target
    may exceed it, because its gradient is the difference of nearly equal probabilities.
    """
    part, base, _ = TRAINED[name]
    x = 2 * DENSE[TARGETS.clamp(min=0)] if sure else X
    args = [*tree.map(lambda t: t.to(dtype), (part, x)), TARGETS, base]
    true_args = [*tree.map(lambda t: t.double(), args[:2]), TARGETS, base]
    grads, value = grad_and_value(of(fused_cross_entropy.cross_entropy, name), BOTH)(*args)
    exact, wanted = grad_and_value(of(whole, name), BOTH)(*true_args)
    theirs = grad(of(whole, name), BOTH)(*args)
    assert value.dtype is torch.float32
    same(value.double(), wanted, rtol=rounding, atol=rounding)
    for mine, peer, true in zip(*map(tree.leaves, (grads, theirs, exact)), strict=True):
        assert mine.dtype is peer.dtype is dtype
        off = (mine - true).norm() / true.norm()
        assert (sure or off < rounding) and off < 1.5 * (peer - true).norm() / true.norm() + 0.1 * rounding


def test_the_gradient_of_x_is_rounded_once():
    x, w = X.bfloat16(), DENSE.bfloat16()
    one, seventh = (
        grad(lambda x, n=n: fused_cross_entropy.cross_entropy(x, w, TARGETS, count=n, chunk=3))(x) for n in (1, 7)
    )
    assert torch.equal(seventh, (one.float() * torch.tensor(1 / 7)).bfloat16())


def test_gradients_of_chunks_are_summed_in_float32():
    """Sum 512 chunks of equal rows: in bfloat16 the sum would stop growing long before the end."""
    x, targets = normal(1, DIM, dtype=torch.bfloat16).expand(512, DIM), torch.zeros(512, dtype=torch.long)
    w = DENSE.bfloat16()
    got = grad(lambda w: fused_cross_entropy.cross_entropy(x, w, targets, chunk=1))(w)
    one = grad(lambda w: fused_cross_entropy.cross_entropy(x[:1], w, targets[:1], chunk=1))(w)
    same(got, one, rtol=0.01, atol=1e-4)


# --- memory and work --------------------------------------------------------------------------------------------------

ROWS, WIDE, CHUNK = 256, 512, 16


class Largest(Live):
    """The largest tensor in float32 elements, and the most tensors of ``size`` elements alive at once."""

    def __init__(self, size):
        super().__init__()
        self.size, self.largest, self.most = size, 0, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = super().__torch_dispatch__(func, types, args, kwargs)
        alive = [n // 4 for ref, n in self.made.values() if not ref.expired()]
        self.largest = max(self.largest, *alive, 0)
        self.most = max(self.most, alive.count(self.size))
        return out


def big(dtype=torch.float32):
    x, w = normal(ROWS, DIM, dtype=dtype), normal(WIDE, DIM, seed=1, dtype=torch.float32) / 8
    a, b = normal(RANK, DIM, seed=2, dtype=torch.float32), normal(WIDE, RANK, seed=3, dtype=torch.float32)
    targets = torch.randint(0, WIDE, (ROWS,), generator=torch.Generator().manual_seed(4))
    return x, w, Lora(a, b), targets


def on(loss, what):
    """Return the computation ``what`` with ``loss`` as a function of no arguments."""
    x, w, part, targets = big()
    packed = quantize(w, NF4_DQ)
    f = lambda x, weight, targets: loss(x, weight, targets, chunk=CHUNK)
    each = lambda t: t.unflatten(0, (8, ROWS // 8))
    return {
        "value": lambda: f(x, w, targets),
        "jvp": lambda: jvp(lambda x: f(x, w, targets), (x,), (x,)),
        "frozen": lambda: grad(f)(x, w, targets),
        "frozen packed": lambda: grad(f)(x, packed, targets),
        "frozen, of torch": lambda: f(x.detach().requires_grad_(), w, targets).backward(),
        "adapter": lambda: grad(lambda part, x: f(x, Adapted(packed, part), targets), BOTH)(part, x),
        "trained": lambda: grad(f, BOTH)(x, w, targets),
        "each": lambda: vmap(grad(f), (0, None, 0))(each(x), w, each(targets)),
        "each adapter": lambda: vmap(grad(lambda p, x, t: f(x, Adapted(w, p), t), BOTH), (None, 0, 0))(
            part, each(x), each(targets)
        ),
    }[what]


BLOCKS = {  # the most tensors of a chunk's logits that are alive at once, all in float32 here
    "value": 1,
    "jvp": 4,
    "frozen": 2,
    "frozen packed": 2,
    "frozen, of torch": 2,
    "adapter": 4,
    "trained": 2,
    "each": 2,
    "each adapter": 4,
}


@pytest.mark.parametrize("what", BLOCKS)
def test_logits_never_exist_whole(what):
    run = on(fused_cross_entropy.cross_entropy, what)
    with Largest(CHUNK * WIDE) as seen:
        run()
    assert 0 < seen.most <= BLOCKS[what]
    assert seen.largest <= max(WIDE * DIM, ROWS * DIM, CHUNK * WIDE) < ROWS * WIDE


def test_whole_logits_would_be_seen():
    with Largest(ROWS * WIDE) as seen:
        on(whole, "frozen")()
    assert seen.largest >= ROWS * WIDE and seen.most >= 2


PRODUCTS = {"value": 1, "frozen": 2, "frozen, of torch": 2, "trained": 4, "each": 2}


@pytest.mark.parametrize("what", PRODUCTS)
def test_products(what):
    """Count the products with the head: two for a frozen head, one for a value."""
    run = on(fused_cross_entropy.cross_entropy, what)
    with FlopCounterMode(display=False) as counter:
        run()
    assert counter.get_total_flops() == PRODUCTS[what] * 2 * ROWS * WIDE * DIM


class Ops(TorchDispatchMode):
    """The number of results of ``[..., dim]`` by operation."""

    def __init__(self, dim):
        super().__init__()
        self.dim, self.count = dim, Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor) and out.ndim and out.shape[-1] == self.dim:
            self.count[func.overloadpacket] += 1
        return out


def test_mapped_examples_are_rows():
    x, w, _, targets = big()
    with Ops(WIDE) as seen:
        vmap(grad(lambda x, t: fused_cross_entropy.cross_entropy(x, w, t, chunk=CHUNK)))(x, targets)
    assert seen.count[torch.ops.aten.mm] == ROWS // CHUNK


def test_a_weight_is_cast_once():
    x, w, part, targets = big(torch.bfloat16)
    for weight in (w, Adapted(w, part)):
        with Ops(DIM) as seen:
            grad(lambda x, weight=weight: fused_cross_entropy.cross_entropy(x, weight, targets, chunk=ROWS // 4))(x)
        adapter = 0 if weight is w else 2 * 4  # an adapter's product is in its own dtype, to and fro
        assert seen.count[torch.ops.aten._to_copy] == 1 + adapter + 1  # and the gradient


def test_default_chunk(monkeypatch):
    """Check that a chunk has CHUNK_LOGITS logits, or as many as x has elements; by 16 rows if possible."""
    x, w, _, targets = big()

    def rows(budget, x):
        monkeypatch.setattr(fused_cross_entropy, "CHUNK_LOGITS", budget)
        with Largest(0) as seen:
            fused_cross_entropy.cross_entropy(x, w, targets[: len(x)])
        return seen.largest // WIDE

    assert [rows(WIDE * n, x[:100]) for n in (15, 16, 17, 31, 100)] == [15, 16, 16, 16, 96]
    assert rows(1, x) == ROWS * DIM // WIDE
    assert rows(1, x[:3]) == 1


# --- refusals ---------------------------------------------------------------------------------------------------------

REFUSED = {
    "targets": (lambda: (X, DENSE, TARGETS[:, 1:]), ValueError, r"targets: shape \(2, 4\), want x's \(2, 5\)"),
    "dtype": (lambda: (X, DENSE, TARGETS.double()), TypeError, "targets: torch.float64, want int64 or int32"),
    "device": (lambda: (X, DENSE, TARGETS.to("meta")), ValueError, "targets: on meta, want x's device cpu"),
    "target": (lambda: (X, DENSE, TARGETS + 1), IndexError, r"target 11 in row 1; wanted one in \[0, 11\), or -100"),
    "chunk": (lambda: (X, DENSE, TARGETS, None, 0), ValueError, r"chunk is 0; wanted at least 1 row"),
    "weight": (lambda: (X, "w", TARGETS), TypeError, r"weight is a str; wanted Tensor, Packed or Adapted"),
    "dims": (lambda: (X, DENSE[0], TARGETS), ValueError, r"weight: shape \(64,\), want \[vocab d\]"),
    "width": (lambda: (X[..., 1:], DENSE, TARGETS), ValueError, r"x \(10, 63\) .*; x's last dim must be 64"),
    "dropout": (
        lambda: (X, Adapted(DENSE, dataclasses.replace(adapter(), dropout=0.1), torch.tensor(0)), TARGETS),
        ValueError,
        r"adapter with dropout 0.1, .* attach it without a key, or use blocks.cross_entropy",
    ),
}


@pytest.mark.parametrize("make, error, message", REFUSED.values(), ids=REFUSED)
def test_refusals(make, error, message):
    with pytest.raises(error, match=message):
        fused_cross_entropy.cross_entropy(*make())


def test_torch_compile_is_refused_by_name():
    torch._dynamo.reset()
    with pytest.raises(RuntimeError, match=r"cross_entropy cannot be traced by torch.compile; capture the step"):
        torch.compile(fused_cross_entropy.cross_entropy, backend="aot_eager", fullgraph=True)(X, DENSE, TARGETS)
    step = lambda x, w, t: grad(lambda x: fused_cross_entropy.cross_entropy(x, w, t, chunk=3))(x)
    same(jit(step, compile="aot_eager")(X, DENSE, TARGETS), step(X, DENSE, TARGETS))  # as the message says
