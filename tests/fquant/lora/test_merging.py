"""Tests of fquant.lora.merging: requantised merges and their losses, whole weights, stacks, and files of models."""

import pytest
import torch

from fquant import embedding, linear, lora, quantize, random, tree
from fquant.format import INT8, NF4, NF4_DQ
from fquant.lora import Lora
from fquant.packed import Packed, dequantize
from fquant.packed_linear import scaling
from models import decoder, hf
from models.config import Config


def draw(name, *shape):
    return random.normal(random.fold(random.key(5), name), shape)


def a_lora(size, out=48, width=64, rank=4):
    """An adapter whose update has ``size`` times the norm of a standard normal weight [out width]."""
    x = Lora(draw("a", rank, width), draw("b", out, rank), alpha=float(rank))
    factor = size * (out * width) ** 0.5 / (x.b @ x.a).norm()
    return Lora(x.a, x.b * factor, alpha=x.alpha)


@pytest.mark.parametrize("format", [NF4, NF4_DQ, INT8], ids=lambda f: f.name)
def test_merge_packed_measures_its_loss(format):
    base = {"q": quantize(draw("q", 48, 64), format), "k": draw("k", 48, 64), "norm": draw("n", 64)}
    adapters = {"q": a_lora(0.1), "k": a_lora(0.1)}
    merged, loss = lora.merge_packed(base, adapters)
    start = dequantize(base["q"]).double()
    wanted = adapters["q"].b.double() @ adapters["q"].a.double()
    assert torch.equal(merged["q"].codes, quantize((start + wanted).float(), format).codes)
    error = (dequantize(merged["q"]).double() - start - wanted).norm() / wanted.norm()
    assert loss["q"] == pytest.approx(error.item(), rel=1e-4) and loss.keys() == {"q", "k"}
    assert isinstance(merged["k"], torch.Tensor) and loss["k"] < 1e-6 and merged["norm"] is base["norm"]
    torch.testing.assert_close(merged["k"], lora.merge(base, adapters)["k"], rtol=0, atol=0)


def test_small_updates_are_lost_in_four_bits():
    """Compare with the figures of bitsandbytes' merge: updates of 1 % are rounded away, and those of 30 % arrive."""
    base = {"q": quantize(draw("q", 48, 64), NF4)}
    losses = {size: lora.merge_packed(base, {"q": a_lora(size)})[1]["q"] for size in (0.01, 0.1, 0.3)}
    assert losses[0.01] > 0.95 and 0.4 < losses[0.1] < 1.1 and losses[0.3] < 0.45, losses
    precise = lora.merge_packed(base, {"q": a_lora(0.1)}, format=INT8)
    assert precise[0]["q"].format is INT8 and precise[1]["q"] < 0.2
    none, zero = Lora(torch.ones(1, 64), torch.zeros(48, 1)), quantize(draw("q", 48, 64), NF4)
    merged, loss = lora.merge_packed({"q": zero}, {"q": none})
    assert loss == {"q": 0.0} and torch.equal(merged["q"].codes, zero.codes)
    assert lora.merge_packed({"q": draw("q", 48, 64)}, {"q": none}, NF4)[1]["q"] == float("inf")


def test_dora_and_nested_adapters_merge_packed():
    base = {"q": quantize(draw("q", 48, 64), INT8)}
    adapters = {"q": Lora(draw("a", 4, 64), draw("b", 48, 4), draw("m", 48).abs() + 1, 8.0)}
    merged, loss = lora.merge_packed(base, adapters)
    torch.testing.assert_close(dequantize(merged["q"]), lora.merge(base, adapters)["q"], rtol=0, atol=0.05)
    assert 0 < loss["q"] < 0.05
    twice, loss = lora.merge_packed(lora.attach(base, {"q": a_lora(0.5)}), {"q": a_lora(0.25)}, INT8)
    wanted = dequantize(base["q"]) + 1.5 * a_lora(0.5).b @ a_lora(0.5).a
    torch.testing.assert_close(dequantize(twice["q"]), wanted, rtol=0, atol=0.05)


@pytest.mark.parametrize("format", [None, NF4, INT8], ids=str)
def test_tables_merge(format):
    table = draw("e", 20, 64)
    base = {"embed": quantize(table, format) if format else table}
    adapters = {"embed": Lora(draw("a", 4, 64), draw("b", 20, 4), alpha=8.0)}
    tokens = torch.tensor([[0, 19, 3]], device="cpu")
    attached = embedding(tokens, lora.attach(base, adapters)["embed"])
    torch.testing.assert_close(embedding(tokens, lora.merge(base, adapters)["embed"]), attached)
    merged, loss = lora.merge_packed(base, adapters)
    error = (embedding(tokens, merged["embed"]) - attached).norm() / attached.norm()
    assert error < {None: 1e-6, NF4: 0.15, INT8: 0.01}[format] and loss.keys() == {"embed"}


