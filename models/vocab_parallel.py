"""Vocabulary-parallel cross entropy: every process holds some rows of the head (``communication.VocabShard``).

Each process computes the logits of the tokens of all processes for its own rows r. Let z be the log-sum-exp over r, and
o the log-sum-exp over all other rows less z. Then r has the share s = 1 / (1 + exp o) of all probability, and

    nll  =  (z - logit of t) + log(1 + exp o)          on the process that holds the target t
    dx   =  sum over processes of s · softmax over r · W of r, less W of t

For o the processes exchange z alone, one number a token. Chunks (see ``models.fused_cross_entropy``) exchange nothing.

The op ``fquant.kernels.ops.nll`` returns z - logit and the gradient of the logits: softmax over r, less one at the
target. So the process that holds the target adds s · gradient · W less (1 - s) · W of t, which is precise for an almost
certain prediction too. Where another process holds the target, row 0 stands in for it, and its gradient is set back to
its softmax, exp(logit - z). The addends of processes are summed in float32 and rounded once.

Forward derivatives and derivatives beyond the first gather the whole head.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fquant import tree
from fquant.communication import VocabShard
from fquant.kernels.ops import nll as ops
from fquant.packed_linear import Packed, embedding, linear

from .blocks import IGNORE


def nll(structure: tree.Structure, chunk: int, x: Tensor, targets: Tensor, *leaves: Tensor) -> tuple[Tensor]:
    """x f[n d], targets i64[n] and the leaves of a VocabShard -> nll f32[n]; n is the same on every process.

    ``chunk`` is the number of tokens handled at a time with a whole head; a shard handles as many times more as there
    are processes. Raises IndexError on every process if any has a target that is neither -100 nor in [0, shard.size).
    """
    local = _gather(structure, x, targets, leaves)
    size = chunk * len(local.x) // len(x)
    losses, logits = map_chunks(partial(_local_nll, local.weight), size, local.x, local.targets, local.holds)
    return (_scatter_nll(local, losses, _log_odds(local.shard, losses + logits)),)


def nll_and_dx(
    structure: tree.Structure, chunk: int, x: Tensor, targets: Tensor, *leaves: Tensor
) -> tuple[Tensor, Tensor]:
    """Compute :func:`nll`, and the gradient [n d] of its sum with respect to x, in x's dtype."""
    local = _gather(structure, x, targets, leaves)
    size, f = chunk * len(local.x) // len(x), partial(_local_nll_and_dx, local.weight)
    losses, logits, dx = map_chunks(f, size, local.x, local.targets, local.holds)
    log_odds = _log_odds(local.shard, losses + logits)
    row = embedding(local.targets, local.weight).to(x.dtype)  # [m d], as the product had it
    other_share = torch.where(local.holds, torch.sigmoid(log_odds), 0)
    dx = torch.sigmoid(-log_odds)[:, None] * dx - other_share[:, None] * row  # f32
    dx = local.shard.scatter(torch.where(local.counted[:, None], dx, 0))
    return _scatter_nll(local, losses, log_odds), dx.to(x.dtype)


class _LocalHead(NamedTuple):
    """The m tokens of all processes beside the rows of this process."""

    shard: VocabShard
    weight: Any  # [rows d], dense in x's dtype
    x: Tensor  # [m d]
    counted: Tensor  # bool[m], the target is not to be ignored
    holds: Tensor  # bool[m], the target is one of the rows
    targets: Tensor  # i64[m], the target's place among the rows, or 0


def _gather(structure: tree.Structure, x: Tensor, targets: Tensor, leaves: tuple[Tensor, ...]) -> _LocalHead:
    shard = tree.unflatten(structure, leaves)
    x, targets = shard.gather(x), shard.gather(targets)
    counted = targets != IGNORE
    known = torch.where(counted, targets, 0)
    known = known + known.new_zeros(()).expand(shard.size).index_select(0, known)  # IndexError outside of [0, size)
    rows = len(tree.leaves(shard.table)[0])
    holds = counted & (known >= shard.first) & (known < shard.first + rows)
    table = shard.table
    weight = replace(table, shape=(rows, *table.shape[1:])) if isinstance(table, Packed) else table.to(x.dtype)
    return _LocalHead(shard, weight, x, counted, holds, torch.where(holds, known - shard.first, 0))


def chunks(size: int, *rows: Tensor) -> list[tuple[Tensor, ...]]:
    """Split each tensor along dim 0 into chunks of ``size`` rows; one empty chunk if there are no rows."""
    return [t.split(size) if len(t) else (t,) for t in rows]  # torch 2.11 cannot trace the split of an empty tensor


def map_chunks(f: Callable[..., tuple[Tensor, ...]], size: int, *rows: Tensor) -> tuple[Tensor, ...]:
    """Concatenate the results of ``f`` over chunks of ``size`` rows."""
    return tuple(map(torch.cat, zip(*map(f, *chunks(size, *rows)), strict=True)))


def _local_nll(weight: Any, x: Tensor, targets: Tensor, holds: Tensor) -> tuple[Tensor, Tensor]:
    """x [c d], targets [c] -> z - logit f32[c], logit f32[c]."""
    logits = linear(x, weight)  # [c rows]
    losses = ops.nll(logits, targets, IGNORE)
    return losses, _pick(logits, targets).to(losses.dtype)


def _local_nll_and_dx(weight: Any, x: Tensor, targets: Tensor, holds: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Compute :func:`_local_nll`, and the product of the logits' gradient with the rows [c d]."""
    logits, pull, *_ = torch.func.vjp(lambda x: linear(x, weight), x)
    losses, dlogits = ops.nll_backward(logits, targets, IGNORE)
    at_target = torch.where(holds, _pick(dlogits, targets), torch.exp(-losses).to(x.dtype))
    rows = torch.arange(len(targets), device=targets.device)
    dlogits.index_put_((rows, targets), at_target)  # in place: no other holds them, and they are as large as the logits
    return losses, _pick(logits, targets).to(losses.dtype), pull(dlogits)[0]


def _pick(t: Tensor, columns: Tensor) -> Tensor:
    """Take one element of each row of ``t`` [c n], [c]."""
    return t.gather(1, columns[:, None])[:, 0]


def _log_odds(shard: VocabShard, z: Tensor) -> Tensor:
    """Return the log-sum-exp over the rows of other processes, less ``z`` f[m], that over our own."""
    every = shard.gather(z[None])  # [processes m]
    return torch.logsumexp(torch.cat([every[: shard.rank], every[shard.rank + 1 :]]) - z, 0)


def _scatter_nll(local: _LocalHead, losses: Tensor, log_odds: Tensor) -> Tensor:
    """Turn losses [m] over the rows of this process into those f32[n] of its tokens over all rows."""
    return local.shard.scatter(torch.where(local.holds, losses - F.logsigmoid(-log_odds), 0))
