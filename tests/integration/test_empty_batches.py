"""Every verb takes an empty batch: forward, gradients, captured, and mapped over batches of no rows or no batches.

The results have the shapes of a batch with rows, less the rows; sums over rows are zero. A loss of no targets is zero:
its default count is at least 1. In a vmap over no batches torch refuses a mapped scalar beside a plain one. LFQ and FSP
divide their losses by a plain count, so they are left out there.
"""

import pytest
import torch
from torch import Tensor
from torch.func import grad, vmap

import fquant
from fquant import (
    INT8_ROW,
    NF4,
    Outliers,
    dequantize,
    embedding,
    fake_quantize,
    grouped_linear,
    jit,
    linear,
    lora,
    optim,
    quantize,
    random,
    tree,
    vq,
)
from fquant.format import Format
from fquant.quantized_training import RECIPES, attach
from models import decoder, fused_cross_entropy, generate
from models.attention import attention
from models.blocks import cross_entropy
from models.config import Config
from models.norm import layer_norm, rms_norm
from models.swiglu import gated
from tests.helpers.arrays import named

KEY = random.key(0)
FORMATS = {name: getattr(fquant, name) for name in fquant.__all__ if isinstance(getattr(fquant, name), Format)}
PLAIN = {name: format for name, format in FORMATS.items() if format.vectors is None}
W = random.normal(KEY, (32, 256))
Q = quantize(W, NF4)
LORA, DORA = (lora.init({"w": Q}, "w", rank=4, alpha=8, key=0, dora=dora) for dora in (False, True))
BOOKS = {name: vq.init(KEY, 16, 8, **given) for name, given in {"book": {}, "cosine": {"metric": "cosine"}}.items()}
STATES = {
    vq.fsq: vq.fsq.init(KEY, (8, 5), dim=8), vq.lfq: vq.lfq.init(KEY, 16, dim=8), vq.binary: vq.binary.init(KEY, 8),
    vq.latent: vq.latent.init(KEY, (8, 5), dim=8), vq.fsp: vq.fsp.init(KEY, (8, 5), dim=8),
    vq.residual: vq.residual.init_books(KEY, 16, 8, num_layers=3), vq.simvq: vq.simvq.init(KEY, 16, 8),
}  # fmt: skip
CFG = {
    "dense": Config(17, 12, 2, 4, 2, 4, 20, max_positions=16),
    "experts": Config(17, 12, 2, 4, 2, 4, 20, max_positions=16, num_experts=4, experts_per_token=2, expert_hidden=8),
}
PARAMS = {name: decoder.init(cfg, KEY) for name, cfg in CFG.items()}
IDS = torch.zeros(3, 4, dtype=torch.int64)


def rows(*shape):
    return random.normal(KEY, (3, *shape))


adapted = lambda x, adapters, q: linear(x, lora.attach({"w": q}, adapters)["w"])
counts = lambda x: torch.zeros(2, dtype=torch.int64) + len(x) // 2
table: dict[str, tuple] = {  # a function of rows and other arguments
    **{f"linear {name}": (lambda x, q: linear(x, q), rows(256), quantize(W, f)) for name, f in FORMATS.items()},
    **{f"act {name}": (lambda x, w, f=f: linear(x, w, act=f), rows(256), W) for name, f in PLAIN.items()},
    **{f"fake_quantize {name}": (lambda x, f=f: fake_quantize(x, f), rows(256)) for name, f in PLAIN.items()},
    **{
        f"recipe {name}": (lambda x, p: linear(x, p["w"]), rows(256), attach({"w": W}, "w", recipe))
        for name, recipe in RECIPES.items()
    },
    **{
        f"{name} {verb}": (f, IDS, params)
        for name, params in PARAMS.items()
        for verb, f in {
            "forward": lambda tokens, p, cfg=CFG[name]: decoder.forward(p, tokens, cfg),
            "loss": lambda tokens, p, cfg=CFG[name]: decoder.loss(p, tokens, tokens, cfg),
        }.items()
    },
    **{f"{name} apply": (lambda x, b: vq.apply(b, x)[:3], rows(8), b) for name, b in BOOKS.items()},
    **{f"{name} encode": (lambda x, b: vq.encode(b, x), rows(8), b) for name, b in BOOKS.items()},
    **{
        f"{name} update": (lambda x, b: vq.update(b, vq.stats(b, x, vq.encode(b, x))), rows(8), b)
        for name, b in BOOKS.items()
    },
    **{
        f"{m.__name__} apply": (lambda x, s, m=m: m.apply(s, x).x, rows(8), state) for m, state in STATES.items()
    },
    "outliers": (lambda x, q: linear(x, q, act=Outliers(INT8_ROW)), rows(256), Q),
    "embedding": (lambda ids, q: embedding(ids, q), IDS, Q),
    "lora": (adapted, rows(256), LORA, Q),
    "dora": (adapted, rows(256), DORA, Q),
    "merge-aware lora": (
        lambda x, adapters, q: linear(x, lora.attach({"w": q}, adapters, merge_aware=True)["w"]), rows(256), LORA, Q,
    ),
    "grouped": (lambda x, w: grouped_linear(x, w, counts(x)), rows(256)[:2], torch.stack([W, W])),
    "grouped packed": (
        lambda x, w: grouped_linear(x, w, counts(x)), rows(256)[:2], tree.map(lambda *t: torch.stack(t), Q, Q),
    ),
    "vq.decode": (lambda ids, b: vq.decode(b, ids), IDS, BOOKS["book"]),
    "attention": (lambda q, k, v: attention(q, k, v), rows(4, 4, 8), rows(4, 2, 8), rows(4, 2, 8)),
    "cross_entropy": (lambda x, t: cross_entropy(x, t), rows(17), IDS[:, 0]),
    "fused cross_entropy": (lambda x, w, t: fused_cross_entropy.cross_entropy(x, w, t), rows(8), rows(8), IDS[:, 0]),
    "rms_norm": (lambda x, w: rms_norm(x, w, 1e-5), rows(8), torch.ones(8)),
    "layer_norm": (lambda x, w: layer_norm(x, w, w, 1e-5), rows(8), torch.ones(8)),
    "gated": (lambda x: gated(x, x), rows(8)),
    "sample": (lambda x: generate.sample(x, generate.GREEDY), rows(17)),
}  # fmt: skip
BATCHED = {
    "attention": 3,
    "cross_entropy": 2,
    "fused cross_entropy": (0, 2),
}  # arguments that have rows beside the first
REDUCED = ("cross_entropy", "fused cross_entropy", "dense loss", "experts loss")


