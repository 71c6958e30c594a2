"""The device mesh: ranks in a grid with named axes, and the process group that they communicate over.

    mesh = shard.mesh(dp=2, fsdp=4)                      # 8 ranks on the host; every axis may be 1
    mesh = shard.mesh(device="cuda", fsdp=8)             # a CUDA device for each rank of a machine
    with shard.abstract_mesh(fsdp=512) as mesh: ...      # as its first rank sees it, in this process alone

``dp`` replicates weights and splits the batch. ``fsdp`` splits the bytes of weights, and the batch too. The result is
torch's DeviceMesh. Tensors of the host travel over gloo and those of a CUDA device over NCCL. What ranks say about
themselves travels over gloo on every mesh, so that a check neither waits for the device nor makes the device wait.

``mesh`` starts the process group unless it runs already, and adds six things to torch:

* A rank that is stopped or cut off is found within 10 seconds (roll_call.py). So a transfer over gloo may take half an
  hour along every axis, and over NCCL, in which a rank is not watched, 60 seconds. Torch has 30 and 10 minutes.
* Ranks compare their devices before there is a group, because NCCL waits for a rank that has none, or shares one.
* Ranks compare their axes before they make groups. With different axes they would wait for each other there.
* Ranks under torchrun agree on a name of their start, and use the agent's store under it. The store outlives them, so
  they would find gloo addresses of dead ranks. The restart count is no such name: after a death it is not that of all.
* ``close`` waits for all ranks, because gloo aborts if a group is torn down while a peer still sends.
* An exit leaves gloo's threads a moment to release the last tensors. One that finds the interpreter ending aborts the
  process and replaces its exit status.
"""

import atexit
import functools
import math
import os
import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from fquant.device import HOST, is_integer, parse

from . import agree, roll_call
from .roll_call import transfer

Axes = str | tuple[str, ...]  # the name of one axis, or the names of some, the first of which is the outermost
AXES = ("dp", "fsdp")
TIMEOUT = timedelta(seconds=60)  # in which ranks find each other
LONGEST = {HOST.type: timedelta(minutes=30), "cuda": TIMEOUT}  # of a wait for a collective
BACKENDS = "cpu:gloo,cuda:nccl"  # of the group of a mesh of CUDA devices
SETTLE = 0.1  # seconds that an exit gives to gloo's threads, which need microseconds


def mesh(device: str | torch.device = HOST, timeout: timedelta | None = None, **axes: int) -> DeviceMesh:
    """Return the ranks of this job as a grid with the named ``axes``, outermost first in the order of ``AXES``.

    Axes left out have size 1. ``device`` is what :func:`fquant.device.parse` accepts; a CUDA device becomes the current
    one of the process. A collective may take ``timeout``, by default 30 minutes on the host and one on CUDA devices.

    Raises ValueError on every rank: for a device that some rank cannot have, for an unknown axis, and for sizes whose
    product is not the number of processes. So it does if ranks have different sizes or types of devices.
    """
    found = _start(device, timeout)
    shown = ", ".join(f"{name}={size}" for name, size in axes.items())
    agree.same("mesh", {"axes": shown or "no axes", "device": found.type})
    roll_call.start(_to_start(timeout).total_seconds())
    sizes, world = check_axes(axes), dist.get_world_size()
    if (ranks := math.prod(sizes)) != world:
        got = f"mesh {shown.replace(' ', '') or '(no axes)'} has {ranks} ranks, and this job has {world}"
        raise ValueError(f"{got}; wanted sizes that multiply to {world}, such as fsdp={world}")
    return _grid(sizes, found.type, timeout or LONGEST[found.type])


@contextmanager
def abstract_mesh(device: str | torch.device = HOST, **axes: int) -> Iterator[DeviceMesh]:
    """Open the mesh of ``axes``, of any size, as its first rank sees it, in this process alone; use it to trace steps.

    Its groups are torch's fake ones, whose collectives do nothing. They end with the block. The ``device`` need not be
    there. Raises ValueError for an unknown axis, RuntimeError if a process group runs already.
    """
    sizes = check_axes(axes)
    if dist.is_initialized():
        raise RuntimeError("abstract_mesh: this process has a process group already; use shard.close() first")
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=math.prod(sizes))
    try:
        yield _grid(sizes, torch.device(device).type, TIMEOUT)
    finally:
        dist.destroy_process_group()


def device_of(mesh: DeviceMesh) -> torch.device:
    """Return the device on which this rank of ``mesh`` computes; of an abstract mesh, the one of its first rank."""
    if mesh.device_type == HOST.type:
        return HOST
    index = torch.cuda.current_device() if torch.cuda.is_initialized() else 0
    return torch.device(mesh.device_type, index)


def _grid(sizes: tuple[int, ...], device_type: str, timeout: timedelta) -> DeviceMesh:
    grid = torch.arange(math.prod(sizes), device=HOST).reshape(sizes)
    along = [_groups_along(grid, dim, timeout) for dim in range(len(sizes))]
    return DeviceMesh.from_group(along, device_type, mesh=grid, mesh_dim_names=AXES)


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
        if not is_integer(size):
            raise TypeError(f"mesh axis {name} has size {size!r}; wanted an int of at least 1")
        if size < 1:
            raise ValueError(f"mesh axis {name} has size {size}; wanted at least 1")
    return tuple(int(axes.get(name, 1)) for name in AXES)


