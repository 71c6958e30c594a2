"""comm: the six places where a forward pass communicates, over a mesh.

    comm = shard.comm(mesh, rules, tokens=512)
    logits = decoder.forward(params, tokens, cfg, comm)

``open`` gathers a block's bytes in one all-gather and views its buffers out of the result. ``wrap`` recomputes a block
in the backward, so that what was gathered is not kept: it is gathered again. A block that is nowhere split is opened
without a collective, and a block whose result is not differentiated is not recomputed. In a captured step blocks need
not be recomputed for that: see shard/passes/regather.py.

``pick`` brings the rows of an embedding that are asked for, and ``cut`` leaves the rows of a head where they are and
brings the tokens to them, each where that is fewer bytes than the table: see shard/sharded_embedding.py and shard/vocab_parallel.py. What
computes logits gathers the head. Where it is the embedding too, that is gathered once rather than twice, or, where
``schedule.keep`` would have joined the two gathers, the rows come on top.
"""

from __future__ import annotations

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
    """The Comm of ``rules`` over ``mesh``; ``order`` 2 allows derivatives beyond the first (see fquant.remat).

    Without ``recompute`` blocks are called plainly, for a step that is captured with ``regather``; uncaptured, such a
    step keeps every block that it gathered until its backward.

    ``tokens`` is the most that any rank looks up, or has the loss of, at once, the same number on every rank (of shares
    of a batch ``shard.max_local_rows``); under vmap that of one example, and every rank then maps over as many. Without it nobody
    can know how many the others have, and tables are gathered.

    Raises ValueError for ``tokens`` below 1, and later where there are more of them.
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
    return replace(plain, pick=partial(_pick, group=group, most=tokens), cut=partial(_cut, group=group, most=tokens))


def _open(x: Any, group: dist.ProcessGroup | None) -> Any:
    _check(x, group)
    return bundle.read(x.bytes if group is None else all_gather(x.bytes, group), x.layout)


def _pick(x: Any, ids: Tensor, group: dist.ProcessGroup, most: int) -> Any:
    _check(x, group)
    return (
        sharded_embedding.rows(x, ids, group, most)
        if sharded_embedding.is_less(x.layout, group.size(), most)
        else _open(x, group)
    )


def _cut(x: Any, rows: Tensor, path: str, group: dist.ProcessGroup, most: int) -> Any:
    _check(x, group)
    less = vocab_parallel.is_less(x.layout, path, group.size(), most, rows)
    return vocab_parallel.cut(x, rows, path, group, most, partial(_open, group=group)) if less else _open(x, group)


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
