"""The cost of a step, read off its graph before anything runs: peak memory, FLOPs, bytes, collectives.

    c = cost(step, adapters, state, base, tokens)       # tensors may be of the device meta: shapes suffice
    print(c.peak, c.flops, c.read + c.written, c.collectives)

The step is captured as ``jit`` captures it. One walk over its graph gives

* *Memory*, by liveness (liveness.py): the most that is held at once; ``holding`` lists it. On the host some ops take
  ``scratch`` bytes more while they run, or results need them. A process grows by ``peak - arguments + scratch``.
* *FLOPs* of matrix products, convolutions and attention, by torch's formulas (``torch.utils.flop_counter``); a
  multiply-add is two, and elementwise work none. fquant.kernels registers those of packed products. Those of torch's
  fused attention on CPUs are below; causal attention counts half.
* *Bytes read and written* by every node but views, as if there were no cache and no fusion.
* *Collectives* by op and group: their number, their payload (the whole gathered or summed buffer), and the bytes that
  one rank sends when each goes around a ring.
* *Transfers* between the device and the host, in bytes, and the host's memory that they need at once.
"""

import dataclasses
import functools
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch.fx import Graph, Node
from torch.fx.node import map_arg
from torch.utils.flop_counter import flop_registry, register_flop_formula

from ..device import HOST
from . import collective_check, graph, liveness, trace
from .memory.scratch import scratch
from .passes.donate import written_over

__all__ = ["Collective", "Cost", "Held", "cost", "of"]

_RING = {"all_reduce": 2}  # times that it goes around; any other collective once


@dataclasses.dataclass(frozen=True)
class Held:
    """A buffer at the peak: the op that made it, or the path of an argument, and its bytes."""

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
    """The bytes and FLOPs of a step; ``nodes`` is the number of ops in a replay."""

    nodes: int
    arguments: int
    peak: int
    holding: tuple[Held, ...]  # at the peak, the largest first
    flops: int
    read: int
    written: int
    collectives: tuple[Collective, ...]
    fetched: int = 0  # bytes from the host to the device
    stashed: int = 0  # and back
    host: int = 0  # bytes of the host: arguments that are fetched, and what is stashed
    scratch: int = 0  # bytes on the host that an op of torch takes for itself (memory/scratch.py), and results need


def cost(
    fn: Callable[..., Any],
    *args: Any,
    donate: tuple[str, ...] = (),
    passes: Sequence[graph.Pass] = (),
    recompute: bool = True,
    fuse: bool = True,
    device: torch.device | str = HOST,
    host: Collection[int] = (),
    **kwargs: Any,
) -> Cost:
    """Return the cost of ``fn(*args, **kwargs)``, captured as :func:`fquant.jit` captures it with these options.

    Tensors may be real, fake or of the device meta. The cost is that on ``device``, wherever they are, and whether the
    machine has such a device or not. Tensors whose ids are in ``host`` stay on the host. Raises the errors of a
    capture.
    """
    bound = trace.signature_of(fn).bind(*args, **kwargs).arguments
    call = functools.partial(trace.apply, fn)
    donated, on = written_over(bound, donate), torch.device(device)
    return of(trace.trace(call, bound, donated, passes, recompute, fuse, device=on, host=host))


def of(captured: trace.Captured) -> Cost:
    """Return the cost of a replay."""
    g = captured.module.graph
    calls = [node for node in g.nodes if node.op == "call_function"]
    working = [node for node in calls if not graph.is_view(node)]
    peak, placeholders = liveness.peak(g), [node for node in g.nodes if node.op == "placeholder"]
    paths = dict(zip(placeholders, captured.paths, strict=True))
    near = graph.storages_on_device(g)
    arguments = {s: nbytes for node in placeholders for s, nbytes in graph.sizes(node).items() if s in near}
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
        fetched=_transferred(calls, "fetch"),
        stashed=_transferred(calls, "stash"),
        host=liveness.peak_on_host(g),
        scratch=max(map(scratch, calls), default=0) + _apart(g, peak.nbytes) if captured.device == HOST else 0,
    )


def _apart(g: Graph, peak: int) -> int:
    """Return the bytes over the peak that results need because no other tensor can have their memory before them.

    The plan ends with the replay, and the caller keeps results. So they have memory of their own (memory/plan.py).
    """
    placeholders, sizes = g.find_nodes(op="placeholder"), dict[int, int]()
    for node in graph.outputs(g):
        sizes |= graph.sizes(node)
    given = graph.all_storages(placeholders)
    own = {storage for node in g.nodes for storage in graph.sizes(node)} - given - sizes.keys()
    held = sum(n for node in placeholders for n in graph.sizes(node).values())
    returned = sum(n for storage, n in sizes.items() if storage not in given)
    return max(0, liveness.peak(g, own).nbytes + returned + held - peak)


def _transferred(calls: list[Node], kind: str) -> int:
    return sum(graph.nbytes(t) for node in calls if graph.transfer(node) == kind for t in graph.tensors(node))


def _collectives(calls: list[Node]) -> tuple[Collective, ...]:
    found: dict[tuple[str, str, int], list[int]] = {}
    for node in calls:
        if (name := graph.collective(node)) is None:
            continue
        payload = max(graph.nbytes(t) for near in (node, *node.all_input_nodes) for t in graph.tensors(near))
        found.setdefault((name, str(node.args[-1]), collective_check.ranks(node)), []).append(payload)
    return tuple(
        Collective(
            name, group, ranks, len(sizes), sum(sizes),
            sum(ring(name, size, ranks) for size in sizes),
        )
        for (name, group, ranks), sizes in found.items()
    )  # fmt: skip


def ring(name: str, payload: int, ranks: int) -> int:
    """Return the bytes that one of ``ranks`` sends when the collective ``name`` goes around a ring."""
    return _RING.get(name, 1) * payload * (ranks - 1) // ranks


def flops(node: Node) -> int:
    """Return the FLOPs of a node; 0 if its op has no formula, as elementwise ops."""
    if (formula := flop_registry.get(getattr(node.target, "overloadpacket", None))) is None:
        return 0
    args, kwargs = map_arg((node.args, node.kwargs), lambda x: x.meta["val"])
    return int(formula(*args, **kwargs, out_val=node.meta["val"]))


def _product(q: Any, k: Any, causal: bool) -> int:
    """Return the FLOPs of the product of q ``[b h t e]`` with k or v ``[b k s e]``."""
    b, h, t, e = q
    return 2 * b * h * e * (t * (t + 1) // 2 if causal else t * k[2])


_FORMULAS: dict[Any, Callable[..., int]] = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: (
        lambda q, k, v, dropout=0.0, causal=False, *_, **__: 2 * _product(q, k, causal)
    ),
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: (  # of weights, values, q, k; and scores again
        lambda g, q, k, v, y, lse, p, causal, **_: 5 * _product(q, k, causal)
    ),
}
for _op in _FORMULAS.keys() - flop_registry.keys():  # a later torch may count them
    register_flop_formula(_op)(_FORMULAS[_op])  # type: ignore[arg-type]
