"""Collectives as pure functions that every transform of torch.func understands.

Each has a dual, and the backward of one is the other (the transpose of a gather is a scattered sum):

    all_gather      u[n ...]  ->  u[ranks·n ...]      dual  reduce_scatter
    enter           identity                          dual  exit, the sum over ranks
    all_reduce      the sum over ranks                dual  itself

They are autograd Functions over torch's functional collectives, with setup_context, a vmap rule and a jvp, so grad,
vmap, jvp, their compositions and make_fx pass through. A backward calls the dual *Function*: a raw collective there
gives silent zeros. Groups are arguments; nothing here looks at global state. Over gloo gathers and scattered sums are
our own ops, those of shard/transport/gloo.py.

``traffic`` counts what is sent while it is open.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from fquant.compile import graph

from .transport import gloo

Group = dist.ProcessGroup
_ops = torch.ops._c10d_functional


def all_gather(x: Tensor, group: Group) -> Tensor:
    """``x`` [n ...] of every rank, one after the other along dim 0: [ranks·n ...]. The dual is reduce_scatter.

    Raises ValueError for a scalar.
    """
    if x.ndim == 0:
        raise ValueError("all_gather got a scalar; wanted at least one dim to gather along")
    return _AllGather.apply(x, group.group_name, group.size())


def reduce_scatter(x: Tensor, group: Group) -> Tensor:
    """The sum over ranks of ``x`` [ranks·n ...], of which each keeps its part [n ...]. The dual is all_gather.

    Raises ValueError for a scalar, and when dim 0 does not divide by the number of ranks.
    """
    if x.ndim == 0:
        raise ValueError("reduce_scatter got a scalar; wanted at least one dim to scatter along")
    if x.shape[0] % group.size():
        raise ValueError(f"reduce_scatter got {x.shape[0]} rows for {group.size()} ranks; pad to a multiple")
    return _ReduceScatter.apply(x, group.group_name, group.size())


def all_reduce(x: Tensor, group: Group) -> Tensor:
    """The sum of ``x`` over ranks, on every rank. Its own dual: the transpose of a sum to all is a sum from all."""
    return _AllReduce.apply(x, group.group_name)


def enter(x: Tensor, group: Group) -> Tensor:
    """``x``, the same on every rank, into a computation that each rank does in part. The dual is exit."""
    return _Enter.apply(x, group.group_name)


def exit(x: Tensor, group: Group) -> Tensor:
    """The sum over ranks of each one's part ``x``, the same on every rank from here on. The dual is enter."""
    return _Exit.apply(x, group.group_name)


class _AllGather(torch.autograd.Function):
    @staticmethod
    def forward(x: Tensor, group: str, ranks: int) -> Tensor:
        issue = gloo.all_gather if gloo.is_used(x, _named(group)) else _ops.all_gather_into_tensor
        return _ops.wait_tensor(issue(x.contiguous(), ranks, group))

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        _, *ctx.where = inputs

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        return _ReduceScatter.apply(g, *ctx.where), None, None

    @staticmethod
    def jvp(ctx: Any, dx: Tensor, *_: Any) -> Tensor:
        return _AllGather.apply(dx, *ctx.where)

    @staticmethod
    def vmap(info: Any, in_dims: Any, x: Tensor, *where: Any) -> tuple[Tensor, int]:
        return _AllGather.apply(x.movedim(in_dims[0], 1), *where), 1


class _ReduceScatter(torch.autograd.Function):
    @staticmethod
    def forward(x: Tensor, group: str, ranks: int) -> Tensor:
        if gloo.is_used(x, _named(group)):
            return _ops.wait_tensor(gloo.reduce_scatter(x.contiguous(), ranks, group))
        return _ops.wait_tensor(_ops.reduce_scatter_tensor(x.contiguous(), "sum", ranks, group))

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        _, *ctx.where = inputs

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        return _AllGather.apply(g, *ctx.where), None, None

    @staticmethod
    def jvp(ctx: Any, dx: Tensor, *_: Any) -> Tensor:
        return _ReduceScatter.apply(dx, *ctx.where)

    @staticmethod
    def vmap(info: Any, in_dims: Any, x: Tensor, *where: Any) -> tuple[Tensor, int]:
        return _ReduceScatter.apply(x.movedim(in_dims[0], 1), *where), 1


class _Sum(torch.autograd.Function):
    """What the three sums share; ``forward`` and the dual are theirs."""

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.group = inputs[1]

    @staticmethod
    def _sum(x: Tensor, group: str) -> Tensor:
        return _ops.wait_tensor(_ops.all_reduce(x.contiguous(), "sum", group))


class _AllReduce(_Sum):
    @staticmethod
    def forward(x: Tensor, group: str) -> Tensor:
        return _Sum._sum(x, group)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        return _AllReduce.apply(g, ctx.group), None

    @staticmethod
    def jvp(ctx: Any, dx: Tensor, _: Any) -> Tensor:
        return _AllReduce.apply(dx, ctx.group)

    @staticmethod
    def vmap(info: Any, in_dims: Any, x: Tensor, group: str) -> tuple[Tensor, int]:
        return _AllReduce.apply(x, group), in_dims[0]


class _Enter(_Sum):
    @staticmethod
    def forward(x: Tensor, group: str) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        return _Exit.apply(g, ctx.group), None

    @staticmethod
    def jvp(ctx: Any, dx: Tensor, _: Any) -> Tensor:
        return _Enter.apply(dx, ctx.group)

    @staticmethod
    def vmap(info: Any, in_dims: Any, x: Tensor, group: str) -> tuple[Tensor, int]:
        return _Enter.apply(x, group), in_dims[0]


class _Exit(_Sum):
    @staticmethod
    def forward(x: Tensor, group: str) -> Tensor:
        return _Sum._sum(x, group)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        return _Enter.apply(g, ctx.group), None

    @staticmethod
    def jvp(ctx: Any, dx: Tensor, _: Any) -> Tensor:
        return _Exit.apply(dx, ctx.group)

    @staticmethod
    def vmap(info: Any, in_dims: Any, x: Tensor, group: str) -> tuple[Tensor, int]:
        return _Exit.apply(x, group), in_dims[0]


def _named(group: str) -> Group:
    return dist.distributed_c10d._resolve_process_group(group)  # type: ignore[arg-type]


@dataclass
class Traffic:
    """Collectives seen, as (name, payload in bytes, ranks): the payload is the whole gathered or summed buffer."""

    calls: list[tuple[str, int, int]] = field(default_factory=list)

    def count(self, name: str) -> int:
        """How many collectives called ``name`` there were."""
        return sum(call[0] == name for call in self.calls)

    def payload(self, name: str | None = None) -> int:
        """Bytes of all payloads, or of those of ``name``."""
        return sum(size for call, size, _ in self.calls if name in (None, call))

    @property
    def sent(self) -> int:
        """Bytes that one rank sends when each collective is done around a ring."""
        twice = {"all_reduce": 2}
        return sum(twice.get(name, 1) * size * (ranks - 1) // ranks for name, size, ranks in self.calls)


class _Counter(TorchDispatchMode):
    def __init__(self, traffic: Traffic) -> None:
        super().__init__()
        self.traffic = traffic

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = graph.issued(func)
        if name is not None:
            whole = out if name.startswith("all_gather") else args[0]
            self.traffic.calls.append((name, whole.numel() * whole.element_size(), _named(args[-1]).size()))
        return out


@contextmanager
def traffic() -> Iterator[Traffic]:
    """Count the collectives of this module that run inside, under any transform."""
    seen = Traffic()
    with _Counter(seen):
        yield seen
