"""The device mesh: ranks in a grid with named axes, and the process group that they communicate over.

    mesh = shard.mesh(dp=2, fsdp=4)                      # 8 ranks; every axis may be 1
    with shard.abstract_mesh(fsdp=512) as mesh: ...      # as its first rank sees it, in this process alone

``dp`` replicates weights and splits the batch. ``fsdp`` splits the bytes of weights, and the batch too. The result is
torch's DeviceMesh. ``mesh`` starts the process group unless it runs already, and adds five things to torch:

* A collective that does not complete fails after 60 seconds along every axis, not after torch's default 30 minutes.
* Ranks compare their axes before they make groups. With different axes they would wait for each other there.
* The store is prefixed with torchrun's restart count. Otherwise restarted workers find gloo addresses of dead ones.
* ``close`` waits for all ranks, because gloo aborts if a group is torn down while a peer still sends.
* An exit leaves gloo's threads a moment to release the last tensors. One that finds the interpreter ending aborts the
  process and replaces its exit status.
"""

import atexit
import functools
import math
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from . import agree

Axes = str | tuple[str, ...]  # the name of one axis, or the names of some, the first of which is the outermost
AXES = ("dp", "fsdp")
TIMEOUT = timedelta(seconds=60)
SETTLE = 0.1  # seconds that an exit gives to gloo's threads, which need microseconds


def mesh(timeout: timedelta = TIMEOUT, **axes: int) -> DeviceMesh:
    """Return the ranks of this job as a grid with the named ``axes``, outermost first in the order of ``AXES``.

    Axes left out have size 1. Ranks compute on the CPU and communicate over gloo. Raises ValueError on every rank for
    an unknown axis, for sizes whose product is not the number of processes, and if ranks have different sizes.
    """
    _start(timeout)
    shown = ", ".join(f"{name}={size}" for name, size in axes.items())
    agree.same("mesh", {"axes": shown or "no axes"})
    sizes, world = check_axes(axes), dist.get_world_size()
    if (ranks := math.prod(sizes)) != world:
        got = f"mesh {shown.replace(' ', '') or '(no axes)'} has {ranks} ranks, and this job has {world}"
        raise ValueError(f"{got}; wanted sizes that multiply to {world}, such as fsdp={world}")
    return _grid(sizes, timeout)


@contextmanager
def abstract_mesh(**axes: int) -> Iterator[DeviceMesh]:
    """Open the mesh of ``axes``, of any size, as its first rank sees it, in this process alone; use it to trace steps.

    Its groups are torch's fake ones, whose collectives do nothing. They end with the block. Raises ValueError for an
    unknown axis, RuntimeError if a process group runs already.
    """
    sizes = check_axes(axes)
    if dist.is_initialized():
        raise RuntimeError("abstract_mesh: this process has a process group already; use shard.close() first")
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=math.prod(sizes))
    try:
        yield _grid(sizes, TIMEOUT)
    finally:
        dist.destroy_process_group()


def _grid(sizes: tuple[int, ...], timeout: timedelta) -> DeviceMesh:
    grid = torch.arange(math.prod(sizes), device="cpu").reshape(sizes)
    along = [_groups_along(grid, dim, timeout) for dim in range(len(sizes))]
    return DeviceMesh.from_group(along, "cpu", mesh=grid, mesh_dim_names=AXES)


def _groups_along(grid: torch.Tensor, dim: int, timeout: timedelta) -> dist.ProcessGroup:
    """Return this rank's group along ``dim`` of the ``grid`` of ranks; every rank takes part in making each group."""
    mine = dist.group.WORLD
    if grid.shape[dim] < grid.numel():
        for ranks in grid.movedim(dim, -1).reshape(-1, grid.shape[dim]).tolist():
            group = dist.new_group(ranks, timeout=timeout, group_desc=f"mesh_{AXES[dim]}")
            mine = group if dist.get_rank() in ranks else mine
    assert isinstance(mine, dist.ProcessGroup)
    return mine


def check_axes(axes: dict[str, int]) -> tuple[int, ...]:
    """Return the sizes of all ``AXES``; raise ValueError for an unknown one, and for a size below 1."""
    for name, size in axes.items():
        if name not in AXES:
            raise ValueError(f"mesh axis {name!r} is unknown; wanted some of {', '.join(AXES)}")
        if size < 1:
            raise ValueError(f"mesh axis {name} has size {size}; wanted at least 1")
    return tuple(axes.get(name, 1) for name in AXES)


def _start(timeout: timedelta) -> None:
    """Start the process group of torchrun's environment, or a group of one without it, unless one runs."""
    _settle_at_exit()
    if dist.is_initialized():
        return
    rank, world, store = int(os.environ.get("RANK", 0)), 1, dist.HashStore()
    if "RANK" in os.environ:
        world, host, port = int(os.environ["WORLD_SIZE"]), os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        shared = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        store = dist.TCPStore(host, port, world, is_master=rank == 0 and not shared, timeout=timeout)
        store = dist.PrefixStore(f"fquant/attempt{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=timeout)


_settle_at_exit = functools.cache(lambda: atexit.register(time.sleep, SETTLE))


def close() -> None:
    """Wait for all ranks, then end the process group, if one runs."""
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()


def as_axes(axes: Axes, mesh: DeviceMesh | None = None) -> tuple[str, ...]:
    """Return ``axes`` as a tuple of names; a str is the name of one axis.

    Raises ValueError for an axis that ``mesh`` does not have, and for an axis that is named twice.
    """
    names = (axes,) if isinstance(axes, str) else tuple(axes)
    known = names if mesh is None else mesh.mesh_dim_names or ()
    for name in names:
        if name not in known:
            raise ValueError(f"the mesh has no axis {name!r}; wanted some of {', '.join(known)}")
    if len(set(names)) != len(names):
        raise ValueError(f"an axis stands twice in {names}; wanted each once")
    return names


def position(mesh: DeviceMesh, axes: Axes) -> tuple[int, int]:
    """Return this rank's number along ``axes``, the first of which is the outermost, and the number of ranks."""
    index, ranks = 0, 1
    for name, size in _sizes(mesh, axes).items():
        index, ranks = index * size + mesh.get_local_rank(name), ranks * size
    return index, ranks


def groups(mesh: DeviceMesh, axes: Axes) -> list[dist.ProcessGroup]:
    """Return the groups whose sums, one after the other, are the sum over ``axes``: one if they span all ranks."""
    sizes, world = _sizes(mesh, axes), dist.group.WORLD
    used = [name for name, size in sizes.items() if size > 1]
    if len(used) > 1 and world is not None and math.prod(sizes.values()) == world.size():
        return [world]
    return [mesh.get_group(name) for name in used]


def _sizes(mesh: DeviceMesh, axes: Axes) -> dict[str, int]:
    names = mesh.mesh_dim_names or ()  # not mesh[axis].size(): torch 2.11 cannot trace it
    return {name: mesh.size(names.index(name)) for name in as_axes(axes, mesh)}
