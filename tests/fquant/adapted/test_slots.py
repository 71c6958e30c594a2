"""Tests of fquant.adapted.slots: updates of mixed rank beside a loop over slots, in float64, and every transform."""

from dataclasses import replace

import pytest
import torch
from torch.func import grad, jvp, vjp, vmap

from fquant import NF4, jit, linear, lora, quantize, random, tree
from fquant.lora import LoraSlots
from fquant.packed import dequantize
from fquant.packed_linear import Lora, embedding
from models import fused_cross_entropy

RANKS, OUT, IN = ((4, 2), (1, 1), (64, 2)), 48, 64
SLOTS = sum(n for _, n in RANKS)


def draw(name, *shape, dtype=torch.float64):
    return random.normal(random.fold(random.key(3), name), shape, dtype)


def make(dtype=torch.float64, dropout=False):
    stacks = [
        Lora(draw(f"a{r}", n, r, IN, dtype=dtype), draw(f"b{r}", n, OUT, r, dtype=dtype), rank_stabilised=r == 64)
        for r, n in RANKS
    ]
    rates = torch.tensor([0.1, 0.0, 0.5, 0.9, 0.3], dtype=torch.float64) if dropout else None
    return LoraSlots(stacks, torch.tensor([8.0, 3.3, 1.0, 16.0, 0.7], dtype=torch.float64), rates)


def each(slots):
    """Return the Lora of each slot."""
    found = []
    for lora_ in slots.stacks:
        found += [replace(lora_, a=a, b=b) for a, b in zip(lora_.a, lora_.b, strict=True)]
    rates = [0.0] * SLOTS if slots.dropout is None else slots.dropout.tolist()
    return [
        replace(one, alpha=alpha, dropout=p) for one, alpha, p in zip(found, slots.alpha.tolist(), rates, strict=True)
    ]


W = draw("w", OUT, IN)
PACKED = quantize(W.float(), NF4)


def by_slot(slots, x, base, key=None):
    """Return the products of a loop over slots."""
    keys = [None] * SLOTS if key is None else list(key)
    many = [lora.attach({"w": base}, {"w": one}, k)["w"] for one, k in zip(each(slots), keys, strict=True)]
    return torch.stack([linear(row, w) for row, w in zip(x, many, strict=True)])


def product(slots, x, base, key=None):
    return linear(x, lora.attach({"w": base}, {"w": slots}, key)["w"])


def assert_as_near(f, loop, slots, x, base):
    """Check that ``f`` is as near to the loop in float64 as the loop in the dtype of ``x`` is."""
    exact = loop(tree.map(lambda t: t.double(), slots), x.double(), base if base is PACKED else base.double())
    if x.dtype is torch.float64:
        return torch.testing.assert_close(f(slots, x, base), exact)
    error = lambda y: float((y.double() - exact).norm())
    assert f(slots, x, base).dtype == x.dtype
    assert error(f(slots, x, base)) <= 1.5 * error(loop(slots, x, base))


@pytest.mark.parametrize("shape", [(7,), (2, 7), (0, 7), ()], ids=str)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_equals_a_loop(dtype, shape):
    slots, x = make(dtype), draw("x", SLOTS, *shape, IN, dtype=dtype)
    assert_as_near(product, by_slot, slots, x, PACKED)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_dropout_has_the_masks_of_each_key(dtype):
    slots, x = make(dtype, dropout=True), draw("x", SLOTS, 2, 7, IN, dtype=dtype)
    key = random.fold(random.key(0), torch.arange(SLOTS))
    assert_as_near(lambda *args: product(*args, key), lambda *args: by_slot(*args, key), slots, x, W.to(dtype))
    assert not torch.equal(product(slots, x, W.to(dtype), key), product(slots, x, W.to(dtype)))


