"""The work of a node: what it computes, moves and sends, by kind.

A node is one piece of work or two. A product of many rows decodes a packed weight to ``SLAB`` bytes at a time, and
multiplies with this slab. For fewer rows one kernel reads the packed bytes, decodes and multiplies. Which of the two,
and how long that kernel takes, is what fquant/kernels/cuda_plans.py says. For a device that it does not know, one
kernel has up to ``FEW`` rows. A slab that the last cache holds, with a fifth to spare, moves no memory. On the host
pieces stay in a nearer cache.

A product with a side of at most ``THIN`` is a *thin* one: those with adapters, which move more than they compute.

*Bytes moved* are those of a node's arguments and results, each once. An op that picks rows of a table reads as many
bytes as it writes. To decode a value takes ``INSTRUCTIONS`` of a lane, which computes 2 FLOPs in float32 by each.
"""

import dataclasses
import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from ...device import HOST
from ...kernels import cuda_plans
from ...kernels.cuda_plans import TENSOR_CORES, Card, Few, Tiled, estimate, grouped_plan, in_words, plan_for
from ...kernels.grouped_ops import num_groups
from ...kernels.spec import Spec, spec_of
from .. import collective_check, graph
from ..cost import flops, ring
from .devices import Device

FEW, INSTRUCTIONS = cuda_plans.FEW, cuda_plans.SLAB_INSTRUCTIONS
THIN = 128

PRODUCT, THIN_PRODUCT, DECODE, ATTENTION = "product", "thin product", "decode", "attention"
LOSS, NORM, ELEMENTWISE, LAUNCH, COLLECTIVE, COPY = (
    "loss", "norm", "elementwise", "launch", "collective", "copy",
)  # fmt: skip
KINDS = (PRODUCT, THIN_PRODUCT, DECODE, ATTENTION, NORM, ELEMENTWISE, LOSS, LAUNCH, COLLECTIVE, COPY)

_PACKED = ("fquant.matmul", "fquant.matmul_t", "fquant.grouped_matmul", "fquant.grouped_matmul_t")
_TABLES = ("aten.embedding", "aten.index", "aten.index_select", "aten.gather")
_ATTENTION = ("fquant.attention", "fquant.cached_attention", "aten._scaled_dot_product", "aten._flash_attention")
_NAMED = {"fquant.nll": LOSS, "fquant.rms_norm": NORM, "aten.native_layer_norm": NORM}  # by the beginning of a name


@dataclasses.dataclass(frozen=True)
class Work:
    """FLOPs of products of ``dtype``, values decoded, bytes moved in memory, and bytes sent over a link.

    ``kernel`` are the seconds of a kernel that has an estimate of its own. ``scratch`` are bytes that it takes while it
    runs.
    """

    kind: str
    flops: int = 0
    dtype: torch.dtype = torch.float32
    decoded: int = 0
    moved: int = 0
    sent: int = 0
    launches: int = 1
    kernel: float = 0.0
    scratch: int = 0

    def computing(self, device: Device) -> float:
        """Return the seconds of its products alone, at the rate that they reach."""
        share = device.share.attention if self.kind == ATTENTION else device.share.products
        return self.flops / (device.rate(self.dtype) * share)

    def seconds(self, device: Device) -> float:
        """Return the seconds of the longest of arithmetic, memory and link, without launches."""
        if self.kind in (COLLECTIVE, COPY):
            link = device.link * device.share.link if self.kind == COLLECTIVE else device.host * device.share.host
            return self.sent / link + (device.latency if self.sent else 0.0)
        decoding = self.decoded * INSTRUCTIONS / (device.flops_f32 / 2)
        return max(self.kernel, self.computing(device), decoding, self.moved / (device.bandwidth * device.share.memory))


def seconds(node: Node, device: Device) -> float:
    """Return the seconds that a node takes on ``device`` by itself, launches included; a view takes none."""
    return sum(part.seconds(device) + part.launches * device.launch for part in work(node, device))


def work(node: Node, device: Device) -> tuple[Work, ...]:
    """Return the work of a node of a captured graph on ``device``; () of a view, an argument and a wait."""
    if node.op != "call_function" or graph.is_wait(node) or graph.is_view(node):
        return ()
    if (name := graph.collective(node)) is not None:
        return (_collective(name, node),)
    if graph.transfer(node) is not None:
        return (Work(COPY, sent=_nbytes(graph.tensors(node)), launches=0),)
    name, counted = str(getattr(node.target, "overloadpacket", node.target)), flops(node)
    moved = sum(traffic(node))
    if name in _PACKED:
        return _packed(node, counted, device)
    if name.startswith(_ATTENTION):
        return (Work(ATTENTION, counted, _dtype(node), moved=moved),)
    if counted:
        kind = THIN_PRODUCT if _thinnest(node) <= THIN else PRODUCT
        return (Work(kind, counted, _dtype(node), moved=moved),)
    kind = next((kind for start, kind in _NAMED.items() if name.startswith(start)), ELEMENTWISE)
    return (Work(kind, moved=moved),)


def traffic(node: Node) -> tuple[int, int]:
    """Return the bytes that a node reads and writes; what is written in place counts as read only if it is read."""
    made, written = _nbytes(graph.tensors(node)), graph.written_storages(node)
    inputs = {t.untyped_storage()._cdata: t for near in node.all_input_nodes for t in graph.tensors(near)}
    over = _nbytes(t for storage, t in inputs.items() if storage in written)
    returned = graph.storages(node) & written
    name = str(getattr(node.target, "overloadpacket", node.target))
    if name in _TABLES:
        indices = _nbytes(t for near in node.all_input_nodes[1:] for t in graph.tensors(near))
        return made + indices, made
    reads = node.args[0] if name == "fquant.pointwise" else node.args[1:] if name == "aten.copy_" else None
    nodes = node.all_input_nodes if reads is None else list(dict.fromkeys(_nodes(reads)))
    read = _nbytes(t for near in nodes for t in graph.tensors(near))
    return read, over if returned else made + over


