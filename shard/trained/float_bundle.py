"""FloatBundle: the parameters of a block that is trained, as one flat run of floats.

A packed block is a constant of a step, and travels as bytes (bundle.py). A block that is trained is differentiated, and
its gradient has to travel back. So its tensors are in one buffer of one dtype, the *master* weights:

    values   f32[size / ranks]     this rank's part; the gradient and every moment of an optimiser are as long
    opening  cast to the dtype of products, one all-gather, tensors are views of the result
    dual     the gradients of all tensors side by side, one reduce-scatter, cast to the dtype of the master

``torch.func.grad`` of a loss that opens bundles therefore gives bundles with this rank's part of the gradient, summed
over the ranks that share the block. This is ZeRO stage 3 (Rajbhandari et al. 2020), as FSDP does it (Zhao et
al. 2023). ``Precision`` has what MixedPrecisionPolicy has there, and the format of matrices on the wire.

Each tensor begins at a multiple of ``wire.BLOCK`` elements, 256, and so does the part of each rank. So a block of an
8-bit moment or of a message is of one tensor and one rank, for any number of ranks. Matrices come before
vectors, so that a rank's part is a run of matrices and then one of vectors.
"""

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fquant import tree
from fquant.autodiff import forward_mode, replace_at, unwrap_dead
from fquant.communication import Loadable
from fquant.tree import node, static

from .. import bundle
from ..bundle import Buffer, Layout
from ..collectives import all_gather, reduce_scatter
from ..transport import wire
from ..transport.wire import BLOCK, Wire
from . import row_layout
from .row_layout import RowLayout

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


@dataclass(frozen=True)
class Precision:
    """The dtypes of a trained block: of products with it, of its gradient's sum over ranks, and of its messages.

    With ``wire`` the matrices of a block are quantised in an all-gather, and their gradient is that of the master
    (straight-through). Blocks that match ``dense``, a regular expression of whole paths, travel in ``compute``.
    """

    compute: torch.dtype = torch.bfloat16
    reduce: torch.dtype = torch.float32
    wire: Wire | None = None
    dense: str | None = None

    def __post_init__(self) -> None:
        for name in ("compute", "reduce"):
            if (got := getattr(self, name)) not in FLOATS:
                raise ValueError(f"precision {name}: got {got}; wanted a float of 16 bits or more, as torch.bfloat16")
        if self.wire is not None and not isinstance(self.wire, Wire):
            raise TypeError(f"precision wire: got {self.wire!r}; wanted a Wire, such as shard.wire.INT8, or None")
        if self.dense is not None and self.wire is None:
            raise ValueError(f"precision dense: got {self.dense!r}, and wire is None; leave it out")


@node
class FloatBundle(Loadable):
    """A block to be trained: its master weights f32[size] whole, f32[size / ranks] on each rank, or at rest a DTensor.

    ``layout`` counts bytes of the master. A gradient, and each moment of an optimiser, is such a bundle too. Those of
    a RowBundle have a RowLayout.
    """

    values: Any  # f32[...], or what an optimiser makes of it
    layout: Layout = static()
    precision: Precision = static()


def master(x: Any, precision: Precision) -> torch.dtype:
    """Return the dtype of master weights of the tree ``x`` of tensors or meta tensors: float32, or float64 if any is.

    Raises TypeError, by path, for a leaf that cannot be trained; ValueError for a wire format that cannot carry it.
    """
    dtype = torch.float32
    for path, t in tree.items(x):
        if t.dtype not in FLOATS:
            fix = "train adapters beside it, or dequantise it first"
            raise TypeError(f"{path}: got {str(t.dtype).removeprefix('torch.')}, wanted floats to train; {fix}")
        dtype = torch.promote_types(dtype, t.dtype)
        if precision.wire is not None and dtype != torch.float32:
            fault = f"{path}: got {t.dtype} to be sent as {precision.wire.name}, wanted at most 32 bits"
            raise ValueError(f"{fault}; use wire=None, or cast it to float32")
    return dtype


def plan(block: Any, ranks: int, dtype: torch.dtype) -> Layout:
    """Return the layout of a block, a tree of tensors or meta tensors, in ``dtype``: matrices first, then vectors."""
    like = [(path, torch.empty(t.shape, dtype=dtype, device="meta")) for path, t in tree.items(block)]
    order = sorted(range(len(like)), key=lambda i: like[i][1].ndim < 2)  # stable
    laid = bundle.plan({str(i): like[i][1] for i in order}, ranks, BLOCK * dtype.itemsize)
    place = {int(buffer.path): buffer.offset for buffer in laid.buffers}
    buffers = tuple(Buffer(path, dtype, tuple(t.shape), place[i]) for i, (path, t) in enumerate(like))
    return Layout(tree.structure(block), buffers, laid.size)


