"""GPTQ: codes that are found column by column, each error being made up for by the columns after it.

    p = gptq(INT4_ZERO)(w, stats)

With H = Σ xᵀ · x, the codes minimise ``‖(W - Ŵ) · xᵀ‖²`` greedily. U is the upper Cholesky factor of H⁻¹. A column j is
rounded; its error over U[j, j], times row j of U, is subtracted from the columns after it. Columns are rounded in
decreasing order of the diagonal of H if ``by_magnitude`` ("act-order"). Scales and zero points are those of
``quantize``, from the weight as it was ("static groups"), so that any order keeps blocks along rows.

Source: Frantar, Ashkboos, Hoefler & Alistarh 2022 (GPTQ). It works for every format with a table and blocks along rows.
"""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from ..format import Format, bits
from ..packed import Packed, dequantize, quantize
from ..quantizers import round_to_nearest
from ..tree import expect
from .statistics import Statistics

LAZY = 128  # columns whose errors are applied to the rest of the weight at once


def gptq(
    format: Format, damping: float = 0.01, by_magnitude: bool = True
) -> Callable[[Tensor, Statistics | None], Packed]:
    """Return the function from a weight f[out in] and its statistics to a Packed in ``format``.

    ``damping`` times the mean of the diagonal of H is added to it. Raises ValueError for a format without a table, with
    blocks over rows or with learned vectors, and for damping that is not above 0.
    """
    fits = format.table is not None and not (format.flat or format.center or format.shared)
    expect(
        fits, f"gptq: {format.name} has no table, or no blocks of its own along rows; use INT4_ZERO, INT8_ROW or NF4"
    )
    expect(damping > 0, f"gptq: damping is {damping}; wanted above 0, such as 0.01")

    def method(w: Tensor, stats: Statistics | None) -> Packed:
        expect(stats is not None, "gptq: got no statistics; wanted those of calibration data")
        assert stats is not None
        p = quantize(w, format)
        order = stats.second.diagonal().argsort(descending=True) if by_magnitude else None
        return replace(p, codes=_codes(w.detach().float(), p, stats.second, order, damping))

    return method


def _codes(w: Tensor, p: Packed, h: Tensor, order: Tensor | None, damping: float) -> Tensor:
    """Return the codes u8[out bytes] of ``w`` f32[out in]."""
    width = w.shape[1]
    order = torch.arange(width, device=w.device) if order is None else order
    scale = p.scale if isinstance(p.scale, Tensor) else dequantize(p.scale)
    zero = torch.zeros_like(scale) if p.zero is None else p.zero
    block = order // (p.format.block or width)  # of each column
    scale, zero, w = scale[:, block], zero[:, block], w[:, order].clone()
    index, upper = torch.empty_like(w, dtype=torch.uint8), _upper(h[order][:, order].double(), damping).float()
    one = replace(p.format, block=None, scale=None)  # a column is rounded as a row of one block
    table = torch.tensor(p.format.table, dtype=torch.float32, device=w.device)
    for start in range(0, width, LAZY):
        stop = min(start + LAZY, width)
        errors = torch.zeros_like(w[:, start:stop])
        for j in range(start, stop):
            x, s, z = w[:, j : j + 1], scale[:, j : j + 1], zero[:, j : j + 1]
            index[:, j : j + 1] = round_to_nearest.index(x, s, z, None, one)
            error = (x - (table[index[:, j : j + 1].long()] - z) * s) / upper[j, j]
            errors[:, j - start : j - start + 1] = error
            w[:, j:stop] -= error * upper[j, j:stop]
        w[:, stop:] -= errors @ upper[start:stop, stop:]
    return bits.pack(index[:, order.argsort()].contiguous(), p.format.bits)


def _upper(h: Tensor, damping: float) -> Tensor:
    """Return the upper Cholesky factor of the inverse of h f64[in in]; inputs that were never met are set to 1."""
    diagonal = h.diagonal()
    h = h + torch.diag(torch.where(diagonal == 0, 1.0, 0.0) + damping * diagonal.mean())
    return torch.linalg.cholesky(torch.cholesky_inverse(torch.linalg.cholesky(h)), upper=True)
