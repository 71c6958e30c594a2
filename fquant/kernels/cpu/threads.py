"""The number of cores that a process may use, which bounds the threads of the C kernels.

``torch.get_num_threads()`` alone is no bound: a program may set it from ``os.cpu_count()``, which counts the cores of
the machine. Three limits of the process are smaller where a machine is shared:

* ``OMP_NUM_THREADS``, if it is set.
* The CPU affinity, which ``taskset``, ``numactl`` and batch schedulers set.
* The CPU quota of the process's cgroup and of its parents: ``cpu.max`` of cgroup v2, ``cpu.cfs_quota_us`` of v1.

More threads than cores are slow, because the OpenMP runtime of torch spins for milliseconds before it sleeps. Take a
product of one row with NF4 [4096 4096] on two threads, beside a process busy on one of two cores. It took 8 to 16 ms
(median) instead of 0.7, and 1.5 ms with ``OMP_WAIT_POLICY=passive``, which the runtime reads when torch is imported.
"""

import ctypes
import math
import os
from functools import cache
from pathlib import Path
from typing import Any

import torch


def num_threads() -> int:
    """Return the threads of a C kernel: those of torch, but at most :func:`limit`."""
    return min(torch.get_num_threads(), limit())


@cache
def limit() -> int:
    """Return :func:`usable_cores`, kept because a small product takes 10 µs; ``limit.cache_clear()`` after a change."""
    return usable_cores()


def usable_cores(processes: int = 1, root: Path = Path("/")) -> int:
    """Return how many threads each of ``processes`` processes on this machine may run, at least 1.

    That is the minimum of OMP_NUM_THREADS, which counts for each process, and of affinity and cgroup quota (rounded
    up), which the processes divide. ``root`` holds ``proc`` and ``sys``. Raises ValueError if OMP_NUM_THREADS is
    neither a positive integer nor a list that begins with one.
    """
    cores = max(1, math.ceil(min(_affinity(), _quota(root))) // processes)
    text = os.environ.get("OMP_NUM_THREADS", "").strip()
    if not text:
        return cores
    first = text.partition(",")[0].strip()  # OpenMP takes a list: a number for each level of nested regions
    if not (first.isascii() and first.isdigit() and int(first)):
        raise ValueError(f"OMP_NUM_THREADS is {text!r}; wanted a positive integer; correct or unset it")
    return min(cores, int(first))


def _affinity() -> int:
    """Return the cores of the affinity of this process, or of the machine if the system has no affinity."""
    if not hasattr(os, "sched_getaffinity"):
        return os.cpu_count() or 1
    # With OMP_PROC_BIND or OMP_PLACES the runtime binds this thread to one of the cores that it counts.
    return max(len(os.sched_getaffinity(0)), _openmp_cores())


def _openmp_cores() -> int:
    """Return the cores that the OpenMP runtime of torch may use, 0 if it has none."""
    function = openmp("omp_get_num_procs")
    return function() if function else 0


def openmp(name: str) -> Any:
    """Return a function of the OpenMP runtime of torch, or None if it has none.

    The look-up is in the libraries that torch links, because not every build exports the runtime to the process.
    """
    try:
        return getattr(ctypes.CDLL(torch._C.__file__), name)
    except (AttributeError, OSError):
        return None


def _quota(root: Path) -> float:
    """Return the cores that the cgroup of this process and its parents allow; infinity without a quota."""
    try:
        lines = (root / "proc/self/cgroup").read_text("utf-8").splitlines()
    except OSError:
        return math.inf
    allowed = math.inf
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        # A container may see the path of its host: parents are read down from the mount, and missing ones skipped.
        names = [name for name in path.split("/") if name not in ("", "..")]
        for mount in (controllers, "cpu") if controllers else ("", "unified"):
            folder = root / "sys/fs/cgroup" / mount
            folders = [folder.joinpath(*names[:depth]) for depth in range(len(names) + 1)]
            allowed = min(allowed, *map(_quota_of, folders))
    return allowed


def _quota_of(folder: Path) -> float:
    """Return the cores that one cgroup allows, from the files of v2 or else of v1."""
    try:
        if (folder / "cpu.max").exists():
            quota, period = (folder / "cpu.max").read_text("utf-8").split()
        else:
            quota, period = ((folder / f"cpu.cfs_{name}_us").read_text("utf-8") for name in ("quota", "period"))
        return int(quota) / int(period) if int(quota) > 0 else math.inf
    except (OSError, ValueError):  # no such cgroup here, or "max"
        return math.inf
