"""Tests of fquant.lora: initialisation, attaching, merging, and PEFT's LoRA and DoRA as oracles."""

import re
from typing import Any

import peft
import pytest
import torch
from torch import nn
from torch.func import grad, vmap

from fquant import lora, random, tree
from fquant.communication import LOCAL, AfterLoad, Comm, Loadable
from fquant.format import INT4_ZERO, INT8, MXFP4, NF4, NF4_DQ
from fquant.lazy import Lazy
from fquant.packed import dequantize, quantize
from fquant.packed_linear import Adapted, Lora, embedding, linear, row_norms
from fquant.tree import node


@node
class LoraSealed(Loadable):
    """A block that only ``OPENED`` opens."""

    content: dict


OPENED = Comm(open=lambda x: x.content)


def draw(name, *shape):
    return random.normal(random.fold(random.key(5), name), shape)


def make_base(format=NF4):
    return {
        "embed": quantize(draw("e", 20, 64), format),
        "layers": [
            {"q": quantize(draw(f"q{i}", 48, 64), format), "k": draw(f"k{i}", 64, 64), "norm": draw(f"n{i}", 64)}
            for i in range(2)
        ],
    }


def trained(adapters):
    """Return adapters whose ``b`` is not zero and whose magnitude is not the norm."""
    return tree.map_with_path(lambda path, t: t + 0.1 * draw(path, *t.shape), adapters)


# --- init -------------------------------------------------------------------------------------------------------------


def test_init_chooses_by_whole_paths():
    adapters = lora.init(make_base(), r"layers\.\d+\.(q|k)", rank=4, alpha=8.0, dropout=0.1, rank_stabilised=True)
    assert list(adapters) == ["layers.0.q", "layers.0.k", "layers.1.q", "layers.1.k"]
    q = adapters["layers.0.q"]
    assert q.a.shape == (4, 64) and q.b.shape == (48, 4) and q.magnitude is None
    assert (q.alpha, q.dropout, q.rank_stabilised) == (8.0, 0.1, True)
    assert all(t.dtype == torch.float32 for t in tree.leaves(adapters))
    assert all(w.b.eq(0).all() and w.a.ne(0).any() for w in adapters.values())
    half = lora.init(make_base(), "embed", rank=4, dora=True, dtype=torch.bfloat16)
    assert {t.dtype for t in tree.leaves(half)} == {torch.bfloat16}


@pytest.mark.parametrize("init", ["kaiming", "gaussian"])
def test_values_depend_on_key_and_path_alone(init):
    base = make_base()
    one = lora.init(base, r".*\.q", rank=4, key=3, init=init)
    more = lora.init({"layers": base["layers"][::-1], "other": base["embed"]}, r".*(q|k|other)", 4, key=3, init=init)
    assert torch.equal(one["layers.1.q"].a, more["layers.1.q"].a)
    assert torch.equal(one["layers.1.q"].a, lora.init(base, r".*1\.q", 4, key=random.key(3), init=init)["layers.1.q"].a)
    assert not torch.equal(one["layers.0.q"].a, one["layers.1.q"].a)
    assert not torch.equal(one["layers.0.q"].a, lora.init(base, r".*\.q", 4, key=4, init=init)["layers.0.q"].a)


def test_distributions():
    base = {"w": torch.empty(8, 400, device="meta")}
    a = lora.init(base, "w", rank=64)["w"].a
    bound = 400**-0.5
    assert a.abs().max() < bound and a.abs().max() > 0.99 * bound
    assert a.std().item() == pytest.approx(bound / 3**0.5, rel=0.02) and abs(a.mean().item()) < 0.02 * bound
    a = lora.init(base, "w", rank=64, init="gaussian")["w"].a
    assert a.std().item() == pytest.approx(1 / 64, rel=0.02) and a.abs().max() > 3 / 64


def test_init_changes_nothing_yet():
    base, x = make_base(), draw("x", 3, 64)
    for dora in (False, True):
        loaded = lora.attach(base, lora.init(base, ".*q", rank=4, dora=dora))
        torch.testing.assert_close(linear(x, loaded["layers"][0]["q"]), linear(x, base["layers"][0]["q"]))


