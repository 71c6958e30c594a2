"""The cost of one training step on one rank of a mesh, found without weights and without the mesh.

    price(job, {"fsdp": 8}, device=DEVICES["h100"])    # a Price: bytes by kind, FLOPs, bytes moved and sent, seconds

``training_step.train_step`` is traced whole on meta tensors over an abstract mesh, as the device runs it. Bytes are
read off its graph (fquant.compile.cost), and so are seconds (fquant.compile.roofline).

*Layers* are alike, so every figure is extrapolated linearly from steps of four and of five layers. For memory, the peak
of each phase and op is extrapolated, and the highest is the peak of the step. Seconds are extrapolated by kind. With
offloaded blocks these are steps of six and seven, because a fetch begins up to two layers ahead. With ordered sums they
are too, because adds fuse over two layers. The whole step is traced where layers differ: where activations are chosen
to be stashed, or the ranks do not divide an ordered sum of a layer, whose parts are then filled up.

*Counted* as memory are all tensors of the graph, and on a GPU the slab that a packed weight is decoded to. *Left out*
are what libraries take for themselves, the device's context, and gaps between tensors in a memory plan. What is
offloaded counts as the host's.
"""

import dataclasses
import math
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.fx import Node

import shard
from fquant import lora, optim
from fquant.compile import graph, liveness, roofline, trace
from fquant.compile.cost import Collective, ring
from fquant.compile.cost import of as cost_of
from fquant.compile.passes.donate import written_over
from fquant.compile.roofline import DEVICES, Device, Prediction
from fquant.device import HOST
from fquant.format import Format
from models import decoder
from models.config import Config

from ..data import dataset as data
from .command_line import pattern, quantised
from .training_step import Checkpoint, Offload, Setup, initial, rules, train_step

FEW = 4  # layers of the smaller of two steps: a first, a last, and two between, of which one is gathered by the other
KINDS = {"base": "base.", "adapters": "state.trained.", "moments": "state.moments."}  # arguments, by their paths

BLOCK = re.compile(r"(?:base|state\.trained)\.(embed|final|layers\.(\d+))\.(?:bytes|values)")
UPDATE, OPTIMISER = "update", "optimiser"
FAR = ("host", "fetched", "stashed")  # figures of the host

Figures = dict[tuple[str, ...], Any]


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
    offload: Offload | None = None
    offload_activations: bool = False
    train: shard.Precision | None = None  # of full training, which has no adapters
    moments: optim.Moments | None = None  # None: float32
    ordered: bool = False  # gradients are added in one order


@dataclass(frozen=True)
class Price:
    """The cost of a step on one rank: bytes at the peak by kind, FLOPs, bytes moved and sent."""

    base: int
    adapters: int  # or the parameters of full training
    moments: int  # of the optimiser
    gathered: int  # blocks that were gathered from all ranks
    activations: int  # and all else: gradients, the batch
    phase: str  # in which the peak is
    flops: int
    read: int
    written: int
    collectives: tuple[Collective, ...]
    predicted: Prediction | None = None  # seconds, on a device
    host: int = 0  # bytes of the host's memory: of blocks, and of activations at their peak
    fetched: int = 0  # bytes from there
    stashed: int = 0  # and back

    @property
    def peak(self) -> int:
        """Return the bytes of all tensors at the peak."""
        return self.base + self.adapters + self.moments + self.gathered + self.activations

    @property
    def sent(self) -> int:
        """Return the bytes that the rank sends."""
        return sum(c.sent for c in self.collectives)


def price(
    job: Job, axes: Mapping[str, int], done: Callable[[], Any] = lambda: None, device: Device | None = None
) -> Price:
    """Return the price of a step of ``job`` on the mesh of ``axes``; ``done`` is called after each trace.

    Seconds are those of a rank on ``device``. Without one, the step is that of the host, and no time is predicted.
    """
    layers, few = job.cfg.num_layers, FEW + 2 * (job.offload is not None or job.ordered)
    is_whole = job.offload_activations or layers <= few + 1 or len(set(map(repr, _weights(job).layers[few - 1 :]))) > 1
    found = []
    for count in (layers,) if is_whole else (few, few + 1):
        found.append(figures(_first_layers(job, count), axes, device))
        done()
    less, more = found[0], found[-1]
    ranks = math.prod(axes.get(name, 1) for name in rules(job.offload).batch)
    is_filled_up = job.ordered and (more["adapters",] - less["adapters",]) // 4 % ranks  # numbers of a layer
    if is_filled_up or less.keys() != more.keys():
        return total(figures(job, axes, device))
    return total({name: less[name] + (layers - few) * (more[name] - less[name]) for name in less})


