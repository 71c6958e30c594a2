"""Public verbs, each with the arguments of one call, as (function, tree of arguments on the host)."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.func import grad, jvp, vmap

import fquant
from fquant import (
    AQ_3X8,
    NF4,
    NF4_DQ,
    dequantize,
    embedding,
    grouped_linear,
    linear,
    lora,
    optim,
    quantize,
    random,
    tree,
)
from fquant.format import FORMATS
from models import autoencoder, blocks, decoder, encoder, generate
from models.config import Config
from models.losses import distillation, preference
from tests.helpers.arrays import randn
from tests.helpers.devices.vq_verbs import VQ
from tests.helpers.models.encoders import CONFIGS as ENCODERS
from tests.helpers.models.encoders import random_params

Verb = tuple[Callable[..., Any], tuple[Any, ...]]
W, X, KEY = randn(96, 64), randn(2, 5, 64, seed=1), random.key(3)
TOKENS = torch.randint(0, 96, (2, 12), generator=torch.Generator().manual_seed(4))
CFG = Config(
    vocab=96, dim=64, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=16, hidden=128, norm_eps=1e-5,
    rope_theta=10000.0, rope_scaling=None, max_positions=64, tied=False, attention_bias=True, mlp_bias=True,
)  # fmt: skip


def formats() -> dict[str, Verb]:
    """Each format: quantise, decode, products of one row, of some, and their dual, and rows of tokens."""
    verbs: dict[str, Verb] = {}
    for name, format in FORMATS.items():
        if format.flat:
            continue
        p, few = quantize(W, format), quantize(W.bfloat16(), format)
        verbs |= {
            f"quantize {name}": (partial(quantize, format=format), (W,)),
            f"quantize bf16 {name}": (partial(quantize, format=format), (W.bfloat16(),)),
            f"dequantize {name}": (dequantize, (p,)),
            f"linear {name}": (linear, (X, p, randn(96))),
            f"linear of a row {name}": (linear, (X.bfloat16()[0, :1], few)),
            f"dual {name}": (grad(lambda x, p: linear(x, p).sin().sum()), (X, p)),
            f"embedding {name}": (embedding, (TOKENS, p)),
        }
    return verbs


def adapters() -> dict[str, Verb]:
    """Adapters: made, attached, merged, and differentiated."""
    base = {"w": quantize(W, NF4_DQ)}
    plain, dropped = (lora.init(base, "w", rank=4, key=1, dropout=p) for p in (0.0, 0.3))
    shaken = tree.map(lambda t: t + 0.05 * randn(*t.shape, seed=2), plain)
    attached = lambda x, base, a, key=None, **more: linear(x, lora.attach(base, a, key, **more)["w"])
    trained = lambda a, x, base, **more: attached(x, base, a, **more).sin().sum()
    aware = grad(partial(trained, merge_aware=True))
    stack = tree.map(lambda *t: torch.stack(t), *[quantize(randn(24, 64, seed=i), NF4_DQ) for i in range(4)])
    counts, bias = torch.tensor([2, 0, 1, 4]), randn(4, 24, seed=5)
    return {
        "lora.init": (lambda base, key: lora.init(base, "w", rank=2, key=key), (base, KEY)),
        "lora.init gaussian": (lambda w, key: lora.init(w, "w", 2, key=key, init="gaussian"), ({"w": W}, KEY)),
        "lora.init dora": (lambda base, key: lora.init(base, "w", rank=2, key=key, dora=True), ({"w": W}, KEY)),
        "attach": (attached, (X, base, shaken)),
        "attach dropout": (attached, (X, base, dropped, KEY)),
        "attach dora": (attached, (X, base, lora.init(base, "w", rank=2, dora=True))),
        "attach ia3": (attached, (X, base, lora.init_ia3(base, "w", "w"))),
        "attach to rows": (lambda t, b, a: embedding(t, lora.attach(b, a)["w"]), (TOKENS, base, shaken)),
        "gradient of adapters": (grad(trained), (shaken, X, base)),
        "gradients of examples": (vmap(grad(trained), (None, 0, None)), (shaken, X, base)),
        "tangent of adapters": (lambda a, x, b: jvp(lambda a: trained(a, x, b), (a,), (a,))[1], (shaken, X, base)),
        "merge-aware": (aware, (shaken, X, base)),
        "merge": (lora.merge, (base, shaken)),
        "combine": (lambda a, b: lora.combine([a, b], (1.0, 0.5)), (plain, shaken)),
        "dither": (lambda base, a, key: lora.dither(base, a, key), (base, shaken, KEY)),
        "pissa": (lambda w, key: lora.pissa(w, "w", rank=4, niter=2, key=key), ({"w": W}, KEY)),
        "olora": (lambda w: lora.olora(w, "w", rank=4), ({"w": W},)),
        "loftq": (lambda w: lora.loftq(w, "w", rank=4), ({"w": W},)),
        "eva": (lambda w, x: lora.eva(w, {"w": x}, rank=4), ({"w": W}, X)),
        "stacked weights": (grouped_linear, (X.flatten(0, 1)[:7], stack, counts, bias)),
        "stacked dense weights": (grouped_linear, (X.flatten(0, 1)[:7], randn(4, 24, 64), counts, bias)),
    }  # fmt: skip


def numbers() -> dict[str, Verb]:
    """Random numbers, and optimisers of a small tree."""
    tree_ = {"a": randn(3, 64), "b": randn(7)}
    verbs: dict[str, Verb] = {
        "fold": (lambda key: [random.fold(key, data) for data in ("name", 3, key)], (KEY,)),
        "bits": (lambda key: random.bits(key, (3, 5)), (KEY,)),
        "uniform": (lambda key: [random.uniform(key, (3,), t) for t in (torch.float64, torch.bfloat16)], (KEY,)),
        "normal": (lambda key: random.normal(key, (3, 5)), (KEY,)),
        "kaiming_uniform": (lambda key: random.kaiming_uniform(key, (3, 5), 5), (KEY,)),
        "bernoulli": (lambda key: random.bernoulli(key, 0.4, (3, 5)), (KEY,)),
        "permutation": (lambda key: random.permutation(key, 9), (KEY,)),
        "dropout": (lambda x, key: random.dropout(x, 0.3, key), (X, KEY)),
    }
    for name in ("adamw", "sgd", "lion"):
        opt = optim.chain(optim.clip_by_global_norm(1.0), getattr(optim, name)(optim.cosine(1e-2, 10, 2)))
        verbs[f"{name} init"] = (opt.init, (tree_,))
        verbs[f"{name} update"] = (opt.update, (tree_, opt.init(tree_), tree_))
    return verbs


def models() -> dict[str, Verb]:
    """Decoders, encoders and an autoencoder, their losses, and the pure parts of generation."""
    key = random.key(6)
    draw = lambda path, like: 0.3 * random.normal(random.fold(key, path), tuple(like.shape)) + path.endswith("norm")
    base = tree.map_at(
        r"layers\.\d+\.(q|k|v|o|gate|up|down)",
        partial(quantize, format=NF4_DQ),
        tree.map_with_path(draw, decoder.shapes(CFG)),
    )
    some = lora.init(base, r"layers\.\d+\.(q|v)", rank=4, key=7)
    segments, lengths = torch.arange(12).expand(2, 12) // 5, torch.tensor([12, 7])
    loss = lambda a, base, t, s=None: decoder.loss(lora.attach(base, a), t, t, CFG, segments=s)
    logits, cache = generate.prefill(base, TOKENS, lengths, CFG, longest=64)
    token = logits.argmax(-1)
    sampled = generate.Sampling(0.8, top_k=9, top_p=0.9)
    verbs: dict[str, Verb] = {
        "decoder init": (lambda key: decoder.init(CFG, key), (KEY,)),
        "decoder": (lambda base, t: decoder.forward(base, t, CFG), (base, TOKENS)),
        "decoder loss": (grad(loss), (some, base, TOKENS)),
        "decoder loss of documents": (grad(loss), (some, base, TOKENS, segments)),
        "logits and loss": (lambda b, t: blocks.cross_entropy(decoder.forward(b, t, CFG), t), (base, TOKENS)),
        "prefill": (lambda b, t, n: generate.prefill(b, t, n, CFG, longest=64), (base, TOKENS, lengths)),
        "decode": (lambda b, t, held: generate.decode(b, t, held, CFG), (base, token, cache)),
        "step": (lambda b, t, held, k: generate.step(b, t, held, k, CFG, sampled), (base, token, cache, KEY)),
    }  # fmt: skip
    for name, cfg in ENCODERS.items():
        tokens = TOKENS % cfg.vocab
        verbs[f"encoder {name}"] = (
            lambda p, t, s, cfg=cfg: encoder.forward(p, t, cfg, segments=s), (random_params(cfg), tokens, segments)
        )  # fmt: skip
    small, images = autoencoder.AutoencoderConfig(6, hidden=8, inner=4, num_blocks=1), randn(2, 3, 8, 8).sigmoid()
    book, params = fquant.vq.init(1, 16, 6), autoencoder.init(small, key)
    verbs["autoencoder init"] = (lambda key: autoencoder.init(small, key), (KEY,))
    verbs["autoencoder"] = (autoencoder.loss, (params, book, images, KEY))
    return verbs


def losses() -> dict[str, Verb]:
    """Losses of preferences and of distillation."""
    policy, reference, lengths = -randn(6).abs() - 0.1, -randn(6, seed=1).abs(), torch.tensor([3, 2, 5, 1, 4, 2])
    verbs: dict[str, Verb] = {}
    for kind in preference.KINDS:
        smoothing = 0.1 if kind in preference.SMOOTHED else 0.0
        f = lambda p, r, n, kind=kind, s=smoothing: preference.dpo(p, r, 0.1, s, kind, n)
        verbs[f"dpo {kind}"] = (f, (policy, reference, lengths))
    head, teacher, targets = randn(11, 64), randn(11, 6, seed=2), TOKENS[:, :5] % 11
    packed, y = (quantize(head, AQ_3X8), quantize(teacher, NF4)), randn(2, 5, 6)
    kto = lambda p, r, d: preference.kto(p, r, d, preference.kto_divergence(p, r))
    divergence = lambda x, h, y, t, at: distillation.divergence(x, h, y, t, at, 0.5, 2.0, 3).sum()
    return verbs | {
        "log_probs": (lambda n, s: preference.log_probs(n, s, 3), (randn(2, 12), TOKENS % 3)),
        "lengths": (lambda t, s: preference.lengths(t, s, 3), (TOKENS, TOKENS % 3)),
        "orpo": (preference.orpo, (policy, lengths)),
        "kto": (kto, (policy, reference, lengths > 2)),
        "distillation": (grad(divergence), (X, head, y, teacher, targets)),
        "distillation packed": (grad(divergence), (X, packed[0], y, packed[1], targets)),
    }


VERBS: dict[str, Verb] = formats() | adapters() | numbers() | models() | losses() | VQ