def test_init_needs_no_values_except_for_dora():
    base = {
        "w": Lazy(lambda: 1 / 0, torch.empty(8, 64, device="meta")),
        "p": quantize(torch.empty(8, 64, device="meta"), NF4),
    }
    real = lora.init({"w": draw("w", 8, 64), "p": quantize(draw("w", 8, 64), NF4)}, "w|p", rank=2)
    got = lora.init(base, "w|p", rank=2)
    assert all(torch.equal(a, b) for a, b in zip(tree.leaves(got), tree.leaves(real), strict=True))
    for path in ("w", "p"):
        with pytest.raises(ValueError, match=f"^{path}: DoRA starts from the norms of .* has not been read; read it"):
            lora.init(base, path, rank=2, dora=True)


INIT_REFUSED = {
    "no match": (dict(targets="layers.q"), r"'layers.q' match no weight; the weights are .*layers\.\*\.k, layers\.\*"),
    "not a weight": (dict(targets=".*norm"), r"norm: a weight of shape \(64,\) cannot be adapted; wanted \[out in"),
    "rank": (dict(rank=0), "rank is 0; wanted at least 1"),
    "init": (dict(init="zeros"), "init is 'zeros'; wanted 'kaiming' or 'gaussian'"),
    "dropout": (dict(dropout=1.0), "dropout is 1.0; wanted 0 <= dropout < 1"),
}


@pytest.mark.parametrize("options, message", INIT_REFUSED.values(), ids=INIT_REFUSED)
def test_init_refuses(options, message):
    with pytest.raises(ValueError, match=message):
        lora.init(make_base(), **{"targets": ".*q", "rank": 4} | options)


# --- attach -----------------------------------------------------------------------------------------------------------


def test_attach_shares_everything_else():
    base = make_base()
    adapters = lora.init(base, r"layers\.1\.q", rank=4)
    loaded = lora.attach(base, adapters)
    assert loaded["layers"][0]["q"] is base["layers"][0]["q"] and loaded["embed"] is base["embed"]
    w = loaded["layers"][1]["q"]
    assert isinstance(w, Adapted) and w.base is base["layers"][1]["q"] and w.lora is adapters["layers.1.q"]
    assert w.key is None
    assert lora.attach(base, {})["layers"][1]["q"] is base["layers"][1]["q"]
    twice = lora.attach(loaded, adapters)["layers"][1]["q"]
    assert isinstance(twice.base, Adapted) and twice.base.base is w.base


def a_lora(rank, width, out, rank_b=None):
    return Lora(torch.zeros(rank, width), torch.zeros(out, rank_b or rank))


ATTACH_REFUSED = {
    "no such layer": ({"layers.7.q": a_lora(2, 64, 48)}, r"^adapter 'layers\.7\.q' has no weight .*; there is 0, 1$"),
    "no such name": (
        {"layers.0.z": a_lora(2, 64, 48)},
        r"^adapter 'layers\.0\.z' has no weight .*; there is .*q, k, norm$",
    ),
    "below a leaf": (
        {"layers.0.k.w": a_lora(2, 64, 64)},
        r"^adapter 'layers\.0\.k\.w' has no weight to be attached to; there is a leaf",
    ),
    "half a name": (
        {"emb": a_lora(2, 64, 20)},
        r"^adapter 'emb' has no weight to be attached to; there is embed, layers",
    ),
    "width": (
        {"embed": a_lora(2, 63, 20)},
        r"embed: an adapter a \(2, 63\), b \(20, 2\) does not fit a weight \(20, 64\)",
    ),
    "out": ({"embed": a_lora(2, 64, 21)}, r"embed: .* b \(21, 2\) does not fit .* wanted a \[rank 64\], b \[20 rank\]"),
    "ranks": ({"embed": a_lora(2, 64, 20, 3)}, r"embed: an adapter a \(2, 64\), b \(20, 3\) does not fit"),
    "no weight": ({"layers.0.norm": a_lora(2, 64, 64)}, r"norm: a weight of shape \(64,\) cannot be adapted"),
    "a list": ({"layers": a_lora(2, 64, 64)}, r"layers: a list is no weight; wanted a tensor or Packed \[out in\]"),
}


