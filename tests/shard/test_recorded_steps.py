"""Steps that fetch, stash and communicate, recorded: replays have the bits of the step, on every rank."""

from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch.func import grad

import shard
from fquant import jit, tree
from fquant.compile.cuda_graph import Recordings, recordings
from fquant.compile.passes.rematerialize import rematerialize
from models import decoder
from shard.passes import prefetch_gathers, regather_blocks
from shard.transport.host import arrived, fetch
from tests.helpers import ranks
from tests.helpers.cases import slow_after
from tests.helpers.graphs.recorder import HostRecorder, use
from tests.helpers.graphs.retargeted import CUDA, HOST, at_home, traced
from tests.helpers.qlora_step import CFG, copied, equal, start, step, tokens_of
from tests.helpers.sharding.schedules import slow

pytestmark = pytest.mark.xdist_group("ranks")
NEAR, FAR, MANY = shard.Rules(), shard.Rules(offload="block"), slow(1e9)
STEPS = {  # rules, whether blocks are recomputed, passes
    "blocks on the host": (FAR, True, (prefetch_gathers(),)),
    "activations stashed": (NEAR, False, (regather_blocks(), prefetch_gathers(), rematerialize, MANY)),
    "both": (FAR, False, (regather_blocks(), prefetch_gathers(), MANY)),
}


def setting(rules=NEAR, recompute=True):
    """Return a step on a mesh, its state and base: ranks have 2 and 1 rows of the batch."""
    mesh, (adapters, state, base) = shard.mesh(fsdp=dist.get_world_size()), start()
    placed, adapters = shard.place((base, adapters), decoder.dims(CFG), rules, mesh, CFG)
    comm, reduce = shard.comm(mesh, rules, recompute=recompute), partial(shard.reduce, mesh=mesh, rules=rules)

    def on_mesh(adapters, state, base, tokens):
        return step(adapters, state, base, tokens, comm=comm, reduce=reduce)

    return on_mesh, adapters, state, shard.local(placed)


def rows_of(i):
    return tokens_of(i)[: 2 - dist.get_rank()]


def replayed(name):
    """Compare recorded steps with those node by node; in between the base is written where it is."""
    rules, recompute, passes = STEPS[name]
    f, adapters, state, base = setting(rules, recompute)
    with pytest.MonkeyPatch.context() as patch:
        host = use(patch)
        patch.setattr(recordings, "SMALL", -1)
        donate = ("adapters", "state")
        captured = jit(f, passes=passes, recompute=False, donate=donate, cuda_graph=True)
        plain = jit(f, passes=passes, recompute=False, cuda_graph=False)
        ours, values = (copied(adapters), copied(state)), []
        for i in range(6):
            if i == 4:
                for t in tree.leaves(base.layers[0]):
                    t.copy_(base.layers[1].bytes)
            *ours, value = captured(*ours, base, rows_of(i))
            adapters, state, wanted = plain(adapters, state, base, rows_of(i))
            assert equal((*ours, value), (adapters, state, wanted)), (name, i)
            values.append(float(value))
        (found,) = captured.traced.values()
        assert (host.recorded, host.replayed) == (1, 5) and len(set(values)) == 6
        assert set(found.recordings._slots) == {len(found.paths) - 1}  # the tokens: base and state are not copied
        return host.waited


@pytest.mark.parametrize(
    ("world", "name"),
    slow_after(2, [(1, "blocks on the host"), (2, "both"), (2, "activations stashed"), (1, "both")]),
)
def test_steps(world, name):
    assert min(ranks.run(world, replayed, name, timeout=180)) > 0


def moved():
    """Return how often each rank records if weights move on one of them only, and whether results stay equal."""
    f, adapters, state, base = setting()
    with pytest.MonkeyPatch.context() as patch:
        host = use(patch)
        patch.setattr(recordings, "SMALL", -1)
        captured, plain = jit(f, cuda_graph=True), jit(f, cuda_graph=False)
        bases, counts = [base, base, base, base], []
        bases[2 + dist.get_rank()] = copied(base)
        for i, one in enumerate((bases[0], *bases, *bases)):
            assert equal(captured(adapters, state, one, rows_of(i)), plain(adapters, state, one, rows_of(i))), i
            counts.append((host.recorded, host.replayed))
        return counts


def test_ranks_record_together():
    """A graph of collectives is recorded and launched by all ranks, though addresses differ between them."""
    first, second = ranks.run(2, moved, timeout=120)
    assert first == second and first[-1][0] > 1 and first[-1][1] == 8


