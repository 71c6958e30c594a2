"""Profiles of steps on a mesh: every rank has its own, with collectives on a track beside the computation."""

from functools import partial

import pytest
import torch.distributed as dist

import fquant
import shard
from fquant.profiling import record
from models import decoder
from shard.passes import prefetch_gathers
from tests.helpers import ranks
from tests.helpers.qlora_step import CFG, copied, equal, start, step, tokens_of

pytestmark = pytest.mark.xdist_group("ranks")


def profiled():
    """Return the events of a rank's profile as tuples, after checks of what holds on each rank."""
    mesh, rules, (adapters, state, base) = shard.mesh(fsdp=dist.get_world_size()), shard.Rules(), start()
    placed, adapters = shard.place((base, adapters), decoder.dims(CFG), rules, mesh, CFG)
    comm, reduce = shard.comm(mesh, rules, recompute=False), partial(shard.reduce, mesh=mesh, rules=rules)
    given = shard.local(adapters), shard.local(state), shard.local(placed), tokens_of(dist.get_rank())
    before = copied(given)
    on_mesh = lambda adapters, state, base, tokens: step(adapters, state, base, tokens, comm=comm, reduce=reduce)
    found = fquant.profile(on_mesh, *given, donate=("adapters", "state"), passes=(prefetch_gathers(),), repeats=2)
    assert equal(given, before)
    beside = [e for e in found.events if e.track == record.COLLECTIVES]
    assert len(beside) == sum(c.count for c in found.cost.collectives) > 2
    waits = [e for e in found.events if e.kind == "wait"]
    assert all(any(e.start + e.seconds == pytest.approx(w.start + w.seconds) for w in waits) for e in beside)
    return [(e.place, e.op, e.track, e.line) for e in found.events]


def test_a_profile_of_each_rank():
    first, second = ranks.run(2, profiled, timeout=120)
    assert first == second
    assert {line.partition(" (")[0] for _, _, track, line in first if track == record.COLLECTIVES} != {""}
