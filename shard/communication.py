"""The Comm of a mesh: the functions with which a forward pass communicates.

    comm = shard.comm(mesh, rules, tokens=512)
    logits = decoder.forward(params, tokens, cfg, comm)

``open`` gathers a block's bytes in one all-gather and views its buffers out of the result. ``wrap`` recomputes a block
in the backward, so that gathered bytes are not kept but gathered again. A block that is not split needs no collective.
A captured step need not recompute: see shard/passes/regather.py.

``pick`` brings the rows of an embedding that are looked up (sharded_embedding.py). ``cut`` leaves the rows of a head in
place and brings the tokens to them (vocab_parallel.py). Each does so if that is fewer bytes than the table. Code that
computes logits gathers the head, once if it is the embedding too. With ``deduplicate_gathers`` the rows come on top.
"""

from dataclasses import replace
from functools import partial
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from fquant.activation_checkpoint import remat
from fquant.communication import Comm, identity

from . import bundle, sharded_embedding, vocab_parallel
from .bundle import Bundle
from .collectives import all_gather
from .device_mesh import position
from .rules import Rules, check_rules


def comm(mesh: DeviceMesh, rules: Rules, order: int = 1, recompute: bool = True, tokens: int | None = None) -> Comm:
    """Return the Comm of ``rules`` over ``mesh``; ``order`` 2 allows derivatives beyond the first (see fquant.remat).

        rank 0  first half of a block's bytes   -> comm.load ->  the block
        rank 1  second half                     -> comm.load ->  the block

    Blocks are constants and have no gradient; the backward gathers them again. Without ``recompute`` blocks are not
    recomputed, for a step that is captured with ``regather_blocks``; uncaptured, it keeps every gathered block.

    ``tokens`` is the maximum over ranks of the tokens that are looked up, or have a loss, at once. It is the same
    number on every rank; for shares of a batch see ``shard.max_local_rows``. Under vmap it counts one example, and
    every rank must map over as many. Without it tables are gathered, because no rank knows the count of another.

    Raises ValueError for ``tokens`` below 1; the Comm raises ValueError for more tokens than that.
    """
    if tokens is not None and tokens < 1:
        raise ValueError(f"comm: tokens is {tokens}; wanted at least 1, or None to gather tables")
    check_rules(rules, mesh)
    split = rules.block is not None and position(mesh, rules.block)[1] > 1
    group = mesh.get_group(rules.block) if split else None
    wrap = partial(remat, order=order) if recompute else identity
    plain = Comm(open=partial(_open, group=group), wrap=wrap)
    if group is None or tokens is None:
        return plain
    known = {"group": group, "max_tokens": tokens}
    return replace(plain, pick=partial(_pick, **known), cut=partial(_cut, **known))


def _open(x: Any, group: dist.ProcessGroup | None) -> Any:
    _check(x, group)
    return bundle.read(x.bytes if group is None else all_gather(x.bytes, group), x.layout)


def _pick(x: Any, ids: Tensor, group: dist.ProcessGroup, max_tokens: int) -> Any:
    _check(x, group)
    if sharded_embedding.is_less(x.layout, group.size(), max_tokens):
        return sharded_embedding.rows(x, ids, group, max_tokens)
    return _open(x, group)


def _cut(x: Any, rows: Tensor, path: str, group: dist.ProcessGroup, max_tokens: int) -> Any:
    _check(x, group)
    if vocab_parallel.is_less(x.layout, path, group.size(), max_tokens, rows):
        return vocab_parallel.cut(x, rows, path, group, max_tokens, partial(_open, group=group))
    return _open(x, group)


def _check(x: Any, group: dist.ProcessGroup | None) -> None:
    if not isinstance(x, Bundle):
        raise TypeError(f"a {type(x).__name__} is closed, and this comm opens bundles made by shard.place")
    if isinstance(x.bytes, DTensor):
        raise TypeError("the bundle holds a DTensor, which torch.func cannot trace; pass shard.local(base) to the step")
    ranks = 1 if group is None else group.size()
    if x.bytes.shape[-1] * ranks != x.layout.size:
        raise ValueError(
            f"the bundle holds {x.bytes.shape[-1]} of {x.layout.size} bytes, and this comm gathers from {ranks} ranks; "
            "make the comm with the mesh and the rules that the bundle was placed with"
        )
