"""Tests of fquant.adapted.dora: norms, rows of zeros and several adapters, against float64 and PEFT."""

import itertools
from typing import Any

import peft
import pytest
import torch
from torch import nn
from torch.func import grad, jvp, vmap

from fquant import jit, linear, lora, quantize, random, tree
from fquant.adapted.dora import row_norms
from fquant.communication import Comm, Loadable
from fquant.format import AQ_2X8, FP8_E4M3, INT4_ZERO, INT8, MXFP4, NF4, NF4_DQ
from fquant.lora import Lora
from fquant.packed import dequantize
from fquant.packed_linear import embedding, scaling
from fquant.tree import node

OUT, WIDTH = 24, 128
ZERO, TINY, LARGE = 3, 5, 7  # rows of the weight
PACKED = {f.name: f for f in (NF4, NF4_DQ, INT8, FP8_E4M3, INT4_ZERO, MXFP4, AQ_2X8)}
DENSE = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16, "f64": torch.float64}


def draw(name, *shape):
    return random.normal(random.fold(random.key(8), name), shape)


def weight(kind):
    w = draw("w", OUT, WIDTH)
    w[ZERO], w[TINY], w[LARGE] = 0, w[TINY] * 1e-3, w[LARGE] * 500
    return quantize(w, PACKED[kind]) if kind in PACKED else w.to(DENSE[kind])


def dense(w):
    return w if isinstance(w, torch.Tensor) else dequantize(w)


def an_adapter(name, w, rank=4, dora=True):
    """An adapter that leaves rows of zeros as they are."""
    b = 0.1 * draw(name + "b", OUT, rank)
    b[ZERO] = 0
    m = (dense(w).float().norm(dim=1) * (1 + draw(name, OUT).abs())) if dora else None
    return Lora(draw(name + "a", rank, WIDTH), b, m, 6.0)


def oracle(w, loras):
    """Apply ``w' = m / ‖w₀ + update‖ ∘ (w + update)`` one after the other, in float64."""
    w = total = dense(w).double()
    for one in loras:
        update = scaling(one) * one.b.double() @ one.a.double()
        total = total + update
        if one.magnitude is not None:
            norms = (w + update).detach().norm(dim=1)
            safe = torch.where(norms == 0, 1.0, norms)
            total = torch.where(norms == 0, 1.0, one.magnitude.double() / safe)[:, None] * total
    return total


def attached(w, loras):
    for one in loras:
        w = lora.attach({"w": w}, {"w": one})["w"]
    return w


def assert_rows(got, wanted, rtol):
    """Compare each column with the norm of its column, because rows of the weight differ by 1e5."""
    error, size = ((t.double()).norm(dim=0) for t in (got.double() - wanted, wanted))
    assert (error <= rtol * size).all(), (error / size).max()


KINDS = ("dora", "dora dora", "lora dora", "dora lora")


@pytest.mark.parametrize("kinds", KINDS)
@pytest.mark.parametrize("kind", [*PACKED, *DENSE])
def test_values_and_merges_are_those_of_float64(kind, kinds):
    """The rows are zeros, of small and of large norms."""
    w, x = weight(kind), draw("x", 5, WIDTH)
    loras = [an_adapter(f"{i}", w, 2 + i, name == "dora") for i, name in enumerate(kinds.split())]
    for order in itertools.permutations(loras):
        wanted = oracle(w, order)
        assert_rows(linear(x, attached(w, order)), x.double() @ wanted.T, 1e-6)
        merged = lora.merge({"w": attached(w, order[:-1])}, {"w": order[-1]}, torch.float32)["w"]
        assert_rows(merged.T, wanted.T, 1e-6)
        got = embedding(torch.tensor([[ZERO, 0, TINY]]), attached(w, order))[0]
        assert_rows(got.T, wanted[[ZERO, 0, TINY]].T, 1e-2 if kind in ("bf16", "f16") else 1e-6)
    if kind == "f64":  # which no format packs
        return
    packed, losses = lora.merge_packed({"w": attached(w, loras[:-1])}, {"w": loras[-1]}, INT8)
    assert dequantize(packed["w"]).isfinite().all() and 0 < losses["w"] < float("inf")


