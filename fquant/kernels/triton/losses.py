"""The loss of logits in Triton: a program is a row, read once, and once more for the gradient.

The first pass computes the maximum and the sum of exponentials block by block. If a block exceeds all before it, the
sum so far is scaled down (Milakov and Gimelshein 2018, "Online normalizer calculation for softmax"). The second pass
finds the row in the L2 cache. All arithmetic is float32.
"""

# tl.constexpr is an annotation to Triton, and Any to a type checker:
# pyright: reportInvalidTypeForm=false

from __future__ import annotations

import torch
from torch import Tensor

from .. import reference
from ..arguments import dense_rows
from .dequantize import DTYPES, narrow, on, tl, triton, widen

SIZE = 4096  # logits that a program handles at a time


def nll(logits: Tensor, targets: Tensor, ignore: int) -> Tensor:
    """See ``fquant.kernels.ops.nll.nll``."""
    if logits.dtype not in DTYPES:
        return reference.nll(logits, targets, ignore)
    return _losses(logits, targets, ignore, None, None)


def nll_backward(logits: Tensor, targets: Tensor, ignore: int, factor: Tensor | None) -> tuple[Tensor, Tensor]:
    """See ``fquant.kernels.ops.nll.nll_backward``."""
    if logits.dtype not in DTYPES:
        return reference.nll_backward(logits, targets, ignore, factor)
    slope = logits.new_empty(logits.shape)
    return _losses(logits, targets, ignore, factor, slope), slope


def _losses(logits: Tensor, targets: Tensor, ignore: int, factor: Tensor | None, slope: Tensor | None) -> Tensor:
    rows, factor = dense_rows(logits), None if factor is None else factor.contiguous()
    out = rows.new_empty(len(rows), dtype=torch.float32)
    if len(rows):
        size = min(SIZE, triton.next_power_of_2(max(1, rows.shape[1])))
        with on(rows):
            _loss[(len(rows),)](
                rows, targets.contiguous(), factor, out, slope, rows.shape[1], rows.stride(0), ignore, size,
                num_warps=8 if size == SIZE else 4,
            )  # fmt: skip
    return out


@triton.jit
def _loss(logits, targets, factor, nll, slope, width, apart, ignore, SIZE: tl.constexpr):
    """Compute the loss of a row, and its gradient unless ``slope`` is None."""
    row = tl.program_id(0).to(tl.int64)
    target = tl.load(targets + row)
    counted = target != ignore
    logits += row * apart
    most, base, total = float("-inf"), 0.0, 0.0
    for start in range(0, width, SIZE):
        at = start + tl.arange(0, SIZE)
        x = widen(tl.load(logits + at, mask=at < width, other=float("-inf")))
        most = tl.maximum(most, tl.max(x, 0))
        new = tl.where(tl.abs(most) == float("inf"), 0.0, most)  # finite, because it is subtracted
        total = tl.where(total == 0, 0.0, total * tl.exp(base - new)) + tl.sum(tl.exp(x - new), 0)
        base = new
    there = counted & (target >= 0) & (target < width)  # an assertion on the device reports other targets
    chosen = widen(tl.load(logits + target, mask=there, other=0))
    tl.store(nll + row, tl.where(counted, tl.log(total) + (base - chosen), 0.0))
    if slope is not None:
        slope += row * width
        scale = tl.where(tl.abs(most) == float("inf"), float("nan"), 1 / total)
        for start in range(0, width, SIZE):
            at = start + tl.arange(0, SIZE)
            x = widen(tl.load(logits + at, mask=at < width, other=float("-inf")))
            value = tl.exp(x - base) * scale - tl.where(at == target, 1.0, 0.0)
            if factor is not None:
                value *= tl.load(factor + row)
            value = narrow(tl.where(counted, value, 0.0), slope.dtype.element_ty)
            tl.store(slope + at, value, mask=at < width)
