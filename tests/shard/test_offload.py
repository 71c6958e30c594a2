"""Offloaded blocks: a step that fetches them has the bits of one that does not, on any number of ranks."""

import re

import pytest
import torch
import torch.distributed as dist
from torch.func import grad, grad_and_value, vmap

import shard
from fquant import cost, jit, lora, tree
from fquant.compile.cost import of
from fquant.compile.trace import trace
from models import decoder
from shard import host_memory
from shard.passes.report import schedule
from tests.helpers import ranks
from tests.helpers.cases import slow_after
from tests.helpers.graphs.retargeted import on_fakes, traced
from tests.helpers.live_memory import Peak
from tests.helpers.qlora_step import CFG, equal, start, tokens_of
from tests.helpers.sharding.schedules import check_order

pytestmark = pytest.mark.xdist_group("ranks")
RULES = {
    "all": shard.Rules(offload="block"),
    "layers": shard.Rules(offload="block", resident="embed|final"),
}
BLOCKS = {"base.embed.bytes", "base.final.bytes", *(f"base.layers.{i}.bytes" for i in range(CFG.num_layers))}
PASSES = {
    "prefetch": (shard.passes.prefetch_gathers(),),
    "regather": (shard.passes.regather_blocks(), shard.passes.prefetch_gathers()),
    "deduplicate": (shard.passes.deduplicate_gathers(), shard.passes.prefetch_gathers(2)),
}
STEPS = [  # whether blocks are recomputed, the tokens of the comm, rules, passes
    (True, None, "all", "prefetch"),
    (True, 16, "layers", "deduplicate"),
    (False, None, "layers", "regather"),
    (False, 16, "all", "regather"),
]


def setting(rules, recompute=True, tokens=None):
    """Return a gradient and its arguments on this rank: ranks have 2, 1 and 0 rows of the batch."""
    mesh = shard.mesh(fsdp=dist.get_world_size())
    adapters, _, base = start()
    placed, adapters = shard.place((base, adapters), decoder.dims(CFG), rules, mesh, CFG)
    assert equal(shard.collect(placed), base)
    comm = shard.comm(mesh, rules, recompute=recompute, tokens=tokens)

    def loss(adapters, base, tokens):
        params = lora.attach(base, adapters)
        return decoder.loss(params, tokens[:, :-1], tokens[:, 1:], CFG, comm, count=24.0)

    args = tree.map(lambda t: t + 0.01, adapters), shard.local(placed), tokens_of(0)[: 2 - dist.get_rank()]
    return loss, args


def same_bits():
    """Compare steps with and without offload; return what each captured step fetches."""
    found = []
    for recompute, tokens, name, by in STEPS:
        loss, args = setting(shard.Rules(), recompute, tokens)
        wanted = grad_and_value(loss)(*args)
        loss, args = setting(RULES[name], recompute, tokens)
        assert equal(grad_and_value(loss)(*args), wanted), (recompute, tokens, name)

        @jit(passes=PASSES[by])
        def step(adapters, base, tokens, loss=loss):
            return grad_and_value(loss)(adapters, base, tokens)

        assert equal(step(*args), wanted) and equal(step(*args), wanted), (recompute, tokens, name, by)
        with Peak() as peak:
            step(*args)
        (captured,) = step.traced.values()
        predicted = of(captured)
        assert predicted.peak - predicted.arguments >= peak.most  # a gather in shared memory frees its input early
        assert dist.get_world_size() > 1 or predicted.peak - predicted.arguments == peak.most
        rows = [row for row in schedule(captured) if row.axis == "host"]
        assert all(row.name == "fetch" and row.issued < row.waited for row in rows)
        assert predicted.fetched == sum(row.nbytes for row in rows) and predicted.stashed == 0
        assert predicted.host == sum(b.bytes.nbytes for b in bundles(args[1]) if b.offloaded)
        found.append([row.of for row in rows])
    return found


def bundles(base):
    found = []
    tree.map(found.append, base, is_leaf=lambda x: isinstance(x, shard.Bundle))
    return found


@pytest.mark.parametrize("world", [1, pytest.param(2, marks=pytest.mark.slow), pytest.param(3, marks=pytest.mark.slow)])
def test_same_bits(world):
    found = ranks.run(world, same_bits, timeout=300)
    assert all(one == found[0] for one in found)
    layers = sorted(path for path in BLOCKS if "layers" in path)
    for (recompute, _, name, by), fetched in zip(STEPS, found[0], strict=True):
        assert set(fetched) == (BLOCKS if name == "all" else set(layers))
        of_layers = [path for path in fetched if path in layers]
        turn = world == 1 and name == "layers" and not recompute  # nothing is brought between the last layer's uses
        again = [] if by == "deduplicate" else layers[-2::-1] if turn else layers[::-1]
        assert of_layers == [*layers, *again], (recompute, by)


def overlap():
    """Return, of the fetches of layers, the depth of each: how many waits of blocks come between its issue and wait."""
    loss, args = setting(RULES["layers"])
    whole = lambda args: grad_and_value(loss)(*args)
    rows = schedule(trace(whole, args, passes=(shard.passes.prefetch_gathers(),)))
    last = "all_gather" if dist.get_world_size() > 1 else "fetch"
    waits = [row.waited for row in rows if row.name == last and "layers" in row.of]
    return [
        sum(row.issued < wait for wait in waits) - sum(row.waited < wait for wait in waits) - (row.name == last)
        for row in rows
        if row.name == "fetch"
    ]


