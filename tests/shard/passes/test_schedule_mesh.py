"""Passes over a step on a mesh: equal bits, one order on all ranks, a kept budget, and overlap."""

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch.func import grad_and_value

import shard
from fquant import jit, lora, optim, tree
from fquant.compile.cost import of
from fquant.compile.trace import trace
from models import decoder
from shard.passes.deduplicate import deduplicate_gathers
from shard.passes.prefetch import prefetch_gathers
from shard.passes.report import schedule
from tests.helpers import ranks
from tests.helpers.live_memory import Peak
from tests.helpers.qlora_step import CFG, OPT, equal, start, tokens_of
from tests.helpers.sharding.schedules import early, gathers, passed, run, under_way, written_under_way

pytestmark = pytest.mark.xdist_group("ranks")


def setting(sums=False):
    """Return a step, its arguments on this rank, and the mesh. Ranks have 2, 1 and 0 rows of the batch.

    With ``sums`` each block also sums over ranks, between its products.
    """
    mesh, rules = shard.mesh(fsdp=dist.get_world_size()), shard.Rules()
    adapters, state, base = start()
    placed, adapters = shard.place((base, adapters), decoder.dims(CFG), rules, mesh, CFG)
    comm, group = shard.comm(mesh, rules), mesh.get_group("fsdp")
    if sums:
        comm = replace(comm, exit=lambda y: y + shard.exit(y.sum(), group) / 1000)

    def loss(adapters, base, tokens):
        params = lora.attach(base, adapters)
        return decoder.loss(params, tokens[:, :-1], tokens[:, 1:], CFG, comm, count=24.0)

    def step(adapters, state, base, tokens):
        grads, value = shard.reduce(grad_and_value(loss)(adapters, base, tokens), mesh, rules)
        updates, state = OPT.update(grads, state, adapters)
        return optim.apply_updates(adapters, updates), state, value

    mine = tokens_of(0)[: 2 - dist.get_rank()]
    return step, dict(adapters=adapters, state=state, base=shard.local(placed), tokens=mine), mesh


