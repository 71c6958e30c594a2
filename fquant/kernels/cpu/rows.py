"""The loss of logits and norms of rows on the CPU, by csrc/loss.h and csrc/norm.h: there may be gaps between rows."""

from collections.abc import Sequence

import torch
from torch import Tensor

from ..arguments import dense_rows
from .library import DTYPES, call, result


def nll(logits: Tensor, targets: Tensor, ignore: int, out: Tensor | None = None) -> Tensor:
    out = result(out, len(logits), dtype=torch.float32)
    _losses(logits, targets, ignore, None, out, None)
    return out


def nll_backward(
    logits: Tensor, targets: Tensor, ignore: int, factor: Tensor | None = None, out: Sequence = (None, None)
) -> tuple[Tensor, Tensor]:
    losses = result(out[0], len(logits), dtype=torch.float32)
    slope = result(out[1], *logits.shape, dtype=logits.dtype)
    _losses(logits, targets, ignore, None if factor is None else factor.contiguous(), losses, slope)
    return losses, slope


def _losses(logits: Tensor, targets: Tensor, ignore: int, *others: Tensor | None) -> None:
    if len(logits):
        call("nll", *_described(logits), targets.contiguous(), ignore, *others)


def rms_norm(x: Tensor, weight: Tensor, eps: float, out: Sequence = (None, None)) -> tuple[Tensor, Tensor]:
    y, scale = result(out[0], *x.shape, dtype=x.dtype), result(out[1], len(x), dtype=torch.float32)
    if len(x):
        call("rms_norm", *_described(x), weight.to(x.dtype).contiguous(), eps, None, 0, y, scale)
    return y, scale


def rms_norm_backward(g: Tensor, x: Tensor, weight: Tensor, scale: Tensor, out: Tensor | None = None) -> Tensor:
    dx, g = result(out, *x.shape, dtype=x.dtype), dense_rows(g)
    if dx.numel():
        weight = weight.to(x.dtype).contiguous()
        call("rms_norm", *_described(x), weight, 0.0, g, g.stride(0), dx, scale.contiguous())
    return dx


def _described(x: Tensor) -> tuple[Tensor | int, ...]:
    rows = dense_rows(x)
    return rows, DTYPES[rows.dtype], *rows.shape, rows.stride(0)
