"""gloo: an all-gather over gloo that moves every part once, to where it is to lie.

torch's own receives into one buffer and copies into another, and makes both anew each time: of large parts most of the
time goes there. Here the result is made once. A rank copies its part to its place in it, sends it from there to every
other rank, and receives theirs in place. So nothing else is held, and what was given may be written or freed at once.

Every rank begins with its neighbour, so that not all send to the same one first, and no part is passed on: each goes
once over the wire to each rank that wants it, whatever their number, and none waits for another, as it would in a tree
of broadcasts. Gathers that are under way at the same time are told apart by their order, which is the same on every
rank.

It is one op, ``fquant::all_gather``, which issues, and torch's ``wait_tensor`` waits for it: the sends and receives are
registered with the result, as torch registers its own. They fail where gloo's do, at the wait when a rank has gone or
the group's time-out has passed.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import _register_work

TAG = 0x6671  # of our messages: those that a program sends itself over the same group have 0, unless it says otherwise


def is_used(x: Tensor, group: dist.ProcessGroup) -> bool:
    """Whether ``group`` sends tensors as ``x`` over gloo, which is the same on every rank."""
    return x.device.type == "cpu" and group._get_backend(x.device).name() == "gloo"


def all_gather(x: Tensor, ranks: int, group: str) -> Tensor:
    """``x`` [n ...] of every rank, contiguous: [ranks·n ...], which is there once it was waited for. Any dtype will do.

    Raises RuntimeError, at the latest when it is waited for, where a rank has gone or does not come in time.
    """
    return _ALL_GATHER(x, ranks, group)


def _all_gather(x: Tensor, ranks: int, group: str) -> Tensor:
    over: Any = dist.distributed_c10d._resolve_process_group(group)  # type: ignore[arg-type]
    out, mine = x.new_empty((ranks * x.shape[0], *x.shape[1:])), over.rank()
    parts = out.unflatten(0, (ranks, x.shape[0])).unbind()
    parts[mine].copy_(x)
    for step in range(1, ranks) if x.numel() else ():
        _register_work(out, over.recv([parts[mine - step]], (mine - step) % ranks, TAG))
    for step in range(1, ranks) if x.numel() else ():
        _register_work(out, over.send([parts[mine]], (mine + step) % ranks, TAG))
    return out


def _fake(x: Tensor, ranks: int, group: str) -> Tensor:
    return x.new_empty((ranks * x.shape[0], *x.shape[1:]))


_LIBRARY = torch.library.Library("fquant", "FRAGMENT")
_LIBRARY.define("all_gather(Tensor x, int ranks, str group) -> Tensor", tags=(torch.Tag.pt2_compliant_tag,))
_LIBRARY.impl("all_gather", _all_gather, "CPU")
torch.library.register_fake("fquant::all_gather", _fake, lib=_LIBRARY)
_ALL_GATHER = torch.ops.fquant.all_gather.default
