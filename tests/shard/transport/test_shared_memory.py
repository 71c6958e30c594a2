"""Shared memory of ranks: which ranks have it, reuse of slots, ownership of results, and failures."""

import contextlib
import datetime
import gc
import os
import socket
import threading
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import shard
from fquant import jit
from shard.transport import gloo, shared_memory
from tests.helpers import ranks

pytestmark = pytest.mark.xdist_group("ranks")
FUNCTIONAL = torch.ops._c10d_functional


def world() -> Any:
    assert dist.group.WORLD is not None
    return dist.group.WORLD


def memory() -> Any:
    """Return the memory of all ranks."""
    found = shared_memory.of_group(world())
    assert found is not None
    return found


def gathered(x):
    return shard.all_gather(x, world())


def scattered(x):
    return shard.reduce_scatter(x, world())


def lent(x):
    return FUNCTIONAL.wait_tensor(torch.ops.fquant.all_gather.lent(x, dist.get_world_size(), world().group_name))


def own(size, turn=0):
    return torch.full((size,), 1000 * turn + dist.get_rank())


def wanted(size, turn=0):
    return 1000 * turn + torch.arange(dist.get_world_size()).repeat_interleave(size)


# --- reuse of slots


def used_again():
    """Gather many times in mixed sizes; return the number of slots, and True if small pages went back to the system."""
    sizes = [10, 100_000, 5000, 10, 300_000, 100_000]
    for turn in range(30):
        for size in sizes:
            assert torch.equal(gathered(own(size, turn)), wanted(size, turn))
    slots = memory()._slots
    return len(slots), sum(len(slot.pages) for slot in slots) <= 8 * len(slots) * dist.get_world_size() * max(sizes)


@pytest.mark.parametrize("n", [2, 3])
def test_a_few_slots_are_enough(n):
    for count, is_little in ranks.run(n, used_again):
        assert count <= 2 + shared_memory.MAX_PENDING and is_little


def kept_by_one():
    """Keep results on one rank alone: they stay unchanged there, and all ranks agree on the slots."""
    kept = []
    for turn in range(40):
        x = lent(own(2000, turn))
        if turn % 3 == 0 and dist.get_rank() == turn // 3 % dist.get_world_size():
            kept.append((turn, x[5:]))  # a view keeps it as well
        assert torch.equal(x, wanted(2000, turn))
    for turn, x in kept:
        assert torch.equal(x, wanted(2000, turn)[5:]), turn
    mine = len(kept)
    del kept, x
    slots = len(memory()._slots)
    for turn in range(40):
        assert torch.equal(lent(own(2000, turn)), wanted(2000, turn))
    return mine, slots, len(memory()._slots)


@pytest.mark.parametrize("n", [2, 3])
def test_kept_by_one_rank(n):
    results = ranks.run(n, kept_by_one)
    kept = sum(mine for mine, *_ in results)
    assert kept == 14 and {slots for _, *slots in map(list, results) for slots in slots} <= set(range(kept, kept + 5))


def many():
    """Keep more results than there are slots: the others travel, until some are released."""
    with mock.patch.object(shared_memory, "MAX_SLOTS", 3):
        kept = [(turn, lent(own(50, turn))) for turn in range(12)]
        total = scattered(own(dist.get_world_size()))
        assert all(torch.equal(x, wanted(50, turn)) for turn, x in kept) and total.item() == 3
        del kept
        for _ in range(2 * shared_memory.MAX_PENDING):  # until every rank knows
            gathered(own(50))
        with mock.patch.object(gloo, "_travel"):
            assert torch.equal(gathered(own(50)), wanted(50))
        return len(memory()._slots)


def test_more_than_there_are_slots():
    assert ranks.run(3, many) == [3] * 3


def no_others():
    """Write to a result, which changes nothing on other ranks or in later gathers."""
    first = gathered(own(3000))
    dist.barrier()
    first.fill_(-7 - dist.get_rank())
    dist.barrier()
    second = gathered(own(3000, 1))
    assert (first == -7 - dist.get_rank()).all() and torch.equal(second, wanted(3000, 1))
    return scattered(own(2 * dist.get_world_size())).tolist()


def test_results_are_the_callers():
    assert ranks.run(3, no_others) == [[3, 3]] * 3


def modes():
    """Issue in inference mode and wait outside of it, and the other way round."""
    group, n = world().group_name, dist.get_world_size()
    for turn in range(6):
        with torch.inference_mode(turn % 2 == 0):
            x = own(100, turn)
            out, total = gloo.all_gather(x, n, group), gloo.reduce_scatter(x[:n].contiguous(), n, group)
        with torch.inference_mode(turn % 2 == 1):
            assert torch.equal(FUNCTIONAL.wait_tensor(out), wanted(100, turn))
            assert FUNCTIONAL.wait_tensor(total).item() == sum(1000 * turn + rank for rank in range(n))


def test_modes():
    ranks.run(2, modes)


# --- captured


