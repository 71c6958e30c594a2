"""Ranks that do different things, or nothing, are found and named by every other rank; slow ones are waited for."""

import ctypes
import os
import re
import signal
import subprocess
import sys
import time

import pytest
import torch
import torch.distributed as dist

import shard
from fquant import jit
from shard import agree, roll_call
from shard.transport import desync, liveness
from tests.helpers import ranks
from tests.helpers.arrays import named

pytestmark = pytest.mark.xdist_group("ranks")

LIMIT = 10.0  # seconds in which every rank raises
LINE = r" \(test_desync\.py:\d+\)"
FIX = "call the same collectives on every rank, in the same order"


def total(mesh, size=64, dtype=torch.float32, axes="fsdp"):
    return shard.psum(torch.ones(size, dtype=dtype), mesh, axes)


def wait(mesh):
    """Wait for ranks that do not come; raise the error, with the seconds that it took."""
    total(mesh)  # so that all are there when the clock starts
    start = time.monotonic()
    try:
        total(mesh)
    except RuntimeError as error:
        raise RuntimeError(f"[{time.monotonic() - start:.1f} s] {error}") from None


def expect(n, fn, *args, dies=(), returns=()):
    """Return the messages of the RuntimeErrors of all ranks that neither die nor return, by rank."""
    with pytest.raises(ranks.RankFailure) as caught:
        ranks.run(n, fn, *args, timeout=2 * LIMIT)
    failures = dict(caught.value.failures)
    for rank in dies:
        failures.pop(rank)
    assert {rank: f.type for rank, f in failures.items()} == dict.fromkeys(
        set(range(n)) - set(dies) - set(returns), "RuntimeError"
    )
    for f in failures.values():
        if took := re.match(r"\[([\d.]+) s\]", f.message):
            assert float(took[1]) < LIMIT
    return {rank: f.message for rank, f in failures.items()}


# --- calls that differ


def other_shape(mesh, rank):
    total(mesh, 64 + (rank == 1))


def other_dtype(mesh, rank):
    total(mesh, dtype=torch.int64 if rank == 1 else torch.float32)


def other_order(mesh, rank):
    for op in [shard.all_reduce, shard.all_gather][:: -1 if rank == 1 else 1]:
        op(torch.ones(64), mesh.get_group("fsdp"))


def one_more(mesh, rank):
    for _ in range(3 if rank == 1 else 2):
        total(mesh)
    shard.close()


def one_fewer(mesh, rank):
    for _ in range(1 if rank == 1 else 2):
        total(mesh)
    agree.same("data", {"rows": "3"})


def backward(mesh, rank):
    f = lambda x: (shard.all_gather if rank == 1 else shard.enter)(x, mesh.get_group("fsdp")).sum()
    torch.func.grad(f)(torch.ones(64))


def replay_or_not(mesh, rank):
    step = jit(lambda x: shard.psum(x, mesh, "fsdp"))
    step(torch.ones(64))
    (total if rank == 1 else step)(*([mesh] if rank == 1 else [torch.ones(64)]))


SUM = "all_reduce sum float32[64] over all ranks"
DIFFERENT = {  # rank 0 and rank 1 are about to
    other_shape: (SUM, "all_reduce sum float32[65] over all ranks"),
    other_dtype: (SUM, "all_reduce sum int64[64] over all ranks"),
    other_order: (SUM, "all_gather float32[64] over all ranks"),
    one_more: ("close of the mesh over all ranks", SUM),
    one_fewer: (SUM, "comparison: data over all ranks"),
    backward: (SUM, "all_gather float32[64] over all ranks"),
    replay_or_not: ("replay of jit(<lambda>) over all ranks", SUM),
}


def differ(case):
    case(shard.mesh(fsdp=dist.get_world_size()), dist.get_rank())


@pytest.mark.parametrize("n", [2, 3])
@pytest.mark.parametrize("case", DIFFERENT, ids=lambda case: case.__name__)
def test_different_calls_raise_on_every_rank(case, n):
    mine, other = map(re.escape, DIFFERENT[case])
    first = "rank 0" if n == 2 else "ranks 0, 2"
    wanted = rf"ranks are about to do different things: {first} {mine}{LINE}; rank 1 {other}{LINE}; {re.escape(FIX)}"
    for rank, message in expect(n, differ, case).items():
        assert re.search(wanted + "$", message), (rank, message)


