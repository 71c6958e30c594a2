"""cost: what a step takes, read off its graph before anything runs.

    c = cost(step, adapters, state, base, tokens)       # tensors may be of the device meta: shapes suffice
    print(c.peak, c.flops, c.read + c.written, c.collectives)

The step is captured as ``jit`` captures it, on fake tensors, and its graph is walked once:

* *Memory*: arguments are there from the beginning to the end. What a node makes is there until the last node that uses
  it or a view of it. The peak is the most that is there at once; ``holding`` says what that is.
* *FLOPs*: of matrix products, convolutions and attention, by torch's own formulas (``torch.utils.flop_counter``), and
  of packed products and attention on CPUs by ours (fquant.compile.cost); elementwise work is bytes, not FLOPs.
* *Bytes read and written*: of every node but views, as if nothing were in a cache and nothing fused.
* *Collectives*: by op and group, their number, their payload (the whole gathered or summed buffer), and what one rank
  sends when each goes around a ring.

FLOPs of a node of a captured graph, by torch's own formulas, and by formulas for what torch does not count.

A multiply-add is two. Elementwise work is bytes, not FLOPs. torch counts the fused attention of GPUs and not the one of
CPUs; it is counted as it is computed, of causal attention half. Ops of ours register themselves (fquant.kernels).
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx import Node
from torch.fx.node import map_arg
from torch.utils.flop_counter import flop_registry, register_flop_formula

from . import graph, jit, liveness, trace

__all__ = ["Collective", "Cost", "Held", "cost", "of"]

_RING = {"all_reduce": 2}  # a sum goes around twice, everything else once


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
    fn: Callable[..., Any],
    *args: Any,
    donate: tuple[str, ...] = (),
    passes: Sequence[graph.Pass] = (),
    recompute: bool = True,
    fuse: bool = True,
    **kwargs: Any,
) -> Cost:
    """The cost of ``fn(*args, **kwargs)``, captured as :func:`fquant.jit` captures it with these options.

    Tensors may be real, fake or of the device meta. Raises what capturing raises.
    """
    bound = trace.signature_of(fn).bind(*args, **kwargs).arguments
    over = jit.written_over(bound, donate)
    return of(trace.trace(functools.partial(trace.apply, fn), bound, over, passes, recompute, fuse))


def of(captured: trace.Captured) -> Cost:
    """The cost of what was captured."""
    g = captured.module.graph
    calls = [node for node in g.nodes if node.op == "call_function"]
    working = [node for node in calls if not graph.is_view(node)]
    peak, given = liveness.peak(g), [node for node in g.nodes if node.op == "placeholder"]
    paths, arguments = dict(zip(given, captured.paths, strict=True)), dict[int, int]()
    for node in given:
        arguments |= graph.sizes(node)
    holding = [Held(paths.get(by, str(by.target)), graph.sizes(by)[storage]) for storage, by in peak.holding.items()]
    return Cost(
        nodes=len(calls),
        arguments=sum(arguments.values()),
        peak=peak.nbytes,
        holding=tuple(sorted(holding, key=lambda held: -held.nbytes)),
        flops=sum(map(flops, calls)),
        read=sum(graph.nbytes(t) for node in working for near in node.all_input_nodes for t in graph.tensors(near)),
        written=sum(graph.nbytes(t) for node in working for t in graph.tensors(node)),
        collectives=_collectives(calls),
    )


def _collectives(calls: list[Node]) -> tuple[Collective, ...]:
    found: dict[tuple[str, str], list[int]] = {}
    for node in calls:
        name = graph.collective(node)
        if name is None:
            continue
        (out,) = graph.tensors(node)
        (given,) = (t for near in node.all_input_nodes for t in graph.tensors(near))
        group = str(node.args[-1])
        found.setdefault((name, group), []).append(max(graph.nbytes(out), graph.nbytes(given)))
    told = []
    for (name, group), sizes in found.items():
        ranks = _ranks(group)
        sent = sum(_RING.get(name, 1) * size * (ranks - 1) // ranks for size in sizes)
        told.append(Collective(name, group, ranks, len(sizes), sum(sizes), sent))
    return tuple(told)


def _ranks(group: Any) -> int:
    return torch.distributed.distributed_c10d._resolve_process_group(group).size()


def flops(node: Node) -> int:
    """FLOPs of a node; of what has no formula, elementwise work say, 0."""
    formula = flop_registry.get(getattr(node.target, "overloadpacket", None))
    if formula is None:
        return 0
    value = lambda x: x.meta["val"] if isinstance(x, Node) else x
    args, kwargs = map_arg((node.args, node.kwargs), value)
    return int(formula(*args, **kwargs, out_val=node.meta["val"]))


def _attention(q: Any, k: Any, v: Any, dropout: float = 0.0, causal: bool = False, *_: Any, **__: Any) -> int:
    """Two products of q ``[b h t e]`` and k, v ``[b k s e]``."""
    return 2 * _product(q, k, causal)


def _attention_backward(g: Any, q: Any, k: Any, v: Any, y: Any, lse: Any, p: float, causal: bool, **_: Any) -> int:
    """Five: the scores again, the gradients of weights and values, and of these scores to q and to k."""
    return 5 * _product(q, k, causal)


def _product(q: Any, k: Any, causal: bool) -> int:
    b, h, t, e = q
    return 2 * b * h * e * (t * (t + 1) // 2 if causal else t * k[2])


_FORMULAS: dict[Any, Callable[..., int]] = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _attention,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward,
}
for _op, _formula in _FORMULAS.items():
    if _op not in flop_registry:  # a torch that counts them counts them
        register_flop_formula(_op)(_formula)
