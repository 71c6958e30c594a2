"""What a step of examples/qlora/cli.py takes on one rank of a mesh, found without weights and without the mesh.

    price(job, {"fsdp": 8})     # a Price: bytes by what they are for, FLOPs, bytes moved and sent

The step is the whole of it: gradients of adapters beside a packed base, recomputed block by block, their sum over
ranks, clipping, AdamW, the update written over the old values. It is captured (fquant.compile.jit) on tensors that have
shapes only, over an imagined mesh, and its graph is read (fquant.cost).

*Layers.* The layers of a model are alike, so a step of four and one of five say what each further layer adds: every
figure is their difference, as often as there are layers more. That holds for counts at once. Memory rises and falls
within a step, and where its peak lies depends on the number of layers; but within one phase, the forward pass, the
head, the backward of the last, a middle or the first layer, the update, and for one op in it, the most that is there
grows by the same bytes with every layer. So the peaks of all phases are extrapolated, and the highest is the step's.

*What is not in it*: what a library takes for itself, and the room that a kernel works in. It is traced as for the CPU,
where attention is one op; of nodes that read a few rows of a table (embeddings) the whole table counts as read.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.func import grad_and_value
from torch.fx import Node

import shard
from fquant import lora, optim, quantize, tree
from fquant.compile import graph, liveness, trace
from fquant.compile.cost import Collective
from fquant.compile.cost import of as cost_of
from fquant.compile.passes.donate import written_over
from fquant.format import Format
from models import decoder
from models.config import Config

from ..common import data
from ..qlora import train

FEW = 4  # layers of the smaller of two steps: a first, a last, and two between, of which one is gathered by the other
DONATED = ("adapters", "moments")
PASSES = (shard.passes.prefetch_gathers(),)  # as examples/qlora/train.py has, where blocks keep their inputs

Figures = dict[tuple[str, ...], int]


@dataclass(frozen=True)
class Job:
    """What is trained, and a rank's share of a step: ``batch`` rows of ``seq`` tokens.

    ``weights`` is the dtype of what is not packed, ``stream`` that of the residual stream.
    """

    cfg: Config
    format: Format
    targets: tuple[str, ...]
    rank: int
    batch: int
    seq: int
    weights: torch.dtype = torch.bfloat16
    stream: torch.dtype = torch.bfloat16


@dataclass(frozen=True)
class Price:
    """What a step takes on one rank: bytes at the peak, by what they are for; FLOPs; bytes moved and sent."""

    base: int
    adapters: int
    moments: int  # of the optimiser
    gathered: int  # blocks that were gathered from all ranks
    activations: int  # and all else: gradients, the batch
    phase: str  # where the peak is
    flops: int
    read: int
    written: int
    collectives: tuple[Collective, ...]

    @property
    def peak(self) -> int:
        """Bytes of all tensors at the peak."""
        return self.base + self.adapters + self.moments + self.gathered + self.activations

    @property
    def sent(self) -> int:
        """Bytes that the rank sends."""
        return sum(c.sent for c in self.collectives)


def price(job: Job, axes: Mapping[str, int], done: Callable[[], Any] = lambda: None) -> Price:
    """The price of a step of ``job`` on the mesh of ``axes``; ``done`` is called after each of two traces."""
    layers = job.cfg.num_layers
    sizes = (FEW, FEW + 1) if layers > FEW + 1 else (layers, layers)
    found = []
    for size in sizes[: 1 + (sizes[0] != sizes[1])]:
        found.append(figures(dataclasses.replace(job, cfg=dataclasses.replace(job.cfg, num_layers=size)), axes))
        done()
    return total(extrapolated(found[0], found[-1], layers - FEW))


def extrapolated(few: Figures, more: Figures, layers: int) -> Figures:
    """``few`` with ``layers`` layers more, ``more`` having one more."""
    if few.keys() != more.keys():
        raise RuntimeError(f"layers differ in what they do: {min(few.keys() ^ more.keys())}; price the whole model")
    return {name: few[name] + layers * (more[name] - few[name]) for name in few}


def figures(job: Job, axes: Mapping[str, int]) -> Figures:
    """Everything that is known of a step as it is written in ``job``, by name; no figure is derived from another."""
    with shard.abstract_mesh(**axes) as mesh:
        given = arguments(job, mesh)
        over = written_over(given, DONATED)
        captured = trace.trace(partial(trace.apply, step(job, mesh)), given, over, PASSES, recompute=False)
        told = cost_of(captured)
        out: Figures = {("flops",): told.flops, ("read",): told.read, ("written",): told.written}
        for c in told.collectives:
            out |= {(c.name, str(c.ranks), "count"): c.count, (c.name, str(c.ranks), "payload"): c.payload}
    return out | _memory(captured, 2 * job.cfg.num_layers * len(job.targets), job.cfg.num_layers)


def total(found: Figures) -> Price:
    """The price that ``found`` amount to."""
    peak, *where = max((nbytes, *name[1:]) for name, nbytes in found.items() if name[0] == "peak")
    kinds = {kind: found[kind,] for kind in ("base", *DONATED)}
    gathered = found["gathered", *where]
    collectives = []
    for name, ranks, _ in (name for name in found if name[-1] == "count"):
        payload, n = found[name, ranks, "payload"], int(ranks)
        sent = (2 if name == "all_reduce" else 1) * payload * (n - 1) // n
        collectives.append(Collective(name, "", n, found[name, ranks, "count"], payload, sent))
    return Price(
        **kinds,
        gathered=gathered,
        activations=peak - gathered - sum(kinds.values()),
        phase=where[0],
        flops=found["flops",],
        read=found["read",],
        written=found["written",],
        collectives=tuple(collectives),
    )


def arguments(job: Job, mesh: DeviceMesh) -> dict[str, Any]:
    """What a step takes, in meta tensors, by the names of its parameters."""
    pattern = r"layers\.\d+\.({})".format
    with torch.device("meta"):
        dense = decoder.shapes(job.cfg, job.weights)
        packed = tree.map_at(pattern("|".join(train.TARGETS)), partial(quantize, format=job.format), dense)
        adapters = lora.init(packed, pattern("|".join(job.targets)), job.rank)
        tokens = [torch.empty(job.batch, job.seq, dtype=torch.int64) for _ in range(3)]
        return {
            "adapters": adapters,
            "moments": optimizer().init(adapters),
            "base": shard.abstract_local(packed, decoder.dims(job.cfg), shard.Rules(), mesh),
            "batch": data.Rows(*tokens),
            "count": torch.empty((), dtype=torch.int64),
        }


def optimizer() -> optim.Optimizer:
    """The optimiser of examples/qlora/train.py, at some learning rate."""
    return optim.chain(optim.clip_by_global_norm(1.0), optim.adamw(optim.cosine(1e-2, 60, 6), weight_decay=0.0))


def step(job: Job, mesh: DeviceMesh) -> Callable[..., tuple[Any, Any, Tensor]]:
    """A whole step as a pure function: see :func:`arguments` for what it takes; new adapters, moments, the loss."""
    rules, opt = shard.Rules(), optimizer()
    comm = shard.comm(mesh, rules, tokens=job.batch * job.seq)

    def step(adapters: Any, moments: Any, base: Any, batch: Any, count: Tensor) -> tuple[Any, Any, Tensor]:
        gradient = grad_and_value(train.loss)(adapters, base, batch, count, None, job.cfg, comm, job.stream)
        grads, value = shard.reduce(gradient, mesh, rules)
        updates, moments = opt.update(grads, moments, adapters)
        return optim.apply_updates(adapters, updates), moments, value

    return step


def _memory(captured: trace.Captured, leaves: int, num_layers: int) -> Figures:
    """Bytes of the arguments by kind; for every phase and op the most that is there, and what of it was gathered."""
    out: Figures = {}
    phase, phases = "start", _phases(captured, leaves, num_layers)
    paths = dict(zip(_given(captured), captured.paths, strict=True))
    size = lambda alive, told: sum(graph.sizes(by)[storage] for storage, by in alive.items() if told(by))
    for node, now, alive in liveness.walk_memory(captured.module.graph):
        if node.op == "placeholder":
            for kind in ("base", *DONATED):
                out[kind,] = size(alive, lambda by, kind=kind: paths.get(by, "").startswith(f"{kind}."))
            continue
        phase = phases.get(node, phase)
        where = (phase, str(node.target))
        if now > out.get(("peak", *where), 0):
            out["peak", *where] = now
            out["gathered", *where] = size(alive, lambda by: graph.collective(by) == "all_gather")
    return out


def _given(captured: trace.Captured) -> list[Node]:
    return [node for node in captured.module.graph.nodes if node.op == "placeholder"]


def _phases(captured: trace.Captured, leaves: int, num_layers: int) -> dict[Node, str]:
    """The nodes with which a phase begins: a layer begins when its bytes are there, and again with its backward.

    The update begins with the sum over ranks, of all gradients side by side.
    """
    nodes = list(captured.module.graph.nodes)
    paths = dict(zip(_given(captured), captured.paths, strict=True))
    summed = next(n for n in nodes if n.target is torch.ops.aten.cat.default and len(n.all_input_nodes) > leaves)
    out = {min(summed.all_input_nodes, key=nodes.index): "update"}
    backward = {0: "backward of the first layer", num_layers - 1: "backward of the last layer"}
    forward = True
    for node in nodes:
        for path in (paths.get(near, "") for near in node.all_input_nodes if node.op == "call_function"):
            if graph.collective(node) == "all_gather":  # issued ahead perhaps: the layer begins when it is waited for
                paths[node] = path
            elif path == "base.final.bytes":
                out[node], forward = "head", False
            elif path.startswith("base.layers."):
                at = int(path.split(".")[2])
                out[node] = "forward" if forward else backward.get(at, "backward")
    return out
