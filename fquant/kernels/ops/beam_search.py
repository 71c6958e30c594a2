"""The two ops that learn additive codebooks: the search for the codes of groups, and the sums of groups by code.

    beam_search(x, near, vectors, width)              x f32[n D], vectors f32[S 256 D] to codes u8[n S]
    stage_sums(x, mass, codes, vectors, stage)        to sums f64[256 D] of residuals, and masses f64[256 m]

A group is approximated by the sum of one vector of each stage. The search goes from stage to stage and keeps ``width``
candidates, those of least ``(near · (x - sum)²).sum()``. Without ``near`` all elements weigh the same. The result is
the best candidate of the last stage.

``stage_sums`` adds the residuals of the other stages, times ``mass`` f32[n D] or [n 1], in float64. The sums over the
masses are the means to which a round of refinement moves the vectors of ``stage``.

The ops have no derivatives and no vmap rule.
"""

from typing import Any

import torch
from torch import Tensor

from ...format import CODES
from ..registry import register


def beam_search(x: Tensor, near: Tensor | None, vectors: Tensor, width: int) -> Tensor:
    """Return the codes u8[n S] of the best sums that a beam of ``width`` candidates, 1 to 16, finds.

    x and near f32[n D], vectors f32[S 256 D]. Raises TypeError for other dtypes, ValueError for other shapes or devices
    and widths.
    """
    return _SEARCH(x, near, vectors, width)


def stage_sums(x: Tensor, mass: Tensor, codes: Tensor, vectors: Tensor, stage: int) -> tuple[Tensor, Tensor]:
    """Return sums f64[256 D] of ``mass · (x - vectors of the stages other than stage)`` by code, and of ``mass``.

    x f32[n D], mass f32[n D] or [n 1], codes u8[n S], vectors f32[S 256 D]. Raises the errors of :func:`beam_search`.
    """
    return _SUMS(x, mass, codes, vectors, stage)


def _check(op: str, x: Tensor, vectors: Tensor, others: dict[str, tuple[Tensor, torch.dtype, int]]) -> None:
    """Check x and vectors, and others: a tensor [n d], its dtype and its d."""
    f32 = torch.float32
    if x.ndim != 2 or vectors.ndim != 3 or vectors.shape[1:] != (CODES, x.shape[1]):
        got = f"x {tuple(x.shape)} and vectors {tuple(vectors.shape)}"
        raise ValueError(f"{op} got {got}; wanted [n D] and [S {CODES} D]")
    for name, (t, dtype, d) in {"x": (x, f32, x.shape[1]), "vectors": (vectors, f32, 0), **others}.items():
        if t.dtype is not dtype:
            raise TypeError(f"{op} got {name} {t.dtype}; wanted {dtype}")
        if t.device != x.device:
            raise ValueError(f"{op} got x on {x.device} and {name} on {t.device}; move one")
        if t is not vectors and t.shape != (len(x), d):
            raise ValueError(f"{op} got {name} {tuple(t.shape)}; wanted {(len(x), d)}")


def _check_search(op: str, x: Tensor, near: Tensor | None, vectors: Tensor, width: int) -> None:
    _check(op, x, vectors, {} if near is None else {"near": (near, torch.float32, x.shape[-1])})
    if not 1 <= width <= 16:
        raise ValueError(f"{op} got width {width}; wanted 1 to 16 candidates")


def _check_sums(op: str, x: Tensor, mass: Tensor, codes: Tensor, vectors: Tensor, stage: int) -> None:
    each = 1 if mass.shape[-1] == 1 else x.shape[-1]
    _check(op, x, vectors, {"mass": (mass, torch.float32, each), "codes": (codes, torch.uint8, len(vectors))})
    if not 0 <= stage < len(vectors):
        raise ValueError(f"{op} got stage {stage} of {len(vectors)}; wanted 0 to {len(vectors) - 1}")


def _empty_sums(x: Tensor, mass: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return tuple(x.new_empty(CODES, t.shape[1], dtype=torch.float64) for t in (x, mass))  # type: ignore[return-value]


_FIX = "vectors are learned by counting, not by gradients; detach its arguments, as fquant.quantize does"
_SEARCH = register(
    beam_search, _check_search, lambda x, near, vectors, width: x.new_empty(len(x), len(vectors), dtype=torch.uint8),
    None, _FIX, out=False,
)  # fmt: skip
_SUMS = register(stage_sums, _check_sums, _empty_sums, None, _FIX, out=False)
