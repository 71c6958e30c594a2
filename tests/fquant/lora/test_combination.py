"""Tests of fquant.lora.combination: PEFT's ``add_weighted_adapter``, ``set_adapter`` and ``set_scale`` as oracles."""

import re
from dataclasses import replace
from typing import Any

import peft
import pytest
import torch
from torch import nn

from fquant import lora, random, tree
from fquant.lora import Lora
from fquant.packed_linear import Adapted, linear, scaling

OUT, IN = 24, 16


def draw(name, *shape):
    return random.normal(random.fold(random.key(7), name), shape)


class Two(nn.Module):
    def __init__(self):
        super().__init__()
        self.q = nn.Linear(IN, OUT, bias=False)
        self.k = nn.Linear(IN, OUT, bias=False)

    def forward(self, x):
        return self.q(x) + 2 * self.k(x)


BASE = {"q": draw("q", OUT, IN), "k": draw("k", OUT, IN)}


def make(seed, rank, alpha, paths=("q", "k"), **static):
    return {
        p: Lora(draw(f"a{seed}{p}", rank, IN), draw(f"b{seed}{p}", OUT, rank), None, alpha, **static) for p in paths
    }


def theirs(many):
    """PEFT's model with each of the adapters, called 0, 1, ..."""
    model: Any = Two()
    for path, w in BASE.items():
        model.get_submodule(path).weight.data.copy_(w)
    for i, adapters in enumerate(many):
        first = next(iter(adapters.values()))
        options = {"r": first.a.shape[0], "lora_alpha": first.alpha, "use_rslora": first.rank_stabilised}
        config = peft.LoraConfig(target_modules=list(adapters), **options)
        if i == 0:
            model = peft.get_peft_model(model, config, adapter_name="0")
        else:
            model.add_adapter(str(i), config)
        for path, x in adapters.items():
            layer: Any = model.base_model.model.get_submodule(path)
            layer.lora_A[str(i)].weight.data.copy_(x.a)
            layer.lora_B[str(i)].weight.data.copy_(x.b)
    return model.eval()


def update(x):
    return scaling(x) * x.b @ x.a


MANY = {
    "equal ranks": ([make(0, 4, 8.0), make(1, 4, 6.0)], [0.7, 0.4]),
    "subtracted": ([make(0, 4, 8.0), make(1, 4, 6.0)], [1.0, -1.0]),
    "three": ([make(0, 3, 8.0), make(1, 3, 6.0), make(2, 3, 1.0)], [1.0, -0.5, 0.25]),
    "other ranks": ([make(0, 4, 8.0), make(1, 2, 6.0)], [0.7, 0.4]),
    "other paths": ([make(0, 4, 8.0), make(1, 4, 6.0, ("q",))], [0.7, 0.4]),
    "rank-stabilised": ([make(0, 4, 8.0), make(1, 4, 6.0, rank_stabilised=True)], [0.7, 0.4]),
}


@pytest.mark.parametrize("method", lora.combination.METHODS)
@pytest.mark.parametrize(("many", "weights"), MANY.values(), ids=MANY)
def test_combine_equals_add_weighted_adapter(many, weights, method):
    if method == "linear" and many[0]["q"].a.shape != many[1]["q"].a.shape:
        with pytest.raises(ValueError, match="^q: got ranks 2, 4, wanted one for 'linear'; use 'cat' or 'svd'"):
            lora.combine(many, weights, method)
        return
    model = theirs(many)
    model.add_weighted_adapter([str(i) for i in range(len(many))], weights, "sum", combination_type=method)
    got = lora.combine(many, weights, method)
    assert got.keys() == {"q", "k"}
    for path, x in got.items():
        layer: Any = model.base_model.model.get_submodule(path)
        torch.testing.assert_close(update(x), layer.get_delta_weight("sum"), rtol=1e-5, atol=1e-5)
        assert scaling(x) == 1
        if method == "linear":
            torch.testing.assert_close(x.a, layer.lora_A["sum"].weight.data)
            torch.testing.assert_close(x.b, layer.lora_B["sum"].weight.data)
        if method == "svd":
            torch.testing.assert_close(x.a @ x.a.T, torch.eye(len(x.a)), rtol=0, atol=1e-6)


