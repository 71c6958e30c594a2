"""A QLoRA step in bfloat16 of a small decoder, whose elementwise chains are fused.

Its AdamW is the formula in ops of torch, a chain on each side of a root. That of ``optim`` is one op for each leaf.
"""

from functools import partial

import torch
from torch.func import grad_and_value

from fquant import LOCAL, NF4_DQ, lora, optim, quantize, random, tree
from models import decoder
from models.config import Config

CFG = Config(vocab=64, dim=64, num_layers=2, num_heads=2, num_kv_heads=1, head_dim=32, hidden=96)
BF16 = torch.bfloat16


def _update(grads, state, params, lr=1e-2, b1=0.9, b2=0.999, eps=1e-8, decay=1e-2):
    step = state.step + 1
    debias1, debias2 = optim.optimizer.debias(b1, step), optim.optimizer.debias(b2, step)
    mean = tree.map(lambda m, g: b1 * m + (1 - b1) * g.float(), state.mean, grads)
    square = tree.map(lambda v, g: b2 * v + (1 - b2) * g.float() ** 2, state.square, grads)
    change = lambda p, m, v: (m / debias1) / ((v / debias2).sqrt() + eps) + decay * p.float()
    return tree.map(lambda *leaf: -lr * change(*leaf), params, mean, square), optim.AdamState(step, mean, square)


OPT = optim.Optimizer(optim.adamw(1e-2).init, _update)


def step(adapters, state, base, tokens, cfg=CFG, dtype=BF16):
    """Run a QLoRA step in ``dtype``."""

    def loss(adapters):
        params = lora.attach(base, tree.map(lambda t: t.to(dtype), adapters))
        return decoder.loss(params, tokens[..., :-1], tokens[..., 1:], cfg, LOCAL)

    grads, value = grad_and_value(loss)(adapters)
    updates, state = OPT.update(grads, state, adapters)
    return optim.apply_updates(adapters, updates), state, value


def start(cfg=CFG, dtype=BF16):
    params = decoder.init(cfg, random.key(0), dtype)
    base = tree.map_at(r"layers\.\d+\.(q|k|v|o|gate|up|gate_up|down)", partial(quantize, format=NF4_DQ), params)
    adapters = lora.init(base, r"layers\.\d+\.(q|v|gate|gate_up|down)", rank=2, alpha=4, key=1)
    adapters = tree.map(lambda t: t + 0.01, adapters)
    return adapters, OPT.init(adapters), base, random.permutation(random.key(3), 64)[:34].reshape(2, 17)