def captured():
    """Return the gathers of a captured step: lent for results that it only reads, copied for others."""
    group = shard.mesh(fsdp=dist.get_world_size()).get_group("fsdp")

    def step(a, b, c):
        read, given = shard.all_gather(a, group), shard.all_gather(b, group)
        return (read @ read.mT).sum(0), given, given * 2, shard.all_gather(c, group).add_(1).sum()

    args = [torch.randn(64, 32, generator=torch.Generator().manual_seed(i + 3 * dist.get_rank())) for i in range(3)]
    want, taken = step(*args), jit(step)
    for _ in range(5):
        got = taken(*args)
        assert all(map(torch.equal, got, want))
        got[1].zero_()  # the caller's own memory
    (one,) = taken.traced.values()
    return [str(node.target) for node in one.placed.module.graph.nodes if "all_gather" in str(node.target)]


def test_a_captured_step_is_lent_what_it_reads():
    op = "fquant.all_gather."
    assert ranks.run(2, captured) == [[f"{op}lent", f"{op}default", f"{op}default"]] * 2


# --- availability and failures


def not_on(rank):
    """Gather while one rank cannot listen; return True if there is no memory, and a sum."""
    refuse = mock.patch.object(shared_memory, "_listen", lambda *_: (None, -1))
    with refuse if dist.get_rank() == rank else contextlib.nullcontext():
        assert torch.equal(gathered(own(70)), wanted(70))
        assert torch.equal(lent(own(70)), wanted(70))
    return shared_memory.of_group(world()) is None, scattered(own(2 * dist.get_world_size())).tolist()


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_one_rank_that_cannot(rank):
    assert ranks.run(3, not_on, rank) == [(True, [3, 3])] * 3


def unreachable():
    """Gather with ranks in different networks, as in containers, where names are not found."""
    real = shared_memory._address
    with mock.patch.object(shared_memory, "_address", lambda name: real(name + dist.get_rank())):
        assert torch.equal(gathered(own(70)), wanted(70))
    return shared_memory.of_group(world()) is None


def test_ranks_of_different_networks():
    assert ranks.run(3, unreachable) == [True] * 3


def left_behind():
    """Return the number of files that remain open after groups are gone."""
    count = lambda: len(os.listdir("/proc/self/fd"))
    gathered(own(10))
    before = count()
    for _ in range(3):
        group: Any = dist.new_group()
        shard.all_gather(own(10), group)
        dist.destroy_process_group(group)
        del group
    gc.collect()
    return count() - before


def test_nothing_is_left_behind():
    assert max(ranks.run(2, left_behind)) <= 0


def test_a_stranger_is_sent_away():
    """A process that read the name of a socket, and does not know its secret, is rejected."""
    listener, _ = shared_memory._listen(12345, 1, 3)
    assert listener is not None
    stranger = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    stranger.connect(shared_memory._address(12345))
    stranger.send(b"let me in, I am rank 2!!"[:16])
    found: dict[int, socket.socket] = {}
    thread = threading.Thread(target=lambda: found.update(shared_memory._accept(listener, 77, 1, 10)))
    thread.start()
    peers = shared_memory._connect([[12345, 77, 1]], 2)
    thread.join()
    assert peers is not None and list(found) == [2] and stranger.recv(1) == b""
    found[2].send(b"in")
    assert peers[0].recv(9) == b"in"
    for one in (stranger, *found.values(), *peers.values()):
        one.close()


CONTRADICTIONS = {
    "sizes": (lambda x: gathered(x[: 5 + dist.get_rank()]), "all_gather int64[5]", "all_gather int64[6]"),
    "dtypes": (lambda x: gathered(x.to([torch.int64, torch.float64][dist.get_rank()])), "int64[8]", "float64[8]"),
    "kinds": (lambda x: [gathered, scattered][dist.get_rank()](x), "all_gather", "reduce_scatter"),
}


def contradict(case):
    gathered(own(4))
    with pytest.raises(RuntimeError) as caught:
        CONTRADICTIONS[case][0](own(8))
    with pytest.raises(RuntimeError):  # from now on the state of other ranks is unknown
        gathered(own(4))
    dist.barrier()
    return str(caught.value)


@pytest.mark.parametrize("case", CONTRADICTIONS)
def test_different_things(case):
    for error in ranks.run(2, contradict, case):
        assert all(part in error for part in CONTRADICTIONS[case][1:]), error
        assert "rank 0" in error and "rank 1" in error


def late():
    """Gather twice on rank 0 and once on rank 1, over a group with a time-out of a second; return the error."""
    group: Any = dist.new_group(timeout=datetime.timedelta(seconds=1))
    gather, seen = (lambda: gloo.all_gather(torch.ones(8), 2, group.group_name)), None
    FUNCTIONAL.wait_tensor(gather())
    if dist.get_rank() == 0:
        out = gather()
        with pytest.raises(RuntimeError) as caught:
            FUNCTIONAL.wait_tensor(out)
        seen = str(caught.value)
    dist.barrier()  # of the group of all
    return seen


def test_a_rank_that_is_late():
    assert ranks.run(2, late, timeout=30)[0] == "Timed out waiting 1000ms for rank 1 of the group"


def gone():
    gathered(own(8))
    if dist.get_rank() == 1:
        raise KeyError("gone")
    gathered(own(8))


def test_a_rank_that_has_gone():
    with pytest.raises(ranks.RankFailure) as caught:
        ranks.run(3, gone, timeout=30)
    failures = caught.value.failures
    assert [failures[rank].type for rank in range(3)] == ["RuntimeError", "KeyError", "RuntimeError"]
    assert any("rank 1 of the group has gone" in failures[rank].message for rank in (0, 2))
