"""Ranks that stop, end or raise while tensors travel are found and named by the others; slow ones are waited for."""

import contextlib
import ctypes
import json
import os
import re
import signal
import threading
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import shard
from fquant import jit
from fquant.compile import collective_check
from shard import collectives, device_mesh, roll_call
from shard.transport import desync
from tests.helpers import ranks

pytestmark = pytest.mark.xdist_group("ranks")

LIMIT = 10.0  # seconds in which every rank raises
LINE = r" \(test_transfers\.py:\d+\)"


def group():
    return dist.group.WORLD


def sums():
    """Over TCP."""
    return shard.all_reduce(torch.ones(8), group())


def gathers():
    """In shared memory."""
    return shard.all_gather(torch.ones(8), group())


def broadcasts():
    x = torch.full((8,), float(dist.get_rank()))
    collectives.broadcast(x, 1)
    return x


def sum_step(x):
    return shard.all_reduce(x * 2, group())


def gather_step(x):
    return shard.all_gather(x * 2, group())


def replays_a_sum():
    return jit(sum_step)(torch.ones(8))  # traced for the ranks of this call


def replays_a_gather():
    return jit(gather_step)(torch.ones(8))


ALL = "over all ranks"
CASES = {  # call, and how errors show it
    sums: f"all_reduce sum float32[8] {ALL}",
    gathers: f"all_gather float32[8] {ALL}",
    broadcasts: f"broadcast from rank 1 float32[8] {ALL}",
    replays_a_sum: f"replay of jit(sum_step) {ALL}",
    replays_a_gather: f"replay of jit(gather_step) {ALL}",
    shard.close: f"close of the mesh {ALL}",
}


@contextlib.contextmanager
def at_the_start_of_a_transfer(do):
    """Call ``do`` where the next transfer begins, once all ranks have announced it."""
    with pytest.MonkeyPatch.context() as patch:
        for module, name in ((collectives, "transfer"), (collective_check, "watched"), (device_mesh, "transfer")):
            patch.setattr(module, name, after(do, getattr(module, name)))
        yield


def after(do, f):
    @contextlib.contextmanager
    def doing_so(*args):
        with f(*args):
            do()
            yield

    return doing_so


def stop(call, silence, pids):
    """Stop rank 1 in a transfer; the others try again once they have an error, and the last of them kills it."""
    shard.mesh(fsdp=dist.get_world_size())
    if call is not shard.close:
        call()
    sums()
    with pytest.MonkeyPatch.context() as patch:
        if silence:
            patch.setattr(desync, "SILENCE", silence)
        start, stops = time.monotonic(), lambda: os.kill(os.getpid(), signal.SIGSTOP)
        with pytest.raises(RuntimeError) as caught:
            with at_the_start_of_a_transfer(stops) if dist.get_rank() == 1 else contextlib.nullcontext():
                call()
        took = time.monotonic() - start
        with pytest.raises(RuntimeError) as again:
            sums()
    assert str(again.value) == str(caught.value)
    if dist.get_rank() == 0:
        time.sleep(1)  # the others have theirs
        os.kill(pids[1], signal.SIGKILL)
    raise RuntimeError(f"[{took:.1f} s] {caught.value}")


def check_stopped(call, n, silence, **limits):
    ranks.run(n, dist.get_rank)  # so that they exist
    with pytest.raises(ranks.RankFailure) as caught:
        ranks.run(n, stop, call, silence, ranks.pids(), **limits)
    what, seconds = re.escape(CASES[call]), f"{silence or desync.SILENCE:g}"
    silent = f"rank 1 has not answered for {seconds} s, so it is stopped; it was last seen in {what}{LINE}"
    found = {rank: failure.message for rank, failure in caught.value.failures.items() if rank != 1}
    assert len(found) == n - 1
    for rank, message in found.items():
        cause = rf"(rank \d raised RuntimeError: )*{silent}(; rank \d is in {what}{LINE})*"
        assert (took := re.fullmatch(rf"\[(.+) s\] {cause}; rank {rank} is in {what}{LINE}", message)), (rank, message)
        assert float(took[1]) < LIMIT
    assert any(re.match(r"\[.+ s\] rank 1 has not", message) for message in found.values())


@pytest.mark.parametrize(
    ("call", "n"),
    [(sums, 3), (gathers, 3), (broadcasts, 2), (replays_a_sum, 2), (replays_a_gather, 2), (shard.close, 2)],
)
def test_a_rank_that_is_stopped(call, n):
    check_stopped(call, n, 1.0, timeout=30)


@pytest.mark.slow
@pytest.mark.parametrize("call", CASES)
def test_within_ten_seconds(call):
    check_stopped(call, 4, None, timeout=60)


def stop_in_another_group(pids):
    """Rank 3 stops in a sum with rank 1; ranks 0 and 1, and 0 and 2, have sums of their own."""
    mesh, rank = shard.mesh(dp=2, fsdp=2), dist.get_rank()
    for axis in ("dp", "fsdp"):
        shard.psum(torch.ones(8), mesh, axis)
    stops = lambda: os.kill(os.getpid(), signal.SIGSTOP)
    with pytest.MonkeyPatch.context() as patch, pytest.raises(RuntimeError) as caught:
        patch.setattr(desync, "SILENCE", 1.0)
        with at_the_start_of_a_transfer(stops) if rank == 3 else contextlib.nullcontext():
            for axis in ("dp", "fsdp"):
                shard.psum(torch.ones(8), mesh, axis)
    if rank == 1:
        time.sleep(2)
        os.kill(pids[3], signal.SIGKILL)
    raise RuntimeError(str(caught.value))


