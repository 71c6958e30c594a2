"""Fair timing of contestants, and the limits of the machine that they run on.

    samples = interleave({"ours": f, "theirs": g}, repeats=9)     # f(i), g(i) use their i-th weight, modulo its number
    medians = {name: median(s) * 1e3 for name, s in samples.items()}

Fair means:

* Contestants take turns, A B C A B C, so that a machine that slows down slows down for all of them.
* Every call takes the contestant's next weight, timed or not. The weights (:func:`num_weights`) together exceed the
  last-level cache several times, so that no call finds its weight there.
* A call is timed as in use: it allocates its result and frees it. Chance decides if a big result finds memory that was
  used before, and that matters more than the kernel. So where the result is most of the work, each :func:`memory`,
  fresh and warm, is a row.
* A turn begins with untimed calls for a few milliseconds. The previous contestant has left its memory in the caches and
  the page tables, and perhaps spinning threads. That hardly matters to a call that takes longer.
* A turn of a fast contestant has several samples; each one has at least ``repeats`` in all. Ratios are of medians.

The floor of a kernel that must read n bytes is the time of that reading (:func:`fastest_read`). The memory of a
computation beside its inputs and its result is counted by torch's allocator (:func:`extra_bytes`), so other processes
do not matter.
"""

import ctypes
import os
import platform
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import count
from pathlib import Path
from statistics import median
from typing import Any, Literal

import torch

from fquant import tree

Call = Callable[[int], object]

WARM_UP = 2  # untimed calls of each contestant at the start
SETTLE = 2e-3  # seconds of untimed calls at the start of a turn
TURN = 5e-3  # seconds of timed calls in a turn,
MOST = 10  # but at most so many of them
_TRIM_THRESHOLD, _MMAP_THRESHOLD, _MMAP_MAX = -1, -3, -4  # of mallopt, in malloc.h
CACHES = 4  # the weights together are at least so many times the last-level cache


def interleave(
    calls: dict[str, Call],
    repeats: int,
    before: Callable[[], object] = lambda: None,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, list[float]]:
    """Return the seconds of each call: ``repeats`` samples or more for every name.

    ``call(i)`` is called with i = 0, 1, 2, ..., each contestant counting its own calls; ``before()`` before each call.
    """
    numbers = {name: count() for name in calls}

    def once(name: str) -> float:
        call, i = calls[name], next(numbers[name])
        before()
        start = clock()
        call(i)
        return clock() - start

    last = {name: [once(name) for _ in range(WARM_UP)][-1] for name in calls}
    samples: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(repeats):
        for name in calls:
            spent = 0.0
            while last[name] < SETTLE and spent < SETTLE:
                last[name] = once(name)
                spent += last[name]
            for _ in range(max(1, min(MOST, int(TURN / max(last[name], 1e-9))))):
                last[name] = once(name)
                samples[name].append(last[name])
    return samples


def medians(calls: dict[str, Call], repeats: int, before: Callable[[], object] = lambda: None) -> dict[str, float]:
    """Return the medians of :func:`interleave` in milliseconds."""
    return {name: median(samples) * 1e3 for name, samples in interleave(calls, repeats, before).items()}


@contextmanager
def memory(kind: Literal["fresh", "warm"]) -> Iterator[Callable[[], object]]:
    """Yield a function to call ``before`` each call of :func:`interleave`, so that results get memory of this kind.

    fresh: freed memory has been given back, and the system clears pages as they are touched. warm: nothing is given
    back inside the block, and calls find memory that earlier calls have used. If the C library is not glibc, both do
    nothing (:func:`has_memory`).
    """
    if not has_memory():
        yield lambda: None
        return
    libc = ctypes.CDLL(None)
    if kind == "fresh":
        yield partial(libc.malloc_trim, 0)
        return
    for option, value in ((_MMAP_MAX, 0), (_TRIM_THRESHOLD, -1)):
        libc.mallopt(option, value)
    try:
        yield lambda: None
    finally:  # to what glibc arrives at by itself once a big tensor has been freed
        for option, value in ((_MMAP_MAX, 65536), (_MMAP_THRESHOLD, 32 << 20), (_TRIM_THRESHOLD, 64 << 20)):
            libc.mallopt(option, value)
        libc.malloc_trim(0)


def has_memory() -> bool:
    """Return True if :func:`memory` works on this machine."""
    return platform.libc_ver()[0] == "glibc"


