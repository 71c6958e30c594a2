"""Products of integers on the CPU (csrc/integers.h)."""

from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

from ...format import Format
from .. import reference
from ..spec import Spec
from .codec import flattened, packed
from .library import DTYPES, Rounding, call, result

MOST = 1 << 15  # elements of a block whose sum of products fits int32


def integer_matmul(x: Tensor, buffers: Sequence[Tensor], spec: Spec, act: Format, out: Tensor | None = None) -> Tensor:
    """Return the product by C, or by the reference where a sum may be beyond int32."""
    *outer, rows, width = x.shape
    y = result(out, *outer, rows, spec.shape[0], dtype=x.dtype)
    if not x.numel() or not y.numel():
        return y.zero_()
    if min(width, spec.format.block or width) > MOST or x.dtype not in DTYPES:
        return y.copy_(reference.integer_matmul(x, buffers, spec, act))
    if outer:
        for x_, y_, *own in flattened(len(outer), x, y, *buffers):
            integer_matmul(x_, own, spec, act, y_)
        return y
    w, levels = packed(buffers, spec), _levels(spec.format)
    unit, plain = 1 if spec.format.integers else 127, _is_plain(spec.format)
    args = w, levels, plain, unit, _rounding(act), x.contiguous(), rows, y, DTYPES[x.dtype]
    call("integer_matmul", *args, torch.empty(call("integer_matmul", *args, None), dtype=torch.uint8, device="cpu"))
    return y


def integer_mm(a: Tensor, b: Tensor, act_a: Format, act_b: Format, out: Tensor | None = None) -> Tensor:
    """Return the product by C, or by the reference where a sum may be beyond int32."""
    y = result(out, len(a), len(b), dtype=a.dtype)
    if not a.numel() or not y.numel():
        return y.zero_()
    if a.shape[1] > MOST or a.dtype not in DTYPES:
        return y.copy_(reference.integer_mm(a, b, act_a, act_b))
    (a, across_a), (b, across_b) = map(_operand, (a, b))
    args = a, across_a, len(a), _rounding(act_a), b, across_b, len(b), _rounding(act_b), a.shape[1], y, DTYPES[a.dtype]
    call("integer_mm", *args, torch.empty(call("integer_mm", *args, None), dtype=torch.uint8, device="cpu"))
    return y


def _operand(t: Tensor) -> tuple[Tensor, int]:
    """Return t [rows k] as C reads it, and the stride of its elements if its rows are columns in memory, else 0."""
    if t.stride(0) == 1 and t.stride(1) >= len(t) > 1:
        return t, t.stride(1)
    return t.contiguous(), 0


@lru_cache(maxsize=64)
def _rounding(act: Format) -> Rounding:
    if act.integers is None:
        return Rounding(first=-127, last=127, unit=127, zero=0, halves=1)
    first, last = act.integers
    return Rounding(first=first, last=last, unit=act.unit or last, zero=act.zero, halves=0)


@lru_cache(maxsize=64)
def _is_plain(format: Format) -> bool:
    """Return True if each code that has a value is ``code + levels[0]``: NaN may be after the integers, not before."""
    return format.integers is not None and format.table is not None and format.table[0] == format.integers[0]


@lru_cache(maxsize=64)
def _levels(format: Format) -> Tensor | None:
    """Return the integer of each code i16[1 << bits], at least 16; None for int8 codes."""
    if format.levels is None:
        return None
    return torch.tensor([*format.levels, *[0] * (16 - len(format.levels))], dtype=torch.int16, device="cpu")
