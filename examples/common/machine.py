"""Processor cores and memory that this machine gives one rank."""

from __future__ import annotations

import os
from pathlib import Path

from fquant.kernels.cpu import usable_cores


def local_ranks() -> int:
    """Return the number of ranks that share this machine, by torchrun's environment."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def threads(ranks: int | None = None) -> int:
    """Return the threads of one of ``ranks`` processes here (default: torchrun's), at least 1."""
    return usable_cores(ranks or local_ranks())


def resident() -> int:
    """Return the bytes of memory resident in this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def available_memory(proc: Path = Path("/proc"), cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """Return the bytes that one rank may still take: this machine's free memory, within its cgroup, over its ranks."""
    lines = dict(line.split(":", 1) for line in (proc / "meminfo").read_text().splitlines())
    free = int(lines["MemAvailable"].split()[0]) * 1024
    limit, used = cgroup / "memory.max", cgroup / "memory.current"
    if limit.is_file() and used.is_file() and (most := limit.read_text().strip()) != "max":
        free = min(free, int(most) - int(used.read_text()))
    return max(0, free) // local_ranks()
