"""Offloaded activations: equal bits, a peak that never rises, copies in time, and no more of them than asked."""

import random
import re
from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch.func import grad, grad_and_value

import shard
from fquant import jit, lora, tree
from fquant.compile import graph, liveness, roofline
from fquant.compile.cost import of
from fquant.compile.passes.rematerialize import rematerialize
from fquant.compile.trace import trace
from fquant.device import HOST
from models import decoder
from shard.passes.offload import offload_activations
from shard.passes.report import schedule
from shard.transport.host import arrived, fetch
from tests.helpers import ranks
from tests.helpers.cases import slow_after
from tests.helpers.graphs import llama_step
from tests.helpers.qlora_step import CFG, equal, start, tokens_of
from tests.helpers.sharding.schedules import RATE, check_order, flights, passed, slow

pytestmark = pytest.mark.xdist_group("ranks")
MANY = slow(1e9)


def near_peak(captured):
    """Return the peak of the device's memory: without what was stashed, which the CPU has too."""
    g = captured.module.graph
    return liveness.peak(g, graph.storages_on_device(g) - graph.storages_offloaded(g)).nbytes


# --- a stack of layers ------------------------------------------------------------------------------------------------

WIDE = 1 << 12  # bytes of an activation


def layers(w, x):
    """Return the gradient of layers, of which each saves one activation for the backward."""

    def loss(w):
        y = x
        for each in w:
            y = torch.tanh(y @ each)
        return y.sum()

    return grad(loss)(w)


def eight():
    return [torch.sin(torch.arange(256.0) + i).reshape(16, 16) for i in range(8)], torch.cos(
        torch.arange(1024.0)
    ).reshape(64, 16)


def plain():
    w, x = eight()
    assert x.nbytes == WIDE
    return trace(lambda args: layers(*args), (w, x), fuse=False, recompute=False)


def offloaded(captured, *passes):
    """Return ``captured`` with ``passes``, which keep the bits and the order."""
    found, args = passed(captured, *passes), [t for t in tree.leaves(eight())]
    assert equal(found(*args), captured(*args))
    check_order(found)
    assert near_peak(found) <= near_peak(captured)
    return found


def test_the_peak_sinks_and_what_is_far_apart_goes_first():
    before = plain()
    found = offloaded(before, MANY)
    saved = near_peak(before) - near_peak(found)
    moved = [row.nbytes for row in schedule(found) if row.name == "stash"]
    c = of(found)
    assert saved >= 3 * WIDE and set(moved) == {WIDE} and c.stashed == c.fetched == sum(moved) == c.host
    inputs = [issue.all_input_nodes[0] for issue, *_ in flights(found) if graph.transfer(issue) == "stash"]
    made = [node for node in before.module.graph.nodes if node.target is torch.ops.aten.tanh.default]
    assert [node.name for node in inputs] == [node.name for node in made[: len(inputs)]]  # of the first layers


@pytest.mark.parametrize("reduce", [0, 1, WIDE, WIDE + 1, 2 * WIDE, None])
def test_no_more_is_moved_than_asked(reduce):
    before = plain()
    found = offloaded(before, slow(1e9, reduce=reduce))
    sunk, moved = near_peak(before) - near_peak(found), of(found).stashed
    assert reduce is None or reduce <= sunk <= moved < reduce + WIDE


def test_copies_are_issued_so_that_they_arrive_in_time():
    """A link of half the speed has time for fewer tensors, each with twice the work between issue and wait."""
    before, moved = plain(), []
    for link in (1e10, 1e9, 5e8, 1e8, 1e6):
        found = offloaded(before, slow(link))
        rows = schedule(found)
        moved.append(sum(row.name == "stash" for row in rows))
        assert all(row.flops / RATE >= 0.5 * row.nbytes / link or row.ops > 0 for row in rows)
    assert moved[0] >= moved[1] >= moved[2] >= moved[3] >= moved[4] == 0 < moved[1]


def test_small_tensors_stay():
    assert not flights(offloaded(plain(), replace(MANY, min_bytes=WIDE + 1)))


