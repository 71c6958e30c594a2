"""lookup: rows of a table that is spread over ranks, brought instead of the table.

An embedding reads one row a token. Gathered, a table of 32000 rows brings 31488 that no token of 512 asked for; here
the tokens travel and the rows come back, two collectives of sizes that do not depend on what is asked:

    ids      i32[most]           of every rank to all: one all-gather
    rows     u8[ranks·most row]  what each rank has of the rows asked for, zero where it has nothing: one reduce-scatter

A bundle's bytes are cut among ranks wherever it falls, so a row may lie on more than one. Each gives the bytes that it
has, at their place in the row; of every byte at most one term of the sum is not zero, so it is the row, bit for bit. A
row of a packed table is the rows of its buffers side by side, decoded by who asked.

Ranks may ask for different numbers of rows, which none knows of another: ``most`` is a bound on all of them, and what
is sent is filled up to it. Whether rows are fewer bytes than the table is decided by that bound and the table's layout,
which are the same on every rank: see :func:`is_less`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from fquant import tree
from fquant.communication import LookedUpRows

from .bundle import Buffer, Bundle, Layout
from .collectives import all_gather, reduce_scatter

_ID = torch.int32


def is_less(layout: Layout, ranks: int, most: int) -> bool:
    """Whether up to ``most`` rows for each rank are fewer bytes on the wire than the block that lies as ``layout``.

    Never where rows cannot be told apart: that takes a row of every buffer for a row of the table. Flat formats, the
    nested scales of double quantisation among them, have none.
    """
    row = sum(buffer.width for buffer in layout.buffers) if num_rows(layout.buffers) else math.inf
    return ranks * most * (_ID.itemsize + row) < layout.size


def num_rows(buffers: Sequence[Buffer]) -> int:
    """The rows of the table that ``buffers`` are, 0 where they cannot be told apart."""
    shapes = [buffer.shape for buffer in buffers]
    apart = bool(shapes) and min(map(len, shapes)) > 1 and len({shape[0] for shape in shapes}) == 1
    return shapes[0][0] if apart else 0


def rows(x: Bundle, ids: Tensor, group: dist.ProcessGroup, most: int) -> LookedUpRows:
    """The rows of the table ``x``, whose bytes u8[size / ranks] are this rank's, that ``ids`` i[...] ask for, in order.

    The table is a constant: rows have no derivative with respect to it. Raises ValueError for more than ``most`` ids,
    IndexError, when it is run and on every rank, where any rank asks for one that is outside of the table.
    """
    if ids.numel() > most:
        raise ValueError(
            f"{ids.numel()} tokens are looked up, and this comm is for at most {most} a rank; "
            f"make it with tokens={ids.numel()} or more, the same on every rank"
        )
    buffers, total = x.layout.buffers, x.layout.buffers[0].shape[0]
    flat = ids.reshape(-1).clamp(-1, total).to(_ID)  # [n]
    asked = _inside(all_gather(F.pad(flat, (0, most - flat.shape[0])), group), total)  # [ranks·most]
    begin = group.rank() * x.bytes.shape[-1]
    found = torch.cat([_found(x.bytes, begin, buffer, asked) for buffer in buffers], -1)  # u8[ranks·most row]
    mine = reduce_scatter(found, group)[: flat.shape[0]]
    parts = mine.split([buffer.width for buffer in buffers], -1)

    def read(buffer: Buffer, t: Tensor) -> Tensor:
        t = t.clone(memory_format=torch.contiguous_format)  # bytes cannot be viewed where they are not aligned
        return t.view(buffer.dtype).reshape(t.shape[0], *buffer.shape[1:])

    return LookedUpRows(tree.unflatten(x.layout.structure, list(map(read, buffers, parts))), total)


def _inside(ids: Tensor, total: int) -> Tensor:
    """``ids``, by an op that refuses those that are not in 0 ... total - 1, as an embedding does."""
    return ids + ids.new_zeros(()).expand(total).index_select(0, ids)


def _found(part: Tensor, begin: int, buffer: Buffer, asked: Tensor) -> Tensor:
    """Of the rows ``asked`` [n] of a buffer the bytes that lie in ``part``, which begins at ``begin``: u8[n width]."""
    width, total, end = buffer.width, buffer.shape[0], begin + part.shape[-1]
    first = min(max(0, -((buffer.offset - begin) // width)), total)  # of the rows that lie here whole
    last = min(max(0, (end - buffer.offset) // width), total)  # behind these
    out = part.new_zeros(()).expand(asked.shape[-1], width)
    if first < last:
        whole = part.narrow(-1, buffer.offset + first * width - begin, (last - first) * width)
        some = whole.unflatten(-1, (last - first, width)).index_select(0, (asked - first).clamp(0, last - first - 1))
        out = torch.where(((asked >= first) & (asked < last))[:, None], some, out)
    for row in sorted({first - 1, last} - set(range(first, last))):  # cut, at either end
        low, high = buffer.offset + row * width, buffer.offset + (row + 1) * width
        here = max(low, begin), min(high, end)
        if 0 <= row < total and here[0] < here[1]:
            cut = F.pad(part.narrow(-1, here[0] - begin, here[1] - here[0]), (here[0] - low, high - here[1]))
            out = torch.where((asked == row)[:, None], cut, out)
    return out
