"""The pool of ranks returns results, reports failures and hangs by rank, reuses processes, and leaves no files."""

import os
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from tests.conftest import group
from tests.helpers import ranks

pytestmark = pytest.mark.xdist_group("ranks")


def total(x):
    t = torch.full((2,), x * (dist.get_rank() + 1))
    dist.all_reduce(t)
    return t, int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), torch.get_num_threads()


def pid():
    dist.barrier()
    return os.getpid()


def bad(rank):
    if dist.get_rank() == rank:
        raise ValueError(f"layers.{rank}: bad\nfix")
    return "fine"


def bad_while_others_wait(rank):
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    if dist.get_rank() == rank:
        raise ValueError("bad")
    distribute_tensor(torch.zeros(8), mesh, [Shard(0)])
    dist.barrier()


def stop(rank):
    if dist.get_rank() == rank:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def leave():
    raise SystemExit(2)


def unpicklable():
    return lambda: 0


def hang(stuck):
    if dist.get_rank() in stuck:
        time.sleep(1000)
    if dist.get_rank() == 2:
        raise KeyError("other")


class SlowToJoin:
    """Makes its rank slow to join the group of this one call."""

    def __reduce__(self):
        return slow_to_join, ()


def slow_to_join():
    join = ranks.join

    def slow(*group):
        ranks.join = join
        time.sleep(1.0)
        join(*group)

    ranks.join = slow


def same(x):
    return x


class Unjoinable:
    """Makes rank 1 fail to join the group of this one call."""

    def __reduce__(self):
        return unjoinable, ()


def unjoinable():
    join = ranks.join

    def refused(*group):
        ranks.join = join
        if group[-1] == 1:
            raise ConnectionError("refused")

    ranks.join = refused


def forgotten_collective():
    if dist.get_rank() == 0:
        dist.barrier()


def gathered(rows):
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("fsdp",))
    d = distribute_tensor(torch.arange(rows * 2.0).reshape(rows, 2), mesh, [Shard(0)])
    twice = d + d
    assert isinstance(twice, DTensor)
    return twice.full_tensor(), d.to_local().shape[0]


def many_threads():
    torch.set_num_threads(3)


def threads():
    return torch.get_num_threads()


def test_a_call_finds_one_thread_whatever_the_last_one_set():
    ranks.run(2, many_threads)
    assert ranks.run(2, threads) == [1, 1]


@pytest.mark.parametrize("n", [1, 2, 3, 5])
def test_sum(n):
    for rank, (t, env_rank, env_world, threads) in enumerate(ranks.run(n, total, 2.0)):
        assert t.tolist() == [n * (n + 1.0)] * 2
        assert (env_rank, env_world, threads) == (rank, n, 1)


def test_processes_are_reused():
    first = ranks.run(3, pid)
    assert first == ranks.run(3, pid) == ranks.pids()[:3]
    assert ranks.run(2, pid) == first[:2]
    assert ranks.run(5, pid)[:3] == first
    assert len(set(ranks.pids())) == len(ranks.pids()) >= 5


def test_groups_are_fresh():
    """DTensor caches by mesh, and its caches must not return an earlier group."""
    for n in (2, 3, 2, 2, 1, 3):
        full = torch.arange(10.0).reshape(5, 2) * 2
        for rank, (got, rows) in enumerate(ranks.run(n, gathered, 5)):
            assert torch.equal(got, full)
            assert rows == [len(c) for c in torch.zeros(5).chunk(n)][rank]


@pytest.mark.parametrize("fn, n, rank", [(bad, 1, 0), (bad, 3, 1), (bad_while_others_wait, 3, 2)])
def test_failure_is_reported_with_its_rank(fn, n, rank):
    before = ranks.run(n, pid)
    with pytest.raises(ranks.RankFailure, match="bad") as raised:
        ranks.run(n, fn, rank, timeout=10)
    found = raised.value.failures[rank]
    assert found.type == "ValueError" and found.message.split(": ")[-1].startswith("bad")
    assert f"in {fn.__name__}" in found.traceback
    if fn is bad:
        assert list(raised.value.failures) == [rank]
    else:  # the others do not wait for it
        assert set(raised.value.failures) == set(range(n))
    assert ranks.run(n, pid) == before