@pytest.mark.parametrize("captured", [False, True], ids=["eager", "captured"])
@pytest.mark.parametrize("base", [W, PACKED], ids=["dense", "packed"])
def test_transforms(base, captured):
    """Compare values, gradients, tangents and second derivatives in float64 with those of a dense loop."""
    slots, x, u = make(), draw("x", SLOTS, 7, IN), draw("u", SLOTS, 7, OUT)
    dense = dequantize(base, torch.float64) if base is PACKED else base
    factors = lambda slots: [(one.a, one.b) for one in slots.stacks]
    tangents = tree.map(lambda t: 0.1 * t.cos(), factors(slots))
    scale = [8.0 / 4, 3.3 / 4, 1.0, 16.0 / 8, 0.7 / 8]

    def mine(factors, x, fixed):
        slots, base, _ = fixed
        pairs = zip(slots.stacks, factors, strict=True)
        return product(replace(slots, stacks=[replace(one, a=a, b=b) for one, (a, b) in pairs]), x, base).sin()

    def naive(factors, x, fixed):
        pairs = [(a, b) for many in factors for a, b in zip(*many, strict=True)]
        rows = [row @ (dense + s * (b @ a)).mT for row, s, (a, b) in zip(x, scale, pairs, strict=True)]
        return torch.stack(rows).sin()

    def every(f):
        def g(given, x, u, tangents, fixed):
            h = lambda given, x: f(given, x, fixed)
            value, pull, *_ = vjp(h, given, x)
            first = lambda given, x: sum(t.sum() for t in tree.leaves(grad(lambda y: (h(y, x) * u).sum())(given)))
            return value, pull(u), jvp(h, (given, x), (tangents, u @ fixed[2])), grad(first, (0, 1))(given, x)

        return g

    many = torch.stack([x, x.cos()])
    run = jit(every(mine)) if captured else every(mine)
    fixed = slots, base, dense
    args = factors(slots), x, u, tangents, fixed
    torch.testing.assert_close(run(*args), every(naive)(*args), rtol=1e-6, atol=1e-6)
    mapped = vmap(grad(lambda *args: mine(*args).sum()), (None, 0, None))
    got = (jit(mapped) if captured else mapped)(factors(slots), many, fixed)
    loop = [grad(lambda f, x: naive(f, x, fixed).sum())(factors(slots), one) for one in many]
    torch.testing.assert_close(got, tree.map(lambda *t: torch.stack(t), *loop), rtol=1e-6, atol=1e-6)


def test_errors():
    slots, x = make(torch.float32), torch.ones(SLOTS, 2, IN)
    base = W.float()
    with pytest.raises(ValueError, match=r"linear got x \(4, 2, 64\) for 5 slots; dim 0 of x must be the slot"):
        product(slots, x[1:], base)
    cast = tree.map(lambda t: t.bfloat16(), slots)
    with pytest.raises(TypeError, match=r"slots: got alpha of torch\.bfloat16, wanted float64; cast a and b alone"):
        product(cast, x, base)
    with pytest.raises(ValueError, match=r"w: slots of a \(2, 4, 64\), b \(2, 48, 4\) do not fit a weight \(64, 48\)"):
        product(slots, x, base.mT)
    with pytest.raises(ValueError, match="w: merge-aware got slots"):
        lora.attach({"w": base}, {"w": slots}, merge_aware=True)
    with pytest.raises(ValueError, match=r"cannot be adapted; wanted \[out in\]"):
        lora.attach({"w": base[None]}, {"w": slots})
    with pytest.raises(TypeError, match="embedding got a weight of type AdaptedSlots; wanted"):
        embedding(torch.zeros(SLOTS, 2, dtype=torch.int64), lora.attach({"w": base}, {"w": slots})["w"])
    head, targets = lora.attach({"w": base}, {"w": slots})["w"], torch.zeros(SLOTS, 2, dtype=torch.int64)
    with pytest.raises(TypeError, match="weight is a AdaptedSlots; wanted Tensor, Packed or Adapted"):
        fused_cross_entropy.token_losses(x, head, targets)
