"""The cost of one training step on one rank of a mesh, found without weights and without the mesh.

    price(job, {"fsdp": 8})     # a Price: bytes by kind, FLOPs, bytes moved and sent

``training_step.train_step`` is traced whole on meta tensors over an abstract mesh, and its graph is read
(fquant.compile.cost).

*Layers* are alike, so every figure is extrapolated linearly from steps of four and of five layers. For memory, the peak
of each phase and op is extrapolated, and the highest is the peak of the step.

*Left out* are the libraries' own memory and the scratch memory of kernels. The trace is for the CPU, where attention is
one op. A node that reads a few rows of a table, an embedding say, counts as if it read the whole table.
"""

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.fx import Node

import shard
from fquant import lora, optim
from fquant.compile import graph, liveness, trace
from fquant.compile.cost import Collective
from fquant.compile.cost import of as cost_of
from fquant.compile.passes.donate import written_over
from fquant.format import Format
from models import decoder
from models.config import Config

from ..data import dataset as data
from .command_line import pattern, quantised
from .training_step import Checkpoint, Setup, initial, train_step

FEW = 4  # layers of the smaller of two steps: a first, a last, and two between, of which one is gathered by the other
KINDS = {"base": "base.", "adapters": "state.adapters.", "moments": "state.moments."}  # arguments, by their paths

Figures = dict[tuple[str, ...], int]


@dataclass(frozen=True)
class Job:
    """A rank's share of a step: ``accumulate`` micro-batches of ``batch`` rows of ``seq`` tokens.

    ``weights`` is the dtype of dense weights, ``stream`` that of the residual stream; without ``format`` all are dense.
    ``base`` is a tree of meta tensors in place of what ``weights`` and ``format`` say.
    """

    cfg: Config
    format: Format | None
    targets: tuple[str, ...]
    rank: int
    batch: int
    seq: int
    weights: torch.dtype = torch.bfloat16
    stream: torch.dtype = torch.bfloat16
    accumulate: int = 1
    checkpoint: Checkpoint = "full"
    base: Any = None


@dataclass(frozen=True)
class Price:
    """The cost of a step on one rank: bytes at the peak by kind, FLOPs, bytes moved and sent."""

    base: int
    adapters: int
    moments: int  # of the optimiser
    gathered: int  # blocks that were gathered from all ranks
    activations: int  # and all else: gradients, the batch
    phase: str  # in which the peak is
    flops: int
    read: int
    written: int
    collectives: tuple[Collective, ...]

    @property
    def peak(self) -> int:
        """Return the bytes of all tensors at the peak."""
        return self.base + self.adapters + self.moments + self.gathered + self.activations

    @property
    def sent(self) -> int:
        """Return the bytes that the rank sends."""
        return sum(c.sent for c in self.collectives)


def price(job: Job, axes: Mapping[str, int], done: Callable[[], Any] = lambda: None) -> Price:
    """Return the price of a step of ``job`` on the mesh of ``axes``; ``done`` is called after each of two traces."""
    layers = job.cfg.num_layers
    found = []
    for size in (FEW, FEW + 1) if layers > FEW + 1 else (layers,):
        found.append(figures(dataclasses.replace(job, cfg=dataclasses.replace(job.cfg, num_layers=size)), axes))
        done()
    few, more = found[0], found[-1]
    if few.keys() != more.keys():
        raise RuntimeError(f"layers are not alike: {min(few.keys() ^ more.keys())}; price the whole model")
    return total({name: few[name] + (layers - FEW) * (more[name] - few[name]) for name in few})


def figures(job: Job, axes: Mapping[str, int]) -> Figures:
    """Return every figure of a step as ``job`` has it, by name; none is derived from another."""
    with shard.abstract_mesh(**axes) as mesh:
        args = arguments(job, mesh)
        options = args["setup"].capture()
        donated = written_over(args, options.pop("donate"))
        captured = trace.trace(partial(trace.apply, train_step), args, donated, **options)
        found = cost_of(captured)
        out: Figures = {("flops",): found.flops, ("read",): found.read, ("written",): found.written}
        for c in found.collectives:
            out |= {(c.name, str(c.ranks), "count"): c.count, (c.name, str(c.ranks), "payload"): c.payload}
    return out | _memory(captured, 2 * job.cfg.num_layers * len(job.targets), job.cfg.num_layers)


