"""Vocabulary-parallel loss: each rank keeps some rows of a head, and the tokens of all ranks come to them.

The loss of a token needs all rows of the head, but its results are small: a number, and a gradient as wide as the
token. A table of 32000 rows has 31 times the bytes of 1024 tokens. With up to m tokens on each rank:

    missing bytes      u8[ranks·room]                 see below; if any rank misses bytes: one reduce-scatter
    x, targets         f[ranks·m dim], i64[ranks·m]   of every rank to all: two all-gathers
    sums               f[ranks ranks·m]               of exponentials, over the rows of each rank: one all-gather
    losses, gradients  f[ranks·m], f[ranks·m dim]     to which each rank adds: two reduce-scatters

        rank 0  holds rows 0 and 1 of 4, tokens [a]  ->  sums of [a b] over rows 0 and 1  ->  loss of a
        rank 1  holds rows 2 and 3,      tokens [b]  ->  sums of [a b] over rows 2 and 3  ->  loss of b

The computation between is in models/vocab_parallel.py. Sums, losses and gradients travel at least in float32, because
in bfloat16 a sum over ranks would be rounded once for each rank.

A bundle's bytes are cut into equal parts, so a rank has most bytes of its rows already. It may miss those of a row that
is cut, and those of a packed table's scales, which are behind all codes. It misses other buffers of the block, too,
which every rank needs whole. The layout determines who misses what. Each rank gives its part of the missing bytes, zero
elsewhere, and the sum completes them.
"""

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

Span = tuple[int, int]  # a range of bytes of a bundle: the first, and the end


def is_less(layout: Layout, path: str, ranks: int, max_tokens: int, x: Tensor) -> bool:
    """Return True if the losses of ``max_tokens`` tokens ``x`` f[... dim] for each rank are fewer bytes than the block.

    The table is at ``path`` in the block of ``layout``. False if it has no separate rows, or fewer rows than ranks.
    """
    if sharded_embedding.num_rows(_table(layout, path)) < ranks:
        return False
    wide = torch.promote_types(x.dtype, torch.float32).itemsize  # of sums, losses and gradients
    token = x.shape[-1] * (x.itemsize + wide) + torch.int64.itemsize + (ranks + 1) * wide
    return ranks * (max_tokens * token + _room(_missing(layout, path, ranks))) < layout.size


def cut(
    x: Bundle, rows: Tensor, path: str, group: dist.ProcessGroup, max_tokens: int, whole: Callable[[Bundle], Any]
) -> Any:
    """Return the block ``x`` with a VocabShard in place of the table at ``path``; ``x`` has this rank's bytes.

    ``rows`` f[... dim] are the tokens of the loss; ``whole(x)`` opens all of the block. It is not used on one device.
    The table is a constant and has no backward. Raises ValueError for more than ``max_tokens`` tokens.
    """
    sharded_embedding.check_count(math.prod(rows.shape[:-1]), "have a loss", max_tokens)
    ranks, rank, begin = group.size(), group.rank(), group.rank() * x.bytes.shape[-1]
    missing = _missing(x.layout, path, ranks)
    received = _receive(x.bytes, begin, missing, group)

    def bytes_of(span: Span) -> Tensor:
        return received[span] if span in received else x.bytes.narrow(-1, span[0] - begin, span[1] - span[0])

    def read(buffer: Buffer) -> Tensor:
        pieces = _pieces(buffer, begin, begin + x.bytes.shape[-1])
        if _room(missing):  # a rank that misses nothing copies as well, so that all take the same memory
            return bundle.view(torch.cat(list(map(bytes_of, pieces)), -1), buffer)
        return bundle.view(bytes_of(*pieces), buffer)

    block = tree.unflatten(x.layout.structure, list(map(read, _own(x.layout, path, rank, ranks))))
    table, total = tree.get(block, path), sharded_embedding.num_rows(_table(x.layout, path))
    gather, scatter = partial(all_gather, group=group), partial(reduce_scatter, group=group)
    first, full = total * rank // ranks, lambda closed: tree.get(whole(closed), path)
    shard = VocabShard(table, x, first, total, rank, max_tokens, gather, scatter, full)
    return tree.map(lambda leaf: shard if leaf is table else leaf, block, is_leaf=lambda leaf: leaf is table)


def _table(layout: Layout, path: str) -> list[Buffer]:
    """Return the buffers of the table at ``path``."""
    return [b for b in layout.buffers if not path or b.path == path or b.path.startswith(f"{path}.")]


def _own(layout: Layout, path: str, rank: int, ranks: int) -> list[Buffer]:
    """Return the part of each buffer that ``rank`` needs: its rows of the table, and all of the other buffers."""

    def rows(of: Buffer) -> Buffer:
        first, stop = (of.shape[0] * i // ranks for i in (rank, rank + 1))
        return replace(of, shape=(stop - first, *of.shape[1:]), offset=of.offset + first * of.width)

    table = _table(layout, path)
    return [rows(buffer) if buffer in table else buffer for buffer in layout.buffers]


def _pieces(buffer: Buffer, begin: int, end: int) -> list[Span]:
    """Return the bytes of ``buffer`` in up to three spans: before ``begin``, up to ``end``, and behind it."""
    low, high = buffer.offset, buffer.end
    cuts = [low, min(max(begin, low), high), min(max(end, low), high), high]
    return [span for span in itertools.pairwise(cuts) if span[0] < span[1]]


def _missing(layout: Layout, path: str, ranks: int) -> list[list[Span]]:
    """Return for each rank the bytes that it needs and does not have."""
    size, missing = layout.size // ranks, list[list[Span]]()
    for rank in range(ranks):
        pieces = [_pieces(own, rank * size, (rank + 1) * size) for own in _own(layout, path, rank, ranks)]
        missing.append([span for span in itertools.chain(*pieces) if span[0] // size != rank])
    return missing


def _room(missing: list[list[Span]]) -> int:
    """Return the maximum over ranks of the bytes that a rank misses."""
    return max(sum(high - low for low, high in spans) for spans in missing)


def _receive(part: Tensor, begin: int, missing: list[list[Span]], group: dist.ProcessGroup) -> dict[Span, Tensor]:
    """Return the bytes that this rank misses. It gives the others theirs from ``part``, which begins at ``begin``."""
    room, end = _room(missing), begin + part.shape[-1]
    if not room:
        return {}
    given, filled = [], 0
    for rank, spans in enumerate(missing):
        place = rank * room
        for low, high in spans:
            first, last = max(low, begin), min(high, end)
            if first < last:
                at = place + first - low
                given += [part.new_zeros(at - filled), part.narrow(-1, first - begin, last - first)]
                filled = at + last - first
            place += high - low
    given.append(part.new_zeros(len(missing) * room - filled))
    sizes = [high - low for low, high in missing[group.rank()]]
    got = reduce_scatter(torch.cat(given), group).split([*sizes, room - sum(sizes)])
    return dict(zip(missing[group.rank()], got, strict=False))  # the last of ``got`` is padding
