"""Random programs over ranks: captured, and with passes that move its collectives, a program has equal bits."""

import random
from functools import partial

import pytest
import torch
import torch.distributed as dist

import shard
from fquant import NF4, NF4_DQ, lora, quantize, tree
from shard.passes import deduplicate_gathers, prefetch_gathers, regather_blocks
from tests.helpers import programs, ranks
from tests.helpers.verbs import NAMES, STEPS, block

pytestmark = [pytest.mark.xdist_group("ranks"), pytest.mark.filterwarnings("ignore")]

RULES = shard.Rules()
TRAVEL = {  # a, b: tensors; K: a block of weights
    "gathered": """
        linear(a, comm.load(base['K'])['w']) | linear(a, with_adapter('K', base, theta)) |
        comm.wrap(partial(one, 'K'))(a, base, theta) | plain(a, base, theta) | deep(a, base, theta) |
        grad(lambda t: deep(t, base, theta).sin().sum())(a) | vmap(lambda r: linear(r, comm.load(base['K'])['w']))(a) |
        jvp(lambda t: linear(t, comm.load(base['K'])['w']), (a,), (b,))[1]""",
    "travel": """
        shard.all_gather(a, group) | shard.all_reduce(a, group) | shard.enter(a, group) | shard.exit(a, group) |
        shard.reduce_scatter(a, group) | shard.reduce_scatter(shard.all_gather(a, group).sin(), group) |
        shard.exit(shard.enter(a, group).sin() * (1 + group.rank()), group) | shard.psum(a, mesh, RULES.batch) |
        grad(lambda t: shard.all_gather(t, group).sin().sum())(a) | vmap(lambda r: shard.all_reduce(r, group) * r)(a) |
        jvp(lambda t: shard.all_gather(t, group).sin(), (a,), (b,))[1] | vmap(lambda r: shard.all_gather(r, group))(a) |
        grad(lambda t: (shard.reduce_scatter(shard.all_gather(t, group), group) * b).sin().sum())(a)""",
}
KINDS = {kind: STEPS[kind] for kind in ("torch", "written")}
ROWS = ((4, 64), (6, 64), (2, 3, 64), (12, 64))
PASSES = (
    regather_blocks(), deduplicate_gathers(), deduplicate_gathers(3000), prefetch_gathers(2), prefetch_gathers(1, 3000),
    prefetch_gathers(8),
)  # fmt: skip


def language():
    """Return the language of statements over all ranks, with weights in three bundles."""
    mesh = shard.mesh(fsdp=dist.get_world_size())
    comm, draw = shard.comm(mesh, RULES, order=2), torch.Generator().manual_seed(5)
    format = {"first": NF4, "second": NF4_DQ, "third": NF4}
    whole = {name: {"w": quantize(0.2 * torch.randn(64, 64, generator=draw), f)} for name, f in format.items()}
    vary = lambda t: t + 0.05 * torch.randn(t.shape, generator=draw)
    theta = {name: tree.map(vary, lora.init(w, "w", rank=4, key=i)) for i, (name, w) in enumerate(whole.items())}
    base = {name: shard.local(shard.place(w, {"": {"w": "out in"}}, RULES, mesh)) for name, w in whole.items()}
    base |= {"dense": 0.2 * torch.randn(64, 64, generator=draw), "norm": torch.rand(64, generator=draw) + 0.5}

    def with_adapter(name, base, theta):
        return lora.attach(comm.load(base[name]), theta[name])["w"]

    def one(name, x, base, theta):
        return block(x, with_adapter(name, base, theta), base["norm"])

    def plain(x, base, theta):
        for name in whole:
            x = one(name, x, base, theta)
        return x

    def deep(x, base, theta):
        for name in whole:
            x = comm.wrap(partial(one, name))(x, base, theta)
        return x

    names = {"shard": shard, "group": mesh.get_group("fsdp"), "mesh": mesh, "RULES": RULES, "comm": comm}
    names |= {"partial": partial, "with_adapter": with_adapter, "one": one, "plain": plain, "deep": deep}
    return programs.Language(
        {**KINDS, **TRAVEL}, {"gathered": 4, "travel": 3, "torch": 3}, ROWS,
        (torch.float32,) * 4 + (torch.bfloat16, torch.float64), NAMES | names, {"theta": theta, "base": base},
        words={"K": tuple(whole), "P": ("dense",)},
    )  # fmt: skip


def each(seeds):
    """Compare a program for each seed; return the reasons for those that were refused."""
    spoken, why = language(), []
    for seed in seeds:
        draw = random.Random(seed)
        passes = tuple(draw.sample(PASSES, draw.randint(0, 3)))
        why.append(programs.refused(spoken, draw, passes, dist.get_rank()))
    return why


ROUNDS = [pytest.param(2, (2, 4), id="2-few")]
ROUNDS += [
    pytest.param(n, range(5 * i, 5 * i + 5), id=f"{n}-{i}", marks=pytest.mark.slow) for n in (2, 3) for i in range(8)
]


@pytest.mark.parametrize("world, seeds", ROUNDS)
def test_any_program_over_ranks(world, seeds):
    why = ranks.run(world, each, list(seeds), timeout=120)
    assert all(one == why[0] for one in why) and not all(why[0]), why
