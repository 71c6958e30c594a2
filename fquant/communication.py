"""Comm: the seven places where a loss may communicate. Memory: the two where a step of an optimiser may.

A model never sees a mesh. It is written once, against these functions, and gets other ones if its weights are sharded.
``LOCAL`` is the identity everywhere, and its ``total`` raises in a job of several ranks. ``replace(LOCAL, wrap=remat)``
saves memory on one device. So it is with an optimiser and ``BESIDE_PARAMETERS``, in whose place ``shard.PINNED`` keeps
moments on the host.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from .tree import node, static


class Loadable:
    """Base of nodes whose content, and so whose inner paths, are invisible until a Comm loads them."""

    def __getattr__(self, name: str) -> Any:
        fault = f"{type(self).__name__!r} object has no attribute {name!r}"
        raise AttributeError(f"{fault}; its block is not loaded: call comm.load on it first")


def wanted_weights(verb: str, w: Any) -> TypeError:
    """Return the error of a weight ``w`` that ``verb`` does not know."""
    fix = "; its block is not loaded: call comm.load on it first" if isinstance(w, Loadable) else ""
    return TypeError(f"{verb} got a weight of type {type(w).__name__}; wanted Tensor, Packed or Adapted{fix}")


@node
class AfterLoad(Loadable):
    """A deferred call ``then(load(closed), args)``, which ``load`` makes; ``args`` is a tree."""

    closed: Any
    args: Any
    then: Callable[[Any, Any], Any] = static()


@node
class LookedUpRows:
    """The rows of a table of ``size`` rows that some ids ask for, in the order of the ids.

    ``table`` is the weight [size dim], except that dim 0 of its tensors is that of the ids. It replaces the weight in a
    lookup of these very ids only.
    """

    table: Any
    size: int = static()


@node
class VocabShard:
    """This process's rows of a vocabulary-parallel table of ``size`` rows, from row ``first`` on.

    Dim 0 of the tensors of ``table`` counts these rows. ``gather`` concatenates the tokens [k ...] of n processes to
    [n·k ...], in which this process is at ``rank``; ``scatter`` sums [n·k ...] over processes, and each keeps its own
    [k ...]. A process has at most ``max_tokens``. ``whole(closed)`` is the full weight.
    """

    table: Any
    closed: Loadable
    first: int = static()
    size: int = static()
    rank: int = static()
    max_tokens: int = static()
    gather: Callable[[Tensor], Tensor] = static()
    scatter: Callable[[Tensor], Tensor] = static()
    whole: Callable[[Any], Any] = static()


def identity(x: Any) -> Any:
    """Return ``x``."""
    return x


def total_of_one_process(x: Tensor) -> Tensor:
    """Return ``x``; raise ValueError in a job of several ranks, whose gradients add up."""
    if dist.is_available() and dist.is_initialized() and (ranks := dist.get_world_size()) > 1:
        fix = "give the loss the comm of the mesh, or count, the number on all ranks"
        raise ValueError(f"count: missing on one of {ranks} ranks, whose gradients add up; {fix}")
    return x


def no_total(x: Tensor) -> Tensor:
    """Raise ValueError: a loss of single rows cannot know the number of targets of all rows."""
    raise ValueError("count: missing, and the gradients of rows add up; give the number of targets of the whole batch")


@dataclasses.dataclass(frozen=True)
class Comm:
    """The communication of a loss; a block calls ``load`` first, an embedding ``rows``, a head's loss ``part``.

    ``enter`` and ``exit`` surround a column- and row-parallel pair: identity forward and sum backward, and the reverse.
    ``wrap`` calls a block, perhaps with recomputation in the backward (see fquant.remat). The methods use the others:
    ``open`` gathers one Loadable into the tree that it stands for. ``pick`` gathers the rows of one closed table that
    ids ask for, or the table. ``cut`` opens one closed block except for its table, which may become a VocabShard if the
    rows travel instead. None means ``open``.

    ``total`` sums a constant over ranks with other rows of the batch. A loss divides by such a sum, so that gradients
    of ranks add up to the gradient of the whole batch.
    """

    open: Callable[[Any], Any] = identity
    enter: Callable[[Any], Any] = identity
    exit: Callable[[Any], Any] = identity
    wrap: Callable[[Callable[..., Any]], Callable[..., Any]] = identity
    pick: Callable[[Any, Tensor], Any] | None = None
    cut: Callable[[Any, Tensor, str], Any] | None = None
    total: Callable[[Tensor], Tensor] = total_of_one_process

    def load(self, x: Any) -> Any:
        """Open the parameters of one block and do the work that waits for them."""
        if isinstance(x, AfterLoad):
            return x.then(self.load(x.closed), x.args)
        return self.open(x) if isinstance(x, Loadable) else x

    def rows(self, x: Any, ids: Tensor) -> Any:
        """Make the table of an embedding ready for a lookup of ``ids``, and of no others."""
        if isinstance(x, AfterLoad):
            return x.then(self.rows(x.closed, ids), x.args)
        return self.pick(x, ids) if isinstance(x, Loadable) and self.pick is not None else self.load(x)

    def part(self, x: Any, rows: Tensor, path: str = "") -> Any:
        """Make the block that ends in a head ready for the loss of ``rows`` f[... dim], and of no others.

        The head's table at ``path`` is [vocab dim] or a VocabShard of it. Work that waits is done on the whole table.
        """
        is_closed = isinstance(x, Loadable) and not isinstance(x, AfterLoad)
        return self.cut(x, rows, path) if self.cut is not None and is_closed else self.load(x)


LOCAL = Comm()


class RowExchange(NamedTuple):
    """The collectives of rows sharded along dim 0 (see ``shard.exchange_rows``); the defaults are those of one rank."""

    gather: Callable[[Tensor], Tensor] = identity  # [n ...] of each rank to [N ...] of all, each padded to the maximum
    mine: Callable[[Tensor, int], Tensor] = lambda t, n: t  # this rank's n rows of [N ...]
    scatter: Callable[[Tensor], Tensor] = identity  # the sum over ranks of [N ...]; each keeps its own rows, padded
    largest: Callable[[Tensor], Tensor] = identity  # the maximum over ranks of i64[N]
    sum: Callable[[Any], Any] = identity  # the sum over ranks of a tree
    rank: int = 0  # this one
    num_ranks: int = 1


ONE_PROCESS = RowExchange()

Wait = Callable[[], Tensor]


def _here(t: Tensor) -> Wait:
    return lambda: t


class Memory(NamedTuple):
    """The memory in which an optimiser keeps its moments between steps; the defaults keep them beside the parameters.

    A transfer is issued by a call, and waited for by the function that the call returns, once.
    """

    zeros: Callable[[tuple[int, ...], torch.dtype, Tensor], Tensor] = lambda shape, dtype, param: torch.zeros(
        shape, dtype=dtype, device=param.device
    )  # of this shape and dtype, in the memory for moments of the parameter
    fetch: Callable[[Tensor, Tensor], Wait] = lambda moment, param: _here(moment)  # to the device of the parameter
    store: Callable[[Tensor, Tensor], Wait] = lambda old, new: _here(new)  # to memory like that of the old moment


BESIDE_PARAMETERS = Memory()
