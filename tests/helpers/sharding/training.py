"""Full training of a small decoder, in one process and on a mesh: its loss, a step, and several steps."""

from functools import partial

import torch
from torch.func import grad_and_value

import shard
from fquant import LOCAL, jit, optim, random, tree
from models import decoder
from models.blocks import IGNORE
from tests.helpers.sharding.meshes import batch

PASSES = (
    shard.passes.regather_blocks(), shard.passes.deduplicate_gathers(budget=1 << 16), shard.passes.prefetch_gathers(),
    shard.passes.overlap_reductions(),
)  # fmt: skip
EXACT = shard.Precision(torch.float64, torch.float64)
RATE, EPS = 1e-3, 1e-6


def params(cfg, dtype=torch.float64):
    """Return parameters whose logits are of order one."""
    return tree.map(lambda t: (3 * t).to(dtype), decoder.init(cfg, random.key(0), torch.float32))


def loss(params, x, y, count, cfg, comm=LOCAL, dtype=None):
    return decoder.loss(params, x, y, cfg, comm, None, dtype, count)


def rows(n, i=0):
    """Return the n rows of batch ``i``, and the number of targets that count."""
    x, y = batch(n)
    x, y = (x + 7 * i) % 96, torch.where(y == IGNORE, y, (y + 7 * i) % 96)
    return x, y, (y != IGNORE).sum()


def optimizer(norm=None):
    return optim.chain(optim.clip_by_global_norm(0.5, norm), optim.adamw(RATE, eps=EPS, weight_decay=0.1))


def alone(cfg, steps, n=7):
    """Return parameters, moments and losses after ``steps`` in one process."""
    p, opt, losses = params(cfg), optimizer(), []
    state = opt.init(p)
    for i in range(steps):
        grads, value = grad_and_value(loss)(p, *rows(n, i), cfg)
        updates, state = opt.update(grads, state, p)
        p = optim.apply_updates(p, updates)
        losses.append(value)
    return p, state, torch.stack(losses)


def setting(cfg, axes, precision, recompute=True, dtype=None, tokens=None, start=None):
    """Return the mesh, rules, this rank's parameters and moments, and a step on them."""
    mesh, rules = shard.mesh(**axes), shard.Rules()
    comm = shard.comm(mesh, rules, recompute=recompute, tokens=tokens)
    opt = optimizer(partial(shard.global_norm, mesh=mesh, rules=rules))
    placed = shard.place(params(cfg) if start is None else start, decoder.dims(cfg), rules, mesh, cfg, precision)
    mine = shard.local(placed)

    def step(params, state, scales, x, y, count):
        scaled = lambda p, *rest: loss(shard.scaled(p, scales), *rest, cfg, comm, dtype)
        grads, value = shard.reduce(grad_and_value(scaled)(params, x, y, count), mesh, rules)
        updates, state = opt.update(grads, state, params)
        return optim.apply_updates(params, updates), state, value.clone()

    return mesh, rules, mine, opt.init(mine), step


def together(cfg, axes, precision, steps, n=7, captured=False, **options):
    """Return what :func:`alone` does, whole on rank 0, and this rank's parameters."""
    mesh, rules, p, state, step = setting(cfg, axes, precision, **options)
    if captured:
        step = jit(step, donate=("params", "state"), passes=PASSES, recompute=False)
    losses = []
    for i in range(steps):
        *mine, count = (*shard.share(rows(n, i)[:2], mesh, rules), rows(n, i)[2])
        p, state, value = step(p, state, shard.wire_scales(p, mesh, rules), *mine, count)
        losses.append(value)
    return *shard.whole((p, state), mesh, rules), torch.stack(losses), tree.leaves(p)
