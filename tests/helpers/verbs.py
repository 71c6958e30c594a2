"""The language of random programs over fquant's verbs (tests/helpers/programs.py).

They are packed weights, adapters, norms, attention, heads, keys and codebooks, under transforms of their own.

Tensors have a last dim of 64. ``theta`` are adapters by how they are made, ``base`` is all that stays as it is.
"""

import torch
import torch.nn.functional as F
from torch.func import grad, jvp, vjp, vmap

from fquant import (
    AQ_2X8,
    AQ_3X8,
    FP4,
    INT8,
    NF4,
    NF4_DQ,
    dequantize,
    embedding,
    linear,
    lora,
    quantize,
    random,
    remat,
    tree,
    vq,
)
from models import blocks, fused_cross_entropy
from models.attention import attention
from models.norm import rms_norm
from models.rope import rotate
from models.swiglu import gated
from tests.helpers import programs

STEPS = {  # a, b, c: tensors; P: a weight; Q: one with DoRA; R: one with dropout; B: a codebook; M, N: numbers
    "linear": """
        linear(a, base['P']) | linear(a, base['P'], base['bias']) | linear(a, layers['P']) | linear(a, dora['Q']) |
        linear(a, dropped['R']) | linear(linear(a, layers['wide']).tanh(), layers['narrow']) |
        linear(a, b.reshape(-1, 64)[:64]) | remat(linear)(a, base['P']) | block(a, layers['P'], base['norm']) |
        remat(block)(a, layers['P'], base['norm']) | remat(block, 2)(a, dropped['R'], base['norm'])""",
    "model": """
        rms_norm(a, base['norm'], 1e-5) | rms_norm(a, b.flatten()[:64], 1e-5) | gated(a, b) | turned(a) |
        heads(a, b, c) | heads(turned(a), turned(a), c) | embedding(codes(a), layers['P']) * b |
        a * head.cross_entropy(b, base['P'], codes(c)) | head.cross_entropy(a, layers['P'], codes(b), chunk=2) |
        head.cross_entropy(a, dora['Q'], codes(a), count=3.0) | blocks.cross_entropy(a, codes(b)) |
        dequantize(base['packed'], a.dtype) @ a.mT""",
    "random": """
        random.dropout(a, 0.3, random.fold(base['key'], M)) |
        a + random.normal(random.fold(base['key'], M), a.shape, a.dtype) |
        a * random.bernoulli(random.fold(base['key'], M), 0.4, a.shape) | random.uniform(base['key'], (64,)) * a |
        a.reshape(-1, 64)[random.permutation(random.fold(base['key'], M), a.numel() // 64)]""",
    "vq": """
        vq.apply(base['B'], a).x | vq.apply(base['B'], a, losses=('orthogonal',)).losses['orthogonal'].sum |
        vq.apply(base['B'], a, gradient=vq.straight_through).x | vq.decode(base['B'], vq.encode(base['B'], a)) |
        vq.fsq.apply(base['fsq'], a).x | vq.lfq.apply(base['lfq'], a, base['key']).x |
        vq.update(base['book'], vq.apply(base['book'], a).stats).codes[:1] * b |
        vq.apply(base['B'], a, base['key'], temperature=0.5).x""",
    "transformed": """
        grad(lambda t: (linear(t, base['P']) * b).sin().sum())(a) | vmap(lambda r: linear(r, base['P']))(a) |
        vmap(lambda r, s: gated(r, s))(a, b) | jvp(lambda t: rms_norm(t, base['norm'], 1e-5), (a,), (b,))[1] |
        vjp(lambda t: linear(t, layers['P']), a)[1](b)[0] | jvp(lambda t: linear(t, dropped['R']), (a,), (b,))[1] |
        vmap(grad(lambda r: rms_norm(r, base['norm'], 1e-5).sin().sum()))(a) |
        vmap(lambda r: head.cross_entropy(r[None], base['P'], codes(r[None])))(a) |
        grad(lambda t: head.cross_entropy(t, layers['P'], codes(b)))(a) |
        grad(lambda t: heads(t, t, b).sin().sum())(a) | jvp(lambda t: heads(t, b, t), (a,), (c,))[1] |
        vmap(lambda r: vq.apply(base['B'], r[None]).x)(a) |
        jvp(grad(lambda t: linear(gated(t, b), layers['P']).sin().sum()), (a,), (c,))[1] |
        tree.leaves(grad(lambda l: linear(a, beside(base, l)['P']).sin().sum())(theta['plain']))[1].sum() * b |
        jvp(lambda t: head.cross_entropy(t, base['P'], codes(b)), (a,), (b,))[1] |
        grad(lambda t: remat(block)(t, layers['P'], base['norm']).sum())(a)""",
    "torch": """
        a + b | a * b | a - b * 0.3 | a.tanh() | F.silu(a) * b | a[:1] | a.flip(0) | a.mT.contiguous().mT |
        a.mean(0, keepdim=True) | a.reshape(-1, 64) | a[None] | a.bfloat16() | a.float() | a.double() | a.half() |
        a.expand(2, *a.shape) | torch.cat([a, b]) | F.softmax(a, -1) | a * N | a.sum() * b | a.to(b.dtype) |
        a.transpose(0, -2) | a[..., ::2].repeat_interleave(2, -1) | torch.where(a > 0, a, b) | a.detach()""",
    "written": """
        t = a.clone(); t.add_(b) | t = a * 1; t[:1].mul_(2) | t = torch.zeros_like(a); t.copy_(linear(a, base['P'])) |
        t = linear(a, base['P']); t.mul_(b) | t = rms_norm(a, base['norm'], 1e-5); t[..., :3].add_(1) |
        t = gated(a, b); t.mT.sub_(1)""",
}