def last_level_cache(cpus: Path = Path("/sys/devices/system/cpu")) -> int:
    """Return the bytes of the last level of cache over all instances; raise ValueError if they cannot be read."""
    found: dict[tuple[int, str], int] = {}  # (level, the CPUs that share it) -> bytes
    for index in cpus.glob("cpu[0-9]*/cache/index*"):
        level, shared, size = ((index / name).read_text().strip() for name in ("level", "shared_cpu_list", "size"))
        scale = {"K": 2**10, "M": 2**20, "G": 2**30}.get(size[-1:])
        found[int(level), shared] = int(size[:-1]) * scale if scale else int(size)
    if not found:
        raise ValueError(f"the size of the cache cannot be read from {cpus}; say with --weights how many to take")
    last = max(level for level, _ in found)
    return sum(size for (level, _), size in found.items() if level == last)


def num_weights(weight_bytes: int, cache: int) -> int:
    """Return the number of weights of ``weight_bytes`` that exceed ``cache`` bytes ``CACHES`` times."""
    return max(2, -(-CACHES * cache // weight_bytes))


def reads(num_bytes: int, number: int = 1) -> dict[str, Call]:
    """Return several ways to read ``num_bytes`` of memory once with all of torch's threads, by name.

    There are ``number`` pieces of memory, read in turn.
    """
    t = torch.ones(number, max(2, num_bytes // 16) * 4)  # written: pages that never were are all one page
    half = t.shape[1] // 2
    t[:, half:] = 2

    def reading(f: Callable[[torch.Tensor], object]) -> Call:
        return lambda i: f(t[i % number])

    return {
        "sum of int64": reading(lambda t: t.view(torch.int64).sum()),
        "max of int64": reading(lambda t: t.view(torch.int64).max()),
        "sum of float64": reading(lambda t: t.view(torch.float64).sum()),
        "sum of float32": reading(lambda t: t.sum()),
        "max of float32": reading(lambda t: t.max()),
        "dot of float32": reading(lambda t: t[:half] @ t[half:]),
    }


def fastest_read(num_bytes: int, number: int, repeats: int) -> tuple[str, Call, dict[str, float]]:
    """Return the fastest of :func:`reads` by its name and call, and the GB/s of each."""
    calls = reads(num_bytes, number)
    speed = {name: num_bytes / ms / 1e6 for name, ms in medians(calls, repeats).items()}
    best = max(speed, key=speed.__getitem__)
    return best, calls[best], speed


def extra_bytes(call: Callable[[], Any]) -> int:
    """Return the peak of bytes that ``call()`` holds beside its result, a tree of new tensors and numbers.

    Counted by torch's CPU allocator, inside of ops too, so it is the same on every machine. Memory that C code
    allocates by itself, to pack a GEMM's operands or on its stack, is not seen.
    """
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # else the profiler writes to stderr whenever it starts
    from torch.profiler import ProfilerActivity, _utils, profile

    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as seen:
        result = call()
    assert seen.profiler is not None and seen.profiler.kineto_results is not None
    events = _utils.traverse_dfs(seen.profiler.kineto_results.experimental_event_tree())
    changes = [e.extra_fields for e in sorted(events, key=lambda e: e.start_time_ns) if e.name == "[memory]"]
    own = {t.untyped_storage().data_ptr() for t in tree.leaves(result) if isinstance(t, torch.Tensor)}
    kept = {at.ptr: i for i, at in enumerate(changes) if at.ptr in own}  # the last of each
    held = most = 0
    for i, at in enumerate(changes):
        if kept.get(at.ptr) != i:
            held += at.alloc_size
            most = max(most, held)
    return most


def check_threads(number: int) -> None:
    """Raise ValueError for more threads than there are cores."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if not 1 <= number <= cores:
        raise ValueError(f"--threads is {number}; wanted 1 to {cores}, the cores there are")


@contextmanager
def threads(number: int) -> Iterator[None]:
    """Use ``number`` threads inside the block, for torch and the libraries that share its OpenMP."""
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def others() -> Iterator[Callable[[], float | None]]:
    """Yield a function for the cores' time that others took inside the block; None if it cannot be read."""
    start = _elsewhere()
    end: list[float | None] = []
    yield lambda: end[0]
    now = _elsewhere()
    end.append(None if start is None or now is None else max(0.0, (now[0] - start[0]) / (now[1] - start[1])))


def _elsewhere() -> tuple[float, float] | None:
    """Return the seconds that all cores spent on other processes, and the time."""
    try:
        ticks = [int(x) for x in Path("/proc/stat").read_text().split("\n")[0].split()[1:]]
    except OSError:
        return None
    busy = sum(ticks[:8]) - ticks[3] - ticks[4]  # all but idle and iowait
    own = os.times()
    return busy / os.sysconf("SC_CLK_TCK") - own.user - own.system, time.monotonic()


def machine() -> str:
    """Name the processor and the instruction set that torch uses on it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        name = next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        name = platform.processor() or platform.machine()
    return f"{name}, {torch.backends.cpu.get_cpu_capability()}"