def test_a_fetch_is_issued_before_the_gather_that_needs_it():
    ((found),) = ranks.run(1, overlap)
    assert found[1:] == [1] * (len(found) - 1)


def mapped():
    """Compare gradients of each example, and of stacked bases, which vmap maps."""
    loss, (adapters, base, tokens) = setting(shard.Rules(), recompute=False)
    near, far = (loss, base), setting(RULES["all"], recompute=False)
    each = lambda f, base: vmap(grad(f), in_dims=(None, None, 0))(adapters, base, tokens[:, None])
    twice = lambda base: tree.map(lambda t: torch.stack([t, t]), base)
    stacked = lambda f, base: vmap(grad(f), in_dims=(None, 0, None))(adapters, twice(base), tokens)
    return equal(each(*near), each(far[0], far[1][1])), equal(stacked(*near), stacked(far[0], far[1][1]))


@pytest.mark.skipif(torch.__version__ < "2.13", reason="torch before 2.13 cannot vmap view(dtype)")
def test_under_vmap():
    assert ranks.run(1, mapped) == [(True, True)]


def refused():
    """Return the errors of placing: a rule that matches nothing, and too little memory."""
    mesh = shard.mesh(fsdp=dist.get_world_size())
    _, _, base = start()
    found = []
    for rules, free in ((shard.Rules(offload="block", resident="tail"), 1 << 40), (RULES["all"], 1000)):
        host_memory.available_memory, former = (lambda free=free: free), host_memory.available_memory
        try:
            shard.place(base, decoder.dims(CFG), rules, mesh)
        except ValueError as error:
            found.append(str(error))
        host_memory.available_memory = former
    return found


def test_errors():
    for unmatched, small in ranks.run(2, refused):
        assert unmatched == ("rule resident: no block matches 'tail'; the blocks are embed, final, layers.0, layers.1")
        assert re.search(
            r"^offload: 0.00 GiB of blocks for each of \d ranks of this machine, and its memory has 0.00 GiB for",
            small,
        )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"offload": "layer"}, "rule offload: got 'layer'; wanted 'block', or None to keep all on the device"),
        ({"resident": "embed"}, "rule resident: got 'embed', and offload is None; add offload='block'"),
        ({"offload": "block", "resident": "("}, "rule resident: '(' is no regular expression: missing ), unterm"),
    ],
)
def test_rules_that_are_refused(options, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        shard.Rules(**options)


def test_pinned_memory_that_the_system_does_not_give():
    """Without a device there is none at all."""
    if torch.cuda.is_available():
        pytest.skip("there is pinned memory")
    with pytest.raises(RuntimeError, match=r"host: got no 2.00 GiB of pinned memory \(.*\); offload less, or raise"):
        host_memory.pinned(2 << 30)


def test_ranks_of_a_machine_share_its_memory(monkeypatch):
    alone = host_memory.available_memory()
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert host_memory.local_ranks() == 4 and host_memory.available_memory() < alone / 2
    host_memory.check_room(0)


# --- on a device, which need not be here ------------------------------------------------------------------------------


def captured_for_cuda(world, rules, passes, recompute=True):
    """Return a step captured for CUDA, the Cost of it, and its schedule."""
    adapters, _, base = start()
    with shard.abstract_mesh(device="cuda", fsdp=world) as mesh:
        local = shard.abstract_local(base, decoder.dims(CFG), rules, mesh)
        comm = shard.comm(mesh, rules, recompute=recompute)

        def step(adapters, base, tokens):
            loss = lambda adapters: decoder.loss(
                lora.attach(base, adapters), tokens[:, :-1], tokens[:, 1:], CFG, comm, count=24.0
            )
            return grad_and_value(loss)(adapters)

        captured = traced(step, adapters, local, tokens_of(0), passes=passes, host=shard.on_host(local))
        on_fakes(captured.module)
        check_order(captured)
        return captured, of(captured), schedule(captured, mesh)


@pytest.mark.parametrize("world", slow_after(1, [1, 2]))
def test_the_peak_of_a_device_sinks(world):
    """By the bytes of the base, but for those of blocks under way."""
    passes = (shard.passes.prefetch_gathers(),)
    _, near, _ = captured_for_cuda(world, shard.Rules(), passes)
    for rules in RULES.values():
        captured, far, rows = captured_for_cuda(world, rules, passes)
        arguments = [node for node in captured.module.graph.nodes if node.op == "placeholder"]
        on_host = [path for path, node in zip(captured.paths, arguments, strict=True) if node.meta["val"].is_cpu]
        assert {path for path in on_host} == {row.of for row in rows if row.name == "fetch"}
        assert near.arguments - far.arguments == far.host > 0 == near.host == near.fetched
        largest = max(row.nbytes for row in rows if row.name == "fetch")
        assert far.peak <= near.peak - far.host + 2 * largest
        assert (near.flops, far.stashed) == (far.flops, 0)


def test_memory_of_the_host_is_not_the_device_s():
    """A cost on the host has both; on the device the blocks count only while they are there."""
    adapters, _, base = start()
    with shard.abstract_mesh(device="cuda") as mesh:
        local = shard.abstract_local(base, decoder.dims(CFG), RULES["all"], mesh)
        comm = shard.comm(mesh, RULES["all"])

        def loss(base):
            return sum(t.sum() for t in tree.leaves(comm.load(base.layers[0])))

        block = local.layers[0].layout.size
        found = cost(loss, local, device="cuda", host=shard.on_host(local))
    assert found.arguments == 0 and block <= found.peak <= 2 * block + 1024 and found.fetched == block
