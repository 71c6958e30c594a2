"""Dtypes and memory layouts of the tensors that kernels read and write."""

from __future__ import annotations

import torch
from torch import Tensor

from .spec import FLOATS

COMPUTED = (*FLOATS, torch.float64)  # dtypes that kernels compute with; float64 by the reference


def sum_dtype(x: Tensor) -> torch.dtype:
    """Return the dtype in which a kernel sums elements of ``x``: float32, or float64 for float64."""
    return torch.promote_types(x.dtype, torch.float32)


def widened(x: Tensor) -> Tensor:
    """Return ``x`` in the dtype of its sums."""
    return x.to(sum_dtype(x))


def dense_rows(x: Tensor) -> Tensor:
    """Return ``x`` with its last dim contiguous; rows may have gaps between them."""
    return x if x.stride(-1) == 1 else x.contiguous()


def check_out(out: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Return ``out`` if a result of ``shape`` and ``dtype`` can be written there; raise ValueError otherwise."""
    if out.shape != shape or out.dtype is not dtype or not out.is_contiguous():
        got = f"{out.dtype} {tuple(out.shape)} of strides {out.stride()}"
        raise ValueError(f"a result was to go into {got}; wanted contiguous {dtype} {shape}")
    return out
