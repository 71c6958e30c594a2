"""Attention sinks against gpt-oss of transformers: its eager attention, with windows, in every dtype and derivative."""

from types import SimpleNamespace

import pytest
import torch
from torch.func import grad_and_value
from transformers.models.gpt_oss import modeling_gpt_oss

from fquant import NF4, jit, lora, quantize, random, tree
from models import decoder
from models.attention import attention
from models.config import Config
from tests.helpers.arrays import normal

CFG = Config(
    vocab=32, dim=24, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=8, hidden=32, window=5, full_layers=(1,),
    attention_bias=True, sinks=True, max_positions=32,
)  # fmt: skip
TOKENS = torch.randint(0, 32, (2, 20), generator=torch.Generator().manual_seed(0))


def theirs(q, k, v, sinks, window=None):
    """Compute gpt-oss's eager attention: [b t h e] each."""
    module = SimpleNamespace(sinks=sinks, num_key_value_groups=q.shape[2] // k.shape[2], training=False)
    place = torch.arange(q.shape[1])
    seen = (place[:, None] >= place) & (place[:, None] < place + (window or q.shape[1]))
    mask = torch.zeros(seen.shape, dtype=q.dtype).masked_fill(~seen, torch.finfo(q.dtype).min)[None, None]
    heads = (t.transpose(1, 2) for t in (q, k, v))
    return modeling_gpt_oss.eager_attention_forward(module, *heads, mask, scaling=q.shape[-1] ** -0.5)[0]


def drawn(dtype=torch.float32):
    shapes = (2, 150, 4, 16), (2, 150, 2, 16), (2, 150, 2, 16), (4,)
    return tuple(normal(*shape, seed=i).to(dtype).requires_grad_() for i, shape in enumerate(shapes))


@pytest.mark.parametrize("window", [None, 20])
def test_float32(window):
    """Compare the result, and the gradients of queries, keys, values and sinks."""
    args, g = drawn(), normal(2, 150, 4, 16, seed=9).float()
    ours, wanted = attention(*args[:3], window=window, sinks=args[3]), theirs(*args, window)
    torch.testing.assert_close(ours, wanted, rtol=0, atol=2e-5)
    assert (ours - attention(*args[:3], window=window)).abs().max() > 0.1
    found, right = (torch.autograd.grad((y * g).sum(), args) for y in (ours, wanted))
    for got, true in zip(found, right, strict=True):
        torch.testing.assert_close(got, true, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(dtype):
    """Compare with float64: the error is at most that of transformers, whose softmax is in the narrow dtype."""
    args = drawn(dtype)
    exact = theirs(*(t.double() for t in args))
    far = lambda y: (y.double() - exact).square().mean().sqrt()
    assert far(attention(*args[:3], sinks=args[3])) <= far(theirs(*args)) < 1e-2


def test_a_decoder_with_sinks(monkeypatch):
    """Compare a decoder with the same one whose attention is that of transformers; captured equals eager."""
    shaken = lambda path, t: t + 0.3 * random.normal(random.fold(random.key(1), path), tuple(t.shape))
    params = tree.map_with_path(shaken, decoder.init(CFG, random.key(0)))
    verb = grad_and_value(lambda params, tokens: decoder.loss(params, tokens, tokens.roll(-1, 1), CFG))
    grads, loss = verb(params, TOKENS)
    assert all(map(torch.equal, tree.leaves(jit(verb)(params, TOKENS)), tree.leaves((grads, loss))))
    with monkeypatch.context() as patch:
        patch.setattr(decoder, "attention", lambda q, k, v, *a, sinks: theirs(q, k, v, sinks, a[1]))
        wanted, right = verb(params, TOKENS)
    torch.testing.assert_close(loss, right, rtol=0, atol=1e-5)
    for path, got in tree.items(grads):
        torch.testing.assert_close(got, tree.get(wanted, path), rtol=1e-4, atol=1e-4, msg=path)
    assert tree.get(grads, "layers.1.sinks").abs().max() > 1e-4


def test_adapters_beside_sinks():
    base = tree.map_at(r"layers\.\d+\.(q|v)", lambda w: quantize(w, NF4), decoder.init(CFG, random.key(0)))
    adapters = lora.init(base, r"layers\.\d+\.q", rank=2, alpha=4, key=0)
    loss = lambda adapters: decoder.loss(lora.attach(base, adapters), TOKENS, TOKENS.roll(-1, 1), CFG)
    assert any(t.abs().max() > 0 for t in tree.leaves(grad_and_value(loss)(adapters)[0]))


def test_other_shapes_are_refused():
    q, k, v, sinks = drawn()
    with pytest.raises(ValueError, match=r"sinks: shape \(3,\), want one score for each head, \(4,\)"):
        attention(q, k, v, sinks=sinks[:3])
