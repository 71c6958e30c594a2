"""Comm: the six places where a forward pass may communicate.

A model never sees a mesh. It is written once, against these six functions, and is given others when its weights are
spread over ranks:

    load(subtree)      what a block does first with its parameters: gathers them where they are sharded
    rows(table, ids)   what an embedding does with its table instead: of all rows these are the only ones it needs
    part(block, x)     what the loss of a head does instead: its table may stay where it is, and ``x`` come to all of it
    enter(x), exit(x)  around a column- and row-parallel pair: identity forward and sum backward, and the reverse
    wrap(block)        how a block is called: plainly, or recomputed in the backward so that what ``load`` brought
                       is not kept (see fquant.remat)

``LOCAL`` is all identity. ``replace(LOCAL, wrap=remat)`` saves memory on one device.

A subtree that only ``load`` can open is *closed*: its class derives from :class:`Closed`, and its inner paths are not
visible until then. What is to happen to it once it is open (adapters being attached, say) waits beside it in a
:class:`Deferred`, and ``load`` does it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor

from .tree import node, static


class Loadable:
    """Base of nodes whose content is invisible until a Comm loads them."""


@node
class AfterLoad(Loadable):
    """``then(load(closed), args)``, to be done by ``load``; ``args`` is a tree."""

    closed: Any
    args: Any
    then: Callable[[Any, Any], Any] = static()


@node
class LookedUpRows:
    """Of a table of ``size`` rows those that some ids ask for, in the order of the ids.

    ``table`` is the weight [size dim] but for its tensors, of which dim 0 is that of the ids. It stands for the weight
    where it is looked up with these ids, and nowhere else (see fquant.linear.embedding).
    """

    table: Any
    size: int = static()


@node
class VocabShard:
    """Of a table of ``size`` rows those that this process has, from ``first`` on; every process has some of its own.

    ``table`` is the weight [size dim] but for its tensors, of which dim 0 is that of these rows. The tokens of all
    processes meet them: ``gather`` brings [k ...] of each to all, as [n·k ...] in which this process is at ``place``;
    ``scatter`` sums [n·k ...] over processes, and each keeps its own [k ...]. A process has at most ``most`` tokens.
    ``whole(closed)`` is the weight itself.
    """

    table: Any
    closed: Loadable
    first: int = static()
    size: int = static()
    place: int = static()
    most: int = static()
    gather: Callable[[Tensor], Tensor] = static()
    scatter: Callable[[Tensor], Tensor] = static()
    whole: Callable[[Any], Any] = static()


def identity(x: Any) -> Any:
    """``x``."""
    return x


@dataclasses.dataclass(frozen=True)
class Comm:
    """The communication of a forward pass, as six functions; see the module's docstring.

    ``open`` gathers one closed node into the tree it stands for; use :meth:`load` in models. ``pick`` brings of one
    closed table the rows that ids ask for, or the table; use :meth:`rows`. ``cut`` opens one closed block but for its
    table, which may be a Part; use :meth:`part`. None is ``open``.
    """

    open: Callable[[Any], Any] = identity
    enter: Callable[[Any], Any] = identity
    exit: Callable[[Any], Any] = identity
    wrap: Callable[[Callable[..., Any]], Callable[..., Any]] = identity
    pick: Callable[[Any, Tensor], Any] | None = None
    cut: Callable[[Any, Tensor, str], Any] | None = None

    def load(self, x: Any) -> Any:
        """The parameters of one block, ready for use: closed nodes opened, deferred work done."""
        if isinstance(x, AfterLoad):
            return x.then(self.load(x.closed), x.args)
        return self.open(x) if isinstance(x, Loadable) else x

    def rows(self, x: Any, ids: Tensor) -> Any:
        """The table of an embedding, ready to be looked up with ``ids``, and with no others."""
        if isinstance(x, AfterLoad):
            return x.then(self.rows(x.closed, ids), x.args)
        return self.pick(x, ids) if isinstance(x, Loadable) and self.pick is not None else self.load(x)

    def part(self, x: Any, rows: Tensor, path: str = "") -> Any:
        """The block that ends in a head, ready for the loss of ``rows`` f[... dim], and of no others.

        At ``path`` is the head's table [vocab dim], or a Part of it. Work that waits is done to the whole of it.
        """
        if self.cut is None or isinstance(x, AfterLoad) or not isinstance(x, Loadable):
            return self.load(x)
        return self.cut(x, rows, path)


LOCAL = Comm()


class RowExchange(NamedTuple):
    """The collectives of rows that are spread over ranks by dim 0; by default there is one rank.

    ``shard.exchange_rows`` makes one over an axis of a mesh.
    """

    gather: Callable[[Tensor], Tensor] = identity  # [n ...] of each rank to [N ...] of all, each padded to the maximum
    mine: Callable[[Tensor, int], Tensor] = lambda t, n: t  # the n rows of [N ...] that are this rank's
    scatter: Callable[[Tensor], Tensor] = identity  # the sum over ranks of [N ...]; each keeps its own, padded
    largest: Callable[[Tensor], Tensor] = identity  # the maximum over ranks of i64[N]
    sum: Callable[[Any], Any] = identity  # the sum over ranks of a tree
    place: tuple[int, int] = (0, 1)  # this rank, and the number of ranks


ONE_PROCESS = RowExchange()
