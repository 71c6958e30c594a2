"""gloo: an all-gather and a reduce-scatter over gloo in which every part moves once, to where it is to lie.

Ranks of one machine share memory (shard/transport/shared_memory.py): each writes its part there, and reads those of others. A gathered
result is then copied out, unless it is only lent (see below); of a sum each rank adds up its own part, in the order of
ranks.

Elsewhere parts travel. torch's own gather receives into one buffer and copies into another, and makes both anew each
time: of large parts most of the time goes there. Here the result is made once. A rank copies its part to its place in
it, sends it from there to every other rank, and receives theirs in place. So nothing else is held, and what was given
may be written or freed at once. Every rank begins with its neighbour, so that not all send to the same one first, and
no part is passed on: each goes once over the wire to each rank that wants it, whatever their number, and none waits for
another, as it would in a tree of broadcasts. Gathers that are under way at the same time are told apart by their order,
which is the same on every rank. Sums that travel are torch's.

They are ops, ``fquant::all_gather`` and ``fquant::reduce_scatter``, which issue, and torch's ``wait_tensor`` waits for
them: what is to arrive is registered with the result, as torch registers its own. They fail where gloo's do, at the
wait when a rank has gone or the group's time-out has passed; in shared memory also where ranks are in different ones.

``fquant::all_gather.lent`` gives the memory that ranks share itself, so it must not be written. Captured graphs call it
where they neither write the result nor return it (see fquant.compile.memory.plan).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import _register_work

from fquant.compile import graph

from . import shared_memory

TAG = 0x6671  # of our messages: those that a program sends itself over the same group have 0, unless it says otherwise


def is_used(x: Tensor, group: dist.ProcessGroup) -> bool:
    """Whether ``group`` sends tensors as ``x`` over gloo, which is the same on every rank."""
    return x.device.type == "cpu" and group._get_backend(x.device).name() == "gloo"


def all_gather(x: Tensor, ranks: int, group: str) -> Tensor:
    """``x`` [n ...] of every rank, contiguous: [ranks·n ...], which is there once it was waited for. Any dtype will do.

    Raises RuntimeError, at the latest when it is waited for, where a rank has gone or does not come in time.
    """
    return _ALL_GATHER(x, ranks, group)


def reduce_scatter(x: Tensor, ranks: int, group: str) -> Tensor:
    """The sum over ranks of ``x`` [ranks·n ...], contiguous numbers, of which each keeps its part [n ...].

    It is there once it was waited for. Raises what :func:`all_gather` raises.
    """
    return _REDUCE_SCATTER(x, ranks, group)


def _all_gather(x: Tensor, ranks: int, group: str, lent: bool = False) -> Tensor:
    over, shape = resolve(group), (ranks * x.shape[0], *x.shape[1:])
    memory = _shared(x, over)
    if memory is None:
        return _sent(x, shape, over)
    slot = memory.take(ranks * x.nbytes)
    if slot is None:
        out = _sent(x, shape, over)
        memory.tell(f"all_gather {graph.describe(x)}", out)
        return out
    whole = slot.tensor(x.dtype, shape)
    whole.unflatten(0, (ranks, x.shape[0]))[over.rank()].copy_(x)
    out = whole if lent else x.new_empty(shape)
    memory.tell(f"all_gather {graph.describe(x)}", out, None if lent else partial(_add, out, [whole]))
    return out


def _lent(x: Tensor, ranks: int, group: str) -> Tensor:
    return _all_gather(x, ranks, group, lent=True)


def _reduce_scatter(x: Tensor, ranks: int, group: str) -> Tensor:
    over = resolve(group)
    memory = None if x.dtype is torch.bool else _shared(x, over)
    if memory is None:
        return torch.ops._c10d_functional.reduce_scatter_tensor(x, "sum", ranks, group)
    slot = memory.take(ranks * x.nbytes)
    if slot is None:
        out = torch.ops._c10d_functional.reduce_scatter_tensor(x, "sum", ranks, group)
        memory.tell(f"reduce_scatter {graph.describe(x)}", out)
        return out
    whole = slot.tensor(x.dtype, (ranks, ranks, x.shape[0] // ranks, *x.shape[1:]))
    whole[over.rank()].copy_(x.view(whole.shape[1:]))
    out = x.new_empty(whole.shape[2:])
    memory.tell(f"reduce_scatter {graph.describe(x)}", out, partial(_add, out, whole[:, over.rank()].unbind()))
    return out


def _shared(x: Tensor, group: dist.ProcessGroup) -> shared_memory.Shared | None:
    return shared_memory.of(group) if group.size() > 1 and x.numel() else None


def _sent(x: Tensor, shape: tuple[int, ...], group: Any) -> Tensor:
    """The gather where ranks share no memory."""
    out, mine, ranks = x.new_empty(shape), group.rank(), group.size()
    parts = out.unflatten(0, (ranks, x.shape[0])).unbind()
    parts[mine].copy_(x)
    for step in range(1, ranks) if x.numel() else ():
        _register_work(out, group.recv([parts[mine - step]], (mine - step) % ranks, TAG))
    for step in range(1, ranks) if x.numel() else ():
        _register_work(out, group.send([parts[mine]], (mine + step) % ranks, TAG))
    return out


def _add(out: Tensor, parts: Sequence[Tensor]) -> None:
    """Write the sum of ``parts``, in order."""
    with torch.inference_mode():  # outside of which what was made inside cannot be written
        out.copy_(parts[0])
        for part in parts[1:]:
            out.add_(part)


def resolve(group: str) -> dist.ProcessGroup:
    """Return the process group of that name."""
    return dist.distributed_c10d._resolve_process_group(group)  # type: ignore[arg-type]


def _fake_gather(x: Tensor, ranks: int, group: str) -> Tensor:
    return x.new_empty((ranks * x.shape[0], *x.shape[1:]))


def _fake_scatter(x: Tensor, ranks: int, group: str) -> Tensor:
    return x.new_empty((x.shape[0] // ranks, *x.shape[1:]))


_LIBRARY = torch.library.Library("fquant", "FRAGMENT")
for _name, _compute, _fake in (
    ("all_gather", _all_gather, _fake_gather),
    ("all_gather.lent", _lent, _fake_gather),
    ("reduce_scatter", _reduce_scatter, _fake_scatter),
):
    _LIBRARY.define(f"{_name}(Tensor x, int ranks, str group) -> Tensor", tags=(torch.Tag.pt2_compliant_tag,))
    _LIBRARY.impl(_name, _compute, "CPU")
    torch.library.register_fake(f"fquant::{_name}", _fake, lib=_LIBRARY)
_ALL_GATHER, _REDUCE_SCATTER = torch.ops.fquant.all_gather.default, torch.ops.fquant.reduce_scatter.default
