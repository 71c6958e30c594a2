"""The mesh and its process group: axes, time-outs, and a start under torchrun with restarts."""

import os
import subprocess
import sys
import textwrap
import threading
import time
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode

import shard
from shard import device_mesh
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
    for size in ("2", 2.0, True):
        with pytest.raises(TypeError, match=f"mesh axis fsdp has size {size!r}"), shard.abstract_mesh(fsdp=size):
            pass
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


@pytest.mark.parametrize("device", ["cpu", "cuda", "cuda:0", torch.device("cuda")], ids=str)
def test_abstract_mesh_of_a_device_that_need_not_be_there(device):
    kind = torch.device(device).type
    with shard.abstract_mesh(device=device, dp=2, fsdp=3) as mesh:
        assert (mesh.device_type, shard.device_of(mesh)) == (kind, torch.device("cpu" if kind == "cpu" else "cuda:0"))
        with nullcontext() if kind == "cpu" else FakeTensorMode(), torch.no_grad():
            t = torch.ones(2, device=shard.device_of(mesh))
            assert shard.all_gather(t, mesh.get_group("fsdp")).shape == (6,)
            first, total = shard.rows(2, mesh, "fsdp")
            assert first.device == total.device == t.device


def starts(file, counts, device):
    """Start a mesh on machines that have ``counts[rank]`` CUDA devices; return the error, the backend, the device."""
    rank, world, backends, current = dist.get_rank(), dist.get_world_size(), [], []
    dist.destroy_process_group()
    env = {"MASTER_ADDR": "none", "MASTER_PORT": "0", "RANK": str(rank), "WORLD_SIZE": str(world)}
    own = [other for other in range(world) if counts[other] == counts[rank]]  # ranks of one machine
    env |= {"LOCAL_RANK": str(own.index(rank)), "LOCAL_WORLD_SIZE": str(len(own))}
    with (
        mock.patch.dict(os.environ, env),
        mock.patch.object(torch.backends.cuda, "is_built", lambda: True),
        mock.patch.object(torch.cuda, "is_available", lambda: counts[rank] > 0),
        mock.patch.object(torch.cuda, "device_count", lambda: counts[rank]),
        mock.patch.object(torch.cuda, "set_device", current.append),
        mock.patch.object(dist, "TCPStore", lambda *args, **kwargs: dist.FileStore(file, world)),
        mock.patch.object(dist, "init_process_group", lambda backend, **kwargs: backends.append(backend)),
    ):
        try:
            found = device_mesh._start(device if isinstance(device, str) else device[rank], timedelta(seconds=20))
        except ValueError as error:
            return str(error), backends, current
    return found, backends, current


TWO = "device: got 2 local ranks for 1 CUDA device; use at most 1 a machine"
NONE = f"device: got cuda, but torch {torch.__version__} finds no device"


@pytest.mark.parametrize(
    ("counts", "device", "wanted"),
    [
        ([2, 2], "cuda", [torch.device("cuda:0"), torch.device("cuda:1")]),
        ([8, 4], "auto", [torch.device("cuda:0"), torch.device("cuda:0")]),
        ([4, 2], "cuda:1", [torch.device("cuda:1"), torch.device("cuda:1")]),
        ([4, 4], [torch.device("cuda:0"), torch.device("cuda:1")], [torch.device("cuda:0"), torch.device("cuda:1")]),
        ([1, 1], "cuda", [TWO, TWO]),
        ([4, 4], "cuda:1", ["device: got cuda:1 for 2 local ranks; wanted a device for each; use cuda"] * 2),
        ([1, 0], "cuda", [f"mesh failed on rank 1: ValueError: {NONE}", NONE]),
        ([1, 0], "auto", ["mesh: ranks disagree on device: rank 0 has cuda; rank 1 has cpu; start every rank"] * 2),
    ],
    ids=str,
)
def test_ranks_agree_on_devices_before_there_is_a_group(tmp_path, counts, device, wanted):
    got = ranks.run(2, starts, str(tmp_path / "store"), counts, device)
    for (found, backends, current), want in zip(got, wanted, strict=True):
        if isinstance(want, str):
            assert found.startswith(want) and "\n" not in found and backends == current == []
        else:
            assert (found, backends, current) == (want, ["cpu:gloo,cuda:nccl"], [want])


