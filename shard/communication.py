"""The Comm of a mesh: the functions with which a loss communicates.

    comm = shard.comm(mesh, rules, tokens=512)
    logits = decoder.forward(params, tokens, cfg, comm)

``open`` gathers a block's bytes in one all-gather; those of an offloaded block are fetched from the host first.
``wrap`` recomputes a block in the backward, so that gathered bytes are not kept but gathered again; a captured step
need not recompute (shard/passes/regather.py). ``pick`` brings the rows of an embedding, and ``cut`` the tokens to the
rows of a head, if these are fewer bytes than the table. Code that computes logits gathers the head, once if it is the
embedding too. With ``deduplicate_gathers`` the rows come on top.

``total`` is a psum over the axes of the batch, without a derivative. A loss without ``count`` calls it, on every rank.

A FloatBundle or a RowBundle, which is trained, is opened whole by all of them: its gradient is that of the whole table,
and goes back in the one reduce-scatter of its block.
"""

from dataclasses import replace
from functools import partial
from typing import Any

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from fquant.activation_checkpoint import remat
from fquant.communication import Comm, identity, no_total

from . import bundle, sharded_embedding, vocab_parallel
from .bundle import Bundle
from .collectives import all_gather
from .data import psum
from .device_mesh import device_of, position
from .rules import Rules, check_rules
from .trained import FloatBundle, RowBundle, Scaled, float_bundle, row_bundle
from .transport.host import arrived, fetch


def comm(
    mesh: DeviceMesh, rules: Rules, order: int = 1, recompute: bool = True, tokens: int | None = None,
    by_row: bool = False,
) -> Comm:  # fmt: skip
    """Return the Comm of ``rules`` over ``mesh``; ``order`` 2 allows derivatives beyond the first (see fquant.remat).

        rank 0  first half of a block's bytes   -> comm.load ->  the block
        rank 1  second half                     -> comm.load ->  the block

    Packed blocks are constants and have no gradient. That of a FloatBundle is this rank's part of the sum over the axis
    ``rules.block``, by one reduce-scatter a block. The backward gathers blocks again. Without ``recompute`` none are
    recomputed, for a step that is captured with ``regather_blocks``; uncaptured, it keeps every gathered block.

    ``tokens`` is the maximum over ranks of the tokens that are looked up, or have a loss, at once. It is the same
    number on every rank; for shares of a batch see ``shard.max_local_rows``. Under vmap it counts one example, and
    every rank must map over as many. Without it tables are gathered, because no rank knows the count of another.

    ``by_row`` is for losses of single rows under vmap, whose number may differ between ranks (shard/ordered). Then
    ``tokens`` counts those of all rows, and a head is gathered, because sums over a split one depend on the mesh. A
    loss must be given ``count``, the number of targets of the whole batch.

    Raises ValueError for ``tokens`` below 1. The Comm raises ValueError for more tokens than that, and with ``by_row``
    for a loss without ``count``.
    """
    if tokens is not None and tokens < 1:
        raise ValueError(f"comm: tokens is {tokens}; wanted at least 1, or None to gather tables")
    check_rules(rules, mesh)
    split = rules.block is not None and position(mesh, rules.block)[1] > 1
    group = mesh.get_group(rules.block) if split else None
    ranks = group.size() if group else 1
    wrap = partial(remat, order=order) if recompute else identity
    device = device_of(mesh)

    def near(x: Any) -> Bundle:
        _check(x, ranks)
        return replace(x, bytes=arrived(fetch(x.bytes, device)), offloaded=False) if x.offloaded else x

    def open(x: Any) -> Any:
        if isinstance(x, FloatBundle | Scaled):
            b, scales = (x.bundle, x.scales) if isinstance(x, Scaled) else (x, None)
            _check_held(b.values, float_bundle.length(b.layout), ranks, "elements")
            return float_bundle.open(b, group, scales)
        if isinstance(x, RowBundle):
            _check_held(x.bytes, x.layout.size, ranks, "bytes")
            return row_bundle.open(x, group)
        x = near(x)
        return bundle.read(all_gather(x.bytes, group) if group else x.bytes, x.layout)

    one = position(mesh, rules.batch)[1] == 1
    total = no_total if by_row else identity if one else lambda t: psum(t.detach(), mesh, rules.batch)
    plain = Comm(open=open, wrap=wrap, total=total)
    if group is None or tokens is None:
        return plain

    def pick(x: Any, ids: Tensor) -> Any:
        if not isinstance(x, Bundle):
            return open(x)
        x = near(x)
        is_less = sharded_embedding.is_less(x.layout, ranks, tokens)
        return sharded_embedding.rows(x, ids, group, tokens, by_row) if is_less else open(x)

    def cut(x: Any, rows: Tensor, path: str) -> Any:
        if not isinstance(x, Bundle):
            return open(x)
        x = near(x)
        is_less = vocab_parallel.is_less(x.layout, path, ranks, tokens, rows)
        return vocab_parallel.cut(x, rows, path, group, tokens, open) if is_less else open(x)

    return replace(plain, pick=pick) if by_row else replace(plain, pick=pick, cut=cut)


def _check(x: Any, ranks: int) -> None:
    if not isinstance(x, Bundle):
        raise TypeError(f"a {type(x).__name__} is closed, and this comm opens bundles made by shard.place")
    _check_held(x.bytes, x.layout.size, ranks, "bytes")


def _check_held(part: Tensor, size: int, ranks: int, unit: str) -> None:
    if isinstance(part, DTensor):
        raise TypeError("the bundle holds a DTensor, which torch.func cannot trace; pass shard.local(base) to the step")
    if part.shape[-1] * ranks != size:
        held = f"the bundle holds {part.shape[-1]} of {size} {unit}, and this comm gathers from {ranks} ranks"
        raise ValueError(f"{held}; make the comm with the mesh and the rules that the bundle was placed with")