def _weights(job: Job) -> Any:
    """Return the base of a job, as a tree of meta tensors."""
    return quantised(decoder.shapes(job.cfg, job.weights), job.format) if job.base is None else job.base


def _first_layers(job: Job, count: int) -> Job:
    """Return the job of the first ``count`` layers."""
    base = None if job.base is None else dataclasses.replace(job.base, layers=job.base.layers[:count])
    return dataclasses.replace(job, cfg=dataclasses.replace(job.cfg, num_layers=count), base=base)


def figures(job: Job, axes: Mapping[str, int], device: Device | None = None) -> Figures:
    """Return every figure of a step as ``job`` has it, by name; none is derived from another. Times are in seconds."""
    with captured_step(job, axes, device) as captured:
        leaves = 2 * job.cfg.num_layers * len(job.targets) if job.train is None else None
        phases = _phases(captured, leaves, job.cfg.num_layers)
        found = cost_of(captured)
        out: Figures = {(name,): getattr(found, name) for name in ("flops", *FAR)}
        for c in found.collectives:
            out |= {(c.name, str(c.ranks), "count"): c.count, (c.name, str(c.ranks), "payload"): c.payload}
        return out | _traffic(captured) | _memory(captured, phases, device) | _seconds(captured, phases, device)


@contextmanager
def captured_step(
    job: Job, axes: Mapping[str, int], device: Device | None = None, lines: bool = False
) -> Iterator[trace.Captured]:
    """Open a mesh that stands for ``axes``, and give the step of ``job`` on it, captured from shapes alone.

    With ``lines``, nodes have the places in the source that made them.
    """
    on = torch.device(device.type) if device else HOST
    with shard.abstract_mesh(on, **axes) as mesh:
        args = arguments(job, mesh, device)
        options = args["setup"].capture()
        donated = written_over(args, options.pop("donate"))
        call, far = partial(trace.apply, train_step), shard.on_host(args["base"])
        yield trace.trace(call, args, donated, **options, device=on, host=far, lines=lines)


def total(found: Figures) -> Price:
    """Return the figures ``found`` as a Price."""
    peak, *where = max((nbytes, *name[1:]) for name, nbytes in found.items() if name[0] == "peak")
    kinds = {kind: found[kind,] for kind in KINDS}
    gathered = found["gathered", *where]
    collectives = []
    for name, ranks, _ in (name for name in found if name[-1] == "count"):
        payload, n = found[name, ranks, "payload"], int(ranks)
        collectives.append(Collective(name, "", n, found[name, ranks, "count"], payload, ring(name, payload, n)))
    counts = {name: found[name,] for name in ("flops", "read", "written", *FAR)}
    kinds |= {"gathered": gathered, "activations": peak - gathered - sum(kinds.values())}
    seconds = {name[1]: each for name, each in found.items() if name[0] == "seconds"}
    predicted = Prediction(seconds, *(found[name,] for name in ("serial", "limit", "copying"))) if seconds else None
    return Price(**kinds, **counts, phase=where[0], collectives=tuple(collectives), predicted=predicted)


def arguments(job: Job, mesh: DeviceMesh, device: Device | None = None) -> dict[str, Any]:
    """Return the arguments of ``train_step`` by name; their tensors are on the device meta."""
    stash = (device or DEVICES["h100"]) if job.offload_activations else None
    schedule, sharding = optim.cosine(1e-2, 60, 6), rules(job.offload)  # no rate changes a cost
    clip = optim.clip_by_global_norm(1.0, partial(shard.global_norm, mesh=mesh, rules=sharding))
    opt = optim.chain(clip, optim.adamw(schedule, weight_decay=0.0, moments=job.moments))
    sizes = job.batch, job.seq, job.checkpoint, job.stream, sharding
    rows = job.batch * job.accumulate * mesh.size() if job.ordered else None  # of which each rank has as many
    setup = Setup(job.cfg, mesh, opt, schedule, *sizes, stash=stash, train=job.train, ordered=rows)
    with torch.device("meta"):
        weights = _weights(job)
        local = shard.abstract_local(weights, decoder.dims(job.cfg), setup.rules, mesh, job.train)
        is_full = job.train is not None
        trained = local if is_full else lora.init(weights, pattern(job.targets), job.rank)
        tokens = [torch.empty(job.batch, job.seq, dtype=torch.int64) for _ in range(3)]
        return {
            "state": initial(trained, opt),
            "base": [] if is_full else local,
            "micros": tuple((data.Rows(*tokens), None) for _ in range(job.accumulate)),
            "count": torch.empty((), dtype=torch.int64),
            "setup": setup,
        }