def crossed():
    """Rank 0 begins with its row of the mesh and rank 3 too; ranks 1 and 2 begin with their column."""
    mesh, rank = shard.mesh(dp=2, fsdp=2), dist.get_rank()
    axes = ["fsdp", "dp"] if rank in (0, 3) else ["dp", "fsdp"]
    for axis in axes:
        total(mesh, axes=axis)


def test_crossed_orders_of_two_groups():
    """Ranks 0 and 3 wait for 1 and 2 along fsdp, and these along dp for 3 and 0."""
    for message in expect(4, crossed).values():
        assert "ranks wait for each other: " in message, message
        for axis in ("dp", "fsdp"):
            waits = rf"rank \d waits in all_reduce sum float32\[64\] over {axis}{LINE} for rank \d"
            assert re.search(waits, message), message


def later_error():
    mesh, rank = shard.mesh(fsdp=2), dist.get_rank()
    with pytest.raises(RuntimeError, match="ranks are about to do different things"):
        total(mesh, 64 + rank)
    total(mesh)


def test_an_error_stays():
    for message in expect(2, later_error).values():
        assert message.startswith("ranks are about to do different things")


# --- ranks that do not come


def leaves(how):
    mesh, rank = shard.mesh(fsdp=dist.get_world_size()), dist.get_rank()
    if rank != 1:
        return wait(mesh)
    total(mesh)
    time.sleep(0.2)
    if how == "raises":
        raise ValueError("a bad batch")
    if how == "exits":
        os._exit(3)
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("n", [2, 3])
@pytest.mark.parametrize("how", ["raises", "exits", "is killed"])
def test_a_rank_that_leaves(how, n):
    for rank, message in expect(n, leaves, how, dies=[1]).items():
        gone = rf"rank 1 has gone, its connection closed; it was last seen in {re.escape(SUM)}{LINE}"
        waits = rf"; rank {rank} waits for it in {re.escape(SUM)}{LINE}"
        assert re.search(gone + waits, message) or "rank 1 has gone" in message.partition("raised RuntimeError")[2], (
            message
        )


def raises_alone(file, rank, pipe):
    """Be a rank of a job without the pool, whose process ends by an error."""
    ranks.join(file, 2, 20.0, rank)
    mesh = shard.mesh(fsdp=2)
    total(mesh)
    if rank == 1:
        raise ValueError("a bad batch")
    try:
        total(mesh)
    except RuntimeError as error:
        pipe.send(str(error))


def test_the_last_words_of_a_process(tmp_path):
    context = ranks.server()
    ours, theirs = context.Pipe()
    processes = [context.Process(target=raises_alone, args=(str(tmp_path / "job"), i, theirs)) for i in range(2)]
    for process in processes:
        process.start()
    try:
        assert ours.poll(60)
        message = ours.recv()
        assert re.match(rf"rank 1 raised ValueError: a bad batch; rank 0 waits for it in .*{LINE}$", message), message
    finally:
        for process in processes:
            process.kill()
            process.join()


def stops(pids):
    """Stop rank 1; another lets it go on once its own error is there."""
    mesh, rank = shard.mesh(fsdp=2), dist.get_rank()
    if rank == 1:
        total(mesh)
        os.kill(os.getpid(), signal.SIGSTOP)
        total(mesh)
    try:
        wait(mesh)
    finally:
        os.kill(pids[1], signal.SIGCONT)


def test_a_rank_that_is_stopped():
    ranks.run(2, dist.get_rank)  # so that they exist
    messages = expect(2, stops, ranks.pids())
    assert re.search(
        rf"rank 1 has not answered for 6 s, so it is stopped; it was last seen in {re.escape(SUM)}{LINE}; "
        rf"rank 0 waits for it in {re.escape(SUM)}{LINE}$",
        messages[0],
    ), messages[0]
    assert messages[1].startswith("rank 0 raised RuntimeError: rank 1 has not answered"), messages[1]


APART = pytest.mark.parametrize("apart", [False, True], ids=["one host", "two hosts"])


def keeps_the_lock(seconds, pids, apart, number):
    """Keep Python's lock on rank 1 for longer than a silent rank is waited for; then it gets a signal, if any."""
    own, rank = liveness.own(), dist.get_rank()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(desync, "SILENCE", 1.0)
        if apart:
            patch.setattr(liveness, "own", lambda: own._replace(host=f"host {rank}"))
        mesh = shard.mesh(fsdp=2)
        total(mesh)
        if rank == 1:
            if number:
                command = f"import os, time; time.sleep({seconds / 2}); os.kill({pids[1]}, {number})"
                subprocess.Popen([sys.executable, "-c", command])
            ctypes.PyDLL(None).sleep(seconds)
        try:
            return total(mesh)[0].item()
        finally:
            if rank == 0 and number != signal.SIGKILL:
                os.kill(pids[1], signal.SIGCONT)