@pytest.mark.parametrize("fn, kind, message", [(leave, "SystemExit", "2"), (unpicklable, None, "unpicklable")])
def test_failure_on_every_rank(fn, kind, message):
    with pytest.raises(ranks.RankFailure) as raised:
        ranks.run(2, fn, timeout=10)
    assert list(raised.value.failures) == [0, 1]
    for found in raised.value.failures.values():
        assert kind in (None, found.type) and message in found.message


def test_dead_rank_is_replaced():
    before = ranks.run(3, pid)
    with pytest.raises(ranks.RankFailure, match="rank 1: died: exit code -9") as raised:
        ranks.run(3, stop, 1, timeout=10)
    assert set(raised.value.failures) == {0, 1, 2}
    after = ranks.run(3, pid)
    assert after[1] != before[1]


def test_hang_is_killed_and_the_pool_recovers():
    before = ranks.run(3, pid)
    with pytest.raises(ranks.RankTimeout, match=r"ranks \[1\] did not answer within 2 s") as raised:
        ranks.run(3, hang, (1,), timeout=2)
    assert raised.value.hung == [1] and raised.value.returned == [0]
    assert raised.value.failures[2].type == "KeyError"
    assert "in hang" in str(raised.value)
    for old in before:
        with pytest.raises(ProcessLookupError):
            os.kill(old, 0)
    after = ranks.run(3, pid)
    assert not set(after) & set(before)


def test_joining_is_not_counted():
    """A busy machine takes seconds to join a group, which the time-out of a test does not count."""
    assert ranks.run(2, same, SlowToJoin(), timeout=0.5) == [None] * 2


def test_failure_to_join():
    before = ranks.run(3, pid)
    with pytest.raises(ranks.RankFailure, match="rank 1: ConnectionError: refused") as raised:
        ranks.run(3, same, Unjoinable(), timeout=10)
    assert list(raised.value.failures) == [1]
    assert ranks.run(3, pid) == before


def test_hang_inside_a_collective():
    with pytest.raises(ranks.RankTimeout, match=r"ranks \[0\] .* ranks \[1\] returned") as raised:
        ranks.run(2, forgotten_collective, timeout=1)
    assert "in forgotten_collective" in str(raised.value)


def test_function_that_a_rank_cannot_import(monkeypatch):
    monkeypatch.setattr(total, "__module__", "tests.integration.helpers.test_ranks")
    monkeypatch.setattr(total, "__qualname__", "nowhere")
    monkeypatch.setitem(globals(), "nowhere", total)
    with pytest.raises(ranks.RankFailure, match="nowhere") as raised:
        ranks.run(2, total, 1.0)
    assert [f.type for f in raised.value.failures.values()] == ["AttributeError"] * 2


ENDS = {"returns": "pass", "is killed": "os.kill(os.getpid(), 9)"}
POOL = """
    import os, tempfile
    from tests.helpers import ranks
    if __name__ == "__main__":
        ranks.PRELOAD = ["torch.distributed"]
        assert len(ranks.run(2, os.getpid)) == 2
        print(os.listdir(tempfile.gettempdir()), flush=True)
        END
"""


@pytest.fixture
def temporary():
    """A folder whose path is short, as that of a socket must be."""
    with tempfile.TemporaryDirectory() as folder:
        yield folder


@pytest.mark.slow
@pytest.mark.parametrize("end", ENDS)
def test_nothing_is_left_in_the_temporary_folder(tmp_path, temporary, end):
    script = tmp_path / "pool.py"
    script.write_text(textwrap.dedent(POOL.replace("END", ENDS[end])))
    env = os.environ | {"PYTHONPATH": str(Path(__file__).parents[3]), "TMPDIR": temporary}
    done = subprocess.run([sys.executable, str(script)], env=env, capture_output=True, text=True, timeout=100)
    assert "ranks-" in done.stdout, done.stderr
    left = lambda: [name for name in os.listdir(temporary) if not name.startswith("torchinductor_")]  # torch's own
    deadline = time.monotonic() + 20
    while left() and time.monotonic() < deadline:
        time.sleep(0.1)  # ranks end a moment after the process that started them
    assert left() == []
    assert "leaked" not in done.stderr


def test_there_is_one_pool():
    """All test files that use the pool run in one worker."""
    here = Path(__file__).parents[2]
    users = [path for path in here.rglob("test_*.py") if "ranks.run(" in path.read_text()]
    assert len(users) > 20 and {group(path) for path in users} == {"ranks"}
    assert group(here / "fquant/test_tree.py") != group(here / "fquant/test_communication.py")
