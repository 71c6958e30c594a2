"""The loss of logits on the CPU, by csrc/loss.h."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .. import reference
from ..arguments import dense_rows
from .library import DTYPES, call, result


def nll(logits: Tensor, targets: Tensor, ignore: int, out: Tensor | None = None) -> Tensor:
    """See ``fquant.kernels.ops.nll.nll``."""
    if logits.dtype not in DTYPES:
        return reference.nll(logits, targets, ignore)
    out = result(out, len(logits), dtype=torch.float32)
    _losses(logits, targets, ignore, None, out, None)
    return out


def nll_backward(
    logits: Tensor, targets: Tensor, ignore: int, factor: Tensor | None, out: Sequence[Tensor | None] = (None, None)
) -> tuple[Tensor, Tensor]:
    """See ``fquant.kernels.ops.nll.nll_backward``."""
    if logits.dtype not in DTYPES:
        return reference.nll_backward(logits, targets, ignore, factor)
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
        given = rows.data_ptr(), DTYPES[rows.dtype], *rows.shape, rows.stride(0), targets.data_ptr(), ignore
        results = out.data_ptr(), None if slope is None else slope.data_ptr()
        call("nll", *given, None if factor is None else factor.data_ptr(), *results)