def test_several_adapters_are_rounded_once():
    """The sum of adapters in bf16 is that of float64, rounded."""
    w = weight("bf16")
    merged = lora.merge({"w": attached(w, [an_adapter("0", w, dora=False)])}, {"w": an_adapter("1", w, dora=False)})
    wanted = oracle(w, [an_adapter("0", w, dora=False), an_adapter("1", w, dora=False)])
    assert ((merged["w"].double() - wanted).abs() <= 2**-8 * wanted.abs()).all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", ["f16", "bf16", "f32", "nf4"])
def test_norms_of_stored_dtypes_are_exact(kind, dtype):
    w = weight(kind)
    one = tree.map(lambda t: t.to(dtype), an_adapter("0", w))
    v = dense(w).double() + scaling(one) * one.b.double() @ one.a.double()
    torch.testing.assert_close(row_norms(w, one).double(), v.norm(dim=1), rtol=1e-6, atol=0)
    torch.testing.assert_close(row_norms(w).double(), dense(w).double().norm(dim=1), rtol=1e-6, atol=0)


def test_norms_do_not_cancel():
    """The update is minus the row, but for a thousandth of it."""
    a, b = draw("a", 4, WIDTH), draw("b", OUT, 4)
    w = 1e-3 * draw("w", OUT, WIDTH) - b @ a
    v = w.double() + b.double() @ a.double()
    got = row_norms(w, Lora(a, b, torch.ones(OUT), 4.0)).double()
    torch.testing.assert_close(got, v.norm(dim=1), rtol=2e-4, atol=0)


@pytest.mark.parametrize("rows", [1, 7, OUT, OUT + 1])
def test_norms_by_rows(monkeypatch, rows):
    monkeypatch.setattr("fquant.adapted.dora.PIECE", rows * WIDTH)
    w = weight("nf4_dq")
    torch.testing.assert_close(
        row_norms(w, an_adapter("0", w)).double(),
        oracle(w, [an_adapter("0", w, dora=False)]).norm(dim=1),
        rtol=1e-6,
        atol=0,
    )


def test_half_precision_keeps_a_factor_near_one():
    """A trained norm differs by less than half a step of bf16; it is not rounded away."""
    w, x = draw("w", OUT, WIDTH), draw("x", 200, WIDTH).bfloat16()
    one = Lora(draw("a", 2, WIDTH), torch.zeros(OUT, 2), w.norm(dim=1) * 1.003)
    got = (linear(x, lora.attach({"w": w}, {"w": one})["w"]).double() / linear(x, w).double()).mean()
    assert got.item() == pytest.approx(1.003, abs=3e-4)


def loss(one, w, x):
    return (linear(x, lora.attach({"w": w}, {"w": one})["w"]) ** 2).sum()


@pytest.mark.parametrize("kind", ["f32", "f64", "nf4", "int8"])
def test_gradients_of_a_row_of_zeros(kind):
    """They are LoRA's for the factors, and zero for the norm; the others are those of float64, in every transform."""
    w, x = weight(kind), draw("x", 3, WIDTH)
    one = an_adapter("0", w)
    wide = tree.map(torch.Tensor.double, one)
    wanted = grad(lambda one: ((x.double() @ oracle(w, [one]).T) ** 2).sum())(wide)
    got = grad(loss)(one, w, x)
    for g, e in zip(tree.leaves(got), tree.leaves(wanted), strict=True):
        torch.testing.assert_close(g.double(), e, rtol=1e-4, atol=1e-4 * e.abs().max().item())
    assert got.magnitude[ZERO] == 0
    captured = jit(grad(loss))(one, w, x)
    assert all(map(torch.equal, tree.leaves(captured), tree.leaves(got)))
    each = vmap(grad(loss), (None, None, 0))(one, w, x.unsqueeze(1))
    many = vmap(grad(loss), (0, None, None))(tree.map(lambda *t: torch.stack(t), one, one), w, x)
    tangent = tree.map(torch.ones_like, one)
    _, slope, *_ = jvp(lambda one: loss(one, w, x), (one,), (tangent,))
    for g, sum_of, twice in zip(tree.leaves(got), tree.leaves(each), tree.leaves(many), strict=True):
        torch.testing.assert_close(sum_of.sum(0), g, rtol=1e-4, atol=1e-4 * g.abs().max().item())
        torch.testing.assert_close(twice[1], g, rtol=1e-4, atol=1e-4 * g.abs().max().item())
    inner = sum((g.double() * t).sum() for g, t in zip(tree.leaves(got), tree.leaves(tangent), strict=True))
    torch.testing.assert_close(slope.double(), inner, rtol=1e-4, atol=0)