@pytest.mark.parametrize("adapters, message", ATTACH_REFUSED.values(), ids=ATTACH_REFUSED)
def test_attach_refuses(adapters, message):
    with pytest.raises(ValueError, match=message):
        lora.attach(make_base(), adapters)


def test_attach_refuses_swapped_arguments():
    base = make_base()
    adapters = lora.init(base, "embed", rank=2)
    for verb in (lora.attach, lora.merge):
        with pytest.raises(TypeError, match="of type dict; wanted .*; the arguments are swapped, call attach"):
            verb(adapters, base)
    for wrong in (None, adapters["embed"], {"q": None}):
        with pytest.raises(TypeError, match=f"adapters of type {type(wrong).__name__}; wanted a dict of path to Lora$"):
            lora.attach(base, wrong)


# --- closed subtrees --------------------------------------------------------------------------------------------------


def test_attach_waits_in_a_closed_subtree():
    base = make_base()
    sealed = base | {"layers": [LoraSealed(layer) for layer in base["layers"]]}
    adapters = trained(lora.init(base, r"layers\.0\.(q|k)|embed", rank=4, dropout=0.5))
    key = random.key(2)
    waiting, wanted = lora.attach(sealed, adapters, key), lora.attach(base, adapters, key)
    first, second = waiting["layers"]
    assert isinstance(first, AfterLoad) and second is sealed["layers"][1]
    assert isinstance(waiting["embed"], Adapted)
    assert LOCAL.load(second) is second and OPENED.load(second) is base["layers"][1]
    opened = OPENED.load(first)
    assert tree.structure(opened) == tree.structure(wanted["layers"][0])
    assert all(torch.equal(a, b) for a, b in zip(tree.leaves(opened), tree.leaves(wanted["layers"][0]), strict=True))
    again = OPENED.load(lora.attach(waiting, {"layers.0.k": adapters["layers.0.k"]})["layers"][0])
    assert isinstance(again["k"].base, Adapted)
    with pytest.raises(ValueError, match=r"adapter 'layers.0.z' has no weight to be attached to; there is q, k, norm"):
        OPENED.load(lora.attach(sealed, {"layers.0.z": adapters["embed"]})["layers"][0])
    with pytest.raises(ValueError, match="merge got adapters of a subtree that is not loaded; load it"):
        lora.merge(sealed, adapters)


def test_gradients_reach_adapters_that_wait():
    base, x = make_base(), draw("x", 3, 64)
    adapters = trained(lora.init(base, r".*\.k", rank=4))

    def loss(adapters, layers):
        loaded = lora.attach({"layers": layers}, adapters)["layers"]
        return sum(linear(x, OPENED.load(layer)["k"]).sin().sum() for layer in loaded)

    got, wanted = (grad(loss)(adapters, [f(v) for v in base["layers"]]) for f in (LoraSealed, lambda v: v))
    for a, b in zip(tree.leaves(got), tree.leaves(wanted), strict=True):
        assert a.abs().max() > 0 and torch.equal(a, b)


def test_init_does_not_look_into_closed_subtrees():
    base = {"layers": [LoraSealed(make_base()["layers"][0])]}
    with pytest.raises(ValueError, match=r"match no weight; the weights are layers\.\*$"):
        lora.init(base, r"layers\.0\.q", rank=2)
    with pytest.raises(ValueError, match=r"layers\.0: a LoraSealed is no weight; wanted a tensor or Packed \[out in\]"):
        lora.init(base, r"layers\.0", rank=2)


# --- merge and stack --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [dict(), dict(dora=True), dict(rank_stabilised=True)], ids=["lora", "dora", "rs"])
@pytest.mark.parametrize("format", [NF4, NF4_DQ, INT8, INT4_ZERO, MXFP4], ids=lambda f: f.name)
def test_merge_equals_forward(format, options):
    base, x = make_base(format), draw("x", 3, 64)
    adapters = trained(lora.init(base, r"embed|layers\.0\.(q|k)", rank=4, **options))
    loaded, merged = lora.attach(base, adapters), lora.merge(base, adapters)
    for name in ("q", "k"):
        w = merged["layers"][0][name]
        assert isinstance(w, torch.Tensor) and w.dtype == torch.float32
        torch.testing.assert_close(linear(x, w), linear(x, loaded["layers"][0][name]), rtol=1e-4, atol=1e-4)
    tokens = torch.tensor([0, 19, 3])
    torch.testing.assert_close(embedding(tokens, merged["embed"]), embedding(tokens, loaded["embed"]))
    assert merged["layers"][1]["q"].codes is base["layers"][1]["q"].codes
    half = lora.merge(base, adapters, torch.bfloat16)["layers"][0]["q"]
    assert torch.equal(half, merged["layers"][0]["q"].bfloat16())  # rounded once