@APART
def test_a_rank_that_keeps_the_lock_of_python_is_waited_for(apart):
    ranks.run(2, dist.get_rank)
    assert ranks.run(2, keeps_the_lock, 3, ranks.pids(), apart, 0) == [2.0, 2.0]


@APART
@pytest.mark.parametrize(
    ("number", "fault"),
    [(signal.SIGSTOP, "rank 1 has not answered for 1 s, so it is stopped; it"), (signal.SIGKILL, "rank 1 has gone")],
    ids=["stopped", "killed"],
)
def test_a_rank_that_keeps_the_lock_of_python_and_is_lost_is_named(apart, number, fault):
    ranks.run(2, dist.get_rank)
    messages = expect(2, keeps_the_lock, 4, ranks.pids(), apart, number, dies=(1,) * (number == signal.SIGKILL))
    assert messages[0].startswith(fault)


def slow(seconds):
    mesh, rank = shard.mesh(fsdp=3), dist.get_rank()
    before = total(mesh)
    if rank == 1:
        time.sleep(seconds)
    return (before + total(mesh)).tolist(), shard.psum(torch.tensor(rank), mesh, "fsdp").item()


def test_a_slow_rank_is_waited_for():
    assert ranks.run(3, slow, 12.0, timeout=60) == [([6.0] * 64, 3)] * 3


def slow_in_another_group():
    """Ranks 0 and 2 wait for 1 and 3; rank 3 waits for rank 1, which is slow: no circle."""
    mesh, rank = shard.mesh(dp=2, fsdp=2), dist.get_rank()
    if rank == 1:
        time.sleep(4)
    for axis in ("dp", "fsdp"):
        total(mesh, axes=axis)
    return rank


def test_a_chain_of_waits_is_no_circle():
    assert ranks.run(4, slow_in_another_group, timeout=30) == [0, 1, 2, 3]


# --- captured steps


def replays(counts, then):
    mesh = shard.mesh(fsdp=dist.get_world_size())
    step = jit(lambda x: shard.psum(x, mesh, "fsdp"))
    start = time.monotonic()
    try:
        for _ in range(counts[dist.get_rank()]):
            start = time.monotonic()
            step(torch.ones(64))
        if then == "evaluate":
            total(mesh)
        elif then == "close":
            shard.close()
    except RuntimeError as error:
        raise RuntimeError(f"[{time.monotonic() - start:.1f} s] {error}") from None


@pytest.mark.parametrize(("then", "what"), [("evaluate", SUM), ("close", "close of the mesh over all ranks")])
@named("counts", {"a step more": [3, 4], "a step skipped": [3, 2], "of three": [3, 4, 3]})
def test_another_number_of_steps(counts, then, what):
    each = {"a step more": [3, 4], "a step skipped": [3, 2], "of three": [3, 4, 3]}[counts]
    for message in expect(len(each), replays, each, then).values():
        assert "ranks are about to do different things: rank" in message
        assert "replay of jit(<lambda>) over all ranks (test_desync.py:" in message and what in message


def test_a_program_that_ends_while_others_step():
    """Rank 1 returns and waits for the pool to leave, so its process lives: rank 0 waits, until the test ends it."""
    with pytest.raises(ranks.RankTimeout) as caught:
        ranks.run(2, replays, [3, 2], "", timeout=3)
    assert caught.value.hung == [0]


# --- what takes no roll call


def count_messages():
    mesh = shard.mesh(fsdp=2)
    (roll,) = roll_call._KNOWN.values()
    step = jit(lambda x: shard.all_gather(shard.psum(x, mesh, "fsdp"), mesh.get_group("fsdp")))
    for _ in range(3):
        step(torch.ones(4))
    captured = roll._calls
    for _ in range(3):
        total(mesh)
        shard.enter(torch.ones(3), mesh.get_group("fsdp"))
        total(mesh, axes="dp")  # of one rank
    uncaptured = roll._calls - captured
    with roll._changed:
        return uncaptured, dict(roll._arrived)


def test_a_replay_takes_one_and_nothing_is_kept():
    for uncaptured, arrived in ranks.run(2, count_messages):
        assert uncaptured == 3
        assert all(number for _, number in arrived) and len(arrived) <= 1