def alternating():
    """Return the numbers of the recordings that each rank replays, if the first has two shapes and others one."""
    f, adapters, state, base = setting()
    with pytest.MonkeyPatch.context() as patch:
        host, seen, replay = use(patch), [], Recordings._replay

        def logged(self, made, tensors):
            seen.append(made.number)
            return replay(self, made, tensors)

        patch.setattr(Recordings, "_replay", logged)
        captured, plain = jit(f, cuda_graph=True), jit(f, cuda_graph=False)
        for i in range(9):
            rows = tokens_of(i)[: 1 + i % 2] if dist.get_rank() == 0 else tokens_of(i)[1:]
            assert equal(captured(adapters, state, base, rows), plain(adapters, state, base, rows)), i
        return seen, host.recorded, len(captured.traced)


def test_ranks_replay_what_they_recorded_together():
    (first, recorded, traces), (second, others, one) = ranks.run(2, alternating, timeout=120)
    assert first == second and recorded == others == 2 and len(first) == 7 and (traces, one) == (2, 1)
    assert first[2:] == [first[0], first[1]] * 2 + [first[0]]


def failing():
    """Return the warning of each rank if one cannot record."""
    f, adapters, state, base = setting()
    with pytest.MonkeyPatch.context() as patch:
        host = use(patch)

        def record(*args, record=host.record):
            record(*args)  # all of it, because the host communicates while it records
            raise RuntimeError("no memory")

        if dist.get_rank() == 1:
            patch.setattr(host, "record", record)
        captured, wanted = jit(f), f(adapters, state, base, rows_of(0))
        assert equal(captured(adapters, state, base, rows_of(0)), wanted)
        with pytest.warns(RuntimeWarning) as seen:
            for _ in range(3):
                assert equal(captured(adapters, state, base, rows_of(0)), wanted)
        return [str(one.message) for one in seen], host.replayed


def test_if_a_rank_cannot_record_none_does():
    ((text,), replays), ((other,), none) = ranks.run(2, failing, timeout=120)
    assert "rank 1 cannot record it" in text and "RuntimeError: no memory" in other and replays == none == 0


def watched():
    """Return the number of replays if one rank watches a call by a mode, which then runs node by node on all."""
    f, adapters, state, base = setting()
    with pytest.MonkeyPatch.context() as patch:
        host, args = use(patch), (adapters, state, base, rows_of(0))
        captured, wanted = jit(f, cuda_graph=True), f(adapters, state, base, rows_of(0))
        for i in range(4):
            mode = torch.utils.flop_counter.FlopCounterMode(display=False) if i == 2 and dist.get_rank() else None
            if mode is None:
                assert equal(captured(*args), wanted)
                continue
            with mode:
                found = captured(*args)
            assert equal(found, wanted) and mode.get_total_flops()
        return host.replayed


def test_a_rank_that_is_watched():
    assert ranks.run(2, watched, timeout=120) == [2, 2]


# --- a graph for CUDA, on the host ------------------------------------------------------------------------------------


def chain(x, far):
    """Return the gradient of layers whose weights are fetched; the backward fetches them again."""

    def loss(x):
        for w in far:
            x = torch.tanh(x @ arrived(fetch(w, CUDA)))
        return x.sum()

    return grad(loss)(x)


def test_memory_of_the_host_is_read_where_it_is(monkeypatch):
    """A weight there has no slot, however small. A new value is seen, another address is recorded again."""
    x, far = torch.randn(8, 4), [torch.randn(4, 4) for _ in range(4)]
    passes, host = (regather_blocks(), prefetch_gathers(), MANY), HostRecorder()
    captured = traced(chain, x, far, passes=passes, host={id(t) for t in far})
    module, graph = at_home(captured.module), captured.module.graph
    made = Recordings(module, graph, captured.paths, host, "chain", True)
    run = lambda *tensors: made.ready(tensors, lambda: module(*tensors))()
    monkeypatch.setattr("tests.shard.test_recorded_steps.CUDA", HOST)
    with torch.no_grad():
        for i in range(6):
            x = x.clone() + i
            far[0].add_(1)
            assert equal(run(x, *far), [chain(x, far)])
        assert (host.recorded, host.replayed, set(made._slots)) == (1, 5, {0}) and host.waited >= 8
        for i in range(recordings.MOST_MOVES):
            far = [w.clone() for w in far]
            assert equal(run(x, *far), [chain(x, far)]) and host.recorded == 2 + i
        kept, far = far, [w.clone() for w in far]
        with pytest.raises(
            RuntimeError, match=r"chain\) cannot be recorded .*: far.0 has another address at every call"
        ):
            run(x, *far)
        del kept
