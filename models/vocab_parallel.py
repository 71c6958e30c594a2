"""parts: the loss of a head of which each process has some rows and none has all (see ``fquant.communication.Part``).

Each process computes logits of the tokens of all, of its rows r only. Let z be the logarithm of the sum of exponentials
over r, and o that over all other rows, less z. Then r has the share s = 1 / (1 + exp o) of all probability, and

    nll  =  (z - logit of t) + log(1 + exp o)          on the process that has the target t
    dx   =  sum over processes of s · softmax over r · W of r, less W of t

For o processes need of each other's rows z alone, a number a token. Chunks (see head.py) exchange nothing.

The middle of a chunk is the op ``fquant.kernels.ops.nll``: z - logit, and the slope in the dtype of the logits, which is
softmax over r less one at the target. So what the process of the target adds is s · slope · W less (1 - s) · W of t:
where a token is almost sure, and its gradient small, that is as precise as on one process. Where the target is another
process's, row 0 stands in for it, and its slope is made its softmax again, exp(logit - z). What processes add to a
gradient is summed in float32, in which a product is summed too, and is rounded once.

Derivatives beyond the first, and forward ones, are those of the whole head, which is gathered for them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fquant import tree
from fquant.communication import VocabShard
from fquant.kernels.ops import nll
from fquant.packed_linear import Packed, embedding, linear

from .blocks import IGNORE


def filled(part: VocabShard, x: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """x f[n d] and targets [n] with tokens that are ignored behind them, so that every process has ``part.most``."""
    room = part.most - len(x)
    return F.pad(x, (0, 0, 0, room)), F.pad(targets, (0, room), value=IGNORE)


def losses(structure: tree.Structure, chunk: int, x: Tensor, targets: Tensor, *leaves: Tensor) -> tuple[Tensor]:
    """x f[n d], targets i64[n] and the leaves of a Part -> nll f32[n]; n is the same on every process.

    ``chunk`` is how many tokens are handled at a time were the head whole; of a part, as many more as it is smaller.

    Raises IndexError on every process for a target of any that is neither -100 nor in [0, part.size).
    """
    met = _meet(structure, x, targets, leaves)
    values, logits = _chunks(_values, met, chunk * len(met.x) // len(x))
    return (_scattered(met, values, _odds(met.part, values + logits)),)


def both(structure: tree.Structure, chunk: int, x: Tensor, targets: Tensor, *leaves: Tensor) -> tuple[Tensor, Tensor]:
    """:func:`losses`, and the gradient [n d] of their sum with respect to x, in x's dtype."""
    met = _meet(structure, x, targets, leaves)
    values, logits, dx = _chunks(_slopes, met, chunk * len(met.x) // len(x))
    odds = _odds(met.part, values + logits)
    row = embedding(met.at, met.weight).to(x.dtype)  # [m d], as the product had it
    less = torch.where(met.has, torch.sigmoid(odds), 0)
    dx = torch.sigmoid(-odds)[:, None] * dx - less[:, None] * row  # f32
    dx = met.part.scatter(torch.where(met.counts[:, None], dx, 0))
    return _scattered(met, values, odds), dx.to(x.dtype)


class _Met(NamedTuple):
    """The m tokens of all processes, and the rows that they meet here."""

    part: VocabShard
    weight: Any  # [rows d], dense in x's dtype
    x: Tensor  # [m d]
    counts: Tensor  # bool[m], whether the target is not to be ignored
    has: Tensor  # bool[m], whether it is among the rows
    at: Tensor  # i64[m], which of them it is, or 0


def _meet(structure: tree.Structure, x: Tensor, targets: Tensor, leaves: tuple[Tensor, ...]) -> _Met:
    part = tree.unflatten(structure, leaves)
    x, targets = part.gather(x), part.gather(targets)
    counts = targets != IGNORE
    known = torch.where(counts, targets, 0)
    known = known + known.new_zeros(()).expand(part.size).index_select(0, known)  # refuses what is outside
    rows = len(tree.leaves(part.table)[0])
    has = counts & (known >= part.first) & (known < part.first + rows)
    at = torch.where(has, known - part.first, 0)
    table = part.table
    weight = replace(table, shape=(rows, *table.shape[1:])) if isinstance(table, Packed) else table.to(x.dtype)
    return _Met(part, weight, x, counts, has, at)


def _chunks(f: Callable[..., tuple[Tensor, ...]], met: _Met, size: int) -> list[Tensor]:
    """``f(weight, x, at, has)`` of ``size`` tokens at a time, put together again."""
    chunks = zip(*(t.split(size) for t in (met.x, met.at, met.has)), strict=True)
    return [torch.cat(parts) for parts in zip(*(f(met.weight, *some) for some in chunks), strict=True)]


def _values(weight: Any, x: Tensor, at: Tensor, has: Tensor) -> tuple[Tensor, Tensor]:
    """x [c d], at [c] -> z - logit f32[c], logit f32[c]."""
    logits = linear(x, weight)  # [c rows]
    values = nll.nll(logits, at, IGNORE)
    return values, _at(logits, at).to(values.dtype)


def _slopes(weight: Any, x: Tensor, at: Tensor, has: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """:func:`_values`, and the slope's product with the rows [c d]."""
    logits, pull, *_ = torch.func.vjp(lambda x: linear(x, weight), x)
    values, slopes = nll.nll_backward(logits, at, IGNORE)
    right = torch.where(has, _at(slopes, at), torch.exp(-values).to(x.dtype))
    rows = torch.arange(len(at), device=at.device)
    slopes.index_put_((rows, at), right)  # nobody else has them, and they are as large as the logits
    return values, _at(logits, at).to(values.dtype), pull(slopes)[0]


def _at(t: Tensor, at: Tensor) -> Tensor:
    """Of each row of ``t`` [c n] one element, [c]."""
    return t.gather(1, at[:, None])[:, 0]


def _odds(part: VocabShard, z: Tensor) -> Tensor:
    """The logarithm of the sum of exponentials over the rows of other processes, less ``z`` f[m], that over our own."""
    every = part.gather(z[None])  # [processes m]
    return torch.logsumexp(torch.cat([every[: part.place], every[part.place + 1 :]]) - z, 0)


def _scattered(met: _Met, values: Tensor, odds: Tensor) -> Tensor:
    """The losses f32[n] over all rows of this process's tokens, from those [m] over the rows that are here."""
    return met.part.scatter(torch.where(met.has, values - F.logsigmoid(-odds), 0))
