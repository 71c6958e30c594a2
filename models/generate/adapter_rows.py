"""Several adapters in one batch: each row of a batch has an adapter of its own.

    stacked = lora.stack(aligned([french, german, {}]))    # {}: the base alone
    own     = rows(stacked, torch.tensor([0, 2, 1]))       # of the rows of a batch
    texts   = generate.generate(base, prompts, cfg, adapters=own, ...)

A stack has one structure, and so one rank for each weight. ``aligned`` gives adapters of several ranks, scalings and
targets the same one; their updates stay as they were.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch.nn.functional as F
from torch import Tensor

from fquant import tree
from fquant.packed_linear import Lora, scaling

Adapters = dict[str, Lora]


def rows(stacked: Adapters, index: Tensor) -> Adapters:
    """Return the adapter of each row: those of ``lora.stack`` at ``index`` i64[b], with the rows in front."""
    return tree.map(lambda t: t[index], stacked)


def aligned(many: Sequence[Adapters]) -> list[Adapters]:
    """Return adapters with the same updates and one structure, for ``lora.stack``; those of one structure as they are.

    Each weight gets the largest rank, a factor of 1 and no dropout. Weights that one adapter lacks get an update of
    zero. Raises ValueError, with the path, for DoRA beside adapters of another structure, and for shapes that differ.
    """
    if all(tree.structure(adapters) == tree.structure(many[0]) for adapters in many):
        shapes = {tuple(tuple(t.shape) for t in tree.leaves(adapters)) for adapters in many}
        if len(shapes) == 1:
            return list(many)
    found: dict[str, list[Lora]] = {}
    for adapters in many:
        for path, lora in adapters.items():
            found.setdefault(path, []).append(lora)
    for path, loras in found.items():
        with tree.at(path):
            _check(loras)
    widest = {path: max(loras, key=_rank) for path, loras in found.items()}
    return [{path: _like(adapters.get(path), wide) for path, wide in widest.items()} for adapters in many]


def _check(loras: Sequence[Lora]) -> None:
    if any(lora.magnitude is not None for lora in loras):
        raise ValueError("got DoRA beside adapters of another structure; wanted all of one rank, alpha and targets")
    shapes = {(*lora.a.shape[:-2], lora.a.shape[-1], *lora.b.shape[:-1]) for lora in loras}
    if len(shapes) > 1:
        raise ValueError(f"got adapters of weights of {len(shapes)} shapes, {sorted(shapes)}; wanted one base")


def _like(lora: Lora | None, wide: Lora) -> Lora:
    """Return a Lora of the rank of ``wide`` and a factor of 1, with the update of ``lora``, or none."""
    rank = _rank(wide)
    own: Lora = replace(wide, a=0 * wide.a, b=0 * wide.b) if lora is None else lora
    more = rank - _rank(own)
    a, b = F.pad(own.a, (0, 0, 0, more)), F.pad(own.b * scaling(own), (0, more))
    kind = wide.a.dtype
    return replace(own, a=a.to(kind), b=b.to(kind), alpha=float(rank), rank_stabilised=False, dropout=0.0)


def _rank(lora: Lora) -> int:
    return lora.a.shape[-2]
