"""RowBundle: a block whose packed weights are trained, and are the only copy.

    bytes      u8[size / ranks]    this rank's rows of codes, scales, and of other tensors in float32
    opening    one all-gather of the bytes; a weight is then a Carried, whose carrier of zeros receives its gradient
    dual       the gradients of all weights and tensors, one reduce-scatter to the rank that has the rows

So for int8 a step gathers one byte an element, where a FloatBundle in bfloat16 gathers two. No rank ever has all
weights in floats. See fquant/quantized_training/weights.py for how they are rounded, and shard/trained/weights.py for a
step.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fquant import tree
from fquant.communication import Loadable
from fquant.quantized_training.weights import Carried, is_packed, rows
from fquant.tree import node, static

from ..collectives import all_gather
from . import float_bundle, row_layout
from .float_bundle import FloatBundle, Precision
from .row_layout import RowLayout


@node
class RowBundle(Loadable):
    """A block as bytes: u8[size / ranks] on each rank, or at rest a DTensor of them all.

    ``carriers``, a FloatBundle of zeros, is there in a loss that is differentiated.
    """

    bytes: Tensor
    carriers: FloatBundle | None
    layout: RowLayout = static()
    precision: Precision = static()


def is_row_bundle(x: Any) -> bool:
    """Return True for a RowBundle."""
    return isinstance(x, RowBundle)


def is_quantized(block: Any) -> bool:
    """Return True if ``block`` has a packed weight, so that to be trained it becomes a RowBundle."""
    return any(is_packed(leaf) for leaf in tree.leaves(block, is_leaf=is_packed))


def open(x: RowBundle, group: dist.ProcessGroup | None) -> Any:
    """Return the block of this rank's ``x``: a Packed, or with carriers a Carried, for each weight.

        rank 0  its rows of the block  ->  the block           backward   its rows of g + h  <-  g
        rank 1  its rows               ->  the block                      its rows of g + h  <-  h

    Other tensors are in ``precision.compute``. One all-gather; the backward is one reduce-scatter. Without a group
    there is neither.
    """
    block = row_layout.read(all_gather(x.bytes, group) if group else x.bytes, x.layout)
    compute = x.precision.compute
    if x.carriers is None:
        return tree.map(lambda w: w if is_packed(w) else w.to(compute), block, is_leaf=is_packed)
    carriers = iter(tree.leaves(float_bundle.open_carriers(x.carriers, group)))
    carried = lambda w, c: Carried(w, c) if is_packed(w) else w.to(compute) + c
    return tree.map(lambda w: carried(w, next(carriers)), block, is_leaf=is_packed)


def own(x: RowBundle) -> list[Any]:
    """Return this rank's rows of each weight, a Packed [rows in], and of each other tensor, f32[rows ...]; views."""
    local = tree.unflatten(x.layout.structure, row_layout.split(x.bytes, x.layout))
    return [rows(w) if is_packed(w) else w for w in tree.leaves(local, is_leaf=is_packed)]


def dense_layout(x: RowBundle) -> RowLayout:
    """Return the layout of the gradient of ``x``."""
    meta = [torch.empty(b.shape, dtype=b.dtype, device="meta") for b in x.layout.buffers]
    return row_layout.dense(tree.unflatten(x.layout.structure, meta), x.layout.ranks)
