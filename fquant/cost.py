"""cost: what a step takes, read off its graph before anything runs.

    c = cost(step, adapters, state, base, tokens)       # tensors may be of the device meta: shapes suffice
    print(c.peak, c.flops, c.read + c.written, c.collectives)

The step is captured as ``jit`` captures it, on fake tensors, and its graph is walked once:

* *Memory*: arguments are there from the beginning to the end. What a node makes is there until the last node that uses
  it or a view of it. The peak is the most that is there at once; ``holding`` says what that is.
* *FLOPs*: of matrix products, convolutions and attention, by torch's own formulas (``torch.utils.flop_counter``), and
  of packed products by the same count; elementwise work is bytes, not FLOPs.
* *Bytes read and written*: of every node but views, as if nothing were in a cache and nothing fused.
* *Collectives*: by op and group, their number, their payload (the whole gathered or summed buffer), and what one rank
  sends when each goes around a ring.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node
from torch.fx.node import map_arg
from torch.utils.flop_counter import flop_registry

from . import capture, graph, order

__all__ = ["Collective", "Cost", "Held", "cost", "of"]

_RING = {"all_reduce": 2}  # a sum goes around twice, everything else once
_NAMES = {"all_gather_into_tensor": "all_gather", "reduce_scatter_tensor": "reduce_scatter"}


@dataclasses.dataclass(frozen=True)
class Held:
    """Some memory at the peak: what made it (an op, or the path of an argument), and its bytes."""

    by: str
    nbytes: int


@dataclasses.dataclass(frozen=True)
class Collective:
    """All collectives of one kind over one group."""

    name: str
    group: str
    ranks: int
    count: int
    payload: int  # bytes
    sent: int  # bytes, by one rank


@dataclasses.dataclass(frozen=True)
class Cost:
    """What a step takes. Bytes, and FLOPs (a multiply-add is two); ``nodes`` is how many ops a replay runs."""

    nodes: int
    arguments: int
    peak: int
    holding: tuple[Held, ...]  # at the peak, the largest first
    flops: int
    read: int
    written: int
    collectives: tuple[Collective, ...]


def cost(
    fn: Callable[..., Any], *args: Any, donate: tuple[str, ...] = (), recompute: bool = True, **kwargs: Any
) -> Cost:
    """The cost of ``fn(*args, **kwargs)``, captured with ``donate`` and ``recompute`` as :func:`fquant.jit` does.

    Tensors may be real, fake or of the device meta. Raises what capturing raises.
    """
    bound = capture.signature_of(fn).bind(*args, **kwargs).arguments
    return of(
        capture.trace(functools.partial(capture.apply, fn), bound, capture.written_over(bound, donate), recompute)
    )


def of(captured: capture.Captured) -> Cost:
    """The cost of what was captured."""
    g = captured.module.graph
    calls = [node for node in g.nodes if node.op == "call_function"]
    working = [node for node in calls if not _is_view(node)]
    arguments, peak, holding = _memory(g, captured.paths)
    return Cost(
        nodes=len(calls),
        arguments=arguments,
        peak=peak,
        holding=holding,
        flops=sum(map(_flops, calls)),
        read=sum(_nbytes(t) for node in working for near in node.all_input_nodes for t in graph.tensors(near)),
        written=sum(_nbytes(t) for node in working for t in graph.tensors(node)),
        collectives=_collectives(calls),
    )


def _memory(g: Graph, paths: tuple[str, ...]) -> tuple[int, int, tuple[Held, ...]]:
    """Bytes of the arguments, bytes at the peak, and what holds these."""
    peak = graph.peak(g)
    given = dict(zip((node for node in g.nodes if node.op == "placeholder"), paths, strict=True))
    sizes = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for node in g.nodes for t in graph.tensors(node)}
    arguments = sum(sizes[storage] for storage in {s for node in given for s in graph.storages(node)})
    holding = [Held(given.get(node, str(node.target)), sizes[storage]) for storage, node in peak.holding.items()]
    return arguments, peak.nbytes, tuple(sorted(holding, key=lambda held: -held.nbytes))


def _is_view(node: Node) -> bool:
    """Whether a node's results lie in memory that was there before."""
    before = {storage for near in node.all_input_nodes for storage in graph.storages(near)}
    writes = isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable
    return bool(before) and graph.storages(node) <= before and not writes


def _flops(node: Node) -> int:
    formula = flop_registry.get(getattr(node.target, "overloadpacket", None))
    if formula is None:
        return 0
    value = lambda x: x.meta["val"] if isinstance(x, Node) else x
    args, kwargs = map_arg((node.args, node.kwargs), value)
    return int(formula(*args, **kwargs, out_val=node.meta["val"]))


def _collectives(calls: list[Node]) -> tuple[Collective, ...]:
    found: dict[tuple[str, str], list[int]] = {}
    for node in calls:
        if not (name := order.op(node)):
            continue
        (out,) = graph.tensors(node)
        (given,) = (t for near in node.all_input_nodes for t in graph.tensors(near))
        group = str(node.args[-1])
        found.setdefault((_NAMES.get(name, name), group), []).append(max(_nbytes(out), _nbytes(given)))
    told = []
    for (name, group), sizes in found.items():
        ranks = _ranks(group)
        sent = sum(_RING.get(name, 1) * size * (ranks - 1) // ranks for size in sizes)
        told.append(Collective(name, group, ranks, len(sizes), sum(sizes), sent))
    return tuple(told)


def _ranks(group: Any) -> int:
    return torch.distributed.distributed_c10d._resolve_process_group(group).size()


def _nbytes(t: Tensor) -> int:
    return t.numel() * t.element_size()
