"""The loss of logits and norms of rows in Triton, in float32: a program reads a row, or a block of short rows, twice.

The second pass finds the row in the caches: the gradient of a loss, and a norm, need a sum over the row. The loss takes
the maximum and the sum of exponentials block by block. If a block exceeds all before it, the sum so far is scaled down
(Milakov and Gimelshein 2018, "Online normalizer calculation for softmax").
"""

# pyright: reportInvalidTypeForm=false
import torch
from torch import Tensor

from ..arguments import dense_rows
from .codes import EXACT, narrow, on, tl, triton, widen

SIZE = 4096  # elements that a program handles at a time
FUSED = {"enable_fp_fusion": True}  # a product and a sum are rounded once; not where a sum over threads has products


def nll(logits: Tensor, targets: Tensor, ignore: int) -> Tensor:
    return _losses(logits, targets, ignore, None, None)


def nll_backward(logits: Tensor, targets: Tensor, ignore: int, factor: Tensor | None = None) -> tuple[Tensor, Tensor]:
    slope = logits.new_empty(logits.shape)
    return _losses(logits, targets, ignore, factor, slope), slope


def _losses(logits: Tensor, targets: Tensor, ignore: int, factor: Tensor | None, slope: Tensor | None) -> Tensor:
    rows, factor = dense_rows(logits), None if factor is None else factor.contiguous()
    out = rows.new_empty(len(rows), dtype=torch.float32)
    if len(rows):
        size = min(SIZE, triton.next_power_of_2(max(1, rows.shape[1])))
        tensors, sizes = (rows, targets.contiguous(), factor, out, slope), (rows.shape[1], rows.stride(0), ignore, size)
        with on(rows):
            _loss[(len(rows),)](*tensors, *sizes, num_warps=8 if size == SIZE else 4, **FUSED)
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


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    y, scale = x.new_empty(x.shape), x.new_empty(len(x), dtype=torch.float32)
    _run(x, None, weight, scale, y, eps)
    return y, scale


def rms_norm_backward(g: Tensor, x: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
    dx = x.new_empty(x.shape)
    _run(x, g, weight, scale.contiguous(), dx, 0.0)
    return dx


def _run(x: Tensor, g: Tensor | None, weight: Tensor, scale: Tensor, out: Tensor, eps: float) -> None:
    n, d = x.shape
    x, g = dense_rows(x), None if g is None else dense_rows(g)
    if n:
        size = min(SIZE, triton.next_power_of_2(max(1, d)))
        rows, apart = SIZE // size, (x.stride(0), 0 if g is None else g.stride(0))
        weight = weight.to(x.dtype).contiguous()
        with on(x):
            sizes = n, d, *apart, rows, size
            _norm[(triton.cdiv(n, rows),)](x, g, weight, scale, out, eps, *sizes, num_warps=8, **EXACT)


@triton.jit
def _norm(x, g, weight, scale, out, eps, n, d, apart, apart_g, ROWS: tl.constexpr, SIZE: tl.constexpr):
    """Compute the norms of ROWS rows, or their gradients unless g is None.

    Squares are rounded before they are added: of two threads that add each other's, fused, each would have another sum.
    """
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