def test_merge_rounds_to_the_dtype_of_the_weight():
    base = {"w": quantize(draw("w", 8, 64).bfloat16(), NF4)}
    assert lora.merge(base, lora.init(base, "w", rank=2))["w"].dtype == torch.bfloat16


def test_stack():
    base, x = make_base(), draw("x", 3, 64)
    many = [trained(lora.init(base, ".*q", rank=4, key=i, dora=True)) for i in range(3)]
    stacked = lora.stack(many)
    assert stacked["layers.0.q"].a.shape == (3, 4, 64) and stacked["layers.0.q"].alpha == 16.0
    f = lambda adapters, x: linear(x, lora.attach(base, adapters)["layers"][1]["q"])
    got = vmap(f, (0, None))(stacked, x)
    torch.testing.assert_close(got, torch.stack([f(adapters, x) for adapters in many]))
    with pytest.raises(ValueError):
        lora.stack([many[0], lora.init(base, ".*k", rank=4)])


# --- dropout ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dora", [False, True], ids=["lora", "dora"])
def test_dropout_is_a_function_of_the_key(dora):
    base, x = make_base(), draw("x", 4, 3, 64)
    adapters = trained(lora.init(base, ".*(q|k)", rank=4, dropout=0.5, dora=dora))

    def f(key, x):
        return linear(x, lora.attach(base, adapters, key)["layers"][0]["q"])

    keys = random.fold(random.key(0), torch.arange(4))
    assert torch.equal(f(keys[0], x), f(keys[0], x)) and not torch.equal(f(keys[0], x), f(keys[1], x))
    batched = f(keys, x)  # a key an example
    torch.testing.assert_close(vmap(f)(keys, x), batched)
    torch.testing.assert_close(torch.stack([f(k, row) for k, row in zip(keys, x, strict=True)]), batched)
    order = torch.tensor([2, 0, 3, 1])
    torch.testing.assert_close(f(keys[order], x[order]), batched[order])
    none = linear(x, lora.attach(base, adapters)["layers"][0]["q"])
    mean = vmap(f, (0, None))(random.fold(random.key(1), torch.arange(4000)), x[0, :1]).mean(0)
    assert (mean - none[0, :1]).abs().max() < 0.15 * none[0, :1].abs().max() and not torch.equal(batched, none)


def test_paths_have_masks_of_their_own():
    base = {"a": torch.eye(64), "b": torch.eye(64)}
    adapters = {path: Lora(torch.eye(64), torch.eye(64), alpha=64.0, dropout=0.5) for path in base}
    loaded = lora.attach(base, adapters, random.key(0))
    x = torch.ones(2, 64)
    masks = [linear(x, w) - x for w in loaded.values()]
    assert not torch.equal(*masks) and all(set(m.unique().tolist()) == {0.0, 2.0} for m in masks)
    plain = {path: Lora(torch.eye(64), torch.eye(64)) for path in base}
    assert all(w.key is None for w in lora.attach(base, plain, random.key(0)).values())


# --- PEFT -------------------------------------------------------------------------------------------------------------


class Tiny(nn.Module):
    def __init__(self, w):
        super().__init__()
        self.q = nn.Linear(w.shape[1], w.shape[0])
        self.q.weight.data.copy_(w)

    def forward(self, x):
        return self.q(x)