def precision_of(path: str, layout: Layout, train: Precision) -> Precision:
    """Return the precision of the block at ``path``, which has no wire format if no matrix of it is to be quantised."""
    is_dense = train.dense is not None and re.fullmatch(train.dense, path)
    has_matrices = any(len(buffer.shape) > 1 for buffer in layout.buffers)
    return replace(train, wire=train.wire if has_matrices and not is_dense else None, dense=None)


def message(layout: Layout, precision: Precision, rank: int, ranks: int) -> wire.Message:
    """Return what a message of the block holds: the blocks of each matrix, and the end of the vectors behind them."""
    blocks = lambda buffer: -(-math.prod(buffer.shape) // BLOCK)
    matrices = [buffer for buffer in in_order(layout) if len(buffer.shape) > 1]
    total = sum(map(blocks, layout.buffers))
    assert precision.wire is not None
    return wire.Message(precision.wire, precision.compute, tuple(map(blocks, matrices)), total, rank, ranks)


def spans(layout: Layout) -> list[tuple[int, int]]:
    """Return the first element of each tensor in the buffer, and the number of its elements."""
    return [(b.offset // b.dtype.itemsize, math.prod(b.shape)) for b in layout.buffers]


def length(layout: Layout) -> int:
    """Return the elements of the whole buffer, which a gradient and a moment have too, in any dtype."""
    return layout.size // layout.buffers[0].dtype.itemsize if layout.buffers else 0


def in_order(layout: Layout) -> list[Buffer]:
    """Return the buffers by their offsets."""
    return sorted(layout.buffers, key=lambda buffer: (buffer.offset, buffer.end))


@dataclass(frozen=True, eq=False)
class _Way:
    """The static half of opening a bundle."""

    layout: Layout
    precision: Precision
    master: torch.dtype
    group: dist.ProcessGroup | None
    is_carrier: bool = False  # zeros, which are not gathered


def open(x: FloatBundle, group: dist.ProcessGroup | None, scales: Tensor | None = None) -> Any:
    """Return the block of this rank's ``x``, with tensors in ``precision.compute`` that are views of one buffer.

        rank 0  first half of the values   ->  the block           backward   its half of g + h  <-  g
        rank 1  second half                ->  the block                      its half of g + h  <-  h

    Along the group's axis: sharded in, replicated out, each rank having a loss of its own. One all-gather; the backward
    is one reduce-scatter in ``precision.reduce``. Without a group: a cast. The wire's rounding is straight-through.

    Raises ValueError for a wire format whose scales are of whole tensors, without ``scales`` (see ``wire_scales``), and
    for one with values that are not float32.
    """
    kind = x.precision.wire
    if kind is not None and kind.statistic is not None and scales is None:
        fix = "open shard.scaled(params, shard.wire_scales(params, mesh, rules))"
        raise ValueError(f"a bundle that travels as {kind.name} has no scales; {fix}")
    if kind is not None and x.values.dtype != torch.float32:
        raise ValueError(f"a bundle of {x.values.dtype} was to travel as {kind.name}; wanted float32, or wire=None")
    if not x.layout.buffers:
        return tree.unflatten(x.layout.structure, [])
    way = _Way(x.layout, x.precision, x.values.dtype, group)
    return tree.unflatten(x.layout.structure, _Open.apply(way, x.values, scales))


def open_carriers(x: FloatBundle, group: dist.ProcessGroup | None) -> Any:
    """Return zeros in ``precision.compute``, a tree like the block, whose gradient goes to ``x``.

        rank 0  first half of the carriers   ->  zeros         backward   its half of g + h  <-  g
        rank 1  second half                  ->  zeros                    its half of g + h  <-  h

    They have no memory if those of ``x`` have none. The backward is that of :func:`open`. Only tangents are gathered.
    """
    way = _Way(x.layout, x.precision, x.values.dtype, group, is_carrier=True)
    return tree.unflatten(x.layout.structure, _Open.apply(way, x.values, None))


class _Open(torch.autograd.Function):
    """This rank's values and perhaps scales -> all tensors of the block."""

    generate_vmap_rule = True

    @staticmethod
    def forward(way: _Way, values: Tensor, scales: Tensor | None) -> tuple[Tensor, ...]:
        buffers = way.layout.buffers
        if way.is_carrier:
            zero = values.new_zeros((), dtype=way.precision.compute)  # torch gives no tangent to an expanded output
            return tuple(zero.expand(b.shape) if values.stride() == (0,) else zero.repeat(b.shape) for b in buffers)
        whole = _gather(way, values, scales)
        if isinstance(way.layout, RowLayout):
            return tuple(tree.leaves(row_layout.read(whole, way.layout)))
        parts = (whole.narrow(0, begin, count) for begin, count in spans(way.layout))
        return tuple(part.view(buffer.shape) for part, buffer in zip(parts, buffers, strict=True))

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.way, values, _ = inputs
        ctx.save_for_backward(values)  # for the check of _Close.vmap
        ctx.set_materialize_grads(False)  # a tensor that is not used has no gradient of zeros

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        (values,) = unwrap_dead(ctx.saved_tensors)
        return None, None if all(g is None for g in grads) else _Close.apply(ctx.way, values, *grads), None

    @staticmethod
    def jvp(ctx: Any, _way: Any, dvalues: Tensor | None, _scales: Any) -> Any:
        if dvalues is None:
            return (None,) * len(ctx.way.layout.buffers)
        with forward_mode([]):
            return _Open.apply(_exactly(ctx.way), dvalues, None)


class _Close(torch.autograd.Function):
    """Gradients of all tensors of the block -> this rank's part of their sum over ranks: the dual of :class:`_Open`.

    The values serve a check only.
    """

    @staticmethod
    def forward(way: _Way, values: Tensor, *grads: Tensor | None) -> Tensor:
        if isinstance(way.layout, RowLayout):
            flat = row_layout.joined(grads, way.layout, way.precision.reduce)
        else:
            flat = _joined(way, grads)
        return (reduce_scatter(flat, way.group) if way.group else flat).to(way.master)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.way, values, *grads = inputs
        ctx.given = [g is not None for g in grads]
        ctx.save_for_backward(values)
        ctx.save_for_forward(values)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        found = _Open.apply(_exactly(ctx.way), g, None)
        return None, None, *(t if given else None for t, given in zip(found, ctx.given, strict=True))

    @staticmethod
    def jvp(ctx: Any, _way: Any, _values: Any, *tangents: Tensor | None) -> Tensor:
        with forward_mode(ctx.saved_tensors) as values:
            return _Close.apply(ctx.way, *values, *tangents)

    @staticmethod
    def vmap(info: Any, in_dims: Any, way: _Way, values: Tensor, *grads: Tensor | None) -> tuple[Tensor, int]:
        if in_dims[1] is None and way.group is not None:
            fault = "a gradient for each example, of weights that ranks share, would be summed with that of other ranks"
            raise RuntimeError(f"{fault}; use a loop over examples, rules with block=None, or adapters")
        given = [i for i, g in enumerate(grads) if g is not None]
        close = lambda *found: _Close.forward(way, values, *replace_at([None] * len(grads), given, found))
        dims = tuple(in_dims[2 + i] for i in given)
        return torch.vmap(close, dims)(*(grads[i] for i in given)), 0


def _joined(way: _Way, grads: Sequence[Tensor | None]) -> Tensor:
    """Return the gradients of all tensors side by side f[size], in ``precision.reduce``."""
    at, wide, parts = 0, way.precision.reduce, list[Tensor]()
    like = next(g for g in grads if g is not None)
    zeros = lambda n: like.new_zeros((n,), dtype=wide)
    for (begin, count), g in sorted(zip(spans(way.layout), grads, strict=True), key=lambda each: each[0]):
        parts.append(zeros(begin - at))
        parts.append(zeros(count) if g is None else _narrowed(g.reshape(count), wide))
        at = begin + count
    parts.append(zeros(length(way.layout) - at))
    return torch.cat([part for part in parts if part.numel()] + [zeros(0)])  # promotes to the widest dtype


def _narrowed(g: Tensor, dtype: torch.dtype) -> Tensor:
    """Return ``g`` in ``dtype``, unless concatenating will widen it to that."""
    return g if torch.promote_types(g.dtype, dtype) == dtype else g.to(dtype)


def _exactly(way: _Way) -> _Way:
    """Return the way of a derivative, which is gathered, and not quantised."""
    return replace(way, precision=replace(way.precision, wire=None, dense=None), is_carrier=False)


def _gather(way: _Way, values: Tensor, scales: Tensor | None) -> Tensor:
    """Return the whole buffer [size] in the dtype of products."""
    gather: Callable[[Tensor], Tensor] = lambda t: all_gather(t, way.group) if way.group else t
    if way.precision.wire is None:
        return gather(values.to(way.precision.compute))
    rank, ranks = (way.group.rank(), way.group.size()) if way.group else (0, 1)
    it = message(way.layout, way.precision, rank, ranks)
    return wire.decode(gather(wire.encode(values, scales, it)), scales, it, values.shape[0])


def is_bundle(x: Any) -> bool:
    """Return True for a FloatBundle."""
    return isinstance(x, FloatBundle)
