"""Weighted sums of adapters, as one adapter of the same kind.

    both = combine([french, legal], [1.0, 0.5], "cat")

The update of a path is ``Σ wᵢ · sᵢ · bᵢ · aᵢ`` over the adapters that have the path. A result has s = 1: its scalings
and weights are in its tensors. To train on from a decomposition of the base (PiSSA, OLoRA) and to publish a plain
adapter of the unchanged base, subtract the start: ``combine([trained, start], [1.0, -1.0], "cat")``.

Source of the three methods: ``add_weighted_adapter`` of PEFT.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from .. import tree
from ..packed_linear import Lora, scaling
from ..tree import expect
from .adapters import Adapters

METHODS = ("cat", "linear", "svd")


def scale(adapters: Adapters, factor: float) -> Adapters:
    """Multiply the updates by ``factor``: every alpha is. The magnitudes of DoRA stay, as in PEFT's ``set_scale``."""
    for path, x in adapters.items():
        expect(isinstance(x, Lora), f"{path}: got {type(x).__name__}, wanted a Lora; its factors multiply", TypeError)
    return {path: replace(x, alpha=x.alpha * factor) for path, x in adapters.items()}


def combine(
    many: Sequence[Adapters], weights: Sequence[float], method: str = "cat", rank: int | None = None
) -> Adapters:
    """Return one adapter f[rank in], f[out rank] a path, the weighted sum of ``many``; one dropout must be shared.

    * "cat" is exact: ranks add up.
    * "svd" is the best approximation of ``rank``, or of the largest rank of the path, in the Frobenius norm.
    * "linear" adds the factors themselves, ``Σ √|wᵢsᵢ| aᵢ`` and ``Σ ± √|wᵢsᵢ| bᵢ``: adapters of one rank, and a rough
      approximation, because it adds the products of different adapters too.

    Tensors have the dtype of the first adapter. Raises ValueError for DoRA, whose magnitudes have no sum. Raises it for
    other ranks, shapes or dropouts than these, and for a ``rank`` that the method does not use.
    """
    expect(method in METHODS, f"method is {method!r:.80}; wanted one of {', '.join(METHODS)}")
    expect(many, "combine got no adapters; wanted at least one")
    expect(len(many) == len(weights), f"combine got {len(many)} adapters and {len(weights)} weights; wanted as many")
    expect(rank is None or (method == "svd" and rank >= 1), f"rank is {rank} for {method}; wanted one for svd, above 0")
    out: Adapters = {}
    for path in dict.fromkeys(path for adapters in many for path in adapters):
        parts = [(x[path], float(w)) for x, w in zip(many, weights, strict=True) if path in x]
        with tree.at(path):
            _check([x for x, _ in parts])
            a, b = _METHODS[method](parts, rank)
        first = parts[0][0]
        cast = lambda t, first=first: t.to(first.a.dtype).contiguous()
        out[path] = Lora(cast(a), cast(b), None, float(a.shape[-2]), False, first.dropout)
    return out


def _check(parts: list[Lora]) -> None:
    first = parts[0]
    for x in parts:
        expect(isinstance(x, Lora), f"got {type(x).__name__}, wanted a Lora; its factors multiply", TypeError)
        expect(x.magnitude is None, "got DoRA, whose magnitudes have no sum; merge it instead (lora.merge)")
        got = f"got a {tuple(x.a.shape)}, b {tuple(x.b.shape)}"
        fits = x.a.shape[-1] == first.a.shape[-1] and x.b.shape[-2] == first.b.shape[-2] and x.a.ndim == first.a.ndim
        expect(fits, f"{got}, wanted the sizes of a {tuple(first.a.shape)}, b {tuple(first.b.shape)}")
        fault = f"got dropout {x.dropout}, wanted {first.dropout} as in the first"
        expect(x.dropout == first.dropout, f"{fault}; give them one by dataclasses.replace")


def _cat(parts: list[tuple[Lora, float]], _: int | None) -> tuple[Tensor, Tensor]:
    a = torch.cat([x.a.float() * (w * scaling(x)) for x, w in parts], dim=-2)
    return a, torch.cat([x.b.float() for x, _ in parts], dim=-1)


def _linear(parts: list[tuple[Lora, float]], _: int | None) -> tuple[Tensor, Tensor]:
    ranks = sorted({x.a.shape[-2] for x, _ in parts})
    expect(len(ranks) == 1, f"got ranks {', '.join(map(str, ranks))}, wanted one for 'linear'; use 'cat' or 'svd'")
    factors = [w * scaling(x) for x, w in parts]
    a = [x.a.float() * (abs(f) ** 0.5 * (1 if f >= 0 else -1)) for (x, _), f in zip(parts, factors, strict=True)]
    b = [x.b.float() * abs(f) ** 0.5 for (x, _), f in zip(parts, factors, strict=True)]
    return torch.stack(a).sum(0), torch.stack(b).sum(0)


def _svd(parts: list[tuple[Lora, float]], rank: int | None) -> tuple[Tensor, Tensor]:
    """Truncate ``B·A = Q_b · (R_b · R_aᵀ) · Q_aᵀ`` by the SVD of the small middle; no dense update is formed."""
    a, b = _cat(parts, None)
    rank = min(rank or max(x.a.shape[-2] for x, _ in parts), a.shape[-2], a.shape[-1], b.shape[-2])
    (qa, ra), (qb, rb) = (torch.linalg.qr(t.double()) for t in (a.mT, b))
    u, s, vh = torch.linalg.svd(rb @ ra.mT, full_matrices=False)
    return (vh @ qa.mT)[..., :rank, :], (qb @ (u * s[..., None, :]))[..., :rank]


_METHODS = {"cat": _cat, "linear": _linear, "svd": _svd}
