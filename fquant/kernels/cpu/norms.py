"""Norms of rows on the CPU, by csrc/norm.h: rows may have gaps between them, elements of a row may not."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .. import reference
from ..arguments import dense_rows
from .library import DTYPES, call, result


def rms_norm(
    x: Tensor, weight: Tensor, eps: float, out: Sequence[Tensor | None] = (None, None)
) -> tuple[Tensor, Tensor]:
    """See ``fquant.kernels.ops.norm.rms_norm``."""
    if x.dtype not in DTYPES:
        return reference.rms_norm(x, weight, eps)
    y, weight = result(out[0], *x.shape, dtype=x.dtype), _weight(weight, x)
    scale = result(out[1], len(x), dtype=torch.float32)
    if len(x):
        rows = dense_rows(x)
        call("norm", *_described(rows), weight.data_ptr(), eps, y.data_ptr(), scale.data_ptr())
    return y, scale


def rms_norm_backward(g: Tensor, x: Tensor, weight: Tensor, scale: Tensor, out: Tensor | None = None) -> Tensor:
    """See ``fquant.kernels.ops.norm.rms_norm_backward``."""
    if x.dtype not in DTYPES:
        return reference.rms_norm_backward(g, x, weight, scale)
    dx, weight, scale = result(out, *x.shape, dtype=x.dtype), _weight(weight, x), scale.contiguous()
    if dx.numel():
        g, rows, addresses = dense_rows(g), dense_rows(x), (weight.data_ptr(), scale.data_ptr())
        call("norm_backward", *_described(rows), *addresses, g.data_ptr(), g.stride(0), dx.data_ptr())
    return dx


def _weight(weight: Tensor, x: Tensor) -> Tensor:
    return weight.to(x.dtype).contiguous()


def _described(rows: Tensor) -> tuple[int, ...]:
    return rows.data_ptr(), DTYPES[rows.dtype], *rows.shape, rows.stride(0)
