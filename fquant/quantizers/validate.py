"""Checks of the values of a weight before it is quantised."""

import math

import torch
from torch import Tensor

from ..device import is_recording
from ..format import Format
from ..kernels.dispatch import has_no_values
from ..tree import expect


def check_importance(importance: Tensor, w: Tensor, format: Format) -> None:
    """Raise ValueError unless ``importance`` fits ``w`` and a format of vectors, and is not negative."""
    fix = "leave it out, or quantize to a format of vectors"
    expect(format.vectors, f"{format.name} has no use for importance; {fix}")
    shape, wanted = tuple(importance.shape), tuple(w.shape)
    fits = shape in (wanted, wanted[-1:]) and importance.is_floating_point() and importance.device == w.device
    got = f"importance: got {name(importance.dtype)} {shape} on {importance.device}"
    expect(fits, f"{got}; wanted floats {wanted[-1:]} or {wanted} on {w.device}")
    fits = has_no_values(importance) or bool((importance.isfinite() & (importance >= 0)).all() & (importance > 0).any())
    expect(fits, "importance: got a value that is negative or not finite, or zeros only; wanted f >= 0")


def largest(rows: Tensor, absmax: Tensor, format: Format) -> float | Tensor:
    """Return the largest of the scales ``absmax``, 0 of none and of meta tensors; raise ValueError unless it is finite.

    While a CUDA graph is recorded it stays on the device, which asserts that it is finite.
    """
    if has_no_values(absmax) or not absmax.numel():
        return 0.0
    if is_recording(absmax.device):
        top = absmax.max()
        torch._assert_async(top.isfinite(), f"{format.name}: a weight in a CUDA graph has values that are not finite")
        return top
    if math.isfinite(top := float(absmax.max())):  # NaN exceeds all: one pass, because small ops take long to start
        return top
    bad = ~torch.isfinite(rows.float())
    if not bad.any():
        top = rows.float().abs().max().item()
        fault = f"{format.name}: a block has values up to {top:g}, and their range is beyond float32"
        expect(not (format.zero or format.mean), f"{fault}; use another format")
        raise ValueError(f"{top:g} is beyond float16's 65504, to which {format.name} rounds first; use another format")
    row, column = bad.nonzero()[0].tolist()
    fault = f"{int(bad.sum())} of {rows.numel()} values are NaN or infinite, the first at row {row}, column {column}"
    raise ValueError(f"{fault}; a quantised weight must be finite")


def name(dtype: torch.dtype) -> str:
    """Return the name of a dtype without its module."""
    return str(dtype).removeprefix("torch.")
