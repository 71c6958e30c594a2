"""Regather: a step that neither keeps gathered bytes nor computes twice has the same bits."""

import pytest
import torch
import torch.distributed as dist
from torch.func import grad_and_value

import shard
from fquant import cost, jit, lora, tree
from fquant.compile.cost import of
from fquant.compile.trace import trace
from models import decoder
from shard.passes.deduplicate import deduplicate_gathers
from shard.passes.gathers import gathers
from shard.passes.prefetch import prefetch_gathers
from shard.passes.report import schedule
from tests.helpers import ranks
from tests.helpers.live_memory import Peak
from tests.helpers.qlora_step import CFG, equal, start, tokens_of

pytestmark = pytest.mark.xdist_group("ranks")
PASSES = {
    "regather": (shard.passes.regather_blocks(),),
    "and prefetch": (shard.passes.regather_blocks(), prefetch_gathers()),
    "and keep": (shard.passes.regather_blocks(), deduplicate_gathers(), prefetch_gathers(2)),
}


def setting(recompute=False):
    """Return a gradient and its arguments on this rank: ranks have 2, 1 and 0 rows of the batch."""
    mesh, rules = shard.mesh(fsdp=dist.get_world_size()), shard.Rules()
    adapters, _, base = start()
    placed, adapters = shard.place((base, adapters), decoder.dims(CFG), rules, mesh, CFG)
    comm = shard.comm(mesh, rules, recompute=recompute)

    def loss(adapters, base, tokens):
        params = lora.attach(base, adapters)
        return decoder.loss(params, tokens[:, :-1], tokens[:, 1:], CFG, comm, count=24.0)

    args = tree.map(lambda t: t + 0.01, adapters), shard.local(placed), tokens_of(0)[: 2 - dist.get_rank()]
    return grad_and_value(loss), args


def steps():
    """Compare each way of gathering; return its collectives, peak memory and work, on this rank."""
    f, args = setting()
    wanted, found = f(*args), {}
    for name, passes in {"plain": (), **PASSES}.items():
        step = jit(f, passes=passes)
        assert equal(step(*args), wanted), name
        with shard.traffic() as traffic, Peak() as peak:
            assert equal(step(*args), wanted), name
        (captured,) = step.traced.values()
        predicted = of(captured)
        assert predicted.peak - predicted.arguments == peak.most
        assert sum(c.sent for c in predicted.collectives) == traffic.sent
        rows = [(row.name, row.of, row.nbytes) for row in schedule(captured)]
        assert {s for s in map(str, captured.module.graph.nodes) if s.startswith("get_attr")} == set()
        found[name] = rows, predicted.peak, predicted.flops
    again, args = setting(recompute=True)
    predicted = cost(again, *args)
    sent = [c.count for c in predicted.collectives if c.name == "all_gather"]
    found["remat"] = sent, predicted.peak, predicted.flops
    return found


@pytest.mark.slow
@pytest.mark.parametrize("world", [*(pytest.param(n, marks=pytest.mark.slow) for n in (1, 2)), 3])
def test_same_bits_and_a_gather_for_each_way(world):
    found = ranks.run(world, steps)
    for one in found:
        orders = {name: [row[1] for row in rows] for name, (rows, *_) in one.items() if name != "remat"}
        if world == 1:
            assert not any(orders.values())
            continue
        blocks = [f"base.layers.{i}.bytes" for i in range(CFG.num_layers)]
        forward = orders["plain"]
        assert [of for of in forward if of in blocks] == blocks  # each once, in order
        assert orders["regather"] == orders["and prefetch"] == [*forward, *reversed(blocks)]
        assert one["regather"][2] == one["plain"][2]  # and nothing is computed twice
        if one["plain"][2]:  # on a rank with rows
            assert one["regather"][2] < one["remat"][2] and one["regather"][1] < one["plain"][1]
        assert len(orders["regather"]) <= one["remat"][0][0]
        assert len(orders["and keep"]) < len(orders["regather"])
    for name in PASSES:
        assert len({tuple(one[name][0]) for one in found}) == 1, "ranks issue the same in the same order"


def traced(f, x, passes=()):
    return trace(lambda args: f(*args), (x,), passes=passes).module.graph


def alone():
    """Count the gathers that are added to small programs, on one rank."""
    group = shard.mesh(fsdp=dist.get_world_size()).get_group("fsdp")
    gather = lambda x: shard.all_gather(x, group)

    def returned(x):  # a result stays to the end anyway
        y = gather(x)
        z = y.sum() + gather(2 * x[:1]).sum() + gather(x[1:]).sum()
        return y, z + y.exp().sum()

    def written(x):  # a second gather would have another result
        y = gather(x)
        z = y.sum() + gather(x[1:]).sum()
        y.add_(1)
        return z + y.sum()

    def views(x):  # views of the forward, and views of views, become views of the second gather
        y = gather(x)
        part = y[1:]
        z = part.sum() + gather(x[1:]).sum()
        return z + part[1:].exp().sum() + part.mul(3).sum() + y.sum()

    def near(x):  # no other gather between: one run
        y = gather(x)
        return y.sum() + y.exp().sum() + gather(x[1:]).sum()

    counts = {}
    for f, name in ((returned, "returned"), (written, "written"), (views, "views"), (near, "near")):
        x = torch.arange(4.0) + dist.get_rank()
        step = jit(f, passes=(shard.passes.regather_blocks(),))
        assert equal(step(x), f(x)), name
        counts[name] = len(gathers(traced(f, x, (shard.passes.regather_blocks(),)))) - len(gathers(traced(f, x)))
    return counts


def test_what_is_gathered_again():
    assert ranks.run(2, alone) == [{"returned": 0, "written": 0, "views": 1, "near": 0}] * 2
