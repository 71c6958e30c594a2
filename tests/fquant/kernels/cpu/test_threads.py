"""The limits that bound the threads of kernels: OMP_NUM_THREADS, CPU affinity and cgroup quotas."""

import os
import subprocess
import sys

import pytest
import torch

from fquant.kernels import cpu
from fquant.kernels.cpu import threads, usable_cores
from tests.helpers.cases import slow_after

CGROUPS = {
    "no quota": ("0::/", {"cpu.max": "max 100000"}, 8),
    "v2": ("0::/", {"cpu.max": "200000 100000"}, 2),
    "v2, rounded up": ("0::/", {"cpu.max": "250000 100000"}, 3),
    "v2, less than a core": ("0::/", {"cpu.max": "50000 100000"}, 1),
    "v2, own group": ("0::/a/b", {"a/b/cpu.max": "300000 100000", "a/cpu.max": "max 100000"}, 3),
    "v2, a parent is smaller": ("0::/a/b", {"a/b/cpu.max": "500000 100000", "a/cpu.max": "400000 100000"}, 4),
    "v2, a sibling is smaller": ("0::/a/b", {"a/c/cpu.max": "100000 100000"}, 8),
    "v2, hybrid": ("0::/a", {"unified/a/cpu.max": "200000 100000"}, 2),
    "v2, path of the host": ("0::/docker/1f", {"cpu.max": "200000 100000"}, 2),
    "v2, above the namespace": ("0::/../..", {"cpu.max": "200000 100000"}, 2),
    "v1": ("4:cpu,acct:/a", {"cpu,acct/a/cpu.cfs_quota_us": "150000", "cpu,acct/a/cpu.cfs_period_us": "50000"}, 3),
    "v1, alone": ("1:cpu:/", {"cpu/cpu.cfs_quota_us": "100000", "cpu/cpu.cfs_period_us": "50000"}, 2),
    "v1, no quota": ("1:cpu:/", {"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, 8),
    "v1, another controller": ("1:memory:/", {"memory/cpu.max": "100000 100000"}, 8),
}  # fmt: skip


@pytest.fixture(autouse=True)
def eight_cores(monkeypatch):
    """Give each test eight cores, no OMP_NUM_THREADS, and no cached limit."""
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(8)), raising=False)
    monkeypatch.setattr(threads, "_openmp_cores", lambda: 1)
    threads.limit.cache_clear()
    yield
    threads.limit.cache_clear()


@pytest.mark.parametrize(("group", "files", "wanted"), CGROUPS.values(), ids=CGROUPS)
def test_cgroup_quotas(tmp_path, group, files, wanted):
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text(f"9:pids:/x\n{group}\n")
    for name, text in files.items():
        path = tmp_path / "sys/fs/cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{text}\n")
    assert usable_cores(root=tmp_path) == wanted


def test_no_cgroups(tmp_path):
    assert usable_cores(root=tmp_path) == 8


def test_affinity_is_counted_where_there_is_one(monkeypatch, tmp_path):
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {1, 5}, raising=False)
    assert usable_cores(root=tmp_path) == 2
    monkeypatch.delattr(os, "sched_getaffinity")
    monkeypatch.setattr(os, "cpu_count", lambda: 6)
    assert usable_cores(root=tmp_path) == 6


def test_a_bound_thread_is_no_limit(monkeypatch, tmp_path):
    """OMP_PROC_BIND leaves the main thread one core; the runtime counts those of the process."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {1}, raising=False)
    monkeypatch.setattr(threads, "_openmp_cores", lambda: 6)
    assert usable_cores(root=tmp_path) == 6


@pytest.mark.parametrize(("text", "wanted"), [("3", 3), (" 3 ", 3), ("3,2", 3), ("99", 8), ("", 8)])
def test_omp_num_threads(monkeypatch, tmp_path, text, wanted):
    monkeypatch.setenv("OMP_NUM_THREADS", text)
    assert usable_cores(root=tmp_path) == wanted


@pytest.mark.parametrize("text", ["0", "-1", "two", "1.5", ",2"])
def test_wrong_omp_num_threads(monkeypatch, tmp_path, text):
    monkeypatch.setenv("OMP_NUM_THREADS", text)
    with pytest.raises(ValueError, match=f"OMP_NUM_THREADS is '{text}'; wanted a positive integer"):
        usable_cores(root=tmp_path)


def test_processes_divide_the_cores_but_not_omp_num_threads(monkeypatch, tmp_path):
    assert [usable_cores(n, tmp_path) for n in (1, 2, 3, 16)] == [8, 4, 2, 1]
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert [usable_cores(n, tmp_path) for n in (1, 2, 3, 16)] == [3, 3, 2, 1]


def test_kernels_run_on_so_many_threads(monkeypatch):
    """Torch may have more threads, and the limit is read once in a process."""
    seen = []
    real = cpu.library.load().fquant_fold
    monkeypatch.setattr(cpu.library.load(), "fquant_fold", lambda isa, n, *rest: seen.append(n) or real(isa, n, *rest))
    monkeypatch.setattr(torch, "get_num_threads", lambda: 5)
    call = lambda: cpu.fold(torch.zeros(2, dtype=torch.int64), torch.ones(2, dtype=torch.int64))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    call()
    monkeypatch.delenv("OMP_NUM_THREADS")
    call()
    threads.limit.cache_clear()
    monkeypatch.setattr(threads, "usable_cores", lambda: 8)
    call()
    assert seen == [1, 1, 5]


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="this system has no CPU affinity")
@pytest.mark.parametrize(
    "launcher",
    slow_after(1, ["taskset -c 0 env", "env OMP_NUM_THREADS=1", "taskset -c 0 env OMP_PLACES=cores", "env"]),
)
def test_a_process_with_limits(launcher):
    """Kernels stay within the limits of the launcher if a program asks torch for 4 threads."""
    code = (
        "import os, torch\n"
        "from fquant.kernels.cpu import threads, usable_cores\n"
        "if os.environ.get('PIN'): os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})\n"
        "torch.set_num_threads(4)\n"
        "print(usable_cores(), threads.num_threads())"
    )
    env = {k: v for k, v in os.environ.items() if k != "OMP_NUM_THREADS"} | ({"PIN": "1"} if launcher == "env" else {})
    done = subprocess.run(
        [*launcher.split(), sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=120
    )
    assert (done.stdout, done.stderr) == ("1 1\n", "")


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="this system has no CPU affinity")
def test_a_process_with_bound_threads():
    code = "import os; n = len(os.sched_getaffinity(0))\nfrom fquant.kernels import cpu; print(n, cpu.usable_cores())"
    env = {k: v for k, v in os.environ.items() if k != "OMP_NUM_THREADS"}
    count = lambda **more: subprocess.run(
        [sys.executable, "-c", code], env=env | more, capture_output=True, text=True, timeout=120, check=True
    ).stdout.split()
    assert count(OMP_PROC_BIND="true") == count()