@pytest.mark.slow
def test_a_rank_that_is_stopped_in_another_group():
    ranks.run(4, dist.get_rank)
    with pytest.raises(ranks.RankFailure) as caught:
        ranks.run(4, stop_in_another_group, ranks.pids(), timeout=30)
    assert sorted(caught.value.failures) == [0, 1, 2, 3]
    for rank in range(3):
        assert "rank 3 has not answered for 1 s" in caught.value.failures[rank].message


def in_the_middle(how, pids, files):
    """Stop or kill rank 1 by rank 0, while messages of 64 MB are under way."""
    mesh, rank = shard.mesh(fsdp=2), dist.get_rank()
    os.environ["TORCHELASTIC_ERROR_FILE"] = files[rank]
    x = torch.ones(1 << 24)
    sums()
    if rank == 0:
        threading.Timer(0.05, lambda: (os.kill(pids[1], how), Path(f"{files[1]}.lost").touch())).start()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(desync, "SILENCE", 1.0)
        while True:
            shard.psum(x, mesh, "fsdp")


def let_go_on(lost, pid):
    """Let a stopped rank go on when the others have their error."""
    while not lost.exists():
        time.sleep(0.1)
    time.sleep(4)
    os.kill(pid, signal.SIGCONT)


@pytest.mark.parametrize("how", [signal.SIGSTOP, signal.SIGKILL])
def test_in_the_middle_of_a_message(how, tmp_path):
    """gloo may lose the error, so the process may end: with the message in the file of the launcher."""
    ranks.run(2, dist.get_rank)
    files, pids = [str(tmp_path / f"{rank}.json") for rank in range(2)], ranks.pids()
    if how == signal.SIGSTOP:
        threading.Thread(target=let_go_on, args=(Path(f"{files[1]}.lost"), pids[1]), daemon=True).start()
    with pytest.raises(ranks.RankFailure) as caught:
        ranks.run(2, in_the_middle, how, pids, files, timeout=30)
    what = re.escape(f"all_reduce sum float32[{1 << 24}] {ALL}") + LINE
    lost = {signal.SIGSTOP: "has not answered for 1 s", signal.SIGKILL: "has gone, its connection closed"}[how]
    for rank, failure in caught.value.failures.items():
        message = failure.message
        if failure.type == "died" and (rank == 0 or how == signal.SIGSTOP):
            assert failure.message == "exit code 1"
            message = json.loads(Path(files[rank]).read_text())["message"]["message"]
        if rank == 0:
            assert re.search(rf"rank 1 {lost}.*; rank 0 (is|waits for it) in {what}$", message), message
        elif how == signal.SIGSTOP:
            assert f"rank 1 {lost}" in message, message


def is_slow(call, keeps):
    shard.mesh(fsdp=2)
    call()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(desync, "SILENCE", 1.0)
        sleeps = lambda: ctypes.PyDLL(None).usleep(2_500_000) if keeps else time.sleep(2.5)
        with at_the_start_of_a_transfer(sleeps) if dist.get_rank() == 1 else contextlib.nullcontext():
            result = call()
    (roll,) = roll_call._KNOWN.values()
    return result.tolist(), roll._round


@pytest.mark.parametrize(("call", "keeps"), [(sums, False), (gathers, False), (sums, True)])
def test_a_slow_rank_is_waited_for(call, keeps):
    """Also if it ``keeps`` Python's lock meanwhile, and answers no question."""
    (first, rounds), (second, _) = ranks.run(2, is_slow, call, keeps, timeout=30)
    assert first == second == ([2.0] * 8 if call is sums else [1.0] * 16)
    assert rounds >= 4  # of questions, which rank 1 answered: the transfer was watched for longer than SILENCE


def dies(call):
    """Rank 1 announces a transfer and is killed instead of taking part in it."""
    shard.mesh(fsdp=2)
    call()
    kills = lambda: os.kill(os.getpid(), signal.SIGKILL)
    with at_the_start_of_a_transfer(kills) if dist.get_rank() == 1 else contextlib.nullcontext():
        call()


@pytest.mark.parametrize("call", [sums, replays_a_sum])
def test_a_rank_that_dies(call):
    with pytest.raises(ranks.RankFailure) as caught:
        ranks.run(2, dies, call, timeout=20)
    what = re.escape(CASES[call])
    gone = rf"rank 1 has gone, its connection closed; it was last seen in {what}{LINE}; rank 0 is in {what}{LINE}"
    assert re.fullmatch(gone, caught.value.failures[0].message), caught.value
    assert (caught.value.failures[0].type, caught.value.failures[1].type) == ("RuntimeError", "died")


def raises_alone(captured):
    """Rank 1 raises where the transfer begins, and its process goes on."""
    shard.mesh(fsdp=2)
    replays_a_sum()

    def fails():
        raise MemoryError("no room for 64 MiB")

    with pytest.raises((RuntimeError, MemoryError)) as caught:
        with at_the_start_of_a_transfer(fails) if dist.get_rank() == 1 else contextlib.nullcontext():
            replays_a_sum()
    with pytest.raises(RuntimeError) as again:
        sums()
    dist.destroy_process_group()  # its connections are closed
    return str(caught.value), str(again.value)


def test_a_rank_that_raises_in_a_replay():
    (first, again), (own, after_it) = ranks.run(2, raises_alone, True, timeout=20)
    what = re.escape(CASES[replays_a_sum])
    assert re.fullmatch(rf"rank 1 raised MemoryError: no room for 64 MiB; rank 0 is in {what}{LINE}", first), first
    assert again == first
    assert own == "no room for 64 MiB"
    assert re.fullmatch(rf"rank 1 raised MemoryError in {what}{LINE}: no room for 64 MiB", after_it), after_it