def total(found: Figures) -> Price:
    """Return the figures ``found`` as a Price."""
    peak, *where = max((nbytes, *name[1:]) for name, nbytes in found.items() if name[0] == "peak")
    kinds = {kind: found[kind,] for kind in KINDS}
    gathered = found["gathered", *where]
    collectives = []
    for name, ranks, _ in (name for name in found if name[-1] == "count"):
        payload, n = found[name, ranks, "payload"], int(ranks)
        sent = (2 if name == "all_reduce" else 1) * payload * (n - 1) // n
        collectives.append(Collective(name, "", n, found[name, ranks, "count"], payload, sent))
    counts = {name: found[name,] for name in ("flops", "read", "written")}
    rest = peak - gathered - sum(kinds.values())
    return Price(**kinds, **counts, gathered=gathered, activations=rest, phase=where[0], collectives=tuple(collectives))


def arguments(job: Job, mesh: DeviceMesh) -> dict[str, Any]:
    """Return the arguments of ``train_step`` by name; their tensors are on the device meta."""
    schedule = optim.cosine(1e-2, 60, 6)  # no rate changes a cost
    opt = optim.chain(optim.clip_by_global_norm(1.0), optim.adamw(schedule, weight_decay=0.0))
    setup = Setup(job.cfg, mesh, opt, schedule, job.batch, job.seq, job.checkpoint, job.stream)
    with torch.device("meta"):
        shapes = decoder.shapes(job.cfg, job.weights)
        weights = quantised(shapes, job.format) if job.base is None else job.base
        adapters = lora.init(weights, pattern(job.targets), job.rank)
        tokens = [torch.empty(job.batch, job.seq, dtype=torch.int64) for _ in range(3)]
        return {
            "state": initial(adapters, opt),
            "base": shard.abstract_local(weights, decoder.dims(job.cfg), setup.rules, mesh),
            "micros": tuple((data.Rows(*tokens), None) for _ in range(job.accumulate)),
            "count": torch.empty((), dtype=torch.int64),
            "setup": setup,
        }


def _memory(captured: trace.Captured, leaves: int, num_layers: int) -> Figures:
    """Return the bytes of arguments by kind, and for every phase and op the peak and the gathered bytes in it."""
    out: Figures = {}
    nodes = list(captured.module.graph.nodes)
    paths = dict(zip(nodes, captured.paths, strict=False))  # of the placeholders, which come first
    phase, phases = "start", _phases(nodes, paths, leaves, num_layers)
    size = lambda alive, counts: sum(graph.sizes(by)[storage] for storage, by in alive.items() if counts(by))
    for node, now, alive in liveness.walk_memory(captured.module.graph):
        if node.op == "placeholder":
            for kind, prefix in KINDS.items():
                out[kind,] = size(alive, lambda by, prefix=prefix: paths.get(by, "").startswith(prefix))
            continue
        phase = phases.get(node, phase)
        where = (phase, str(node.target))
        if now > out.get(("peak", *where), 0):
            out["peak", *where] = now
            out["gathered", *where] = size(alive, lambda by: graph.collective(by) == "all_gather")
    return out


def _phases(nodes: list[Node], inputs: dict[Node, str], leaves: int, num_layers: int) -> dict[Node, str]:
    """Return the nodes that begin a phase: a layer begins when its bytes have arrived, in the forward and backward.

    The update begins with the reduction over ranks, which concatenates all gradients.
    """
    paths = dict(inputs)
    summed = next(n for n in nodes if n.target is torch.ops.aten.cat.default and len(n.all_input_nodes) > leaves)
    out = {min(summed.all_input_nodes, key=nodes.index): "update"}
    backward = {0: "backward of the first layer", num_layers - 1: "backward of the last layer"}
    forward = True
    for node in nodes:
        for path in (paths.get(near, "") for near in node.all_input_nodes if node.op == "call_function"):
            if graph.collective(node) == "all_gather":  # issued ahead perhaps: the layer begins when it is waited for
                paths[node] = path
            elif path == "base.embed.bytes":
                forward = True  # of the next micro-batch
            elif path == "base.final.bytes":
                out[node], forward = "head", False
            elif path.startswith("base.layers."):
                at = int(path.split(".")[2])
                out[node] = "forward" if forward else backward.get(at, "backward")
    return out
