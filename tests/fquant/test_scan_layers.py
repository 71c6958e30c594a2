"""A scan equals the Python loop in every bit: uncaptured and captured, under every transform, packed and adapted."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch.func import grad, hessian, jacrev, jvp, vjp, vmap

from fquant import NF4_DQ, jit, linear, lora, quantize, random, remat, scan, stack_layers, tree, unstack_layers
from tests.helpers.arrays import equal

pytestmark = pytest.mark.usefixtures("twice")
DRAW = torch.Generator().manual_seed(7)
draw = partial(torch.randn, generator=DRAW)
LISTED = [{"w": draw(6, 7) / 3, "v": draw(6, 7) / 3, "s": draw(())} for _ in range(5)]
STACKED = stack_layers(LISTED)
X = draw(4, 6)


def block(x, layer, gain):
    h = (x @ layer["w"]).tanh()
    return x + gain * (h @ layer["v"].mT) * layer["s"].exp(), h.sum(-1)


def looped(f, x, layers, *shared):
    each = layers if isinstance(layers, list) else unstack_layers(layers)
    outs = []
    for layer in each:
        x, out = f(x, layer, *shared)
        outs.append(out)
    return x, outs if isinstance(layers, list) else torch.stack(outs)


def total(loop, f, layers, x):
    x, outs = loop(f, x, layers, torch.linspace(-1, 1, 6))
    return x.square().sum() + (torch.stack(outs) if isinstance(outs, list) else outs).sin().sum()


def without_outs(loop, f, layers, x):
    return loop(f, x, layers, x.new_ones(6))[0].square().sum()


TRANSFORMS = {
    "value": lambda f: f,
    "grad": grad,
    "grad of both": lambda f: grad(f, (0, 1)),
    "grad of the carry": lambda f: grad(f, 1),
    "vjp": lambda f: lambda layers, x: vjp(f, layers, x)[1](x.new_ones(())),
    "jvp": lambda f: lambda layers, x: jvp(partial(f, layers), (x,), (x.cos(),)),
    "vmap": lambda f: vmap(f, (None, 0)),
    "vmap of grad": lambda f: vmap(grad(f, (0, 1)), (None, 0)),
    "grad of vmap": lambda f: grad(lambda layers, x: vmap(f, (None, 0))(layers, x).sum(), (0, 1)),
    "vmap of grad of vmap": lambda f: vmap(grad(lambda layers, x: vmap(f, (None, 0))(layers, x).sum()), (None, 0)),
    "jacrev": lambda f: jacrev(lambda layers, x: torch.stack([f(layers, x), f(layers, x.sin())]), 1),
    "hessian": lambda f: hessian(f, 1),
    "grad of grad": lambda f: grad(lambda layers, x: grad(f, 1)(layers, x).square().sum()),
    "grad of the pullback": lambda f: (
        lambda layers, x: grad(lambda c: vjp(partial(f, layers), x)[1](c)[0].square().sum())(x.new_ones(()))
    ),
}


def start(name):
    return torch.stack([X, X.cos()]) if name == "vmap of grad of vmap" else X


@pytest.mark.parametrize("listed", [True, False], ids=["listed", "stacked"])
@pytest.mark.parametrize("f", [without_outs, total], ids=["carry", "outs"])
@pytest.mark.parametrize("name", TRANSFORMS)
def test_every_transform_equals_the_loop(name, f, listed):
    layers, x, transform = LISTED if listed else STACKED, start(name), TRANSFORMS[name]
    wanted = transform(partial(f, looped, block))(layers, x)
    assert equal(transform(partial(f, scan, block))(layers, x), wanted)
    captured = jit(transform(partial(f, scan, block)))
    assert equal(captured(layers, x), wanted) and equal(captured(layers, x), wanted)


@pytest.mark.parametrize("name", ["value", "grad of both", "vmap"])
@pytest.mark.parametrize("listed", [True, False], ids=["listed", "stacked"])
def test_torch_compile_traces_a_scan(name, listed):
    layers, f = LISTED if listed else STACKED, TRANSFORMS[name](partial(total, scan, block))
    found, wanted = torch.compile(f, backend="eager", fullgraph=True)(layers, X), f(layers, X)
    assert tree.structure(found) == tree.structure(wanted)
    assert all(map(torch.allclose, tree.leaves(found), tree.leaves(wanted)))


TWO_FORMULAS = {  # torch differentiates them by another formula where the backward is recorded
    "silu": F.silu,
    "mish": F.mish,
    "logit": lambda h: h.sigmoid().logit(1e-3),
    "group_norm": lambda h: F.group_norm(h.reshape(-1, 6), 2).view(h.shape),
}
CONSTANTS = {
    "scalar": lambda h: h * torch.tensor(0.3),
    "index": lambda h: h[..., torch.tensor([0, 0, 2, 5, 4, 1])],
    "new_tensor": lambda h: h * h.new_tensor([0.1, 0.2, float("nan"), 0.4, 0.5, 0.6]).nan_to_num(),
}
MORE = {
    "autograd": lambda f: (
        lambda *args: torch.autograd.grad(f(*(own := [t.detach().requires_grad_() for t in args])), own)
    )
}


@pytest.mark.parametrize("op", [*TWO_FORMULAS, *CONSTANTS])
@pytest.mark.parametrize("name", ["grad of both", "vmap of grad", "grad of grad", "hessian", *MORE])
def test_ops_of_two_formulas_and_constants_of_a_block(name, op):
    transform, f = (TRANSFORMS | MORE)[name], (TWO_FORMULAS | CONSTANTS)[op]

    def loss(loop, layers, x):
        return loop(lambda x, w: (x + f(x @ w), x.sum()), x, layers)[0].square().sum()

    layers = draw(3, 6, 6) / 2
    wanted = transform(partial(loss, looped))(layers, X)
    assert equal(transform(partial(loss, scan))(layers, X), wanted)
    assert equal(jit(transform(partial(loss, scan)))(layers, X), wanted)


class Counted:
    """A block that counts its Python calls."""

    def __init__(self, f=block):
        self.f, self.calls = f, 0

    def __call__(self, *args):
        self.calls += 1
        return self.f(*args)


FORWARD = ("value", "vmap")


@pytest.mark.parametrize("name", [*FORWARD, "grad", "vjp", "vmap of grad", "grad of vmap", "vmap of grad of vmap"])
def test_a_capture_calls_the_block_as_often_for_two_layers_as_for_five(name):
    """Once; with gradients once more for the pullback, and both once more for a first carry without a gradient."""
    calls = list[int]()
    for count in (2, 5):
        counted = Counted()
        jit(TRANSFORMS[name](partial(without_outs, scan, counted)))(LISTED[:count], start(name))
        calls.append(counted.calls)
    assert calls[0] == calls[1] <= (1 if name in FORWARD else 4)


@pytest.mark.parametrize("order", [1, 2])
def test_a_recomputed_block(order):
    f, wrapped = partial(without_outs, scan, block), partial(without_outs, scan, remat(block, order))
    wanted = grad(f, (0, 1))(STACKED, X)
    assert equal(jit(grad(wrapped, (0, 1)))(STACKED, X), wanted) and equal(grad(wrapped, (0, 1))(STACKED, X), wanted)
    if order == 2:
        assert equal(jit(hessian(wrapped, 1))(STACKED, X), hessian(wrapped, 1)(STACKED, X))


def packed_block(x, layer, keys):
    w, lora_, key = layer["w"], layer["lora"], layer["key"]
    return x + linear(x, lora.attach({"w": w}, {"w": lora_}, random.fold(keys, key))["w"]).relu(), ()


@pytest.mark.parametrize("transform", [grad, lambda f: vmap(grad(f), (None, None, 0))], ids=["grad", "vmap of grad"])
def test_packed_layers_with_adapters(transform):
    weights = [{"w": quantize(draw(64, 64) / 8, NF4_DQ)} for _ in range(4)]
    base, adapters = stack_layers(weights), stack_layers(
        [lora.init(w, "w", rank=2, alpha=4, key=i, dropout=0.2)["w"] for i, w in enumerate(weights)]
    )  # fmt: skip
    adapters = tree.map(lambda t: t + 0.1 * draw(*t.shape), adapters)

    def loss(adapters, base, x, loop):
        layers = {"w": base["w"], "lora": adapters, "key": torch.arange(4)}
        return loop(packed_block, x, layers, random.key(3))[0].square().sum()

    scanned, wanted = (transform(lambda *args, loop=loop: loss(*args, loop)) for loop in (scan, listed_loop))
    x = draw(3, 64)
    assert base["w"].codes.shape == (4, 64, 32)
    assert equal(scanned(adapters, base, x), wanted(adapters, base, x))
    assert equal(jit(scanned)(adapters, base, x), wanted(adapters, base, x))


def listed_loop(f, x, layers, *shared):
    for layer in unstack_layers(layers):
        x, _ = f(x, layer, *shared)
    return x, ()


def test_layers_of_several_kinds():
    """Layers of a list may differ; each kind is traced by itself."""
    mixed = [each if i % 2 else {**each, "w": each["w"][:, :5], "v": each["v"][:, :5]} for i, each in enumerate(LISTED)]
    counted = Counted()
    wanted = grad(partial(without_outs, looped, block))(mixed, X)
    assert equal(jit(grad(partial(without_outs, scan, counted)))(mixed, X), wanted)
    assert counted.calls == 6  # of each kind twice, and of the first layer, whose carry is not differentiated


def test_a_carry_that_is_shared_too():
    """The nodes of one layer are not mistaken for those of another: the first carry is an argument of all layers."""
    f = lambda loop: lambda layers, x: loop(lambda h, w, x: ((h @ w + x).sin(), h.sum()), x, layers, x)[0].sum()
    layers = [draw(6, 6) for _ in range(3)]
    assert equal(jit(f(scan))(layers, X), f(looped_list)(layers, X))
    mine = grad(f(scan), (0, 1))(layers, X)
    assert equal(jit(grad(f(scan), (0, 1)))(layers, X), mine)
    for a, b in zip(tree.leaves(mine), tree.leaves(grad(f(looped_list), (0, 1))(layers, X)), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)  # gradients of x are added within a layer first


def looped_list(f, x, layers, *shared):
    return looped(f, x, list(layers), *shared)


def test_a_scan_in_a_scan():
    inner = lambda x, w: ((x @ w).tanh(), ())
    outer = lambda loop: lambda x, ws: (loop(inner, x, ws)[0] + x, ())
    f = lambda loop: lambda layers, x: loop(outer(loop), x, layers)[0].square().sum()
    layers = [draw(3, 6, 6) for _ in range(3)]
    loop = lambda f, x, layers: looped(f, x, layers if isinstance(layers, list) else unstack_layers(layers))
    assert equal(jit(grad(f(scan)))(layers, X), grad(f(loop))(layers, X))


def test_autocast_around_a_scan():
    """The backward is traced with the casts of the forward, though it begins outside of them."""

    def loss(layers, x):
        with torch.autocast("cpu", torch.bfloat16):
            return without_outs(scan, block, layers, x).float()

    assert equal(jit(grad(loss))(LISTED, X), grad(loss)(LISTED, X))


def test_views_of_results_and_writes_to_them():
    def f(x, w):
        h = (x @ w).view(-1)
        halves = h[:12], h[12:]
        h.mul_(2.0)
        return torch.cat([halves[1], halves[0]]).view(4, 6), halves[0].sum()

    g = lambda loop: lambda layers, x: loop(f, x, layers)[0].square().sum()
    layers = [draw(6, 6) for _ in range(3)]
    for transform in (lambda f: f, grad):
        assert equal(jit(transform(g(scan)))(layers, X), transform(g(looped_list))(layers, X))


@pytest.mark.parametrize("loop", [scan, lambda *args: jit(scan)(*args)], ids=["uncaptured", "captured"])
@pytest.mark.parametrize(
    ("f", "layers", "error", "text"),
    [
        (block, {"w": draw(3, 6), "v": draw(2, 6)}, ValueError, r"layers\.v: got 2 layers in dim 0, wanted 3 as of w"),
        (block, {"w": draw(3, 6, 7), "s": draw(())}, ValueError, r"layers\.s: got shape \(\), wanted \[num_layers"),
        (block, {"w": draw(3, 6, 7), "n": 4}, TypeError, r"layers\.n: got a int, wanted a tensor \[num_layers"),
        (block, (), ValueError, "layers has no tensors"),
        (block, {"w": draw(0, 6)}, ValueError, "got 0 layers in dim 0"),
        (lambda x, w: x @ w, draw(2, 6, 6), TypeError, "returned a Tensor, wanted a pair; return the carry"),
        (lambda x, w: (x @ w, ()), draw(2, 6, 5), ValueError, r"layer 0: it: got float32\[4, 5\], wanted float32"),
        (lambda x, w: ((x, w), ()), draw(2, 6, 5), ValueError, "layer 0: got a structure unlike that of the carry"),
    ],
)  # fmt: skip
def test_errors_name_path_got_wanted_and_fix(loop, f, layers, error, text):
    with pytest.raises(error, match=text):
        loop(f, X, layers)


def test_layers_that_cannot_be_stacked():
    for wrong, text in (
        ({"w": draw(6, 7), "v": draw(6, 7)}, r"layer 1: .* paths that only one has are s"),
        ({"w": draw(6, 8), "v": draw(6, 7), "s": draw(())}, r"layer 1: w: got float32\[6, 8\], wanted float32\[6, 7\]"),
        (
            {"w": draw(6, 7).double(), "v": draw(6, 7), "s": draw(())},
            r"layer 1: w: got float64\[6, 7\], wanted float32",
        ),
    ):
        with pytest.raises(ValueError, match=text):
            stack_layers([LISTED[0], wrong])
    with pytest.raises(ValueError, match="no layers"):
        stack_layers([])
    assert equal(unstack_layers(STACKED), LISTED)


class Holds:
    """A block that holds a tensor as an attribute, where no look at its closure finds it."""

    def __init__(self, w):
        self.w = w

    def __call__(self, x, scale):
        return (x @ self.w * scale).tanh(), ()


def test_a_tensor_that_the_block_is_not_given():
    w, layers = draw(6, 6), [draw(6) for _ in range(3)]
    plain = lambda w, layers, x: looped_list(lambda x, s: ((x @ w * s).tanh(), ()), x, layers)[0].sum()
    holding = lambda w, layers, x: scan(Holds(w), x, layers)[0].sum()
    assert equal(jit(holding)(w, layers, X), holding(w, layers, X))
    assert equal(grad(holding)(w, layers, X), grad(plain)(w, layers, X))
    for f, what in (
        (grad(holding), r"'w' float32\[6, 6\] and"),
        (vmap(grad(holding, 2), (0, None, None)), "a tensor that it"),  # here torch fails while it is traced
        (grad(lambda *a: vmap(holding, (None, None, 0))(*a).sum()), "a tensor that it"),
    ):
        with pytest.raises(TypeError, match=f"reads {what} is not given.*would silently be zero: pass it as an arg"):
            jit(f)(w.expand(4, 6, 6) if f.__name__ == "wrapped" else w, layers, X)


@pytest.mark.parametrize(
    "odd, even, text",
    [
        (torch.sin, torch.cos, r"aten.cos.default for aten.sin.default"),
        (lambda h: h * torch.tensor(2.0), lambda h: h * torch.tensor(3.0), "lift_fresh_copy"),
    ],
    ids=["op", "constant"],
)
def test_a_block_that_is_not_pure(odd, even, text):
    calls = []

    def f(x, w):
        calls.append(w)
        return odd(x @ w) if len(calls) % 2 else even(x @ w), ()

    with pytest.raises(RuntimeError, match=f"ran .*{text}.* when it was traced again"):
        jit(grad(lambda w, x: scan(f, x, [w])[0].sum()))(draw(6, 6), X)


class Keeps:
    """A block that keeps a result for later calls."""

    kept = None

    def __call__(self, x, w):
        self.kept = x @ w if self.kept is None else self.kept
        return self.kept + x, ()


def test_a_tensor_that_the_block_keeps_between_calls():
    keeps, layers = Keeps(), [draw(6, 6) for _ in range(2)]
    with pytest.raises(RuntimeError, match="made in an earlier call is used.*pass it to the next call"):
        jit(lambda layers, x: scan(keeps, scan(keeps, x, layers)[0], layers)[0])(layers, X)
