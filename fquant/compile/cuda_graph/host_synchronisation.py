"""Host synchronisations in a captured graph: the nodes for which the host waits, or which compute on the host.

A CUDA graph records what a step launches. It cannot record that the host waits for the device and decides by a value.
What the host computes while a graph is recorded is a constant in every replay. So such nodes are refused:

    values on the host    ``item``, ``nonzero``, masks as indices, ops of ``kernels.registry.WAITS``
    copies                between the device and the host, unless by the transfers of shard.transport.host
    work on the host      calls on tensors of the host that are no views, and new tensors there as results
    collectives           of another backend than NCCL, which sends from the host

An op that waits and is not known here fails when it is recorded. torch's default generator is no obstacle, because
``torch.cuda.graph`` registers it.
"""

import os
from typing import Any

import torch
import torch.distributed as dist
from torch.fx import Graph, Node
from torch.fx.node import map_arg

from ...kernels.registry import WAITS
from .. import graph as graphs

_BY_VALUE = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape, torch.Tag.cudagraph_unsafe}
_BY_INDEX = ("index", "index_put", "index_put_", "_unsafe_index", "_unsafe_index_put", "_index_put_impl_")
_WAITING = ("multinomial", "histc", "linalg_eig", "_linalg_eigh", "_linalg_svd")  # torch reads a value or an error code
_RECORDED = ("nccl", "fake")  # backends of collectives


def synchronises(graph: Graph) -> list[Node]:
    """Return the nodes of a graph for which the host waits or computes; a CUDA graph can be recorded if none does."""
    on_device = _is_on_device(graph)
    return [node for node in graph.nodes if _reason(node, on_device)]


def describe(node: Node) -> str:
    """Return the op and the reason of a node of :func:`synchronises`, with its source line if it was traced."""
    reason = _reason(node, _is_on_device(node.graph)) or "fails"
    place = f" in {node.stack_trace}" if node.stack_trace else ""
    return f"{node.name} ({node.target}){place} {reason}"


def _is_on_device(graph: Graph) -> bool:
    """Return True if tensors of the graph are on another device than the host."""
    return any(not t.is_cpu for node in graph.nodes for t in graphs.tensors(node))


def _reason(node: Node, on_device: bool) -> str | None:
    if node.op == "output":
        given = graphs.all_storages(node.graph.find_nodes(op="placeholder"))
        new = [x for x in graphs.outputs(node.graph) if not graphs.storages(x) <= given]
        far = [x.name for x in new if any(t.is_cpu for t in graphs.tensors(x))]
        return f"returns {', '.join(far)} on the host, not over what is donated" if far and on_device else None
    if node.op != "call_function" or graphs.transfer(node):
        return None
    if graphs.collective(node):
        backend = _backend(node)
        if backend not in _RECORDED and on_device:
            return f"communicates over {backend}, which sends from the host; use a mesh of NCCL"
        if backend == "nccl" and _waits_on_host():
            return "is waited for on the host, because TORCH_NCCL_BLOCKING_WAIT is set; unset it"
        return None
    if (reason := _value(node)) is not None:
        return reason
    near = [t for x in (node, *node.all_input_nodes) for t in graphs.tensors(x)]
    if on_device and any(t.is_cpu for t in near) and not (graphs.is_view(node) or graphs.is_wait(node)):
        both = all(t.is_cpu for t in near)
        return "computes on the host" if both else "copies between the host and the device"
    return None


def _value(node: Node) -> str | None:
    """Return why a node needs a value on the host, wherever its tensors are."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return None
    if (waits := WAITS.get(node.target.name())) is not None:
        return waits(*map_arg(node.args, lambda x: x.meta["val"]))
    name = node.target._schema.name.rpartition("::")[2]
    if name in _BY_INDEX:
        indices: Any = node.args[1]
        masks = [t for x in indices if isinstance(x, Node) for t in graphs.tensors(x)]
        is_counted = any(t.dtype in (torch.bool, torch.uint8) for t in masks)
        return "has a mask as an index, which counts on the host; use torch.where" if is_counted else None
    if name in _WAITING or _BY_VALUE & set(node.target.tags):
        return "needs a value on the host"
    return None


def _waits_on_host() -> bool:
    """Return True if torch lets the host wait for a collective of NCCL, in place of a stream."""
    names = ("TORCH_NCCL_BLOCKING_WAIT", "NCCL_BLOCKING_WAIT")
    value = next((os.environ[name] for name in names if name in os.environ), "0")
    return value.lower() in ("1", "t", "true", "y", "yes")


def _backend(node: Node) -> str:
    """Return the backend of a collective for its tensors: gloo for our own ops, which send from the host."""
    if str(node.target).startswith("fquant."):
        return "gloo"
    (t, *_) = [t for x in (node, *node.all_input_nodes) for t in graphs.tensors(x)]
    group: Any = dist.distributed_c10d._resolve_process_group(str(node.args[-1]))  # type: ignore[arg-type]
    return group._get_backend(t.device).name().lower()
