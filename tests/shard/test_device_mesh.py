"""The mesh and its process group: axes, time-outs, and a start under torchrun with restarts."""

import os
import subprocess
import sys
import textwrap
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import shard
from shard.device_mesh import AXES, groups
from tests.helpers import ranks

pytestmark = pytest.mark.xdist_group("ranks")


def shape(axes):
    mesh = shard.mesh(**axes)
    return mesh.mesh_dim_names, tuple(mesh.shape), [mesh.get_local_rank(name) for name in AXES]


@pytest.mark.parametrize(
    ("axes", "sizes"),
    [
        ({"fsdp": 1}, (1, 1)),
        ({}, (1, 1)),
        ({"fsdp": 3}, (1, 3)),
        ({"dp": 2}, (2, 1)),
        ({"fsdp": 2, "dp": 2}, (2, 2)),
        ({"dp": 3, "fsdp": 2}, (3, 2)),
    ],
)
def test_axes_are_ordered_outermost_first(axes, sizes):
    n = sizes[0] * sizes[1]
    for rank, (names, got, at) in enumerate(ranks.run(n, shape, axes)):
        assert (names, got) == (("dp", "fsdp"), sizes)
        assert at == [rank // sizes[1], rank % sizes[1]]


@pytest.mark.parametrize(
    ("n", "axes", "message"),
    [
        (
            2,
            {"fsdp": 3},
            "mesh fsdp=3 has 3 ranks, and this job has 2; wanted sizes that multiply to 2, such as fsdp=2",
        ),
        (2, {"dp": 2, "fsdp": 2}, "mesh dp=2,fsdp=2 has 4 ranks, and this job has 2; wanted"),
        (2, {}, "mesh (no axes) has 1 ranks, and this job has 2; wanted sizes that multiply to 2"),
        (2, {"pp": 2}, "mesh axis 'pp' is unknown; wanted some of dp, fsdp"),
        (2, {"fsdp": 2, "dp": 0}, "mesh axis dp has size 0; wanted at least 1"),
        (1, {"fsdp": -1, "dp": -1}, "mesh axis fsdp has size -1; wanted at least 1"),
    ],
)
def test_bad_axes_are_refused_on_every_rank(n, axes, message):
    with pytest.raises(ranks.RankFailure) as caught:
        ranks.run(n, shape, axes, timeout=10)
    assert sorted(caught.value.failures) == list(range(n))
    for failure in caught.value.failures.values():
        assert failure.type == "ValueError" and failure.message.startswith(message)


def abstract(axes):
    with pytest.raises(RuntimeError, match="abstract_mesh: this process has a process group already; use shard.close"):
        with shard.abstract_mesh(**axes):
            pass
    shard.close()
    found = []
    for again in range(2):  # it can be made again
        with shard.abstract_mesh(**axes) as mesh:
            sizes = [mesh.get_group(name).size() for name in AXES]
            whole = [g.size() for g in groups(mesh, AXES)]
            gathered = shard.all_gather(torch.ones(2), mesh.get_group("fsdp")).shape[0]
            found.append((mesh.mesh_dim_names, tuple(mesh.shape), list(mesh.get_coordinate()), sizes, whole, gathered))
        assert not dist.is_initialized(), again
    with pytest.raises(KeyError), shard.abstract_mesh(**axes):
        raise KeyError
    with pytest.raises(ValueError, match="mesh axis 'pp' is unknown"), shard.abstract_mesh(pp=2):
        pass
    assert not dist.is_initialized()
    return found


@pytest.mark.parametrize(
    ("axes", "sizes", "whole"),
    [({}, [1, 1], []), ({"fsdp": 300}, [1, 300], [300]), ({"dp": 3, "fsdp": 4}, [3, 4], [12])],
    ids=str,
)
def test_abstract_mesh(axes, sizes, whole):
    (found,) = ranks.run(1, abstract, axes)
    assert found == [(AXES, tuple(sizes), [0, 0], sizes, whole, 2 * sizes[1])] * 2


def different(per_rank):
    shard.mesh(**per_rank[dist.get_rank()])


@pytest.mark.parametrize("other", [{"dp": 2, "fsdp": 1}, {"fsdp": 3}, {"tp": 2}, {}])
def test_ranks_given_different_axes_all_raise(other):
    with pytest.raises(ranks.RankFailure) as caught:
        ranks.run(2, different, [{"fsdp": 2}, other], timeout=10)
    shown = ", ".join(f"{name}={size}" for name, size in other.items()) or "no axes"
    for rank in range(2):
        assert caught.value.failures[rank].message == (
            f"mesh: ranks disagree on axes: rank 0 has fsdp=2; rank 1 has {shown}; start every rank with the same"
        )


def seconds(group):
    return group._get_backend(torch.device("cpu")).options._timeout.total_seconds()


def time_outs(limit):
    mesh = shard.mesh(dp=2, fsdp=2, **({"timeout": timedelta(seconds=limit)} if limit else {}))
    return [seconds(mesh.get_group(name)) for name in AXES]


@pytest.mark.parametrize(("limit", "wanted"), [(None, 60.0), (7, 7.0)])
def test_the_time_out_holds_along_every_axis(limit, wanted):
    assert ranks.run(4, time_outs, limit) == [[wanted, wanted]] * 4


def one_does_not_come():
    mesh = shard.mesh(dp=2, fsdp=2, timeout=timedelta(seconds=1))
    if dist.get_rank() == 0:
        time.sleep(3)  # alive, and away
        return "away"
    try:
        shard.all_gather(torch.ones(2), mesh.get_group("fsdp"))
    except RuntimeError as error:
        return "time" in str(error).lower()
    return "done"


@pytest.mark.slow
def test_a_collective_along_an_axis_gives_up():
    assert ranks.run(4, one_does_not_come, timeout=20) == ["away", True, "done", "done"]


def over(axes):
    mesh = shard.mesh(dp=2, fsdp=2)
    return [dist.get_process_group_ranks(group) for group in groups(mesh, axes)]


@pytest.mark.parametrize(
    ("axes", "wanted"),
    [
        ((), lambda r: []),
        (("dp", "fsdp"), lambda r: [[0, 1, 2, 3]]),
        (("fsdp", "dp"), lambda r: [[0, 1, 2, 3]]),
        (("dp",), lambda r: [[r % 2, r % 2 + 2]]),
        (("fsdp",), lambda r: [[r - r % 2, r - r % 2 + 1]]),
    ],
)
def test_groups_of_a_sum(axes, wanted):
    assert ranks.run(4, over, axes) == [wanted(rank) for rank in range(4)]


# --- real processes

ROOT = Path(__file__).parents[2]


def execute(*command, **env):
    keep = {name: text for name, text in os.environ.items() if not name.startswith(("TORCHELASTIC", "MASTER_"))}
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        keep.pop(name, None)
    return subprocess.run(
        [sys.executable, *command],
        env=keep | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"} | env,
        capture_output=True,
        text=True,
        timeout=100,
    )


def left_in(folder):
    """Return the names in ``folder`` without torch's own: its compiler's cache, and the log folder of torchrun."""
    return [name for name in os.listdir(folder) if not name.startswith(("torchinductor_", "torchelastic_"))]


ALONE = """
    import torch, shard
    shard.close()                                        # nothing runs: nothing happens
    mesh = shard.mesh()
    again = shard.mesh(fsdp=1)                           # the group runs already
    assert tuple(mesh.shape) == tuple(again.shape) == (1, 1)
    import torch.distributed as dist
    limit = dist.group.WORLD._get_backend(torch.device("cpu")).options._timeout
    assert limit.total_seconds() == 60, limit
    placed = shard.place({"w": torch.arange(6.0)}, {"": {"w": "d"}}, shard.Rules(), mesh)
    assert shard.collect(placed)["w"].tolist() == list(range(6))
    shard.close()
    assert not dist.is_initialized()
    print("fine")
"""


def test_one_process_without_torchrun(tmp_path):
    script = tmp_path / "alone.py"
    script.write_text(textwrap.dedent(ALONE))
    (tmp_path / "temporary").mkdir()
    done = execute(str(script), TMPDIR=str(tmp_path / "temporary"))
    assert (done.returncode, done.stdout) == (0, "fine\n"), done.stderr
    assert left_in(tmp_path / "temporary") == []


RESTARTED = """
    import os, signal, sys, torch, shard
    import torch.distributed as dist
    folder, attempt = sys.argv[1], os.environ["TORCHELASTIC_RESTART_COUNT"]
    mesh = shard.mesh(fsdp=2)
    rank, group = dist.get_rank(), mesh.get_group("fsdp")
    limit = group._get_backend(torch.device("cpu")).options._timeout
    assert limit.total_seconds() == 60, limit
    total = shard.all_reduce(torch.tensor(1.0 + rank), group).item()
    open(f"{folder}/attempt{attempt}.rank{rank}", "w").write(str(total))
    if attempt == "0":
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        shard.all_reduce(torch.ones(1), group)           # its peer is gone
    for _ in range(20):
        shard.all_gather(torch.ones(1000), group)
    shard.close()
"""


@pytest.mark.slow
def test_torchrun_restarts_into_a_working_mesh(tmp_path):
    """The store may not hold the gloo addresses of the first attempt, which the second would find."""
    script = tmp_path / "restarted.py"
    script.write_text(textwrap.dedent(RESTARTED))
    (tmp_path / "temporary").mkdir()
    done = execute(
        "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--max-restarts", "1",
        "--monitor-interval", "0.1", str(script), str(tmp_path),
        TMPDIR=str(tmp_path / "temporary"),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert left_in(tmp_path / "temporary") == []
    found = {path.name: path.read_text() for path in tmp_path.glob("attempt*")}
    assert found == {f"attempt{attempt}.rank{rank}": "3.0" for attempt in (0, 1) for rank in (0, 1)}
