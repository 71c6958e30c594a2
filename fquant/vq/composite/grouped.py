"""Grouped residual quantisation: the numbers of a row in groups, each with a residual of its own (Yang et al. 2023).

    one   = partial(residual.init_books, num_codes=1024, width=32, num_layers=4)
    state = grouped.init(key, [one, one])

Codes are [... groups layers], losses are Means of [groups layers] numbers, and statistics are a list, one entry a
group. Dropout gives all groups of a row the same depth.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ... import random, tree
from ..codebook.update import update_each
from ..quantized import Key, Mask, Quantized, Seed, stack_trees
from . import residual
from .residual import Residual


@tree.node
class Grouped:
    """Residuals with equal numbers of layers, side by side."""

    groups: list[Residual]


def init(key: Seed, groups: Sequence[Callable[[Tensor], Residual]]) -> Grouped:
    """Return a state for x f[... dim], dim being the sum over groups; each function gets a key of its own.

    Raises TypeError if one returns no Residual, ValueError for groups with different numbers of layers or dropout.
    """
    if not groups:
        raise ValueError("grouped.init: there are no groups; wanted at least 1")
    residuals = [init_group(random.fold(random.key(key), i)) for i, init_group in enumerate(groups)]
    for i, group in enumerate(residuals):
        if not isinstance(group, Residual):
            raise TypeError(f"grouped.init: groups.{i} is a {type(group).__name__}; wanted a Residual")
        if (got := _depths(group)) != (wanted := _depths(residuals[0])):
            shown = "(layers, dropout, cutoff, multiple)"
            raise ValueError(f"grouped.init: groups.{i} has {shown} {got}; wanted those of the first, {wanted}")
    return Grouped(residuals)


def encode(state: Grouped, x: Tensor) -> Tensor:
    """Return codes i64[... groups layers] of x f[... dim]; -1 for a group of a row that is not finite."""
    each = zip(state.groups, _split(state, x), strict=True)
    return torch.stack([residual.encode(group, part) for group, part in each], -2)


def decode(state: Grouped, codes: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return x [... dim] of codes i[... groups layers], or of the first layers alone, as ``residual.decode`` does."""
    if codes.ndim < 2 or codes.shape[-2] != len(state.groups):
        raise ValueError(f"grouped.decode: codes are {tuple(codes.shape)}; wanted [... {len(state.groups)} layers]")
    each = zip(state.groups, codes.unbind(-2), strict=True)
    return torch.cat([residual.decode(group, part, dtype) for group, part in each], -1)


def apply(state: Grouped, x: Tensor, key: Key = None, mask: Mask = None, **options: Any) -> Quantized:
    """Quantise x f[... dim]. Arguments are those of ``residual.apply``, with ``codes`` [... groups layers]."""
    first = state.groups[0]
    if options.get("depth") is None and key is not None and first.dropout:
        options["depth"] = residual.draw_depth(first, key)
    codes = options.pop("codes", None)
    each = []
    for i, (group, part) in enumerate(zip(state.groups, _split(state, x), strict=True)):
        group_key = None if key is None else random.fold(key, i)
        given = {} if codes is None else {"codes": codes[..., i, :]}
        each.append(residual.apply(group, part, group_key, mask, **given, **options))
    x, codes = torch.cat([got.x for got in each], -1), torch.stack([got.codes for got in each], -2)
    return Quantized(x, codes, stack_trees([got.losses for got in each]), [got.stats for got in each])


def update(state: Grouped, stats: Sequence[Any], **options: Any) -> Grouped:
    """Return ``state`` with each group updated from its statistics. Raises what ``residual.update`` does."""
    update_group = partial(residual.update, **options)
    return replace(state, groups=update_each("grouped.update", "groups", state.groups, stats, update_group))


def _depths(group: Residual) -> tuple[int, bool, int, int]:
    return len(residual.layers_of(group)), group.dropout, group.cutoff, group.multiple


def _split(state: Grouped, x: Tensor) -> tuple[Tensor, ...]:
    sizes = [group.dim for group in state.groups]
    if not x.ndim or x.shape[-1] != sum(sizes):
        raise ValueError(f"grouped: x is {tuple(x.shape)}; wanted {sum(sizes)} in the last dim, {sizes} of the groups")
    return x.split(sizes, -1)
