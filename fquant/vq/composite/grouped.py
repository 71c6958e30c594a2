"""Grouped residuals: the numbers of a row in groups, each of which a residual quantises (Yang et al. 2023).

    one   = partial(residual.init_books, num_codes=1024, width=32, num_layers=4)
    state = grouped.init(key, [one, one])

Codes are [... groups layers], losses Means of [groups layers] numbers, and statistics those of each group, which one
sum over ranks serves as it serves one. All groups of a row are dropped at one depth.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ... import random, tree
from ..quantized import Quantized, stack_trees
from . import residual
from .residual import Residual


@tree.node
class Grouped:
    """Residuals of as many layers, side by side."""

    groups: list[Residual]


def init(key: int | Tensor, groups: Sequence[Callable[[Tensor], Residual]]) -> Grouped:
    """A state for x f[... dim], dim being the sum of those of the groups, each of which is made of a key of its own.

    Raises TypeError for what makes no Residual, ValueError for no groups, and for groups of different numbers of
    layers, or other options of dropout; and what making one raises.
    """
    if not groups:
        raise ValueError("grouped.init: there are no groups; wanted at least 1")
    key = random.key(key)
    made = [make(random.fold(key, i)) for i, make in enumerate(groups)]
    for i, group in enumerate(made):
        if not isinstance(group, Residual):
            raise TypeError(f"grouped.init: groups.{i} is a {type(group).__name__}; wanted a Residual")
        if (got := _depths(group)) != (wanted := _depths(made[0])):
            shown = "(layers, dropout, cutoff, multiple)"
            raise ValueError(f"grouped.init: groups.{i} has {shown} {got}; wanted those of the first, {wanted}")
    return Grouped(made)


def encode(state: Grouped, x: Tensor) -> Tensor:
    """x f[... dim] -> codes i64[... groups layers]; -1 for a group of a row that is not finite."""
    return torch.stack(
        [residual.encode(group, part) for group, part in zip(state.groups, _split(state, x), strict=True)], -2
    )


def decode(state: Grouped, codes: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """codes i[... groups layers], or of the first layers alone -> x [... dim] in ``dtype``; -1 adds nothing.

    Raises what ``residual.decode`` does, and ValueError for another number of groups.
    """
    if codes.ndim < 2 or codes.shape[-2] != len(state.groups):
        raise ValueError(f"grouped.decode: codes are {tuple(codes.shape)}; wanted [... {len(state.groups)} layers]")
    each = zip(state.groups, codes.unbind(-2), strict=True)
    return torch.cat([residual.decode(group, some, dtype) for group, some in each], -1)


def apply(
    state: Grouped, x: Tensor, key: Tensor | None = None, mask: Tensor | None = None, **options: Any
) -> Quantized:
    """x f[... dim] quantised; arguments are those of ``residual.apply``, ``codes`` being [... groups layers].

    A row of which one group is not finite has no code in that group. Statistics are a list, those of each group.
    """
    first = state.groups[0]
    if options.get("depth") is None and key is not None and first.dropout:
        options["depth"] = residual.draw_depth(first, key)
    codes = options.pop("codes", None)
    each = []
    for i, (group, part) in enumerate(zip(state.groups, _split(state, x), strict=True)):
        mine = None if key is None else random.fold(key, i)
        some = {} if codes is None else {"codes": codes[..., i, :]}
        each.append(residual.apply(group, part, mine, mask, **some, **options))
    x, codes = torch.cat([got.x for got in each], -1), torch.stack([got.codes for got in each], -2)
    return Quantized(x, codes, stack_trees([got.losses for got in each]), [got.stats for got in each])


def update(state: Grouped, stats: Sequence[Any], **options: Any) -> Grouped:
    """``state`` with each group updated by its statistics. Raises what ``residual.update`` does."""
    if len(stats) != len(state.groups):
        raise ValueError(f"grouped.update: got stats of {len(stats)} groups; wanted {len(state.groups)}")
    each = enumerate(zip(state.groups, stats, strict=True))
    groups = []
    for i, (group, some) in each:
        with tree.at(f"groups.{i}"):
            groups.append(residual.update(group, some, **options))
    return replace(state, groups=groups)


def _depths(group: Residual) -> tuple[int, bool, int, int]:
    return len(residual.layers_of(group)), group.dropout, group.cutoff, group.multiple


def _split(state: Grouped, x: Tensor) -> tuple[Tensor, ...]:
    """The numbers of each group."""
    sizes = [group.dim for group in state.groups]
    if not x.ndim or x.shape[-1] != sum(sizes):
        raise ValueError(f"grouped: x is {tuple(x.shape)}; wanted {sum(sizes)} in the last dim, {sizes} of the groups")
    return x.split(sizes, -1)
