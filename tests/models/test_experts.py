"""Mixtures of experts against the modules of transformers: values, gradients, transforms, packed weights, adapters."""

import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from torch.func import functional_call, grad, grad_and_value, jvp, vmap
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssMLP
from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock, load_balancing_loss_func
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

from fquant import INT4, NF4, NF4_DQ, dequantize, jit, lora, quantize, random, tree
from models import decoder, experts
from models.config import Config

CFG = Config(96, 64, 1, 4, 2, 16, 48, num_experts=7, experts_per_token=3)
SIZES: dict[str, Any] = {
    "hidden_size": 64, "intermediate_size": 48, "moe_intermediate_size": 48, "num_local_experts": 7, "num_experts": 7,
    "num_experts_per_tok": 3, "hidden_act": "silu", "experts_implementation": "eager",
}  # fmt: skip
GPT_OSS = dataclasses.replace(
    CFG, routing="softmax_of_chosen", expert_bias=True, interleaved=True, swiglu_limit=0.5, swiglu_alpha=1.3
)
ROWS = {  # our config, their module, their config
    "mixtral": (
        dataclasses.replace(CFG, routing="renormalised_wide"), MixtralSparseMoeBlock,
        transformers.MixtralConfig(**SIZES),
    ),
    "qwen3_moe": (
        dataclasses.replace(CFG, routing="softmax"), Qwen3MoeSparseMoeBlock,
        transformers.Qwen3MoeConfig(**SIZES, norm_topk_prob=False),
    ),
    "qwen3_moe, renormalised": (CFG, Qwen3MoeSparseMoeBlock, transformers.Qwen3MoeConfig(**SIZES, norm_topk_prob=True)),
    "one of them": (
        dataclasses.replace(CFG, experts_per_token=1), Qwen3MoeSparseMoeBlock,
        transformers.Qwen3MoeConfig(**SIZES | {"num_experts_per_tok": 1}, norm_topk_prob=True),
    ),
    "all of them": (
        dataclasses.replace(CFG, experts_per_token=7), Qwen3MoeSparseMoeBlock,
        transformers.Qwen3MoeConfig(**SIZES | {"num_experts_per_tok": 7}, norm_topk_prob=True),
    ),
    "gpt_oss": (GPT_OSS, GptOssMLP, transformers.GptOssConfig(**SIZES, swiglu_limit=0.5, swiglu_alpha=1.3)),
}  # fmt: skip
X = random.normal(random.key(1), (2, 11, 64))


def draw(cfg, seed=2):
    """Draw the weights of a layer's experts, as our fields."""
    shapes = {path: t for path, t in tree.items(decoder.shapes(cfg).layers[0]) if "gate" in path or "down" in path}
    shapes |= {path: t for path, t in tree.items(decoder.shapes(cfg).layers[0]) if "router" in path}
    key = random.key(seed)
    out = {path: 0.15 * random.normal(random.fold(key, path), tuple(t.shape)) for path, t in shapes.items()}
    return out | {"router": 4 * out["router"]}


def layer(weights):
    return SimpleNamespace(**{"router_bias": None, "gate_up_bias": None, "down_bias": None, **weights})


def theirs(kind, weights):
    """Return the names and tensors of a module of transformers."""
    turn = (lambda t: t.mT) if kind is GptOssMLP else (lambda t: t)
    router = "router" if kind is GptOssMLP else "gate"
    found = {f"{router}.weight": weights["router"], "experts.gate_up_proj": turn(weights["gate_up"])}
    found |= {"experts.down_proj": turn(weights["down"])}
    if kind is GptOssMLP:
        found |= {"router.bias": weights["router_bias"], "experts.gate_up_proj_bias": weights["gate_up_bias"]}
        found |= {"experts.down_proj_bias": weights["down_bias"]}
    return found


@pytest.mark.parametrize("name", ROWS)
def test_values_and_gradients(name):
    cfg, kind, config = ROWS[name]
    module, weights = kind(config), draw(cfg)

    def wanted(weights, x):
        y = functional_call(module, theirs(kind, weights), (x,))
        return y[0] if isinstance(y, tuple) else y

    ours = lambda weights, x: experts.mixture(x, layer(weights), cfg)
    torch.testing.assert_close(ours(weights, X), wanted(weights, X), rtol=0, atol=1e-5)
    leaves = {name: t.requires_grad_() for name, t in weights.items()} | {"x": X.clone().requires_grad_()}
    wave = lambda y: (y * torch.linspace(0.2, 1.5, y.numel()).reshape(y.shape)).sin().sum()
    theirs_of = dict(zip(leaves, torch.autograd.grad(
        wave(wanted(weights, leaves["x"])), list(leaves.values()), allow_unused=True), strict=True))  # fmt: skip
    plain = tree.map(torch.Tensor.detach, weights)
    grads, dx = grad(lambda weights, x: wave(ours(weights, x)), (0, 1))(plain, X)
    for path, got in {**grads, "x": dx}.items():
        want = theirs_of[path]
        torch.testing.assert_close(got, torch.zeros_like(got) if want is None else want, rtol=1e-4, atol=1e-5, msg=path)
    captured = jit(lambda weights, x: (ours(weights, x), grad(lambda x: wave(ours(weights, x)))(x)))
    assert all(map(torch.equal, captured(plain, X), (ours(plain, X), dx)))


