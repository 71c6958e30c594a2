"""Ranks that do other things than their peers: the seconds until every rank has an error, and whom it names.

Two ranks enter a collective together, and then rank 1 deviates as the case says; four ranks wait in a circle. Seconds
are those of the slowest rank that is left, from its first call that its peer does not make. A rank without an error in
``PATIENCE`` hangs.
"""

import os
import re
import signal
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

import shard
from fquant import jit
from fquant.device import HOST
from tests.helpers import ranks

PATIENCE = 30.0
WANTED = 10.0  # seconds


class Outcome(NamedTuple):
    """The seconds of a mismatch and the error of the slowest rank; None and why if some rank had no error."""

    seconds: float | None
    error: str
    named: bool  # whether each error names the ranks 0 and 1


def _total(mesh: DeviceMesh, size: int = 64, axes: str = "fsdp") -> torch.Tensor:
    return shard.psum(torch.ones(size, dtype=torch.float32, device=HOST), mesh, axes)


def _step(mesh: DeviceMesh) -> Callable[[], Any]:
    """Return a captured step with a sum over ranks, which has been taken once."""
    step, x = jit(lambda x: shard.psum(x, mesh, "fsdp")), torch.ones(64, dtype=torch.float32, device=HOST)
    step(x)
    return lambda: step(x)


def one_more(mesh: DeviceMesh, rank: int) -> None:
    """Call a sum once more on rank 1, where the others close the mesh."""
    if rank == 1:
        _total(mesh)
    shard.close()


def one_fewer(mesh: DeviceMesh, rank: int) -> None:
    """Leave out a sum on rank 1."""
    if rank != 1:
        _total(mesh)
    shard.close()


def other_shape(mesh: DeviceMesh, rank: int) -> None:
    """Sum 65 numbers on rank 1, and 64 on others."""
    _total(mesh, 64 + (rank == 1))


def other_order(mesh: DeviceMesh, rank: int) -> None:
    """Gather and sum on rank 1, sum and gather on others."""
    x = torch.ones(64, dtype=torch.float32, device=HOST)
    for op in [shard.all_reduce, shard.all_gather][:: -1 if rank == 1 else 1]:
        op(x, mesh.get_group("fsdp"))


def step_more(mesh: DeviceMesh, rank: int) -> None:
    """Replay a captured step once more on rank 1."""
    step = _step(mesh)
    if rank == 1:
        step()
    shard.close()


def step_fewer(mesh: DeviceMesh, rank: int) -> None:
    """Skip a captured step on rank 1."""
    step = _step(mesh)
    if rank != 1:
        step()
    shard.close()


def raises(mesh: DeviceMesh, rank: int) -> None:
    """Raise on rank 1 between two sums."""
    if rank == 1:
        raise ValueError("a bad batch")
    _total(mesh)


def exits(mesh: DeviceMesh, rank: int) -> None:
    """End the process of rank 1."""
    if rank == 1:
        os._exit(3)
    _total(mesh)


def killed(mesh: DeviceMesh, rank: int) -> None:
    """Kill the process of rank 1."""
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    _total(mesh)


def stopped(mesh: DeviceMesh, rank: int) -> None:
    """Stop the process of rank 1."""
    if rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    _total(mesh)


def circle(mesh: DeviceMesh, rank: int) -> None:
    """Begin with a row of the mesh on ranks 0 and 3, and with a column on 1 and 2."""
    for axes in ["fsdp", "dp"] if rank in (0, 3) else ["dp", "fsdp"]:
        _total(mesh, axes=axes)


CASES: dict[str, Callable[[DeviceMesh, int], None]] = {
    "one collective more": one_more, "one collective fewer": one_fewer, "another shape": other_shape,
    "another order": other_order, "a captured step more": step_more, "a captured step fewer": step_fewer,
    "a rank raises": raises, "a rank exits": exits, "a rank is killed": killed, "a rank is stopped": stopped,
    "ranks wait in a circle": circle,
}  # fmt: skip
DIES = {"a rank raises", "a rank exits", "a rank is killed", "a rank is stopped"}  # rank 1, whose error does not count


def _take(name: str, pids: list[int]) -> None:
    """Take part in a case on a rank, and put the seconds before its error."""
    mesh = shard.mesh(dp=2, fsdp=2) if name == "ranks wait in a circle" else shard.mesh(fsdp=dist.get_world_size())
    rank = dist.get_rank()
    _total(mesh)
    began = time.monotonic()
    try:
        CASES[name](mesh, rank)
    except RuntimeError as error:
        raise RuntimeError(f"[{time.monotonic() - began:.2f} s] {error}") from None
    finally:
        if name == "a rank is stopped" and rank == 0:
            os.kill(pids[1], signal.SIGCONT)


def measure(name: str) -> Outcome:
    """Return what the mismatch ``name`` leads to."""
    n = 4 if name == "ranks wait in a circle" else 2
    ranks.run(n, dist.get_rank)  # so that they exist
    try:
        ranks.run(n, _take, name, ranks.pids()[:n], timeout=PATIENCE)
    except ranks.RankTimeout as error:
        return Outcome(None, f"ranks {error.hung} hang", False)
    except ranks.RankFailure as error:
        failures = error.failures
    else:
        return Outcome(None, "no rank has an error", False)
    left = [rank for rank in range(n) if not (rank == 1 and name in DIES)]
    times = {rank: re.match(r"\[([\d.]+) s\] ", failures[rank].message) for rank in left if rank in failures}
    if missing := [rank for rank in left if times.get(rank) is None]:
        return Outcome(None, f"ranks {missing} have no error of a mismatch", False)
    seconds, slowest = max((float(found[1]), rank) for rank, found in times.items() if found)
    named = all(
        re.search(r"rank 1\b|ranks .*\b1\b", failures[r].message) and "rank 0" in failures[r].message for r in left
    )
    return Outcome(seconds, failures[slowest].message, named)
