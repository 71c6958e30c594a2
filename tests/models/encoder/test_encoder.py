"""Encoders against transformers: gradients, bfloat16, padding; and adapters, transforms, captures and faults."""

import dataclasses
from typing import Any

import pytest
import torch
from torch.func import grad, grad_and_value, jvp, vmap

from fquant import NF4, dequantize, jit, lora, quantize, random, tree
from models import blocks, encoder, hf_encoder
from models.encoder import EncoderConfig
from models.hf_encoder.names import tensor_name
from tests.helpers.models.encoders import (
    BERT,
    CONFIGS,
    MASK,
    TOKENS,
    TYPES,
    our_results,
    random_params,
    their_results,
    theirs,
)  # fmt: skip

TRAINED = ("bert, pretraining", "bert, labels", "roberta, masked_lm", "distilbert, labels", "electra, discriminator")
WIDE = dataclasses.replace(CONFIGS["bert, labels"], dim=64, hidden=128)  # so that blocks of NF4 fit
LINEAR = r"layers\.\d+\.(q|k|v|o|up|down)"


def types_for(cfg):
    return TYPES if cfg.num_types > 1 else None


def score(results, mask):
    """Return a scalar that every result at a visible token contributes to."""
    parts = [t * mask[..., None] if t.ndim == 3 else t for t in results.values()]
    return sum((t.sin() * (1 + i)).mean() for i, t in enumerate(parts))


@pytest.mark.parametrize("name", TRAINED)
def test_gradients(name, tmp_path):
    """Compare the gradient of every parameter; the captured function has the bits of the eager one."""
    cfg, params = CONFIGS[name], random_params(CONFIGS[name])
    hf_encoder.save(tmp_path, cfg, params)
    model = theirs(tmp_path)
    found = their_results(model, TOKENS, MASK, types_for(cfg))
    keys = found.keys()
    wanted = score(found, MASK)
    wanted.backward()

    def verb(params, tokens, mask, types):
        results = our_results(cfg, params, tokens, mask, types)
        return score({key: results[key] for key in keys}, mask)

    given = params, TOKENS, MASK, types_for(cfg)
    grads, value = grad_and_value(verb)(*given)
    torch.testing.assert_close(value, wanted, rtol=0, atol=1e-5)
    named = dict(model.named_parameters())
    for path, got in tree.items(grads):
        torch.testing.assert_close(got, named[tensor_name(path, cfg)].grad, rtol=1e-4, atol=1e-4, msg=path)
    loss = lambda params, tokens, mask: score(our_results(cfg, params, tokens, mask), mask)
    eager, captured = grad(loss)(params, TOKENS, MASK), jit(grad(loss))(params, TOKENS, MASK)
    assert all(map(torch.equal, tree.leaves(captured), tree.leaves(eager)))


@pytest.mark.parametrize("name", TRAINED)
def test_bfloat16(name, tmp_path):
    """Compare with float64: our results in bfloat16 are hardly further from it than those of transformers."""
    cfg, params = CONFIGS[name], random_params(CONFIGS[name], torch.bfloat16)
    hf_encoder.save(tmp_path, cfg, params)
    with torch.no_grad():
        found = their_results(theirs(tmp_path, torch.bfloat16), TOKENS, MASK, types_for(cfg))
    exact = our_results(cfg, tree.map(lambda t: t.double(), params), TOKENS, MASK, types_for(cfg))
    ours = our_results(cfg, params, TOKENS, MASK, types_for(cfg))
    seen = lambda t: t[MASK.bool()] if t.ndim == 3 else t
    for key, other in found.items():
        far = lambda t, key=key: (seen(t).double() - seen(exact[key])).square().mean().sqrt()
        assert ours[key].dtype is torch.bfloat16
        if other.ndim == 3:
            assert far(ours[key]) <= 1.3 * far(other)
        else:  # too few numbers to compare their errors
            assert far(ours[key]) <= 2.0**-7 * exact[key].abs().max()


