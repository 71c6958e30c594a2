"""part: the rows of a head that a rank has, and how they meet the tokens of all ranks.

The loss of a token needs all rows of a head, but little comes out: a number, and a gradient as wide as the token.
Gathered, a table of 32000 rows is 31 times the bytes of 1024 tokens. Here the tokens travel and the table stays:

    what is lacking    u8[ranks·lacking]       see below; where any rank lacks anything: one reduce-scatter
    x, targets         f[ranks·most dim], i64[ranks·most]   those of every rank to all: two all-gathers
    sums               f[ranks ranks·most]     of exponentials, over the rows of each rank: one all-gather
    losses, gradients  f[ranks·most], f[ranks·most dim]     to which each rank adds: two reduce-scatters

What is computed between is the model's (models/vocab_parallel.py). Sums, losses and gradients travel in float32 at least: in
bfloat16 a sum over ranks would be rounded once a rank.

Every rank has as many rows as any other, or one more. A bundle's bytes are cut among ranks wherever it falls, so most
bytes of a rank's rows are there already, and some it lacks: those of a row that is cut, those of a packed table's
scales, which lie behind all codes, and the other buffers of the block, which every rank needs whole. Who lacks what
follows from the layout: each gives the bytes that it has of it, zero elsewhere, and the sum is what was lacking.

Whether this is fewer bytes than the block is decided by its layout, by ``most`` and by what a token is, which are the
same on every rank: see :func:`is_less`.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fquant import tree
from fquant.communication import VocabShard

from . import bundle, sharded_embedding
from .bundle import Buffer, Bundle, Layout
from .collectives import all_gather, reduce_scatter

Span = tuple[int, int]  # some bytes of a bundle: the first, and the one behind the last


def is_less(layout: Layout, path: str, ranks: int, most: int, x: Tensor) -> bool:
    """Whether the losses of up to ``most`` tokens ``x`` f[... dim] for each rank are fewer bytes without the table.

    The table is what is at ``path`` in the block that lies as ``layout``. Never where rows cannot be told apart (see
    ``lookup.is_less``), nor where ranks are more than rows.
    """
    if sharded_embedding.num_rows(_table(layout, path)) < ranks:
        return False
    wide = torch.promote_types(x.dtype, torch.float32).itemsize  # of sums, losses and slopes
    token = x.shape[-1] * (x.itemsize + wide) + torch.int64.itemsize + (ranks + 1) * wide
    return ranks * (most * token + _room(_lacking(layout, path, ranks))) < layout.size


def cut(x: Bundle, rows: Tensor, path: str, group: dist.ProcessGroup, most: int, whole: Callable[[Bundle], Any]) -> Any:
    """The block ``x``, whose bytes u8[size / ranks] are this rank's, with a Part for the table that is at ``path``.

    ``rows`` f[... dim] are the tokens that it is for; ``whole(x)`` opens all of the block. The table is a constant, and
    has no gradient. Raises ValueError for more than ``most`` tokens.
    """
    if (n := math.prod(rows.shape[:-1])) > most:
        raise ValueError(
            f"{n} tokens have a loss, and this comm is for at most {most} a rank; "
            f"make it with tokens={n} or more, the same on every rank"
        )
    ranks, rank, begin = group.size(), group.rank(), group.rank() * x.bytes.shape[-1]
    lacking = _lacking(x.layout, path, ranks)
    brought = _bring(x.bytes, begin, lacking, group)

    def bytes_of(span: Span) -> Tensor:
        return brought[span] if span in brought else x.bytes.narrow(-1, span[0] - begin, span[1] - span[0])

    def read(buffer: Buffer) -> Tensor:
        pieces = _pieces(_span(buffer), begin, begin + x.bytes.shape[-1])
        if _room(lacking):  # one that lacks nothing copies as well, so that ranks take the same memory
            return bundle.view(torch.cat(list(map(bytes_of, pieces)), -1), buffer)
        return bundle.view(bytes_of(*pieces), buffer)

    block = tree.unflatten(x.layout.structure, list(map(read, _own(x.layout, path, rank, ranks))))
    table, total = tree.get(block, path), sharded_embedding.num_rows(_table(x.layout, path))
    gather, scatter = partial(all_gather, group=group), partial(reduce_scatter, group=group)
    first, _ = _rows(total, rank, ranks)
    known = VocabShard(table, x, first, total, rank, most, gather, scatter, partial(_whole, whole, path))
    return tree.map(lambda leaf: known if leaf is table else leaf, block, is_leaf=lambda leaf: leaf is table)


def _whole(whole: Callable[[Bundle], Any], path: str, x: Bundle) -> Any:
    return tree.get(whole(x), path)


def _table(layout: Layout, path: str) -> list[Buffer]:
    """The buffers of what is at ``path``."""
    return [b for b in layout.buffers if not path or b.path == path or b.path.startswith(f"{path}.")]


def _rows(total: int, rank: int, ranks: int) -> Span:
    """The rows of a rank: the first, and the one behind the last."""
    return total * rank // ranks, total * (rank + 1) // ranks


def _own(layout: Layout, path: str, rank: int, ranks: int) -> list[Buffer]:
    """What a rank is to have of each buffer, where it lies in the bytes of all: some rows of the table, else all."""
    table = _table(layout, path)

    def own(buffer: Buffer) -> Buffer:
        if buffer not in table:
            return buffer
        first, last = _rows(buffer.shape[0], rank, ranks)
        return replace(buffer, shape=(last - first, *buffer.shape[1:]), offset=buffer.offset + first * buffer.width)

    return list(map(own, layout.buffers))


def _span(buffer: Buffer) -> Span:
    return buffer.offset, buffer.offset + buffer.nbytes


def _pieces(span: Span, begin: int, end: int) -> list[Span]:
    """``span`` in up to three: what is before ``begin``, what is from there up to ``end``, and what is behind."""
    low, high = span
    at = [low, min(max(begin, low), high), min(max(end, low), high), high]
    return [piece for piece in itertools.pairwise(at) if piece[0] < piece[1]]


def _lacking(layout: Layout, path: str, ranks: int) -> list[list[Span]]:
    """For each rank the bytes that it is to have, and does not."""
    size = layout.size // ranks

    def one(rank: int) -> list[Span]:
        own = map(_span, _own(layout, path, rank, ranks))
        pieces = itertools.chain.from_iterable(_pieces(span, rank * size, (rank + 1) * size) for span in own)
        return [piece for piece in pieces if piece[0] // size != rank]

    return list(map(one, range(ranks)))


def _room(lacking: list[list[Span]]) -> int:
    """The most bytes that a rank lacks."""
    return max(map(_length, lacking))


def _length(spans: list[Span]) -> int:
    return sum(high - low for low, high in spans)


def _bring(part: Tensor, begin: int, lacking: list[list[Span]], group: dist.ProcessGroup) -> dict[Span, Tensor]:
    """What this rank lacks. Every rank gives of what any lacks what is in its ``part``, which begins at ``begin``."""
    room, end = _room(lacking), begin + part.shape[-1]
    if not room:
        return {}
    given, filled = [], 0
    for rank, spans in enumerate(lacking):
        place = rank * room
        for low, high in spans:
            first, last = max(low, begin), min(high, end)
            if first < last:
                at = place + first - low
                given += [part.new_zeros(at - filled), part.narrow(-1, first - begin, last - first)]
                filled = at + last - first
            place += high - low
    given.append(part.new_zeros(len(lacking) * room - filled))
    mine = lacking[group.rank()]
    got = reduce_scatter(torch.cat(given), group).split([high - low for low, high in mine] + [room - _length(mine)])
    return dict(zip(mine, got, strict=False))  # the last is what others lack more