def test_transforms():
    """Map over examples and over models, and push tangents forward, as a loop and as differences do."""
    cfg, weights = GPT_OSS, tree.map(torch.Tensor.double, draw(GPT_OSS))
    x = X.double()
    f = lambda weights, x: experts.mixture(x, layer(weights), cfg)
    torch.testing.assert_close(vmap(f, (None, 0))(weights, x), f(weights, x))
    many = tree.map(lambda a, b: torch.stack([a, b]), weights, tree.map(torch.Tensor.double, draw(cfg, 3)))
    each = [f(tree.map(lambda t, i=i: t[i], many), x[i]) for i in range(2)]
    torch.testing.assert_close(vmap(f)(many, x), torch.stack(each))
    g = lambda x: grad(lambda x: f(weights, x).sin().sum())(x)
    v, step = x.cos(), 1e-6
    difference = (g(x + step * v) - g(x - step * v)) / (2 * step)
    torch.testing.assert_close(jvp(g, (x,), (v,))[1], difference, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("format", [NF4, NF4_DQ, INT4], ids=lambda f: f.name)
@pytest.mark.parametrize("shared", [False, True])
def test_packed_with_adapters(format, shared):
    """Packed experts equal their decoded weights; adapters of each expert, or shared by all, are merged exactly."""
    weights = draw(GPT_OSS)
    packed = weights | {name: quantize(weights[name], format) for name in ("gate_up", "down")}
    dense = dequantize(packed)
    f = lambda weights, x: experts.mixture(x, layer(weights), GPT_OSS)
    torch.testing.assert_close(f(packed, X), f(dense, X), rtol=0, atol=2e-5)
    torch.testing.assert_close(
        grad(lambda x: f(packed, x).sin().sum())(X), grad(lambda x: f(dense, x).sin().sum())(X), rtol=0, atol=1e-4
    )
    adapters = lora.init(packed, "gate_up|down", rank=2, alpha=4, shared=shared)
    adapters = tree.map(lambda t: t + 0.03, adapters)
    verb = lambda adapters, packed, x: f(lora.attach(packed, adapters), x)
    torch.testing.assert_close(verb(adapters, packed, X), f(lora.merge(packed, adapters), X), rtol=0, atol=2e-5)
    step = lambda adapters, packed, x: grad(lambda a: verb(a, packed, x).sin().sum())(adapters)
    grads = step(adapters, packed, X)
    assert all(t.abs().max() > 0 for t in tree.leaves(grads))
    assert all(map(torch.equal, tree.leaves(jit(step)(adapters, packed, X)), tree.leaves(grads)))


@pytest.mark.parametrize("masked", [False, True])
def test_load_balancing_loss(masked):
    scores = tuple(random.normal(random.key(i), (22, 7)) for i in range(3))
    mask = (torch.arange(22) % 5 > 0).long().reshape(2, 11) if masked else None
    wanted = load_balancing_loss_func(scores, 7, 3, mask)
    assert isinstance(wanted, torch.Tensor)
    torch.testing.assert_close(experts.load_balancing_loss(scores, 3, mask), wanted)
    theirs = grad(lambda scores: load_balancing_loss_func(scores, 7, 3, mask))(scores)
    torch.testing.assert_close(grad(lambda scores: experts.load_balancing_loss(scores, 3, mask))(scores), theirs)


@pytest.mark.parametrize("n", [0, 5])
def test_load_balancing_loss_of_no_tokens_is_zero(n):
    f = lambda scores: experts.load_balancing_loss([scores], 3, torch.zeros(n))
    gradient, value = grad_and_value(f)(torch.randn(n, 7, generator=torch.Generator().manual_seed(0)))
    assert value == 0 and gradient.count_nonzero() == 0


def test_ties_and_unused_experts():
    """Send all tokens to the same experts; those without a token get no gradient, and nothing is NaN."""
    weights = draw(CFG) | {"router": torch.zeros(7, 64)}
    y, grads = jit(lambda w, x: (
        experts.mixture(x, layer(w), CFG), grad(lambda w: experts.mixture(x, layer(w), CFG).sum())(w)
    ))(weights, X)  # fmt: skip
    used = grads["down"].flatten(1).abs().amax(1) > 0
    assert int(used.sum()) == 3 and all(t.isfinite().all() for t in (y, *tree.leaves(grads)))


BAD = {
    "per token": ({"experts_per_token": 8}, "experts_per_token = 8, want 1 to num_experts = 7"),
    "none per token": ({"experts_per_token": 0}, "experts_per_token = 0, want 1 to num_experts = 7"),
    "routing": ({"routing": "sinkhorn"}, "routing = 'sinkhorn', want one of softmax, renormalised"),
    "fused": ({"fused": True}, "fused = True beside experts"),
    "limit": ({"swiglu_limit": 0.0}, "swiglu_limit = 0.0, want a positive number or None"),
}


@pytest.mark.parametrize("change, message", BAD.values(), ids=BAD)
def test_bad_config(change, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(CFG, **change)