def passes_of(block):
    """Return schedules, some bounded by the bytes of a gathered layer."""
    return {
        "plain": (),
        "depth 1": (prefetch_gathers(),),
        "depth 2": (prefetch_gathers(2),),
        "depth 100": (prefetch_gathers(100),),
        "nothing fits": (prefetch_gathers(100, budget=100),),
        "one layer": (prefetch_gathers(100, budget=block),),
        "two layers": (prefetch_gathers(100, budget=2 * block),),
        "kept": (deduplicate_gathers(),),
        "last kept": (deduplicate_gathers(budget=block + block // 2), prefetch_gathers()),
    }


def on_a_mesh():
    step, args, mesh = setting()
    plain = trace(lambda args: step(**args), args)
    wanted, facts = step(**args), {}
    block = max(size for *_, size in gathers(plain)) if gathers(plain) else 0
    for name, passes in passes_of(block).items():
        scheduled = passed(plain, *passes)
        assert equal(run(scheduled, args), wanted), name
        with Peak() as peak, torch.no_grad():
            scheduled(*[leaf for leaf in tree.leaves(args) if isinstance(leaf, torch.Tensor)])
        c = of(scheduled)
        assert c.peak == c.arguments + peak.most, name
        facts[name] = dict(
            order=[(row.name, row.axis, row.nbytes, row.of) for row in schedule(scheduled, mesh)],
            early=0 if "kept" in name else early(scheduled, plain),
            under_way=under_way(scheduled),
            flops=[row.flops for row in schedule(scheduled) if row.name == "all_gather"],
            peak=c.peak,
            nodes=c.nodes,
        )
    return block, facts


@pytest.mark.parametrize("world", [pytest.param(1, marks=pytest.mark.slow), pytest.param(2, marks=pytest.mark.slow), 3])
def test_scheduled_is_unscheduled(world):
    """Graphs differ, even in the number of nodes for a rank without rows; the order of collectives does not."""
    found = ranks.run(world, on_a_mesh, timeout=180)
    layers = [f"base.layers.{i}.bytes" for i in range(CFG.num_layers)]
    blocks = ["base.embed.bytes", *layers, "base.final.bytes"]
    assert world < 3 or found[0][1]["plain"]["nodes"] != found[2][1]["plain"]["nodes"]
    for rank, (block, facts) in enumerate(found):
        orders = {name: row["order"] for name, row in facts.items()}
        assert orders == {name: row["order"] for name, row in found[0][1].items()}
        assert all(sum(what == "all_reduce" for what, *_ in order) == (world > 1) for order in orders.values())
        if world == 1:
            assert not any(orders.values())
            continue
        sent = {name: [of for what, *_, of in order if what == "all_gather"] for name, order in orders.items()}
        assert sent.pop("kept") == blocks and sent.pop("last kept") == [*blocks, layers[0]]
        assert all(of == [*blocks, *reversed(layers)] for of in sent.values())
        assert {axis for _, axis, *_ in orders["plain"]} == {"fsdp"}
        assert [facts[name]["under_way"] for name in sent][:5] == [0, 1, 2, 5, 0]
        computed = [flops > 0 for flops in facts["depth 1"]["flops"]]  # while a gather is under way
        assert facts["plain"]["flops"] == [0] * 6 and computed == [False] * 2 + [rank < 2] * 4
        held, peak = ({name: facts[name][what] for name in facts} for what in ("early", "peak"))
        assert held["plain"] == held["nothing fits"] == 0 < held["one layer"] <= block
        assert block < held["two layers"] <= 2 * block < held["depth 100"]
        assert peak["nothing fits"] == peak["plain"] < peak["depth 100"]
        assert peak["depth 1"] <= peak["plain"] + block and peak["depth 2"] <= peak["plain"] + 2 * block
        assert peak["last kept"] <= peak["plain"] + 2 * block + block // 2


def beside_sums():
    step, args, mesh = setting(sums=True)
    plain = trace(lambda args: step(**args), args)
    wanted, orders = step(**args), []
    for passes in ((), (prefetch_gathers(1),), (prefetch_gathers(2),), (prefetch_gathers(3),)):
        scheduled = passed(plain, *passes)
        assert equal(run(scheduled, args), wanted)
        orders.append([(row.name, row.nbytes, row.of) for row in schedule(scheduled)])
    return orders


@pytest.mark.slow
def test_the_order_beside_other_collectives():
    found = ranks.run(3, beside_sums, timeout=120)
    assert found[1:] == found[:1] * 2
    plain, *orders = found[0]
    assert len(plain) == 6 + 8 + 1 and all(sorted(order) == sorted(plain) for order in orders)
    assert len({tuple(order) for order in (plain, *orders)}) == 4  # gathers pass sums


def donated_on_a_mesh():
    step, args, _ = setting()
    results, predicted = [], None
    for passes in ((), (deduplicate_gathers(), prefetch_gathers(2))):
        captured = jit(
            lambda adapters, state, base, tokens: step(adapters, state, base, tokens),
            donate=("adapters", "state"),
            passes=passes,
        )
        adapters, state = (tree.map(torch.clone, args[name]) for name in ("adapters", "state"))
        for _ in range(3):
            adapters, state, value = captured(adapters, state, args["base"], args["tokens"])
        results.append((adapters, state, value))
        (traced,) = captured.traced.values()
        predicted = of(traced)
    (sums,) = (c for c in predicted.collectives if c.name == "all_reduce")
    assert sums.count == 1
    return equal(*results)


@pytest.mark.slow
def test_steps_that_are_scheduled_and_donated():
    assert ranks.run(2, donated_on_a_mesh, timeout=180) == [True, True]


def donated_under_way():
    def f(a, b):
        first = shard.all_gather(b, dist.group.WORLD)
        result = a + 1
        return result, first.sum() + shard.all_gather(a, dist.group.WORLD).sum()

    captured, a, sums = jit(f, donate=("a",), passes=(prefetch_gathers(),)), torch.zeros(1 << 18), []
    for _ in range(3):
        a, total = captured(a, torch.zeros(2))
        sums.append(total.item() / a.numel())
    (found,) = captured.traced.values()
    return under_way(found), written_under_way(found), sums


def test_a_donated_shard_is_not_written_while_it_is_gathered():
    assert ranks.run(2, donated_under_way) == [(1, False, [0.0, 2.0, 4.0])] * 2
