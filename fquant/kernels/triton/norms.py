"""Norms of rows in Triton: a program is a block of rows, or one long row, and reads it twice.

The second pass finds the row in the caches; it needs the sum over the row. All arithmetic is float32.
"""

# tl.constexpr is an annotation to Triton, and Any to a type checker:
# pyright: reportInvalidTypeForm=false

from __future__ import annotations

import torch
from torch import Tensor

from .. import reference
from ..arguments import dense_rows
from .dequantize import DTYPES, narrow, on, tl, triton, widen

SIZE = 4096  # elements that a program handles at a time


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """See ``fquant.kernels.ops.norm.rms_norm``."""
    if x.dtype not in DTYPES:
        return reference.rms_norm(x, weight, eps)
    y, scale = x.new_empty(x.shape), x.new_empty(len(x), dtype=torch.float32)
    _run(x, None, weight, scale, y, eps)
    return y, scale


def rms_norm_backward(g: Tensor, x: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
    """See ``fquant.kernels.ops.norm.rms_norm_backward``."""
    if x.dtype not in DTYPES:
        return reference.rms_norm_backward(g, x, weight, scale)
    dx = x.new_empty(x.shape)
    _run(x, g, weight, scale.contiguous(), dx, 0.0)
    return dx


def _run(x: Tensor, g: Tensor | None, weight: Tensor, scale: Tensor, out: Tensor, eps: float) -> None:
    n, d = x.shape
    x, g = dense_rows(x), None if g is None else dense_rows(g)
    if n:
        size = min(SIZE, triton.next_power_of_2(max(1, d)))
        rows = SIZE // size
        with on(x):
            _norm[(triton.cdiv(n, rows),)](
                x, g, weight.to(x.dtype).contiguous(), scale, out, eps, n, d, x.stride(0),
                0 if g is None else g.stride(0), rows, size, num_warps=8,
            )  # fmt: skip


@triton.jit
def _norm(x, g, weight, scale, out, eps, n, d, apart, apart_g, ROWS: tl.constexpr, SIZE: tl.constexpr):
    """Compute the norms of ROWS rows, or their gradients unless g is None."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    there = row < n
    x += (row * apart)[:, None]
    out += (row * d)[:, None]
    if g is not None:
        g += (row * apart_g)[:, None]
        factor = tl.load(scale + row, mask=there, other=0)[:, None]
    total = tl.zeros([ROWS], tl.float32)
    for start in range(0, d, SIZE):
        at = start + tl.arange(0, SIZE)[None, :]
        mask = there[:, None] & (at < d)
        value = widen(tl.load(x + at, mask=mask, other=0))
        if g is not None:
            along = widen(tl.load(g + at, mask=mask, other=0)) * widen(tl.load(weight + at, mask=at < d, other=0))
            value = along * (value * factor)
        else:
            value *= value
        total += tl.sum(value, 1)
    mean = total / d
    if g is None:
        factor = 1.0 / tl.sqrt_rn(mean + eps)
        tl.store(scale + row, factor, mask=there)
        factor = factor[:, None]
    for start in range(0, d, SIZE):
        at = start + tl.arange(0, SIZE)[None, :]
        mask = there[:, None] & (at < d)
        normed = widen(tl.load(x + at, mask=mask, other=0)) * factor
        w = widen(tl.load(weight + at, mask=at < d, other=0))
        if g is not None:
            value = (widen(tl.load(g + at, mask=mask, other=0)) * w - normed * mean[:, None]) * factor
        else:
            value = widen(narrow(normed, out.dtype.element_ty)) * w
        tl.store(out + at, narrow(value, out.dtype.element_ty), mask=mask)