def test_a_row_of_zeros_can_be_trained():
    """The first step moves b, and the next ones the norm, which begins at zero."""
    w, x = weight("f32"), draw("x", 8, WIDTH)
    one = lora.init({"w": w}, "w", rank=4, key=0, dora=True)["w"]
    target = draw("t", 8, OUT)

    def error(one):
        return ((linear(x, lora.attach({"w": w}, {"w": one})["w"]) - target)[:, ZERO] ** 2).mean()

    start = error(one)
    for _ in range(200):
        one = tree.map(lambda t, g: t - 0.02 * g, one, grad(error)(one))
    assert error(one) < 0.5 * start


@pytest.mark.parametrize("order", [(0, 1), (1, 0)], ids=str)
@pytest.mark.parametrize("kinds", KINDS[1:])
def test_active_together_as_in_peft(kinds, order):
    w, x = draw("w", OUT, WIDTH), draw("x", 5, WIDTH)

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.q = nn.Linear(WIDTH, OUT)

        def forward(self, x):
            return self.q(x)

    model, ours = Model(), []
    model.q.weight.data = w.clone()
    for i, name in enumerate(kinds.split()):
        config = peft.LoraConfig(r=2 + i, lora_alpha=6, target_modules=["q"], use_dora=name == "dora")
        model = peft.get_peft_model(model, config, str(i)) if i == 0 else model
        if i:
            model.add_adapter(str(i), config)
    layer: Any = model.base_model.model.q
    for i, name in enumerate(kinds.split()):
        one = an_adapter(str(i), w, 2 + i, name == "dora")
        layer.lora_A[str(i)].weight.data, layer.lora_B[str(i)].weight.data = one.a, one.b
        if one.magnitude is not None:
            layer.lora_magnitude_vector[str(i)].weight.data = one.magnitude
        ours.append(one)
    model.base_model.set_adapter([str(i) for i in order])
    bias = layer.base_layer.bias.detach()
    got = linear(x, attached(w, [ours[i] for i in order]), bias)
    torch.testing.assert_close(got, model(x).detach(), rtol=1e-5, atol=1e-5)
    merged = lora.merge({"w": attached(w, [ours[order[0]]])}, {"w": ours[order[1]]})["w"]
    torch.testing.assert_close(x @ merged.T + bias, model(x).detach(), rtol=1e-5, atol=1e-5)


@node
class DoraSealed(Loadable):
    """A block that is opened late."""

    content: dict


def test_adapters_that_wait_for_their_block():
    w, x = weight("nf4"), draw("x", 5, WIDTH)
    loras = [an_adapter("0", w), an_adapter("1", w)]
    waiting = {"block": DoraSealed({"w": w})}
    for one in loras:
        waiting = lora.attach(waiting, {"block.w": one})
    opened = Comm(open=lambda block: block.content).load(waiting["block"])
    assert torch.equal(linear(x, opened["w"]), linear(x, attached(w, loras)))


def test_norms_of_other_weights():
    w = weight("nf4")
    trained = lora.attach({"w": w}, {"w": an_adapter("0", w, dora=False)}, merge_aware=True)["w"]
    with pytest.raises(TypeError, match="the norms of a Adapted were asked for; wanted a Tensor or Packed"):
        linear(draw("x", WIDTH), attached(trained, [an_adapter("1", w)]))