def test_stacks_of_experts_merge_and_map():
    base, x = {"up": draw("up", 3, 48, 64), "n": draw("n", 3)}, draw("x", 3, 5, 64)
    adapters = {"up": Lora(draw("a", 3, 4, 64), draw("b", 3, 48, 4), alpha=8.0)}
    attached = lora.attach(base, adapters)["up"]
    merged = lora.merge(base, adapters)["up"]
    naive = torch.stack([w + 2 * b @ a for w, a, b in zip(base["up"], adapters["up"].a, adapters["up"].b, strict=True)])
    torch.testing.assert_close(merged, naive)
    torch.testing.assert_close(torch.vmap(linear)(x, attached), x @ naive.mT, rtol=1e-4, atol=1e-3)
    for a, b in ((4, 4), (2, 2)):
        wrong = {"up": Lora(draw("a", a, 4, 64), draw("b", b, 48, 4))}
        with pytest.raises(
            ValueError, match=r"up: an adapter a .* does not fit a weight \(3, 48, 64\); wanted a \[3 rank"
        ):
            lora.attach(base, wrong)
    for a, b in (((4, 64), (48, 4)), ((4, 64), (3, 48, 4))):  # shared by all members
        shared = {"up": Lora(draw("a", *a), draw("b", *b), alpha=8.0)}
        torch.testing.assert_close(
            lora.merge(base, shared)["up"], base["up"] + 2 * shared["up"].b @ shared["up"].a, rtol=1e-4, atol=1e-4
        )
    with pytest.raises(ValueError, match=r"does not fit a weight \(3, 48, 64\)"):
        lora.attach(base, {"up": Lora(draw("a", 4, 64), draw("b", 47, 4))})


def test_whole_weights_replace_leaves():
    base = {"head": quantize(draw("h", 20, 64), NF4), "q": draw("q", 48, 64).bfloat16(), "q_bias": torch.zeros(48)}
    new = {"head": draw("h2", 20, 64), "q_bias": draw("bias", 48)}
    got = lora.replace_weights(base, new)
    assert torch.equal(got["head"], new["head"]) and torch.equal(got["q_bias"], new["q_bias"]) and got["q"] is base["q"]
    assert lora.replace_weights(base, {"q": draw("q2", 48, 64)})["q"].dtype == torch.bfloat16
    with pytest.raises(ValueError, match=r"^tail: got a weight of that path, wanted one of the base"):
        lora.replace_weights(base, {"tail": draw("h", 2)})
    with pytest.raises(ValueError, match=r"^head: got the shape \(21, 64\), wanted \(20, 64\); resize the base"):
        lora.replace_weights(base, {"head": draw("h", 21, 64)})


def test_a_merged_model_is_saved_and_computes_the_same(tmp_path):
    cfg = Config(vocab=32, dim=64, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=16, hidden=64)
    params = tree.map_with_path(lambda path, like: 0.2 * draw(path, *like.shape), decoder.shapes(cfg))
    base = tree.map_at(r"layers\.\d+\.(q|v|down)", lambda w: quantize(w, NF4), params)
    adapters = lora.init(base, r"embed|layers\.\d+\.(q|v|down)", rank=4)
    adapters = tree.map_with_path(lambda path, t: t + 0.1 * draw(path, *t.shape), adapters)
    tokens = torch.arange(10, device="cpu").reshape(1, 10)
    want = decoder.forward(lora.attach(base, adapters), tokens, cfg)
    hf.save(tmp_path / "dense", cfg, lora.merge(base, adapters))
    got = decoder.forward(hf.load(tmp_path / "dense")[1], tokens, cfg)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
    packed, _ = lora.merge_packed(base, adapters)
    assert isinstance(packed.layers[0].q, Packed)
    hf.save(tmp_path / "packed", cfg, packed, dequantize=torch.float32)
    torch.testing.assert_close(
        decoder.forward(hf.load(tmp_path / "packed")[1], tokens, cfg), decoder.forward(packed, tokens, cfg),
        rtol=1e-4, atol=1e-4,
    )  # fmt: skip
    assert scaling(adapters["embed"]) == 4