def codes(t):
    """A class of each row, by its values."""
    return t.float().abs().nan_to_num(0, 0, 0).mul(7).long()[..., 0] % 16


def block(t, w, norm):
    """A residual block."""
    return linear(rms_norm(t, norm, 1e-5), w).tanh() + t


def heads(q, k, v):
    """Attention of two heads over all rows."""
    f = lambda t: t.reshape(1, t.numel() // 64, 2, 32)
    return attention(f(q), f(k)[:, :, :1], f(v)[:, :, :1]).reshape(q.shape)


def turned(t):
    """Rows turned by their places."""
    rows = t.reshape(1, t.numel() // 64, 2, 32)
    at = torch.arange(rows.shape[1], dtype=torch.float32)[None, :, None] * torch.linspace(0.1, 1, 32)
    return rotate(rows, at.cos(), at.sin()).reshape(t.shape)


def beside(base, adapters, key=None):
    """Those weights of ``base`` that have adapters, with these."""
    return lora.attach({name: base[name] for name in (*MATRICES, "wide", "narrow")}, adapters, key)


def _given():
    draw = torch.Generator().manual_seed(5)
    rand = lambda *shape: torch.randn(shape, generator=draw)
    formats = {"nf4": NF4, "nf4_dq": NF4_DQ, "fp4": FP4, "int8": INT8, "aq_2x8": AQ_2X8, "aq_3x8": AQ_3X8}
    weights = {name: quantize(0.2 * rand(64, 64), format) for name, format in formats.items()}
    weights |= {"dense": 0.2 * rand(64, 64)}
    weights |= {"wide": quantize(0.2 * rand(96, 64), NF4_DQ), "narrow": quantize(0.2 * rand(64, 96), NF4)}
    theta = {
        "plain": lora.init(weights, ".*", rank=4, key=3),
        "dora": lora.init(weights, "nf4|dense", rank=4, key=4, dora=True),
        "dropped": lora.init(weights, "nf4_dq|int8|aq_3x8", rank=4, key=5, dropout=0.3),
    }
    more = {"norm": rand(64).abs() + 0.5, "bias": rand(64), "key": random.key(11), "packed": weights["nf4"]}
    more |= {"book": vq.init(1, 16, 64), "cosine": vq.init(2, 16, 64, metric="cosine")}
    more |= {"learned": vq.init(2, 16, 64, learnable=True), "fsq": vq.fsq.init(3, (5, 5, 5), 64)}
    more |= {"lfq": vq.lfq.init(3, 6, 64)}
    return {"theta": tree.map(lambda t: t + 0.05 * rand(*t.shape), theta), "base": weights | more}


MATRICES = ("nf4", "nf4_dq", "fp4", "int8", "aq_2x8", "aq_3x8", "dense")
ROWS = ((4, 64), (1, 64), (3, 64), (2, 5, 64), (64,), (17, 64), (0, 64), (33, 64), (1, 3, 1, 64))
NAMES = {
    "torch": torch, "F": F, "grad": grad, "jvp": jvp, "vjp": vjp, "vmap": vmap, "dequantize": dequantize, "vq": vq,
    "embedding": embedding, "linear": linear, "lora": lora, "random": random, "remat": remat, "tree": tree,
    "blocks": blocks, "head": fused_cross_entropy, "gated": gated, "attention": attention, "rms_norm": rms_norm,
    "codes": codes,
    "block": block, "heads": heads, "turned": turned, "beside": beside,
}  # fmt: skip
VERBS = programs.Language(
    STEPS,
    {"linear": 3, "torch": 4, "model": 3, "transformed": 3},
    ROWS,
    (torch.float32,) * 6 + (torch.bfloat16, torch.bfloat16, torch.float16, torch.float64),
    NAMES,
    _given(),
    "layers, dora, dropped = (beside(base, some, key) for some, key in "
    "zip(theta.values(), (None, None, base['key']), strict=True))",
    {"P": MATRICES, "Q": ("nf4", "dense"), "R": ("nf4_dq", "int8", "aq_3x8"), "B": ("book", "cosine", "learned"),
     "M": ("0", "1", "2")},
)  # fmt: skip