@pytest.mark.parametrize("dora", [False, True], ids=["lora", "dora"])
@pytest.mark.parametrize("rank_stabilised", [False, True], ids=["alpha/r", "alpha/sqrt(r)"])
def test_equals_peft(rank_stabilised, dora):
    """Compare forward and gradients; DoRA's norm is detached as in PEFT and section 4.3 of the paper."""
    base = {"q": quantize(draw("w", 48, 64), NF4)}
    adapters = trained(lora.init(base, "q", rank=4, alpha=6, dora=dora, rank_stabilised=rank_stabilised))
    config = peft.LoraConfig(r=4, lora_alpha=6, target_modules=["q"], use_dora=dora, use_rslora=rank_stabilised)
    model: Any = peft.get_peft_model(Tiny(dequantize(base["q"])), config)
    layer: Any = model.base_model.model.q
    mine = adapters["q"]
    theirs = {"a": layer.lora_A["default"].weight, "b": layer.lora_B["default"].weight}
    if dora:
        theirs["magnitude"] = layer.lora_magnitude_vector["default"].weight
    start = lora.init(base, "q", rank=4, dora=dora)["q"]
    for name, p in theirs.items():
        if name == "magnitude":
            torch.testing.assert_close(p.data, start.magnitude, rtol=1e-5, atol=0)
        p.data.copy_(getattr(mine, name))
    x, g, bias = draw("x", 5, 64), draw("g", 5, 48), layer.base_layer.bias.detach()
    leaf = x.clone().requires_grad_()
    out = model(leaf)
    (out * g).sum().backward()

    def f(adapters, x):
        y = linear(x, lora.attach(base, adapters)["q"], bias)
        return (y * g).sum(), y

    (grads, dx), y = grad(f, (0, 1), has_aux=True)(adapters, x)
    torch.testing.assert_close(y, out.detach(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(dx, leaf.grad, rtol=1e-5, atol=1e-5)
    for name, p in theirs.items():
        torch.testing.assert_close(getattr(grads["q"], name), p.grad, rtol=1e-5, atol=1e-5 * p.grad.abs().max().item())


def test_the_norm_of_dora_is_a_constant():
    """Compare with PEFT's formula in float64; without the detached norm the results differ."""
    w, x, g = draw("w", 12, 64).double(), draw("x", 5, 64).double(), draw("g", 5, 12).double()
    item = Lora(draw("a", 4, 64).double(), draw("b", 12, 4).double(), draw("m", 12).double().abs() + 1, alpha=6.0)

    def formula(lora, detach):
        v = w + 1.5 * lora.b @ lora.a
        norm = v.norm(dim=1)
        norm = norm.detach() if detach else norm
        return ((lora.magnitude / norm) * (x @ v.T) * g).sum()

    got = grad(lambda item: (linear(x, Adapted(w, item)) * g).sum())(item)
    wanted, other = grad(formula)(item, True), grad(formula)(item, False)
    for a, b in zip(tree.leaves(got), tree.leaves(wanted), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)
    assert (wanted.a - other.a).abs().max() > 1e-2
    norm = (w + 1.5 * item.b @ item.a).norm(dim=1)
    torch.testing.assert_close(row_norms(w, item), norm, rtol=1e-12, atol=0)


class TinyEmbedding(nn.Module):
    def __init__(self, w):
        super().__init__()
        self.embed = nn.Embedding(*w.shape, _weight=w.clone())

    def forward(self, tokens):
        return self.embed(tokens)


def test_embedding_equals_peft():
    base = {"embed": quantize(draw("w", 20, 64), NF4)}
    adapters = trained(lora.init(base, "embed", rank=4, alpha=6))
    model: Any = peft.get_peft_model(
        TinyEmbedding(dequantize(base["embed"])), peft.LoraConfig(r=4, lora_alpha=6, target_modules=["embed"])
    )
    layer: Any = model.base_model.model.embed
    layer.lora_embedding_A["default"].data.copy_(adapters["embed"].b.T)
    layer.lora_embedding_B["default"].data.copy_(adapters["embed"].a.T)
    tokens = torch.tensor([[3, 3, 19], [0, 1, 2]])
    got = embedding(tokens, lora.attach(base, adapters)["embed"])
    torch.testing.assert_close(got, model(tokens).detach(), rtol=1e-5, atol=1e-5)


def test_doc_example_targets():
    """Run the regular expression of the module's docstring."""
    found = re.search(r'lora\.init\(base, r"(.*?)"', lora.__doc__ or "")
    assert found and list(lora.init({"layers": make_base()["layers"]}, found[1].replace("|v", "|k"), rank=1)) == [
        "layers.0.q", "layers.0.k", "layers.1.q", "layers.1.k",
    ]  # fmt: skip
