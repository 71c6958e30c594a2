"""The device of a program: the meaning of ``--device``, the ranks of a machine, tensors on their way, and memory.

    device = parse(options.device)              # of this rank (fquant/device.py)
    rows = to(rows, device)                     # from the host

A program computes on one device a process. On the host a machine starts as many ranks as the program says; with CUDA it
starts one for each device. The device is no option of the run itself: a run goes on on another one.

*Memory* of a rank is two figures, and they are not the same on all devices. On the host both are the bytes resident in
the process. On a CUDA device ``used`` is the most that tensors took since the figure was last read. ``held`` is
the most that torch's allocator took from the device for them. The driver, its libraries and NCCL show in neither.
"""

import os
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import torch
import tyro

from fquant import tree
from fquant.device import HOST, parse
from shard import host_memory

DeviceName = Annotated[
    str, tyro.conf.arg(metavar="DEVICE", help="Compute on cpu, cuda or cuda:N; auto: cuda where torch can use it.")
]


class Refused(ValueError):
    """A rank did not get its device; the other ranks have not noticed yet."""


class Memory(NamedTuple):
    """Bytes of memory of a rank; see the module."""

    used: int
    held: int


def num_ranks(device: str, alone: int, most: int) -> int:
    """Return the ranks that a program starts by default: ``alone`` on the host, and with CUDA one a device.

    There are at most ``most``, and one on a device that has a number. Raises ValueError as ``parse`` does.
    """
    if parse(device) == HOST:
        return alone
    return 1 if ":" in device else max(1, min(torch.cuda.device_count(), most))


def check_ranks(device: str, ranks: int) -> None:
    """Raise ValueError for a device that is not there, and for more local ``ranks`` than devices.

    To be called by the process that starts the ranks.
    """
    if parse(device) == HOST or ranks == 1:
        return
    if ":" in device:
        raise ValueError(f"device: got {device} for {ranks} local ranks; wanted a device for each; use cuda")
    if ranks > (count := torch.cuda.device_count()):
        found = f"{count} CUDA device" + "s" * (count != 1)
        raise ValueError(f"device: got {ranks} local ranks for {found}; use a --mesh of at most {count}, or cpu")


def begin(device: str) -> None:
    """Make the CUDA device of this rank the current one; shard.mesh agrees on the error of one that is not there.

    Raises Refused, with torch's first line, if the driver does not give the device to this rank.
    """
    try:
        found = parse(device)
    except ValueError:
        return
    if found != HOST:
        try:
            torch.cuda.set_device(found)
            torch.cuda.mem_get_info(found)  # makes the context
        except RuntimeError as error:
            raise Refused(f"device: got {found}, but {str(error).splitlines()[0]}; use another, or cpu") from error


def name(device: str) -> str:
    """Return the kind of device and its maker's name, for a line about a run."""
    found = parse(device)
    return "the host" if found == HOST else f"{found.type} ({torch.cuda.get_device_name(found)})"


def to(x: Any, device: torch.device) -> Any:
    """Return the tree ``x`` with the tensors of the host copied to ``device``, without waiting for it."""
    if device == HOST:
        return x
    return tree.map(lambda t: t.pin_memory().to(device, non_blocking=True) if t.device == HOST else t, x)


def memory(device: torch.device) -> Memory:
    """Return the memory of this rank, and begin the next peak of a CUDA device."""
    if device.type == "cuda":
        found = Memory(torch.cuda.max_memory_allocated(device), torch.cuda.max_memory_reserved(device))
        torch.cuda.reset_peak_memory_stats(device)
        return found
    resident = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return Memory(resident, resident)


def memory_text(used: int, held: int) -> str:
    """Return the memory of a rank in words."""
    if used == held:
        return f"{used / 2**20:.0f} MiB a rank"
    return f"{used / 2**20:.0f} MiB of tensors a rank, {held / 2**20:.0f} held"


def available_memory(device: torch.device) -> int:
    """Return the bytes that one rank may still take: free on its CUDA device, or its share of the host's."""
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else host_memory.available_memory()