def test_svd_is_the_best_of_its_rank_and_cat_is_exact():
    many, weights = MANY["other ranks"]
    total = sum(w * update(x["q"]) for x, w in zip(many, weights, strict=True))
    torch.testing.assert_close(update(lora.combine(many, weights, "cat")["q"]), total)
    torch.testing.assert_close(update(lora.combine(many, weights, "svd", rank=6)["q"]), total, rtol=1e-4, atol=1e-5)
    u, s, vh = torch.linalg.svd(total.double(), full_matrices=False)
    best = (u[:, :2] * s[:2]) @ vh[:2]
    torch.testing.assert_close(
        update(lora.combine(many, weights, "svd", rank=2)["q"]), best.float(), rtol=1e-4, atol=1e-5
    )
    assert lora.combine(many, weights, "svd", rank=99)["q"].a.shape == (6, IN)


def test_two_attached_adapters_equal_two_active_ones():
    many, x = [make(0, 4, 8.0), make(1, 2, 6.0, ("q",))], draw("x", 5, IN)
    model = theirs(many)
    model.base_model.set_adapter(["0", "1"])
    both = lora.attach(lora.attach(BASE, many[0]), many[1])
    assert isinstance(both["q"].base, Adapted)
    y = linear(x, both["q"]) + 2 * linear(x, both["k"])
    torch.testing.assert_close(y, model(x).detach(), rtol=1e-5, atol=1e-4)
    merged = lora.merge(lora.attach(BASE, many[0]), many[1])
    torch.testing.assert_close(linear(x, merged["q"]) + 2 * linear(x, merged["k"]), y, rtol=1e-5, atol=1e-4)
    one = lora.attach(BASE, lora.combine(many, [1.0, 1.0]))
    torch.testing.assert_close(linear(x, one["q"]) + 2 * linear(x, one["k"]), y, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("factor", [0.5, -2.0, 0.0])
def test_scale_equals_set_scale(factor):
    adapters, x = make(0, 4, 8.0), draw("x", 5, IN)
    model = theirs([adapters])
    for path in adapters:
        model.base_model.model.get_submodule(path).set_scale("0", factor)
    scaled = lora.attach(BASE, lora.scale(adapters, factor))
    torch.testing.assert_close(
        linear(x, scaled["q"]) + 2 * linear(x, scaled["k"]), model(x).detach(), rtol=1e-5, atol=1e-4
    )


def test_stacks_and_dtypes():
    stacks = lora.stack([make(0, 4, 8.0), make(1, 4, 8.0)]), lora.stack([make(2, 4, 6.0), make(3, 4, 6.0)])
    for method in lora.combination.METHODS:
        got = lora.combine(stacks, [1.0, -0.5], method)
        for i in range(2):
            member = [tree.map(lambda t, i=i: t[i], s) for s in stacks]
            torch.testing.assert_close(
                update(tree.map(lambda t, i=i: t[i], got)["q"]), update(lora.combine(member, [1.0, -0.5], method)["q"]),
                rtol=1e-4, atol=1e-5,
            )  # fmt: skip
    half = tree.map(lambda t: t.bfloat16(), make(0, 4, 8.0))
    assert lora.combine([half], [1.0], "svd")["q"].b.dtype == torch.bfloat16


ONE = make(0, 4, 8.0)
REFUSED = {
    "method": (dict(method="ties"), "method is 'ties'; wanted one of cat, linear, svd"),
    "nothing": (dict(many=[], weights=[]), "combine got no adapters; wanted at least one"),
    "weights": (dict(weights=[1.0]), "combine got 2 adapters and 1 weights; wanted as many"),
    "rank": (dict(rank=2), "rank is 2 for cat; wanted one for svd, above 0"),
    "rank 0": (dict(method="svd", rank=0), "rank is 0 for svd"),
    "dora": (
        dict(many=[ONE, {"q": replace(ONE["q"], magnitude=torch.ones(OUT))}]),
        "q: got DoRA, whose magnitudes have no sum; merge it instead",
    ),
    "sizes": (
        dict(many=[ONE, {"k": Lora(torch.ones(2, 3), torch.ones(OUT, 2))}]),
        "k: got a (2, 3), b (24, 2), wanted the sizes of a (4, 16), b (24, 4)",
    ),
    "dropout": (dict(many=[ONE, {"q": replace(ONE["q"], dropout=0.5)}]), "q: got dropout 0.5, wanted 0.0"),
}  # fmt: skip


@pytest.mark.parametrize(("options", "message"), REFUSED.values(), ids=REFUSED)
def test_combine_refuses(options, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        lora.combine(**{"many": [ONE, ONE], "weights": [1.0, 1.0]} | options)
