"""Losses that are not a mean over rows, and their gradients: equal on a mesh and in one process."""

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch.func import grad_and_value

import shard
from fquant import random
from fquant.vq import mean
from fquant.vq.composite import residual
from fquant.vq.scalar import fsp, lfq
from tests.helpers import ranks
from tests.helpers.vq.peers import assert_close, drawn

pytestmark = pytest.mark.xdist_group("ranks")

SPLITS = [[33, 7], [30, 0, 10]]  # rows of each rank
MORE_SPLITS = [[20, 20], [0, 40], [13, 14, 13], [0, 0, 40]]
STATES = {
    "lfq": lambda: lfq.init(0, 4, dim=6, gamma=1.5),
    "lfq, softplus": lambda: lfq.init(0, 6, num_codebooks=2, dim=6, offset=1.0, spherical=True),
    "lfq, a share": lambda: lfq.init(0, 4, dim=6, share=0.5),
    "lfq, groups": lambda: lfq.init(0, 4, dim=6, num_codebooks=2, group=2, rotation=True),
    "residual lfq": lambda: residual.init_lfq(0, 4, 3, dim=6, dropout=True, share=0.7),
    "fsp": lambda: fsp.init(0, (5, 4, 3), dim=6, moments=fsp.KURT),
}
WEIGHTS = {"entropy": 1.0, "commitment": 0.25, "moments": 1.0}


def data():
    """Return all rows, of which 3 and 25 are bad, a key for each, and a mask without every seventh."""
    x = drawn(40, 5, 6, size=0.5)
    x[3, 2, 1] = x[25] = torch.nan
    return x, random.fold(random.key(3), torch.arange(40)), torch.arange(200).reshape(40, 5) % 7 > 0


def step(state, x, key, mask, psum):
    """Return this rank's gradient of the global losses, and the losses, stats and codes."""
    verbs = {fsp.FSP: fsp, lfq.LFQ: lfq, residual.Residual: residual}[type(state)]
    call = {} if verbs is fsp else {"inv_temperature": 2.0}
    counts = psum({name: m.count for name, m in verbs.apply(state, x, key, mask, psum=psum, **call).losses.items()})

    def loss(params):
        got = verbs.apply(replace(state, params=params), x, key, mask, psum=psum, **call)
        total = sum((WEIGHTS[name] * m.sum / counts[name].clamp(min=1)).sum() for name, m in got.losses.items())
        return total + (got.x * 0.01).square().sum(), (got.losses, got.stats, got.codes)

    grads, (_, aux) = grad_and_value(loss, has_aux=True)(state.params)
    return grads, *aux


def on_a_rank(split):
    mesh, found = shard.mesh(fsdp=len(split)), {}
    psum = lambda sums: shard.psum(sums, mesh, ("dp", "fsdp"))
    start = sum(split[: dist.get_rank()])
    x, key, mask = (t[start : start + split[dist.get_rank()]] for t in data())
    for name, make in STATES.items():
        with shard.traffic() as seen:
            grads, losses, stats, codes = step(make(), x, key, mask, psum)
        grads, losses = shard.reduce(grads, mesh), {n: mean(m) for n, m in psum(losses).items()}
        found[name] = grads, losses, psum(stats), codes, seen.count("all_reduce")
    return found


@pytest.mark.parametrize(
    "split", SPLITS + [pytest.param(s, marks=pytest.mark.slow, id=str(s)) for s in MORE_SPLITS], ids=str
)
def test_a_mesh_is_one_process(split):
    each = ranks.run(len(split), on_a_rank, split)
    for name, make in STATES.items():
        grads, losses, stats, codes = step(make(), *data(), lambda sums: sums)
        wanted = {name: (grads, {n: mean(m) for n, m in losses.items()}, stats)}  # by name, so that a failure names it
        got = [found[name] for found in each]
        for found in got:
            assert_close({name: found[:3]}, wanted, 1e-6)
        assert torch.equal(torch.cat([found[3] for found in got]), codes), name
        assert len({found[4] for found in got}) == 1 and got[0][4] > 0, name  # on every rank, with any rows


def alone(name):
    mine = data()[0][dist.get_rank() * 20 : dist.get_rank() * 20 + 20]
    return lfq.entropies(STATES[name](), mine, inv_temperature=2.0)[1]


def test_without_the_sum_the_entropy_of_the_mean_is_another():
    """The peer takes the entropy of each rank's own mean."""
    state = STATES["lfq"]()
    wanted = lfq.entropies(state, data()[0], inv_temperature=2.0)[1]
    assert all((found - wanted).abs() > 1e-3 for found in ranks.run(2, alone, "lfq"))