def test_packed_with_adapters():
    """Train adapters on packed weights: values and gradients equal those of the dequantised weights, one by one too."""
    cfg, params = WIDE, random_params(WIDE)
    packed = tree.map_at(LINEAR, lambda w: quantize(w, NF4), params)
    dense = tree.map_at(LINEAR, lambda w: dequantize(quantize(w, NF4)), params)
    adapters = tree.map(lambda t: t + 0.02, lora.init(packed, r"layers\.\d+\.(q|v|down)", rank=2, alpha=4, key=0))
    labels = torch.tensor([2, 0])

    def loss(adapters, base, tokens, labels, mask):
        x = encoder.forward(lora.attach(base, adapters), tokens, cfg, segments=mask)
        return blocks.cross_entropy(encoder.classify(base, x, cfg), labels)

    given = TOKENS, labels, MASK
    grads, value = grad_and_value(loss)(adapters, packed, *given)
    wanted, right = grad_and_value(loss)(adapters, dense, *given)
    torch.testing.assert_close(value, right, rtol=0, atol=1e-5)
    for (path, got), true in zip(tree.items(grads), tree.leaves(wanted), strict=True):
        assert got.abs().max() > 0
        torch.testing.assert_close(got, true, rtol=1e-4, atol=1e-5, msg=path)
    each = vmap(grad(loss), in_dims=(None, None, 0, 0, 0))(adapters, packed, *given)
    for a, b in zip(tree.leaves(each), tree.leaves(grads), strict=True):
        torch.testing.assert_close(a.mean(0), b, rtol=1e-4, atol=1e-5)
    moved = tree.map(lambda t: torch.ones_like(t), adapters)
    _, slope, *_ = jvp(lambda a: loss(a, packed, *given), (adapters,), (moved,))
    torch.testing.assert_close(slope, sum(t.sum() for t in tree.leaves(grads)), rtol=1e-4, atol=1e-5)
    merged = our_results(cfg, lora.merge(packed, adapters), TOKENS, MASK)["classify"]
    attached = our_results(cfg, lora.attach(packed, adapters), TOKENS, MASK)["classify"]
    torch.testing.assert_close(merged, attached, rtol=0, atol=2e-5)


MASKS = {
    "right": (MASK, {}),
    "left": (MASK.flip(1), {"position_ids": (MASK.flip(1).cumsum(1) - 1).clamp(min=0)}),
    "a hole": (torch.ones_like(MASK).index_fill(1, torch.tensor([5, 6, 20]), 0), {}),
}


@pytest.mark.parametrize("name", ["bert", "roberta"])
@pytest.mark.parametrize("at", MASKS)
def test_attention_masks(at, name, tmp_path):
    """An attention mask is a numbering of documents; on the left, positions begin behind the padding."""
    cfg, (mask, options) = CONFIGS[name], MASKS[at]
    params = random_params(cfg)
    hf_encoder.save(tmp_path, cfg, params)
    tokens = torch.where(mask.bool(), TOKENS, 1)
    with torch.no_grad():
        wanted = their_results(theirs(tmp_path), tokens, mask, **({} if name == "roberta" else options))["hidden"]
    got = encoder.forward(params, tokens, cfg, segments=mask)
    torch.testing.assert_close(got[mask.bool()], wanted[mask.bool()], rtol=0, atol=2e-5)


@pytest.mark.parametrize("name", ["bert", "roberta", "distilbert"])
def test_packed_documents(name):
    """Compute two documents in one sequence, also interleaved with padding, as each alone."""
    cfg, params = CONFIGS[name], random_params(CONFIGS[name])
    segments = torch.tensor([7] * 10 + [3] * 20 + [0] * 6).expand(2, 36)
    got = encoder.forward(params, TOKENS, cfg, segments=segments)
    wanted = [encoder.forward(params, part, cfg) for part in TOKENS.split([10, 20, 6], 1)]
    torch.testing.assert_close(got, torch.cat(wanted, 1), rtol=0, atol=2e-5)
    one = encoder.forward(params, TOKENS[0], cfg, segments=segments[0])
    torch.testing.assert_close(one, got[0], rtol=0, atol=2e-5)


def test_roberta_counts_no_padding():
    tokens = torch.tensor([[5, 1, 6, 7, 1, 1, 8, 9]])
    assert encoder.positions(tokens, padding=1).tolist() == [[2, 1, 3, 4, 1, 1, 5, 6]]
    segments = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 0]])
    assert encoder.positions(tokens, segments, 1).tolist() == [[2, 1, 3, 2, 1, 1, 3, 6]]
    assert encoder.positions(tokens, segments).tolist() == [[0, 1, 2, 0, 1, 2, 3, 7]]