def scratch(node: Node, device: Device) -> int:
    """Return the bytes that a node's kernels take while it runs, beside its arguments and results.

    Those of a product with a packed weight are a slab, or the parts of a sum that programs share. On the host kernels
    have a few pages of their own.
    """
    return max((part.scratch for part in work(node, device)), default=0)


def _packed(node: Node, counted: int, device: Device) -> tuple[Work, ...]:
    """Return one kernel, or a decode and a product by slabs."""
    x, buffers, spec = _arguments(node)
    weights, dtype = math.prod(spec.shape), x.dtype
    groups = num_groups(buffers, spec) if "grouped" in str(node.target) else None
    weights *= groups if groups is not None and len(spec.shape) == 2 else 1
    packed, moved = _nbytes(buffers), _nbytes([x, *graph.tensors(node)])
    if device.chip is not None:
        whole = Work(PRODUCT, counted, dtype, moved=packed + moved)
        if (found := _one_kernel(whole, _is_across(node), x, spec, groups, device)) is not None:
            return (found,)
    elif x.numel() <= FEW * x.shape[-1]:
        return (Work(PRODUCT, counted, dtype, weights, packed + moved),)
    dense, on_host = weights * dtype.itemsize, device.type == HOST.type
    depth = spec.shape[-2 if _is_across(node) else -1]
    slab = cuda_plans.slabs(x.shape[-2] if x.ndim > 1 else 1, depth).size
    moves = 0 if on_host or 4 * device.cache >= 5 * slab else dense
    slabs = 1 if on_host else -(-dense // slab)
    again = (slabs - 1) * graph.nbytes(x)  # each slab meets all of x
    return (
        Work(DECODE, decoded=weights, moved=packed + moves, launches=slabs, scratch=0 if on_host else slab),
        Work(PRODUCT, counted, dtype, moved=moved + again + moves, launches=slabs),
    )


def _is_across(node: Node) -> bool:
    """Return True for a product whose sums go across the rows of the weight."""
    return str(node.target).partition(".default")[0].endswith("_t")


def _one_kernel(whole: Work, across: bool, x: Tensor, spec: Spec, groups: int | None, device: Device) -> Work | None:
    """Return ``whole`` with the seconds of the kernel that decodes for itself; None if the product is by slabs."""
    assert (chip := device.chip) is not None
    words = in_words(spec)
    depth, wide = spec.shape[-2:] if across else spec.shape[:-3:-1]
    if groups is None:
        rows, num = x.shape[-2], math.prod(x.shape[:-2])
        plan = plan_for(rows, spec, x.dtype, across, words, chip.generation)
    else:
        rows, num, wide = -(-x.shape[0] // groups), 1, wide * groups
        plan = grouped_plan(rows, chip.generation) if words and x.dtype in TENSOR_CORES else Tiled()
    if isinstance(plan, Tiled) or spec.format.vectors is not None:
        return None
    splits = 1 if isinstance(plan, Few) else plan.splits
    launches, scratch = (2, 4 * splits * rows * num * wide) if splits > 1 else (1, 0)
    operations = device.flops / (chip.processors * chip.clock)
    card = Card(chip.processors, chip.clock, operations, device.bandwidth * device.share.memory)
    each = estimate(plan, rows, depth, wide, spec.format.bits, chip.generation, card, across)
    each -= launches * cuda_plans.LAUNCH
    return dataclasses.replace(whole, kernel=num * each, launches=launches, scratch=scratch)


def _collective(name: str, node: Node) -> Work:
    """Return the bytes that one rank sends when a collective goes around a ring."""
    ranks = collective_check.ranks(node)
    whole = max(graph.nbytes(t) for near in (node, *node.all_input_nodes) for t in graph.tensors(near))
    return Work(COLLECTIVE, sent=ring(name, whole, ranks), launches=0)


def _arguments(node: Node) -> tuple[Tensor, list[Tensor], Spec]:
    """Return x, the buffers and the Spec of the weight of a packed product."""
    names = [argument.name for argument in node.target._schema.arguments]  # type: ignore[union-attr]
    given = dict(zip(names, node.args, strict=False)) | node.kwargs
    buffers: Any = given["buffers"]
    first: Any = node.args[0]
    spec = spec_of(str(given["format"]), given["shape"], given["dtype"])  # type: ignore[arg-type]
    return first.meta["val"], [b.meta["val"] for b in buffers], spec


def _dtype(node: Node) -> torch.dtype:
    return next(t.dtype for near in node.all_input_nodes for t in graph.tensors(near))


def _thinnest(node: Node) -> int:
    """Return the shortest of the last two dims of a product's arguments and result."""
    found = [t for near in (node, *node.all_input_nodes) for t in graph.tensors(near) if t.ndim >= 2]
    return min((size for t in found for size in t.shape[-2:]), default=1)


def _nodes(x: Any) -> Iterable[Node]:
    if isinstance(x, Node):
        yield x
    elif isinstance(x, list | tuple):
        for each in x:
            yield from _nodes(each)


def _nbytes(tensors: Iterable[Tensor]) -> int:
    """Return the bytes of tensors, those of a broadcast one once."""
    return sum(min(graph.nbytes(t), t.untyped_storage().nbytes()) for t in tensors)