def empty(name, args):
    at = BATCHED.get(name, 1)
    at = range(at) if isinstance(at, int) else at
    return [arg[:0] if i in at else arg for i, arg in enumerate(args)]


def shapes(x):
    return [tuple(leaf.shape) for leaf in tree.leaves(x) if isinstance(leaf, Tensor)]


def total(f):
    return lambda *args: sum(leaf.sum() for leaf in tree.leaves(f(*args)) if leaf.is_floating_point())


@named("name", table)
def test_a_verb_takes_no_rows(name):
    f, *full = table[name]
    args = empty(name, full)
    with_rows, out = f(*full), f(*args)
    count = len(full[0])
    wanted = [(0, *s[1:]) if s[:1] == (count,) and "update" not in name else s for s in shapes(with_rows)]
    assert shapes(out) == wanted and shapes(jit(f)(*args)) == wanted
    assert all(leaf.isfinite().all() for leaf in tree.leaves(out) if leaf.is_floating_point())
    if name in REDUCED:
        assert not out
    if args[0].is_floating_point() and "encode" not in name and name != "sample":
        for g in (grad(total(f)), jit(grad(total(f)))):
            assert g(*args).shape == args[0].shape


@named("name", {name: row for name, row in table.items() if name not in (*BATCHED, *REDUCED)})
def test_a_verb_is_mapped_over_no_rows_and_no_batches(name):
    f, x, *rest = table[name]
    if name.startswith(("fquant.vq.scalar.lfq", "fquant.vq.scalar.fsp")):
        return
    for batch, count in ((2, 0), (0, 2), (0, 0)):
        given = x[:count].expand(batch, *x[:count].shape)
        wanted = [(batch, *s) for s in shapes(f(x[:count], *rest))]
        assert shapes(vmap(f, (0,) + (None,) * len(rest))(given, *rest)) == wanted


@pytest.mark.parametrize("rows", [0, 3])
def test_losses_of_no_examples(rows):
    """Each example has a loss and gradients of its own, of the head too."""
    head, targets = W[:17, :8], torch.zeros(0, rows, dtype=torch.int64)
    loss = lambda head, x, t: fused_cross_entropy.cross_entropy(x, head, t)
    plain = lambda head, x, t: cross_entropy(linear(x, head), t)
    for f in (loss, plain):
        assert vmap(f, (None, 0, 0))(head, torch.zeros(0, rows, 8), targets).shape == (0,)
        found = vmap(grad(f, (0, 1)), (None, 0, 0))(head, torch.zeros(0, rows, 8), targets)
        assert shapes(found) == [(0, 17, 8), (0, rows, 8)]
    of_tokens = lambda p, t: decoder.loss(p, t, t, CFG["dense"])
    assert vmap(of_tokens, (None, 0))(PARAMS["dense"], targets).shape == (0,)


@named("format", FORMATS)
def test_a_weight_of_no_rows(format):
    f = FORMATS[format]
    for shape in ((0, 256), (2, 0, 256)):
        if f.vectors is not None:
            with pytest.raises(ValueError, match="learns its vectors from the weight, which needs at least one row"):
                quantize(torch.zeros(shape), f)
        else:
            q = quantize(torch.zeros(shape), f)
            assert dequantize(q).shape == shape and all(t.isfinite().all() for t in tree.leaves(q))
    if f.vectors is None:
        assert linear(torch.ones(3, 256), quantize(torch.zeros(0, 256), f)).shape == (3, 0)


@pytest.mark.parametrize("moments", [None, optim.DYNAMIC8, optim.DYNAMIC4, optim.FP8])
def test_an_optimiser_of_empty_leaves(moments):
    params = {"a": torch.zeros(0), "b": torch.zeros(0, 64), "c": torch.ones(3, 64)}
    given = {} if moments is None else {"moments": moments}
    opt = optim.chain(optim.clip_by_global_norm(1.0), optim.adamw(1e-3, **given))
    updates, _ = jit(opt.update)(params, opt.init(params), params)
    assert shapes(updates) == shapes(params) and updates["c"].isfinite().all()


def test_no_prompts_and_no_tokens():
    assert generate.generate(PARAMS["dense"], [], CFG["dense"], max_new_tokens=3) == []
