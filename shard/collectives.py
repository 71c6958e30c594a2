"""Collectives as pure functions that every transform of torch.func accepts.

Each has a dual, which is its backward. On one device all are the identity.

                                                   value                     cotangent
    all_gather      [n ...]       -> [ranks·n ...] sharded    -> replicated  partial    -> sharded
    reduce_scatter  [ranks·n ...] -> [n ...]       partial    -> sharded     sharded    -> replicated
    all_to_all      [ranks·n ...] -> [ranks·n ...] sharded    -> sharded     sharded    -> sharded
    all_reduce      the sum over ranks             partial    -> replicated  partial    -> replicated
    enter           identity                       replicated -> replicated  partial    -> replicated
    exit            the sum over ranks             partial    -> replicated  replicated -> replicated

all_gather and reduce_scatter are each other's duals, and so are enter and exit. The other two are their own.

A partial value is the sum over ranks. A replicated value has a partial cotangent if each rank goes on to a loss of its
own. The losses of all ranks then add up. It has a replicated cotangent if all ranks go on to one loss, which counts
once. A loss that every rank computes whole, divided by the number of ranks, is a loss of the first kind. The tangent of
a value has the type of the value.

They are one autograd Function over torch's functional collectives. grad, vmap, jvp, their compositions and make_fx pass
through. A backward calls the dual *Function*, because a raw collective there gives silent zeros. Groups are arguments.
Over gloo the gathers, scattered sums and all-to-alls are the ops of shard/transport/gloo.py. Before one runs, the ranks
of its group compare what each is about to do, and of trees also paths, dtypes and shapes (roll_call.py).
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode

from fquant.compile import graph
from fquant.device import HOST

from .roll_call import announce, transfer
from .transport import gloo
from .transport.gloo import resolve

Group = dist.ProcessGroup
_ops = torch.ops._c10d_functional


def all_gather(x: Tensor, group: Group) -> Tensor:
    """Return ``x`` [n ...] of every rank, one after the other along dim 0: [ranks·n ...].

        rank 0  [a]  ->  [a b]
        rank 1  [b]  ->  [a b]

    Along the group's axis: sharded by dim 0 in, replicated out; the cotangent is partial. Raises ValueError for
    a scalar.
    """
    if x.ndim == 0:
        raise ValueError("all_gather got a scalar; wanted at least one dim to gather along")
    return collective(x, "all_gather", group)


def reduce_scatter(x: Tensor, group: Group) -> Tensor:
    """Return this rank's part [n ...] of the sum over ranks of ``x`` [ranks·n ...].

        rank 0  [a b]  ->  [a + c]
        rank 1  [c d]  ->  [b + d]

    Along the group's axis: a partial sum in, sharded by dim 0 out, and its cotangent too. Raises ValueError
    for a scalar, and if the number of ranks does not divide dim 0.
    """
    if x.ndim == 0:
        raise ValueError("reduce_scatter got a scalar; wanted at least one dim to scatter along")
    if x.shape[0] % group.size():
        raise ValueError(f"reduce_scatter got {x.shape[0]} rows for {group.size()} ranks; pad to a multiple")
    return collective(x, "reduce_scatter", group)


def all_to_all(x: Tensor, group: Group) -> Tensor:
    """Return the parts [n ...] of ``x`` [ranks·n ...] that the ranks have for this one, in the order of ranks.

        rank 0  [a b]  ->  [a c]
        rank 1  [c d]  ->  [b d]

    Raises ValueError for a scalar, and if the number of ranks does not divide dim 0.
    """
    if x.ndim == 0 or x.shape[0] % group.size():
        raise ValueError(f"all_to_all got shape {tuple(x.shape)} for {group.size()} ranks; pad dim 0 to a multiple")
    return collective(x, "all_to_all", group)


def all_reduce(x: Tensor, group: Group) -> Tensor:
    """Return the sum of ``x`` over ranks, each of which has a loss of its own; the losses of all ranks add up.

    Along the group's axis: a partial sum in, replicated out; the cotangent is partial. Backward: all_reduce, because
    every rank's loss depends on every rank's ``x``.
    """
    return collective(x, "all_reduce", group)


def enter(x: Tensor, group: Group) -> Tensor:
    """Return ``x``, which is equal on all ranks, at the start of a computation that each rank does a part of.

        rank 0  a  ->  a          backward   g + h  <-  g
        rank 1  a  ->  a                     g + h  <-  h

    Along the group's axis: replicated in and out; the cotangent is partial.
    """
    return collective(x, "enter", group)


def exit(x: Tensor, group: Group) -> Tensor:
    """Return the sum over ranks of ``x``, at the end of a computation that each rank does a part of.

        rank 0  a  ->  a + b      backward   g  <-  g
        rank 1  b  ->  a + b                 g  <-  g

    Along the group's axis: a partial sum in, replicated out, and its cotangent too. All ranks have the same loss from
    here on, which counts once.
    """
    return collective(x, "exit", group)


_DUAL = {"all_gather": "reduce_scatter", "all_reduce": "all_reduce", "all_to_all": "all_to_all", "enter": "exit"}
_DUAL |= {dual: name for name, dual in _DUAL.items()}
_NO_DUAL = (
    "a gradient through the sum of ranks' gradients: got no cotangent, wanted its type; use shard.reduce(..., "
    "cotangent='partial'), and divide an outer loss that every rank computes whole by the number of ranks"
)
_SENT = {"all_reduce": "all_reduce sum", "exit": "all_reduce sum", "reduce_scatter": "reduce_scatter sum"}


def collective(x: Tensor, name: str, group: Group, leaves: Sequence[str] = (), has_dual: bool = True) -> Tensor:
    """Return the collective ``name`` of ``x`` over ``group``, of a tree with ``leaves``, on which ranks must agree.

    Without ``has_dual`` a backward raises ValueError, because the type of the cotangent is not known.
    """
    return _Collective.apply(x, name, group.group_name, tuple(leaves), has_dual)


def broadcast(x: Tensor, source: int) -> None:
    """Write ``x`` of the rank ``source`` to that of every rank of the job; each has its dtype and shape."""
    with _announced(f"broadcast from rank {source}", x):
        dist.broadcast(x, source)


def all_reduce_max(x: Tensor, group: Group) -> Tensor:
    """Return the largest ``x`` of any rank of ``group``, element by element; no derivative."""
    with _announced("all_reduce max", x, group):
        return _ops.wait_tensor(_ops.all_reduce(x.contiguous(), "max", group.group_name))


@contextmanager
def _announced(name: str, x: Tensor, group: Group | None = None, leaves: Sequence[str] = ()) -> Iterator[None]:
    """Announce the collective ``name`` of ``x`` to ``group``, by default all ranks, and watch it; a trace notes it."""
    if isinstance(x, FakeTensor):
        graph.note_leaves(leaves)
        yield
    else:
        announce(f"{name} {graph.describe(x)}", group, leaves)
        with transfer(group):
            yield


class _Collective(torch.autograd.Function):
    """The collective ``name`` over the group with the name ``group``; see :func:`collective`."""

    @staticmethod
    def forward(x: Tensor, name: str, group: str, leaves: tuple[str, ...], has_dual: bool) -> Tensor:
        if name == "enter":
            return x.view_as(x)
        x, over = x.contiguous(), resolve(group)
        with _announced(_SENT.get(name, name), x, over, leaves):
            if name in ("all_reduce", "exit"):
                out = _ops.all_reduce(x, "sum", group)
            elif x.device == HOST and over._get_backend(x.device).name() == "gloo":
                out = getattr(gloo, name)(x, over.size(), group)
            elif name == "all_gather":
                out = _ops.all_gather_into_tensor(x, over.size(), group)
            elif name == "all_to_all":
                each = [x.shape[0] // over.size()] * over.size()
                out = _ops.all_to_all_single(x, each, each, group)
            else:
                out = _ops.reduce_scatter_tensor(x, "sum", over.size(), group)
            return _ops.wait_tensor(out)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        _, ctx.name, *ctx.rest = inputs

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        if not ctx.rest[-1]:
            raise ValueError(_NO_DUAL)
        return _Collective.apply(g, _DUAL[ctx.name], *ctx.rest), None, None, None, None

    @staticmethod
    def jvp(ctx: Any, dx: Tensor, *_: Any) -> Tensor:
        return _Collective.apply(dx, ctx.name, *ctx.rest)

    @staticmethod
    def vmap(info: Any, in_dims: Any, x: Tensor, name: str, *rest: Any) -> tuple[Tensor, int]:
        dim = in_dims[0]
        if name in ("all_gather", "reduce_scatter", "all_to_all"):  # which work along dim 0
            x, dim = x.movedim(dim, 1), 1
        return _Collective.apply(x, name, *rest), dim


class Traffic(TorchDispatchMode):
    """Collectives as (name, payload in bytes, ranks). A payload is the whole gathered or summed buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = list[tuple[str, int, int]]()

    def count(self, name: str) -> int:
        """Return the number of collectives called ``name``."""
        return sum(call[0] == name for call in self.calls)

    def payload(self, name: str | None = None) -> int:
        """Return the bytes of all payloads, or of those of ``name``."""
        return sum(size for call, size, _ in self.calls if name in (None, call))

    @property
    def sent(self) -> int:
        """Bytes that one rank sends if each collective is a ring."""
        twice = {"all_reduce": 2}
        return sum(twice.get(name, 1) * size * (ranks - 1) // ranks for name, size, ranks in self.calls)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if (name := graph.issued(func)) is not None:
            whole = out if name.startswith("all_gather") else args[0]
            self.calls.append((name, whole.numel() * whole.element_size(), resolve(args[-1]).size()))
        return out


def traffic() -> Traffic:
    """Count the collectives of this module that run inside ``with traffic() as seen:``, under any transform."""
    return Traffic()