def test_fetches_of_blocks_have_the_link_first():
    """A base that is fetched takes the time of its bytes, in one direction."""
    near = lambda w: arrived(fetch(w, HOST))[:16]

    def steps(args, load):
        w, x = args

        def loss(x):
            for each in w:
                x = torch.tanh(x @ load(each))
            return x.sum()

        return grad(loss)(x)

    w, x = eight()
    args = [each.repeat(16, 1) for each in w], x
    alone = trace(partial(steps, load=lambda w: w[:16]), args, fuse=False, recompute=False)
    beside = trace(partial(steps, load=near), args, fuse=False, recompute=False)
    beside = passed(beside, shard.passes.regather_blocks(), shard.passes.prefetch_gathers())
    moved = lambda x, link: of(passed(x, slow(link))).stashed
    assert moved(alone, 1e8) > moved(beside, 1e8) and moved(alone, 1e11) == moved(beside, 1e11)


# --- the time of a step ----------------------------------------------------------------------------------------------

H100 = roofline.DEVICES["h100"]


def spent(captured):
    """Return the predicted seconds, and the peak of the device in bytes."""
    return roofline.predict(captured.module.graph, H100).seconds, near_peak(captured)


@pytest.mark.parametrize(
    ("layers", "options"), slow_after(0, [(4, {}), (8, {}), (4, {"offload": "block"}), (8, {"checkpoint": "none"})])
)
def test_a_step_hardly_takes_longer(layers, options):
    """Elementwise chains that are fused later take less time than they seem to, and blocks share the link."""
    with llama_step.captured(layers, **options) as captured:
        before, peak = spent(captured)
    with llama_step.captured(layers, **options, offload_activations=True) as captured:
        after, less = spent(captured)
    assert after < 1.02 * before and less < (0.97 if "offload" in options else 0.85) * peak


def test_no_copy_is_waited_for():
    """Each direction takes turns, however many of the copies begin or end at once."""
    waited = lambda captured, device: roofline.predict(captured.module.graph, device).by_kind.get("copy", 0.0)
    for link in (1e10, 1e9, 5e8, 2e8):
        change = slow(link)
        found = offloaded(plain(), change)
        assert waited(found, change.device) < 1e-9 and (flights(found) or link < 5e8)


def test_room_is_worth_waiting():
    """On a link that is too slow for any, copies are waited for, as far as the room asks."""
    before, taken = plain(), []
    for rooms in (0, 1, 2, 3):
        room = near_peak(before) - rooms * WIDE
        change = slow(1e7, room=room)
        found = offloaded(before, change)
        assert near_peak(found) <= room
        taken.append((len(flights(found)), roofline.predict(found.module.graph, change.device).seconds))
    assert taken == sorted(set(taken)) and taken[0][0] == 0
    assert not flights(offloaded(before, slow(1e7)))


def test_room_is_for_what_kernels_take_too(monkeypatch):
    before = plain()
    wanted = flights(offloaded(before, slow(1e7, room=near_peak(before) - 2 * WIDE)))
    monkeypatch.setattr(roofline, "scratch", lambda node, device: 2 * WIDE)
    found = flights(offloaded(before, slow(1e7, room=near_peak(before))))
    assert len(found) == len(wanted) > 0


# --- any program ------------------------------------------------------------------------------------------------------


def written(x, y, i):
    x = x.clone()
    x.add_(y)
    return [x]


STEPS = {
    "m": lambda x, y, i: [x @ y / 8],
    "e": lambda x, y, i: [torch.sin(x) * y],
    "v": lambda x, y, i: [x.mT.view_as(x.mT).mT],
    "s": lambda x, y, i: [x.split(4)[i].repeat(2, 1)],
    "p": lambda x, y, i: torch.stack([x, y]).unbind(),
    "t": lambda x, y, i: [torch.sort(x, dim=i)[0]],
    "w": written,
}


