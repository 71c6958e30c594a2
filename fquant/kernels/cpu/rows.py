"""The loss of logits and norms of rows on the CPU, by csrc/loss.h and csrc/norm.h: there may be gaps between rows."""

from collections.abc import Sequence

import torch
from torch import Tensor

from ..arguments import dense_rows
from .library import DTYPES, call, result


def nll(logits: Tensor, targets: Tensor, ignore: int, out: Tensor | None = None) -> Tensor:
    """See ``fquant.kernels.ops.nll.nll``."""
    out = result(out, len(logits), dtype=torch.float32)
    _losses(logits, targets, ignore, None, out, None)
    return out


def nll_backward(
    logits: Tensor, targets: Tensor, ignore: int, factor: Tensor | None = None, out: Sequence = (None, None)
) -> tuple[Tensor, Tensor]:
    """See ``fquant.kernels.ops.nll.nll_backward``."""
    losses = result(out[0], len(logits), dtype=torch.float32)
    slope = result(out[1], *logits.shape, dtype=logits.dtype)
    _losses(logits, targets, ignore, factor, losses, slope)
    return losses, slope


def _losses(
    logits: Tensor, targets: Tensor, ignore: int, factor: Tensor | None, out: Tensor, slope: Tensor | None
) -> None:
    rows, targets = dense_rows(logits), targets.contiguous()
    factor = None if factor is None else factor.contiguous()
    if len(rows):
        results = out.data_ptr(), None if slope is None else slope.data_ptr()
        given = targets.data_ptr(), ignore, None if factor is None else factor.data_ptr()
        call("nll", *_described(rows), *given, *results)


def rms_norm(x: Tensor, weight: Tensor, eps: float, out: Sequence = (None, None)) -> tuple[Tensor, Tensor]:
    """See ``fquant.kernels.ops.norm.rms_norm``."""
    y, weight = result(out[0], *x.shape, dtype=x.dtype), weight.to(x.dtype).contiguous()
    scale = result(out[1], len(x), dtype=torch.float32)
    if len(x):
        rows = dense_rows(x)
        call("rms_norm", *_described(rows), weight.data_ptr(), eps, None, 0, y.data_ptr(), scale.data_ptr())
    return y, scale


def rms_norm_backward(g: Tensor, x: Tensor, weight: Tensor, scale: Tensor, out: Tensor | None = None) -> Tensor:
    """See ``fquant.kernels.ops.norm.rms_norm_backward``."""
    dx, weight = result(out, *x.shape, dtype=x.dtype), weight.to(x.dtype).contiguous()
    if dx.numel():
        g, rows, scale = dense_rows(g), dense_rows(x), scale.contiguous()
        given = weight.data_ptr(), 0.0, g.data_ptr(), g.stride(0)
        call("rms_norm", *_described(rows), *given, dx.data_ptr(), scale.data_ptr())
    return dx


def _described(rows: Tensor) -> tuple[int, ...]:
    return rows.data_ptr(), DTYPES[rows.dtype], *rows.shape, rows.stride(0)
