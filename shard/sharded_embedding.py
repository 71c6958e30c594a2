"""Sharded embedding: the rows of a sharded table that tokens ask for, brought instead of the table.

An embedding reads one row for each token. Of a table with 32000 rows, a gather brings 31488 that none of 512 tokens
asks for. Here the ids travel and the rows come back, in two collectives whose sizes do not depend on the ids:

    ids      i32[max_tokens]           of every rank to all: one all-gather
    rows     u8[ranks·max_tokens row]  each rank's part of the rows, zero elsewhere: one reduce-scatter

        rank 0  holds rows 0 and 1, asks for 3  ->  row 3
        rank 1  holds rows 2 and 3, asks for 0  ->  row 0

A bundle's bytes are cut into equal parts, so one row may be on several ranks. Each gives its bytes at their place in
the row, and at most one term of each byte's sum is not zero. A row of a packed table is the rows of its buffers side by
side; the rank that asked decodes it.
"""

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.func import vmap

from fquant import tree
from fquant.communication import LookedUpRows

from .bundle import Buffer, Bundle, Layout
from .collectives import all_gather, reduce_scatter
from .transport.gloo import resolve

_ID = torch.int32


def is_less(layout: Layout, ranks: int, max_tokens: int) -> bool:
    """Return True if ``max_tokens`` rows for each rank are fewer bytes on the wire than the block of ``layout``.

    False if the table has no separate rows, as in flat formats such as the nested scales of double quantisation.
    """
    row = sum(buffer.width for buffer in layout.buffers) if num_rows(layout.buffers) else math.inf
    return ranks * max_tokens * (_ID.itemsize + row) < layout.size


def num_rows(buffers: Sequence[Buffer]) -> int:
    """Return the number of rows of the table with these ``buffers``, 0 if it has no separate rows."""
    shapes = [buffer.shape for buffer in buffers]
    apart = bool(shapes) and min(map(len, shapes)) > 1 and len({shape[0] for shape in shapes}) == 1
    return shapes[0][0] if apart else 0


def rows(x: Bundle, ids: Tensor, group: dist.ProcessGroup, max_tokens: int, by_row: bool = False) -> LookedUpRows:
    """Return the rows of the table ``x`` for ``ids`` i[...], in their order; ``x`` has this rank's part of the bytes.

    It is not used on one device, and has no backward, because the table is a constant. A vmap maps the collectives, or
    with ``by_row`` looks up the ids of all examples together. Of the innermost vmap, over rows, ``max_tokens`` counts
    all examples, whose number may differ between ranks. Of those around it, it counts one. Raises ValueError for more
    than ``max_tokens`` ids. If an id of any rank is outside of the table, every rank raises IndexError at run time.
    """
    given = x.bytes, ids, x.layout, group.group_name, max_tokens
    found = _Together.apply(*given, True) if by_row else _look_up(*given)
    return LookedUpRows(tree.unflatten(x.layout.structure, found), x.layout.buffers[0].shape[0])


class _Together(torch.autograd.Function):
    """:func:`_look_up` for all examples of a vmap at once, of which the next is that over rows if ``of_rows``."""

    @staticmethod
    def forward(
        part: Tensor, ids: Tensor, layout: Layout, group: str, max_tokens: int, of_rows: bool
    ) -> tuple[Tensor, ...]:
        return _look_up(part, ids, layout, group, max_tokens)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.mark_non_differentiable(*output)

    @staticmethod
    def vmap(
        info: Any, in_dims: Any, part: Tensor, ids: Tensor, layout: Layout, group: str, max_tokens: int, of_rows: bool
    ) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
        outs = (0,) * len(layout.buffers)
        if in_dims[0] is not None:  # mapped tables: of each example its own rows
            of = partial(_look_up, layout=layout, group=group, max_tokens=max_tokens)
            return vmap(of, in_dims[:2])(part, ids), outs
        ids, most = ids.movedim(in_dims[1], 0), max_tokens if of_rows else max_tokens * info.batch_size
        found = _Together.apply(part, ids, layout, group, most, False)
        return tuple(t.unflatten(0, (info.batch_size, math.prod(ids.shape[1:]))) for t in found), outs


def _look_up(part: Tensor, ids: Tensor, layout: Layout, group: str, max_tokens: int) -> tuple[Tensor, ...]:
    """Return the rows of each buffer, [n ...] for ``ids`` i[...] of n elements."""
    check_count(ids.numel(), "are looked up", max_tokens)
    buffers, total, over = layout.buffers, layout.buffers[0].shape[0], resolve(group)
    flat = ids.reshape(-1).clamp(-1, total).to(_ID)  # [n]
    asked = all_gather(F.pad(flat, (0, max_tokens - flat.shape[0])), over)  # [ranks·max_tokens]
    asked = asked + asked.new_zeros(()).expand(total).index_select(0, asked)  # IndexError outside of [0, total)
    begin = over.rank() * part.shape[-1]
    found = torch.cat([_found(part, begin, buffer, asked) for buffer in buffers], -1)  # u8[ranks·max_tokens row]
    mine = reduce_scatter(found, over)[: flat.shape[0]]
    parts = mine.split([buffer.width for buffer in buffers], -1)

    def read(buffer: Buffer, t: Tensor) -> Tensor:
        t = t.clone(memory_format=torch.contiguous_format)  # bytes cannot be viewed where they are not aligned
        return t.view(buffer.dtype).reshape(t.shape[0], *buffer.shape[1:])

    return tuple(map(read, buffers, parts))


def check_count(tokens: int, purpose: str, max_tokens: int) -> None:
    """Raise ValueError if there are more ``tokens`` than the messages have room for."""
    if tokens > max_tokens:
        fault = f"{tokens} tokens {purpose}, and this comm is for at most {max_tokens} a rank"
        raise ValueError(f"{fault}; make it with tokens={tokens} or more, the same on every rank")


def _found(part: Tensor, begin: int, buffer: Buffer, asked: Tensor) -> Tensor:
    """Return the rows ``asked`` [n] of a buffer as u8[n width], zero outside of ``part``, which begins at ``begin``."""
    width, total, end = buffer.width, buffer.shape[0], begin + part.shape[-1]
    first = min(max(0, -((buffer.offset - begin) // width)), total)  # of the rows that are here whole
    last = min(max(0, (end - buffer.offset) // width), total)  # the one behind the last of these
    out = part.new_zeros(()).expand(asked.shape[-1], width)
    if first < last:
        whole = part.narrow(-1, buffer.offset + first * width - begin, (last - first) * width)
        found = whole.unflatten(-1, (last - first, width)).index_select(0, (asked - first).clamp(0, last - first - 1))
        out = torch.where(((asked >= first) & (asked < last))[:, None], found, out)
    for row in sorted({first - 1, last} - set(range(first, last))):  # rows that are cut, at either end
        low, high = buffer.offset + row * width, buffer.offset + (row + 1) * width
        start, stop = max(low, begin), min(high, end)
        if 0 <= row < total and start < stop:
            cut = F.pad(part.narrow(-1, start - begin, stop - start), (start - low, high - stop))
            out = torch.where((asked == row)[:, None], cut, out)
    return out
