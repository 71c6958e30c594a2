"""DoRA: the rows of an adapted weight, scaled to trained norms.

    v = w + s · b · a        w' = m / ‖v‖ ∘ v        m f[out], ‖v‖ f[out]

Norms are constants of differentiation (section 4.3 of Liu et al. 2024). Each is taken of the row itself, in float32 at
least. The factored form ``‖w‖² + 2s·(w·aᵀ)∘b + s²·(b·a·aᵀ)∘b`` cancels where the update is close to minus the row. A
few rows are decoded and summed at a time, so the dense sum does not exist.

*Rows of zeros* have the direction 0/0. Their factor is 1, the limit of an adapter that begins with ``m = ‖w‖``. So a
row of zeros stays zero and has LoRA's gradients, all finite, where PEFT has NaN.

*Several adapters* of one weight act one after the other, each with the norms of ``w`` and its own update alone:
``w' = m₂ / ‖w + s₂b₂a₂‖ ∘ (m₁ / ‖w + s₁b₁a₁‖ ∘ (w + s₁b₁a₁) + s₂b₂a₂)``. That is PEFT's result with both active, in
the order in which they are active. So the order matters, though little while the factors are near 1.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from ..packed import Packed, dequantize, take_rows
from ..tree import expect
from .nodes import Adapted, Lora, scaling

PIECE = 1 << 22  # elements of a weight that are summed at a time


def unwound(w: Any, merge_aware: bool = False) -> tuple[Any, list[Adapted]]:
    """Return the weight that adapters are attached to, and the nodes around it, the first attached first.

    The weight is itself adapted if it is merge-aware, unless ``merge_aware`` asks to unwind such nodes too.
    """
    nodes: list[Adapted] = []
    while isinstance(w, Adapted) and (merge_aware or not w.merge_aware):
        nodes.insert(0, w)
        w = w.base
    return w, nodes


def row_norms(w: Any, lora: Lora | None = None) -> Tensor:
    """Return the Euclidean norms f[out] of the rows of ``w`` [out in], or of ``w + s·b·a``, as constants.

    They are computed and returned in float32, or in float64 if a tensor has it. Raises TypeError unless ``w`` is a
    Tensor or Packed.
    """
    got = f"the norms of a {type(w).__name__} were asked for"
    expect(isinstance(w, Tensor | Packed), f"{got}; wanted a Tensor or Packed without adapters", TypeError)
    dtype, found = torch.promote_types(w.dtype, torch.float32), []
    if lora is not None:
        dtype = torch.promote_types(dtype, lora.a.dtype)
        a, b = lora.a.detach().to(dtype), scaling(lora) * lora.b.detach().to(dtype)
    for some, rows in _pieces(w):
        rows = rows.to(dtype)
        found.append(torch.linalg.vector_norm(rows if lora is None else torch.addmm(rows, b[some], a), dim=-1))
    return found[0] if len(found) == 1 else torch.cat(found)


def _pieces(w: Tensor | Packed) -> Iterator[tuple[slice, Tensor]]:
    """Decode a few rows at a time, if the format has rows."""
    rows = take_rows(w, slice(None)) if isinstance(w, Packed) and w.format.rows_alone else dequantize(w)
    step = max(1, PIECE // max(1, w.shape[1]))
    for i in range(0, max(1, w.shape[0]), step):
        some = slice(i, i + step)
        yield some, dequantize(take_rows(rows, some)) if isinstance(rows, Packed) else rows[some].detach()


def gain(magnitude: Tensor, norms: Tensor) -> Tensor:
    """Return the factors ``m / ‖v‖`` f[... out] of rows in the wider dtype; 1 for a row of zeros."""
    is_zero = norms == 0
    return torch.where(is_zero, 1.0, magnitude / torch.where(is_zero, 1.0, norms))
