"""Tests of fquant.lora.decompositions: PEFT's initialisations and float64 decompositions as oracles."""

import re
from collections import Counter
from typing import Any

import peft
import pytest
import torch
from peft.utils import loftq_utils
from torch import nn
from torch.overrides import TorchFunctionMode

from fquant import lora, quantize, random
from fquant.format import INT8, NF4, NF4_DQ
from fquant.lazy import Lazy
from fquant.packed import Packed, dequantize
from fquant.packed_linear import Lora, linear, scaling

OUT, IN, RANK = 48, 64, 4


def draw(name, *shape):
    return random.normal(random.fold(random.key(9), name), shape)


class Two(nn.Module):
    def __init__(self):
        super().__init__()
        self.q = nn.Linear(IN, OUT, bias=False)
        self.k = nn.Linear(IN, OUT, bias=False)
        for path, w in dense().items():
            self.get_submodule(path).weight.data.copy_(w)

    def forward(self, x, y):
        return self.q(x) + self.k(y)


def dense():
    return {"q": draw("q", OUT, IN), "k": draw("k", OUT, IN)}


def theirs(init, **options):
    config = peft.LoraConfig(r=RANK, target_modules=["q"], init_lora_weights=init, **options)
    return peft.get_peft_model(Two(), config).base_model.model.q  # type: ignore[union-attr]


def update(x):
    return scaling(x) * x.b.float() @ x.a.float()


def projection(rows):
    """The projection on the space that ``rows`` span."""
    q, _ = torch.linalg.qr(rows.double().mT)
    return q @ q.mT


@pytest.mark.parametrize("stabilised", [False, True], ids=["alpha/r", "alpha/sqrt(r)"])
@pytest.mark.parametrize(("verb", "name"), [(lora.pissa, "pissa"), (lora.olora, "olora")], ids=["pissa", "olora"])
def test_a_dense_weight_splits_as_in_peft(verb, name, stabilised):
    base = dense()
    adapters, rest = verb(base, "q", RANK, alpha=6.0, rank_stabilised=stabilised, dropout=0.1)
    layer: Any = theirs(name, lora_alpha=6, use_rslora=stabilised)
    x = adapters["q"]
    assert list(adapters) == ["q"] and (x.alpha, x.rank_stabilised, x.dropout) == (6.0, stabilised, 0.1)
    torch.testing.assert_close(rest["q"] + update(x), base["q"], rtol=0, atol=1e-5)
    torch.testing.assert_close(rest["q"], layer.base_layer.weight.data, rtol=0, atol=1e-4)
    torch.testing.assert_close(projection(x.a), projection(layer.lora_A["default"].weight.data), rtol=0, atol=1e-4)
    torch.testing.assert_close(
        projection(x.b.mT), projection(layer.lora_B["default"].weight.data.mT), rtol=0, atol=1e-4
    )
    torch.testing.assert_close(x.b.norm(dim=0), layer.lora_B["default"].weight.norm(dim=0).detach(), rtol=1e-4, atol=0)
    assert rest["k"] is base["k"] and torch.equal(base["q"], dense()["q"])
    inputs = draw("x", 3, IN)
    torch.testing.assert_close(
        linear(inputs, lora.attach(rest, adapters)["q"]), linear(inputs, base["q"]), rtol=1e-4, atol=1e-4
    )


def test_pissa_takes_the_largest_components():
    adapters, rest = lora.pissa(dense(), "q", RANK)
    u, s, vh = torch.linalg.svd(dense()["q"].double())
    torch.testing.assert_close(update(adapters["q"]).double(), (u[:, :RANK] * s[:RANK]) @ vh[:RANK], rtol=0, atol=1e-4)
    torch.testing.assert_close(torch.linalg.svdvals(rest["q"])[0].double(), s[RANK], rtol=1e-4, atol=0)


@pytest.mark.parametrize("niter", [0, 16])
def test_a_randomised_pissa_still_splits_the_weight(niter):
    fall = torch.exp(-0.1 * torch.arange(IN, device="cpu"))
    base = {"q": draw("q", OUT, IN) * fall}
    adapters, rest = lora.pissa(base, "q", RANK, niter=niter, key=3)
    torch.testing.assert_close(rest["q"] + update(adapters["q"]), base["q"], rtol=0, atol=1e-5)
    exact, _ = lora.pissa(base, "q", RANK)
    error = (projection(adapters["q"].a) - projection(exact["q"].a)).norm()
    assert error < (1e-3 if niter else 1.5), error
    again = lora.pissa(base, "q", RANK, niter=niter, key=random.key(3))[0]
    assert torch.equal(again["q"].a, adapters["q"].a)
    if niter:  # PEFT draws as many columns as the rank, and here are 8 more: what is left is at most as large
        torch.manual_seed(0)
        layer: Any = theirs("pissa_niter_16")
        left = lora.pissa(dense(), "q", RANK, alpha=8.0, niter=16)[1]["q"].norm()
        best = lora.pissa(dense(), "q", RANK, alpha=8.0)[1]["q"].norm()
        assert best <= left * (1 + 1e-6) and left <= layer.base_layer.weight.norm() * (1 + 1e-6)