def _traffic(captured: trace.Captured) -> Figures:
    """Return the bytes that all nodes but views read and write."""
    working = [n for n in captured.module.graph.nodes if n.op == "call_function" and not graph.is_view(n)]
    read, written = (sum(each) for each in zip(*map(roofline.traffic, working), strict=True))
    return {("read",): read, ("written",): written}


def _seconds(captured: trace.Captured, phases: Mapping[Node, str], device: Device | None) -> Figures:
    """Return the seconds by kind, of which those of the update are the optimiser's, serial and at the limit."""
    if device is None:
        return {}
    rename = lambda node, kind: OPTIMISER if kind == roofline.ELEMENTWISE and phases.get(node) == UPDATE else kind
    found = roofline.predict(captured.module.graph, device, rename)
    once = {(name,): getattr(found, name) for name in ("serial", "limit", "copying")}
    return once | {("seconds", kind): each for kind, each in found.by_kind.items()}


def _memory(captured: trace.Captured, phases: Mapping[Node, str], device: Device | None) -> Figures:
    """Return the bytes of arguments by kind, and for every phase and op the peak and the gathered bytes in it."""
    out: Figures = {}
    paths = dict(zip(captured.module.graph.nodes, captured.paths, strict=False))  # of placeholders, which come first
    size = lambda alive, counts: sum(graph.sizes(by)[storage] for storage, by in alive.items() if counts(by))
    for node, now, alive in liveness.walk_memory(captured.module.graph):
        if node.op == "placeholder":
            for kind, prefix in KINDS.items():
                out[kind,] = size(alive, lambda by, prefix=prefix: paths.get(by, "").startswith(prefix))
            continue
        where = (phases[node], str(node.target))
        now += roofline.scratch(node, device) if device else 0
        if now > out.get(("peak", *where), 0):
            out["peak", *where] = now
            out["gathered", *where] = size(alive, lambda by: graph.collective(by) == "all_gather")
    return out


def _phases(captured: trace.Captured, leaves: int | None, num_layers: int) -> dict[Node, str]:
    """Return the phase of every node that is no argument."""
    nodes, phase, out = list(captured.module.graph.nodes), "start", dict[Node, str]()
    begin = _begin(nodes, dict(zip(nodes, captured.paths, strict=False)), leaves, num_layers)
    for node in nodes:
        if node.op != "placeholder":
            out[node] = phase = begin.get(node, phase)
    return out


def _begin(nodes: list[Node], inputs: dict[Node, str], leaves: int | None, num_layers: int) -> dict[Node, str]:
    """Return the nodes that begin a phase: a layer begins when its bytes have arrived, in the forward and backward.

    The update begins with the reduction over ranks, which concatenates all gradients, more than ``leaves``, or without
    one when a moment is read. With full training, which is None, it begins when the gradients of the last block stand
    side by side.
    """
    paths = dict(inputs)
    joins = [n for n in nodes if n.target is torch.ops.aten.cat.default]
    joined = [n for n in joins if graph.shape(n).numel() > len(n.all_input_nodes)]  # more than numbers
    if leaves is None:
        update = nodes[nodes.index(joined[-1]) + 1]
    elif whole := next((n for n in joined if len(n.all_input_nodes) > leaves), None):
        update = min(whole.all_input_nodes, key=nodes.index)
    else:
        is_moment = lambda node: paths.get(node, "").startswith(KINDS["moments"])
        update = next(node for node in nodes if any(map(is_moment, node.all_input_nodes)))
    out = {update: UPDATE}
    backward = {0: "backward of the first layer", num_layers - 1: "backward of the last layer"}
    forward = True
    for node in nodes[: nodes.index(update)]:
        for path in (paths.get(near, "") for near in node.all_input_nodes if node.op == "call_function"):
            block = BLOCK.fullmatch(path)
            if block is None:
                continue
            if _is_ahead(node):  # the layer begins when it is waited for
                paths[node] = path
            elif block[1] == "embed":
                forward = True  # of the next micro-batch
            elif block[1] == "final":
                out[node], forward = "head", False
            else:
                out[node] = "forward" if forward else backward.get(int(block[2]), "backward")
    return out


def _is_ahead(node: Node) -> bool:
    """Return True for a node that brings a block perhaps ahead of its layer: a fetch, a gather, what is between."""
    if any(graph.collective(user) == "all_gather" for user in node.users):
        return True
    return graph.collective(node) == "all_gather" or graph.transfer(node) == "fetch"