def program(draw):
    """Return a random program: a forward of products, views, parts and sums, and the same read again in reverse."""
    script = [(draw.choice("mmeevvsptw"), draw.random(), draw.random()) for _ in range(draw.randint(6, 24))]
    reads = [draw.random() for _ in range(draw.randint(2, 12))]

    def f(args):
        made = [args[0] @ args[1]]
        for op, i, j in script:
            x, y = made[int(i * len(made))], made[int(j * len(made))]
            made.extend(STEPS[op](x, y, int(j * 2)))
        total = torch.zeros(())
        for i in reads:
            k = int(i * len(made))
            total = total + (made[k] * (1 + i)).sum() + made[k][1:].cos().sum() + total.sin()
        return total, made[int(reads[0] * len(made))]

    return f


def test_any_program():
    moved = 0
    for seed in range(30):
        draw = random.Random(seed)
        f, args = program(draw), [torch.sin(torch.arange(64.0).reshape(8, 8) * (i + 1)) for i in range(2)]
        before = trace(f, args, fuse=False, recompute=False)
        change = slow(
            draw.choice([1e8, 1e9, 1e10]), reduce=draw.choice([None, 256, 600]), room=draw.choice([None, None, 1, 4000])
        )
        found = passed(before, change)
        assert equal(found(*args), before(*args)) and equal(found(*args), f(args)), seed
        check_order(found)
        assert near_peak(found) <= near_peak(before), seed
        moved += bool(flights(found))
        stashes, fetches = (sum(graph.transfer(n) == kind for n, *_ in flights(found)) for kind in ("stash", "fetch"))
        assert stashes == fetches, seed
    assert moved > 15


# --- a step on a mesh -------------------------------------------------------------------------------------------------

MODES = {  # of checkpointing: whether blocks are recomputed, and the passes before
    "full": (True, ()),
    "selective": (False, (shard.passes.regather_blocks(), rematerialize)),
    "none": (False, (shard.passes.regather_blocks(),)),
}


def steps(modes):
    """Compare steps with activations and base on the host to the plain one; return the bytes that are stashed."""
    mesh, found = shard.mesh(fsdp=dist.get_world_size()), {}
    adapters, _, base = start()
    for mode in modes:
        recompute, before = MODES[mode]
        for rules in (shard.Rules(), shard.Rules(offload="block")):
            placed, adapters = shard.place((base, adapters), decoder.dims(CFG), rules, mesh, CFG)
            comm = shard.comm(mesh, rules, recompute=recompute)

            def loss(adapters, base, tokens, comm=comm):
                params = lora.attach(base, adapters)
                return decoder.loss(params, tokens[:, :-1], tokens[:, 1:], CFG, comm, count=24.0)

            args = tree.map(lambda t: t + 0.01, adapters), shard.local(placed), tokens_of(0)[: 2 - dist.get_rank()]
            passes = (*before, shard.passes.prefetch_gathers(), MANY)
            step = jit(lambda *args, f=loss: grad_and_value(f)(*args), passes=passes, recompute=False)
            wanted = grad_and_value(loss)(*args)
            assert equal(step(*args), wanted) and equal(step(*args), wanted), (mode, rules)
            (captured,) = step.traced.values()
            check_order(captured)
            found[mode, rules.offload] = of(captured).stashed
    return found


@pytest.mark.parametrize(
    ("world", "modes"),
    [
        (1, ("none",)),
        *(pytest.param(n, tuple(MODES), marks=pytest.mark.slow) for n in (1, 2, 3)),
    ],
)
def test_a_step_has_the_same_bits(world, modes):
    found = ranks.run(world, steps, modes, timeout=300)
    assert all(found[0][mode, offload] > 0 for mode in modes for offload in (None, "block"))


# --- errors -----------------------------------------------------------------------------------------------------------

BAD = {
    "bytes below 0": ({"reduce": -1}, "offload_activations: reduce is -1; wanted bytes, or None for no bound"),
    "no room": ({"room": True}, "offload_activations: room is True; wanted bytes, or None for no bound"),
    "part of a byte": ({"min_bytes": 0.5}, "offload_activations: min_bytes is 0.5; wanted bytes"),
}


@pytest.mark.parametrize(("options", "message"), BAD.values(), ids=BAD)
def test_bad_options(options, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        offload_activations(**options)


def test_a_pass_is_a_value():
    assert offload_activations() == offload_activations(1 << 20) and hash(MANY) == hash(MANY) != hash(
        offload_activations()
    )
