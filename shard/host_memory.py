"""The memory of the host: what offloaded blocks may take of it, and pinned memory, which devices copy from.

Ranks of one machine share its memory, each an equal part. torchrun says how many they are.
"""

import os
from pathlib import Path

import torch
from torch import Tensor

from fquant.device import HOST

GIB = 2**30


def pinned(nbytes: int) -> Tensor:
    """Return ``nbytes`` of pinned memory, u8[nbytes]; raise RuntimeError if the system gives none."""
    try:
        return torch.empty(nbytes, dtype=torch.uint8, device=HOST, pin_memory=True)
    except RuntimeError as error:
        reason = str(error).strip().splitlines()[0]
        fix = "offload less, or raise the limit of locked memory (ulimit -l)"
        raise RuntimeError(f"host: got no {nbytes / GIB:.2f} GiB of pinned memory ({reason}); {fix}") from None


def pinned_like(t: Tensor) -> Tensor:
    """Return pinned memory for a tensor with the shape, dtype and order of dims of ``t``; raise as :func:`pinned`."""
    like = torch.empty_like(t, device="meta")
    return pinned(t.numel() * t.element_size()).view(t.dtype).as_strided(like.shape, like.stride())


def moved(t: Tensor, like: Tensor) -> Tensor:
    """Return ``t`` on the device of ``like``, and in pinned memory if ``like`` is."""
    if like.device == HOST and like.is_pinned():
        return pinned_like(t).copy_(t)
    return t.to(like.device)


def check_room(nbytes: int) -> None:
    """Raise ValueError if this rank's part of the free memory cannot hold ``nbytes`` of offloaded blocks."""
    free, ranks = available_memory(), local_ranks()
    if nbytes > free:
        wanted = f"offload: {nbytes / GIB:.2f} GiB of blocks for each of {ranks} ranks of this machine"
        fix = "use fsdp over more machines, or Rules(offload=None)"
        raise ValueError(f"{wanted}, and its memory has {free / GIB:.2f} GiB for each; {fix}")


def local_ranks() -> int:
    """Return the number of ranks that share this machine, by torchrun's environment."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def available_memory() -> int:
    """Return the bytes that one rank may still take: this machine's free memory, within its cgroup, over its ranks."""
    lines = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    free = int(lines["MemAvailable"].split()[0]) * 1024
    limit, used = Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")
    if limit.is_file() and used.is_file() and (most := limit.read_text().strip()) != "max":
        free = min(free, int(most) - int(used.read_text()))
    return max(0, free) // local_ranks()