def _to_start(timeout: timedelta | None) -> timedelta:
    return min(timeout or TIMEOUT, TIMEOUT)


def _start(device: str | torch.device, timeout: timedelta | None) -> torch.device:
    """Start the process group of torchrun's environment, or a group of one without it, unless one runs.

    Returns this rank's device, which is the process's current one from then on.
    """
    _settle_at_exit()
    if dist.is_initialized():
        _check_backend(HOST, "gloo")
        return agree.attempt("mesh", lambda: _use_beside(parse(device)))
    rank, world, store = int(os.environ.get("RANK", 0)), 1, dist.HashStore()
    if "RANK" in os.environ:
        world, host, port = int(os.environ["WORLD_SIZE"]), os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        shared = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        start = _to_start(timeout)
        store = dist.TCPStore(host, port, world, is_master=rank == 0 and not shared, timeout=start)
        name = _agreed_name(store, rank, world, start.total_seconds()) if shared else "alone"
        store = dist.PrefixStore(f"fquant/{name}", store)
    every = functools.partial(_gather_text, store, rank, world)
    found = agree.attempt("mesh", lambda: parse(device), every)
    agree.same("mesh", {"device": found.type}, every)
    backend = "gloo" if _use(found) == HOST else BACKENDS
    longest = timeout or LONGEST[found.type]
    dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=longest)
    return found


def _use(device: torch.device) -> torch.device:
    """Make ``device`` the current one, on which NCCL and torch's kernels run, and return it."""
    if device != HOST:
        torch.cuda.set_device(device)
    return device


def _use_beside(device: torch.device) -> torch.device:
    """Make ``device`` the current one, if the process group that runs already communicates over NCCL there."""
    if device != HOST:
        _check_backend(device, "nccl")
    return _use(device)


def _check_backend(device: torch.device, backend: str) -> None:
    running = dist.get_backend_config()
    if f"{device.type}:{backend}" not in running.split(","):
        got = f"mesh: the process group that runs already is {running}; wanted {backend} for {device}"
        raise ValueError(f"{got}; start it as {BACKENDS}, or let shard.mesh start it")


def _agreed_name(store: dist.Store, rank: int, ranks: int, seconds: float) -> str:
    """Return a name that all ranks of this start of the job have, and no earlier start: a word of rank 0.

        rank 1    hello/1 = its own word        here/NAME/1
        rank 0    welcome/WORD = NAME           go/NAME, once all are here

    A rank that has died said hello, too, and rank 0 may have answered it. So rank 0 looks until a living one is here.
    Raises RuntimeError if some rank has not come in ``seconds``.
    """
    store, mine, end = dist.PrefixStore("fquant", store), secrets.token_hex(8), time.monotonic() + seconds
    name, missing = ("", [0]) if rank else (mine, list(range(1, ranks)))
    if rank:
        store.set(f"hello/{rank}", mine)
    while missing:
        if rank:
            if store.check([f"welcome/{mine}"]):
                name = store.get(f"welcome/{mine}").decode()
                store.set(f"here/{name}/{rank}", "")
            missing = [] if name and store.check([f"go/{name}"]) else [0]
        else:
            missing = [other for other in missing if not store.check([f"here/{mine}/{other}"])]
            for other in missing:
                if store.check([f"hello/{other}"]):
                    store.set(f"welcome/{store.get(f'hello/{other}').decode()}", mine)
        if missing and time.monotonic() > end:
            who = f"rank{'s' * (len(missing) > 1)} {', '.join(map(str, missing))}"
            raise RuntimeError(f"mesh: {who} did not come in {seconds:g} s; start every rank of the job")
        time.sleep(0.01 if missing else 0)
    if rank == 0:
        store.set(f"go/{mine}", "")
    return name


def _gather_text(store: dist.Store, rank: int, ranks: int, text: str) -> list[str]:
    """Gather ``text`` of every rank through the store of a job that has no process group yet."""
    call = store.add(f"texts/{rank}", 1)
    store.set(f"text/{call}/{rank}", text)
    return [each.decode() for each in store.multi_get([f"text/{call}/{other}" for other in range(ranks)])]


_settle_at_exit = functools.cache(lambda: atexit.register(time.sleep, SETTLE))


def close() -> None:
    """Wait for this rank's device and for all ranks, then end the process group, if one runs."""
    if dist.is_initialized():
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
        roll_call.announce("close of the mesh")
        with transfer():
            dist.group.WORLD._get_backend(HOST).barrier().wait()  # type: ignore[union-attr]
        dist.destroy_process_group()


def as_axes(axes: Axes, mesh: DeviceMesh | None = None) -> tuple[str, ...]:
    """Return ``axes`` as a tuple of names; a str is the name of one axis.

    Raises ValueError for an axis that ``mesh`` does not have, and for an axis that is named twice.
    """
    names = (axes,) if isinstance(axes, str) else axes
    if not isinstance(names, tuple | list) or not all(name and isinstance(name, str) for name in names):
        raise TypeError(f"axes: got {axes!r}; wanted the name of an axis, such as 'fsdp', or a tuple of names")
    names = tuple(names)
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