@pytest.mark.parametrize("format", [NF4, NF4_DQ, INT8], ids=lambda f: f.name)
@pytest.mark.parametrize("verb", [lora.pissa, lora.olora], ids=["pissa", "olora"])
def test_a_packed_weight_keeps_its_format_and_comes_closer(verb, format):
    w = draw("q", OUT, IN) + 3 * draw("u", OUT, 1) * draw("v", 1, IN)
    base = {"q": quantize(w, format), "k": draw("k", OUT, IN)}
    adapters, rest = verb(base, "q", RANK)
    assert isinstance(rest["q"], Packed) and rest["q"].format is format and rest["q"].dtype == torch.float32
    residual = dequantize(base["q"]) - update(adapters["q"])
    assert torch.equal(rest["q"].codes, quantize(residual, format).codes)
    if verb is lora.pissa:  # as in the paper: the residual of the first components has less error of quantisation
        full, split = w - dequantize(quantize(w, format)), residual - dequantize(rest["q"])
        assert split.norm() < full.norm() / 1.03


class OnCpu(TorchFunctionMode):
    """Run code that asks for "cuda" on the CPU, because PEFT's LoftQ names the device."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        here = lambda x: "cpu" if str(x).startswith("cuda") else x
        plain = lambda x: here(x) if isinstance(x, str | torch.device) else x
        return func(*map(plain, args), **{key: plain(x) for key, x in (kwargs or {}).items()})


@pytest.mark.parametrize("iterations", [1, 3, 5])
@pytest.mark.parametrize(("format", "bits"), [(NF4, 4), (INT8, 8)], ids=["nf4", "int8"])
def test_loftq_is_as_close_as_that_of_peft(format, bits, iterations):
    w = dense()["q"]
    with OnCpu():
        q, a, b = loftq_utils.loftq_init(w, bits, RANK, iterations)
    wanted = (w - (q + b @ a)).norm()
    for alpha in (RANK, 16.0):
        adapters, rest = lora.loftq(dense(), "q", RANK, alpha, format=format, iterations=iterations)
        got = (w - dequantize(rest["q"]) - update(adapters["q"])).norm()
        assert got <= wanted * (1 + 1e-4 if bits == 4 else 1.01), (got, wanted)
        assert rest["q"].format is format
    assert got < 0.95 * (w - dequantize(quantize(w, format))).norm()


def activations(n=400):
    """Inputs with a mean, and with spectra that fall at different rates."""
    fall = lambda rate: torch.exp(-rate * torch.arange(IN, device="cpu"))
    return {
        "q": draw("x", n, IN) * fall(0.15) @ torch.linalg.qr(draw("o", IN, IN))[0] + 2,
        "k": draw("y", n, IN) * fall(0.05),
    }


@pytest.mark.parametrize("rho", [1.0, 2.0])
@pytest.mark.parametrize("stabilised", [False, True], ids=["alpha/r", "alpha/sqrt(r)"])
def test_eva_equals_a_float64_svd(rho, stabilised):
    base, inputs = dense(), activations()
    adapters = lora.eva(base, inputs, RANK, alpha=8.0, rho=rho, rank_stabilised=stabilised)
    shares = []
    for path, x in inputs.items():
        rows = x.double() - x.double().mean(0)
        values, vectors = torch.linalg.eigh(rows.mT @ rows)
        shares += [(float(v), path) for v in (values / values.sum()).flip(0)[: round(RANK * rho)]]
        n = len(adapters[path].a)
        torch.testing.assert_close(
            projection(adapters[path].a), vectors[:, -n:] @ vectors[:, -n:].mT, rtol=0, atol=1e-5
        )
        torch.testing.assert_close(adapters[path].a @ adapters[path].a.mT, torch.eye(n), rtol=0, atol=1e-5)
        assert adapters[path].b.shape == (OUT, n) and not adapters[path].b.any()
        assert scaling(adapters[path]) == pytest.approx(8 / (RANK**0.5 if stabilised else RANK))
    ranks = Counter(path for _, path in sorted(shares, reverse=True)[: 2 * RANK])
    assert {path: len(x.a) for path, x in adapters.items()} == dict(ranks)
    assert sum(ranks.values()) == 2 * RANK and (rho == 1 or ranks["q"] != RANK)


def test_eva_gives_the_ranks_and_directions_of_peft():
    """PEFT sums up principal components of batches, so the directions are equal up to its convergence."""
    inputs = activations()
    config = peft.LoraConfig(
        r=RANK, lora_alpha=8, target_modules=["q", "k"], init_lora_weights="eva", eva_config=peft.EvaConfig(rho=2.0)
    )  # fmt: skip
    model = peft.get_peft_model(Two(), config, low_cpu_mem_usage=True)
    batches = [inputs] * 12
    forward = lambda model, batch: model(batch["q"], batch["k"])
    peft.initialize_lora_eva_weights(
        model, batches, forward_fn=forward, prepare_model_inputs_fn=None,
        prepare_layer_inputs_fn=lambda x, *_: x[0] if isinstance(x, tuple) else x, show_progress_bar=False,
    )  # fmt: skip
    ours = lora.eva(dense(), inputs, RANK, alpha=8.0)
    for path, x in ours.items():
        layer: Any = model.base_model.model.get_submodule(path)
        assert layer.r["default"] == len(x.a) and layer.scaling["default"] == pytest.approx(scaling(x))
        torch.testing.assert_close(projection(x.a), projection(layer.lora_A["default"].weight.data), rtol=0, atol=2e-2)


def test_the_trained_part_is_a_plain_adapter_of_the_first_base():
    base = dense()
    start, rest = lora.pissa(base, "q", RANK)
    trained = {"q": Lora(start["q"].a + 0.1 * draw("da", RANK, IN), start["q"].b, None, start["q"].alpha)}
    plain = lora.combine([trained, start], [1.0, -1.0], "cat")
    assert plain["q"].a.shape == (2 * RANK, IN)
    torch.testing.assert_close(lora.merge(base, plain)["q"], lora.merge(rest, trained)["q"], rtol=0, atol=1e-4)


WEIGHTS = {"q": draw("q", OUT, IN), "n": draw("n", IN), "z": Lazy(lambda: 1 / 0, torch.empty(OUT, IN, device="meta"))}
REFUSED = {
    "no match": (lora.pissa, dict(targets="x"), "targets 'x' match no weight"),
    "rank": (lora.pissa, dict(rank=49), "q: rank is 49; wanted 1 to 48 for a weight (48, 64)"),
    "rank 0": (lora.olora, dict(rank=0), "q: rank is 0; wanted 1 to 48"),
    "niter": (lora.pissa, dict(niter=-1), "niter is -1; wanted None, or at least 0"),
    "alpha": (lora.pissa, dict(alpha=0.0), "alpha is 0.0; wanted it above 0"),
    "dropout": (lora.loftq, dict(dropout=1.0), "dropout is 1.0; wanted 0 <= dropout < 1"),
    "iterations": (lora.loftq, dict(iterations=0), "iterations is 0; wanted at least 1"),
    "a norm": (lora.olora, dict(targets="n"), "n: a weight of shape (64,) cannot be adapted"),
    "not read": (
        lora.pissa,
        dict(targets="z"),
        "z: a Lazy cannot be decomposed, wanted a tensor or Packed; read it or",
    ),
}


@pytest.mark.parametrize(("verb", "options", "message"), REFUSED.values(), ids=REFUSED)
def test_decompositions_refuse(verb, options, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        verb(WEIGHTS, **{"targets": "q", "rank": RANK} | options)


EVA_REFUSED = {
    "nothing": ({}, {}, "eva got no inputs"),
    "path": ({"x": torch.ones(9, IN)}, {}, "x: got inputs of no weight of the base"),
    "width": ({"q": torch.ones(9, 3)}, {}, "q: got inputs (9, 3), wanted [... 64] for (48, 64)"),
    "few": ({"q": torch.ones(7, IN)}, {}, "q: got 7 inputs of width 64, wanted at least rank · rho = 8 of each"),
    "nan": ({"q": torch.full((9, IN), torch.nan)}, {}, "q: got inputs that are not finite"),
    "rho": ({"q": torch.ones(9, IN)}, dict(rho=0.5), "rho is 0.5; wanted at least 1"),
}


@pytest.mark.parametrize(("inputs", "options", "message"), EVA_REFUSED.values(), ids=EVA_REFUSED)
def test_eva_refuses(inputs, options, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        lora.eva(WEIGHTS, inputs, RANK, **options)