def on_a_running_group(devices):
    with (
        mock.patch.object(torch.backends.cuda, "is_built", lambda: True),
        mock.patch.object(torch.cuda, "is_available", lambda: True),
        mock.patch.object(torch.cuda, "device_count", lambda: 2),
    ):
        shard.mesh(device=devices[dist.get_rank()], fsdp=2)


def test_a_group_that_runs_already_needs_a_backend_for_the_device():
    with pytest.raises(ranks.RankFailure) as caught:
        ranks.run(2, on_a_running_group, ["cuda", "cpu"], timeout=10)
    first, second = (caught.value.failures[rank].message for rank in range(2))
    assert first.startswith("mesh: the process group that runs already is ")
    assert first.endswith("; wanted nccl for cuda:0; start it as cpu:gloo,cuda:nccl, or let shard.mesh start it")
    assert second == f"mesh failed on rank 0: ValueError: {first}"


def seconds(group):
    return group._get_backend(torch.device("cpu")).options._timeout.total_seconds()


def time_outs(limit):
    mesh = shard.mesh(dp=2, fsdp=2, **({"timeout": timedelta(seconds=limit)} if limit else {}))
    return [seconds(mesh.get_group(name)) for name in AXES]


@pytest.mark.parametrize(("limit", "wanted"), [(None, 1800.0), (7, 7.0)])
def test_the_time_out_holds_along_every_axis(limit, wanted):
    assert ranks.run(4, time_outs, limit) == [[wanted, wanted]] * 4


def one_comes_late():
    mesh = shard.mesh(dp=2, fsdp=2, timeout=timedelta(seconds=1))
    if dist.get_rank() == 0:
        time.sleep(3)  # alive, and away
    return shard.all_gather(torch.ones(2), mesh.get_group("fsdp")).sum().item()


@pytest.mark.slow
def test_a_rank_that_computes_is_waited_for_beyond_the_time_out_of_a_collective():
    assert ranks.run(4, one_comes_late, timeout=20) == [4.0] * 4


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
    assert limit.total_seconds() == 1800, limit
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


def names(store, seconds, ranks):
    """The names that ``ranks`` of a job of three find, each in a thread; or their errors."""
    found = {}

    def meet(rank):
        try:
            found[rank] = device_mesh._agreed_name(store, rank, 3, seconds)
        except RuntimeError as error:
            found[rank] = str(error)

    threads = [threading.Thread(target=meet, args=(rank,)) for rank in ranks]
    for each in threads:
        each.start()
    for each in threads:
        each.join(30)
    return [found[rank] for rank in ranks]


def test_ranks_find_a_name_for_their_start_alone():
    """In a store in which ranks that have died said hello, and were answered or not."""
    store, seen = dist.HashStore(), set()
    for attempt in range(3):
        (name,) = set(names(store, 20.0, (0, 1, 2)))
        assert name not in seen
        seen.add(name)
        lone = names(store, 0.1, ((0,), (1, 2), (0, 2))[attempt])
        wanted = {0: "mesh: ranks 1, 2 did not come in 0.1 s", 1: "mesh: rank 0 did not", 2: "mesh: rank"}
        assert lone[-1].startswith(wanted[attempt])


RESTARTED = """
    import os, signal, sys, torch, shard
    import torch.distributed as dist
    folder, attempt = sys.argv[1], os.environ["TORCHELASTIC_RESTART_COUNT"]
    mesh = shard.mesh(fsdp=2)
    rank, group = dist.get_rank(), mesh.get_group("fsdp")
    limit = group._get_backend(torch.device("cpu")).options._timeout
    assert limit.total_seconds() == 1800, limit
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