def test_second_derivatives_and_forward_mode():
    """Compare with the same function of the model's tensors by torch.autograd, in float64."""
    cfg = dataclasses.replace(BERT, num_layers=1, dim=8, num_heads=2, hidden=8, vocab=12, max_positions=6)
    params = tree.map(lambda t: t.double(), random_params(cfg))
    tokens = torch.tensor([[3, 4, 5, 0]])
    mask = torch.tensor([[1, 1, 1, 0]])
    f = lambda q: encoder.pooled(p := tree.map_at(r"layers\.0\.q", lambda _: q, params),
                                 encoder.forward(p, tokens, cfg, segments=mask), cfg).sum()  # fmt: skip
    q = params.layers[0].q
    assert torch.autograd.gradcheck(f, q.clone().requires_grad_(), check_forward_ad=True)
    assert torch.autograd.gradgradcheck(f, q.clone().requires_grad_())


def test_init_and_dims():
    """Parameters begin as transformers draws them, and every tensor has a name for each dim."""
    for cfg in CONFIGS.values():
        params = encoder.init(cfg, random.key(0))
        assert tree.structure(params) == tree.structure(encoder.shapes(cfg))
        for path, t in tree.items(params):
            if t.ndim == 2:
                bound = 4 * 0.02 / t.numel() ** 0.5  # four standard deviations of the mean
                assert abs(t.std().item() - 0.02) < bound and abs(t.mean().item()) < bound
            else:
                assert torch.all(t == float(path.endswith("norm")))
        for block, inner in encoder.dims(cfg).items():
            for path, names in inner.items():
                assert len(names.split()) == tree.get(params, f"{block}.{path}").ndim


def small(**options):
    return encoder.forward(random_params(BERT), **{"tokens": TOKENS, "cfg": BERT, **options})


WRONG: dict[str, Any] = {
    "length": (ValueError, "tokens: 41 in a sequence, want at most 40", {"tokens": torch.zeros(1, 41).long()}),
    "vocabulary": (IndexError, r"tokens: 96 at \[0, 0\], want 0 to 95", {"tokens": torch.tensor([[96]])}),
    "dtype": (TypeError, "tokens: torch.float32, want int64", {"tokens": TOKENS.float()}),
    "types": (IndexError, "types: 2 at", {"types": torch.full_like(TOKENS, 2)}),
    "types' shape": (ValueError, r"types: shape \(1, 36\), want the tokens' \(2, 36\)", {"types": TYPES[:1]}),
    "mask's dtype": (TypeError, "segments: torch.bool, want int64 or int32", {"segments": MASK.bool()}),
    "mask's shape": (ValueError, r"segments: shape \(36,\), want", {"segments": MASK[0]}),
    "layers": (ValueError, "layers: 2 of them, want num_layers = 3", {"cfg": dataclasses.replace(BERT, num_layers=3)}),
    "no types": (ValueError, "types: given, but num_types = 0", {"cfg": CONFIGS["distilbert"], "types": TYPES}),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_malformed_calls(name):
    error, message, options = WRONG[name]
    with pytest.raises(error, match=message):
        small(**options)


def test_absent_heads():
    x = small()
    for name in ("masked_lm", "next_sentence"):
        with pytest.raises(ValueError, match=f"{name}: this config has no such head"):
            getattr(encoder, name)(random_params(BERT), x, BERT)
    with pytest.raises(ValueError, match="num_labels: this config has no such head"):
        encoder.classify(random_params(BERT), x, BERT)
    with pytest.raises(ValueError, match="pooler: this config has no such head"):
        encoder.pooled(random_params(BERT), x, dataclasses.replace(BERT, pooler=False))


CONFIG_FAULTS: dict[str, Any] = {
    "dim = 30 is not a multiple of num_heads = 4": {"dim": 30},
    "hidden = 0, want a positive integer": {"hidden": 0},
    "num_types = -1, want 0 or a positive": {"num_types": -1},
    "activation = 'mish', want one of gelu, gelu_tanh, relu, silu": {"activation": "mish"},
    "padding = 96, want a token below vocab = 96": {"padding": 96},
    "max_positions = 40, want more than padding": {"padding": 39},
    "pooler = False beside a head that reads it": {"pooler": False, "num_labels": 2},
}


@pytest.mark.parametrize("message", CONFIG_FAULTS)
def test_config_faults(message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(BERT, **CONFIG_FAULTS[message])


def test_a_config_is_a_value():
    assert hash(BERT) == hash(EncoderConfig(96, 32, 2, 4, 48, 40, pooler=True))
