"""Steps of optimisers that a mask gates, in one pass over memory; bits are equal.

    new, m, v = adam_update(g, p, m0, v0)
    where(mask, new, p), where(mask, m, m0), where(mask, v, v0)        # adam_update(g, p, m0, v0, active=mask)

So a step is skipped if a gradient is not finite, or in the free slots of ``fquant.lora.slots``. The mask is bool[], or
bool[n] for n updates in one op, and may be viewed to broadcast.
"""

import operator
from typing import Any

import torch
from torch.fx import Graph, Node

from .. import graph as graphs
from .canonicalize import erase_unused

STEPS = ("fquant.adam_update.default", "fquant.momentum_update.default")  # result i is the new value of argument i + 1
_aten = torch.ops.aten
_VIEWS = (_aten.view.default, _aten._unsafe_view.default, _aten.unsqueeze.default)


def gate_steps(graph: Graph) -> None:
    """Let each step of an optimiser take the mask by which all its results are selected."""
    written = graphs.all_written_storages(graph)
    place = {node: i for i, node in enumerate(graph.nodes)}
    for step in [node for node in place if str(node.target) in STEPS and node.args[-1] is None]:
        count = [isinstance(x, str) for x in step.args].index(True) - 1  # arguments in front of the rates
        old: Any = step.args[1:count]
        if graphs.all_storages(old) & written:
            continue
        (rates,) = graphs.tensors(step.args[count])  # type: ignore[arg-type]
        many = rates.shape[:-1]
        found = _selections(step, old, many)
        masks = {mask for mask, _, _ in found or ()}
        if len(masks) != 1 or place[mask := masks.pop()] > place[step] or graphs.storages(mask) & written:
            continue
        if graphs.shape(mask) != many:
            mask = graphs.insert_before(step, _aten.view.default, (mask, list(many)))
        step.update_arg(len(step.args) - 1, mask)
        for _, item, selected in found or ():
            graphs.replace_uses(selected, item)
            erase_unused(graph, [selected])


def _selections(step: Node, old: Any, many: torch.Size) -> list[tuple[Node, Node, Node]] | None:
    """Return mask, new value and selection for each result that is read; None if one is read otherwise."""
    found = []
    for item in step.users:
        if item.target is not operator.getitem:
            return None
        i: Any = item.args[1]
        if not graphs.shape(item).numel() or not item.users:
            continue
        selected = next(iter(item.users))
        if len(item.users) > 1 or selected.target is not _aten.where.self or selected.args[1:] != (item, old[i]):
            return None
        mask: Any = selected.args[0]
        wanted = (*many, *[1] * (len(graphs.shape(item)) - len(many)))
        if (*[1] * (len(wanted) - len(graphs.shape(mask))), *graphs.shape(mask)) != wanted:
            return None
        if graphs.tensor_layouts(selected) != graphs.tensor_layouts(item):
            return None
        found.append((_base(mask), item, selected))
    return found


def _base(mask: Node) -> Node:
    """Return the node whose elements ``mask`` views in another shape."""
    while mask.target in _VIEWS:
        (mask,) = mask.all_input_nodes
    return mask
