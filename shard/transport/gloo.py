"""Collectives over gloo that move every part once, to its place in the result.

Ranks of one machine use shared memory (shared_memory.py). Each writes its part there and reads the others. A gather
copies its result out, unless it is lent (see below). A sum adds up each rank's part in the order of ranks. An
all-to-all copies from each rank the part that is for this one.

Otherwise parts travel. torch's own gather receives into one buffer and copies to another, both new at each call, which
takes most of the time of large parts. Here the result is the only buffer: a rank sends its part from its place there,
and receives the others in place. Every rank begins with its neighbour, so that not all send to the same rank first. The
order of gathers, the same on every rank, tells those apart that are under way together. Sums that travel are torch's.

    all_gather(x, ranks, group)         x [n ...], contiguous and of any dtype      ->  [ranks·n ...]
    reduce_scatter(x, ranks, group)     x [ranks·n ...], contiguous numbers         ->  [n ...]
    all_to_all(x, ranks, group)         x [ranks·n ...], contiguous and of any dtype ->  [ranks·n ...]

The ops issue, and torch's ``wait_tensor`` waits; they have no derivatives. They raise RuntimeError as gloo does: at the
wait, if a rank has gone or the group's time-out has passed; in shared memory also if ranks are in different
collectives. ``fquant::all_gather.lent`` returns the shared memory itself, which must not be written. Captured graphs
call it for results that they neither write nor return (see fquant.compile.memory.plan).
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import _register_work

from fquant.compile import graph

from . import shared_memory
from .shared_memory import SharedMemory, Slot

resolve: Callable[[str], dist.ProcessGroup] = dist.distributed_c10d._resolve_process_group  # type: ignore[assignment]
TAG = 0x6671  # of our messages; those that a program sends itself over the same group have 0 by default


def _all_gather(x: Tensor, ranks: int, group: str, lent: bool = False) -> Tensor:
    over, shape = resolve(group), (ranks * x.shape[0], *x.shape[1:])
    memory, slot = _acquire(x, over)
    if slot is None:
        out, finish = _travel(x, shape, over), None
    else:
        whole = slot.tensor(x.dtype, shape)
        whole.unflatten(0, (ranks, x.shape[0]))[over.rank()].copy_(x)
        out = whole if lent else x.new_empty(shape)
        finish = None if lent else partial(_sum_into, out, [whole])
    if memory is not None:
        memory.publish(f"all_gather {graph.describe(x)}", out, finish)
    return out


def _reduce_scatter(x: Tensor, ranks: int, group: str) -> Tensor:
    over = resolve(group)
    memory, slot = (None, None) if x.dtype is torch.bool else _acquire(x, over)
    if slot is None:
        out, finish = torch.ops._c10d_functional.reduce_scatter_tensor(x, "sum", ranks, group), None
    else:
        whole = slot.tensor(x.dtype, (ranks, ranks, x.shape[0] // ranks, *x.shape[1:]))
        whole[over.rank()].copy_(x.view(whole.shape[1:]))
        out = x.new_empty(whole.shape[2:])
        finish = partial(_sum_into, out, whole[:, over.rank()].unbind())
    if memory is not None:
        memory.publish(f"reduce_scatter {graph.describe(x)}", out, finish)
    return out


def _all_to_all(x: Tensor, ranks: int, group: str) -> Tensor:
    over = resolve(group)
    (memory, slot), out = _acquire(x, over), torch.empty_like(x)
    given, received = (t.unflatten(0, (ranks, x.shape[0] // ranks)) for t in (x, out))
    if slot is None:
        finish = None
        received[over.rank()].copy_(given[over.rank()])
        _send_each(given, received, over, out)
    else:
        whole = slot.tensor(x.dtype, (ranks, *given.shape))
        whole[over.rank()].copy_(given)
        finish = partial(_sum_into, received, [whole[:, over.rank()]])
    if memory is not None:
        memory.publish(f"all_to_all {graph.describe(x)}", out, finish)
    return out


def _acquire(x: Tensor, group: dist.ProcessGroup) -> tuple[SharedMemory | None, Slot | None]:
    """Return the memory of ``group``, if there is any, and a slot for a tensor like ``x`` of every rank."""
    memory = shared_memory.of_group(group) if group.size() > 1 and x.numel() else None
    return memory, memory and memory.acquire(group.size() * x.nbytes)


def _travel(x: Tensor, shape: tuple[int, ...], group: Any) -> Tensor:
    """Gather by messages."""
    out = x.new_empty(shape)
    parts = out.unflatten(0, (group.size(), x.shape[0]))
    parts[group.rank()].copy_(x)
    _send_each(parts[group.rank()].expand(parts.shape), parts, group, out)
    return out


def _send_each(given: Tensor, received: Tensor, group: Any, out: Tensor) -> None:
    """Send ``given[i]`` to each other rank i, and receive ``received[i]``; a wait for ``out`` waits for all of them."""
    mine, ranks = group.rank(), group.size()
    for step in range(1, ranks) if given.numel() else ():
        _register_work(out, group.recv([received[mine - step]], (mine - step) % ranks, TAG))
    for step in range(1, ranks) if given.numel() else ():
        _register_work(out, group.send([given[(mine + step) % ranks]], (mine + step) % ranks, TAG))


def _sum_into(out: Tensor, parts: Sequence[Tensor]) -> None:
    """Write the sum of ``parts`` to ``out``, in their order."""
    with torch.inference_mode():  # outside of it, a tensor that was made inside could not be written
        out.copy_(parts[0])
        for part in parts[1:]:
            out.add_(part)


_fake_gather = lambda x, ranks, group: x.new_empty((ranks * x.shape[0], *x.shape[1:]))
_fake_scatter = lambda x, ranks, group: x.new_empty((x.shape[0] // ranks, *x.shape[1:]))
_LIBRARY = torch.library.Library("fquant", "FRAGMENT")
for _name, _compute, _fake in (
    ("all_gather", _all_gather, _fake_gather),
    ("all_gather.lent", partial(_all_gather, lent=True), _fake_gather),
    ("reduce_scatter", _reduce_scatter, _fake_scatter),
    ("all_to_all", _all_to_all, lambda x, ranks, group: torch.empty_like(x)),
):
    _LIBRARY.define(f"{_name}(Tensor x, int ranks, str group) -> Tensor", tags=(torch.Tag.pt2_compliant_tag,))
    _LIBRARY.impl(_name, _compute, "CPU")
    torch.library.register_fake(f"fquant::{_name}", _fake, lib=_LIBRARY)
all_gather, reduce_scatter = torch.ops.fquant.all_gather.default, torch.ops.fquant.reduce_scatter.default
all_to_all = torch.ops.fquant.all_to_all.default
