"""Describe a packed array to C."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from ...format import Format, num_bytes
from ..spec import Spec
from .library import DTYPES, Packed


class _Known(NamedTuple):
    """What of a packed array its spec alone says; ``static`` points into the tables."""

    static: bytes
    tables: tuple[Tensor | None, ...]
    row: int  # bytes of codes in a row
    dims: int  # of the codes, without those of a stack
    nested: Format | None  # of the scales, where csrc/kernels.c decodes them on the way


@lru_cache(maxsize=1024)
def _known(spec: Spec) -> _Known:
    format, shape, dtype = spec
    width = math.prod(shape) if format.flat else shape[-1]
    if format.flat and shape[-1] % (format.block or width) == 0:
        width = shape[-1]  # no block straddles a row, and the flat layout is that by rows
    table, nested_table = _table(format), _table(format.scale) if format.scale else None
    w = Packed(width=width, block=format.block or width, bits=format.bits, dtype=DTYPES[dtype])
    nested_bytes = None if nested_table is None else nested_table.view(torch.uint8).view(-1, 4).mT.contiguous()
    if table is not None:
        values = [abs(v) for v in table.tolist() if v != 0]
        w.table, w.least = table.data_ptr(), 2.0**-125 / min(values, default=1.0)
    if nested_table is not None and nested_bytes is not None and format.scale:
        w.nested_table, w.nested_bytes = nested_table.data_ptr(), nested_bytes.data_ptr()
        w.nested_block = format.scale.block or 0
    nested = format.scale if format.scale is not None and _in_one_pass(format.scale) else None
    return _Known(bytes(w), (table, nested_table, nested_bytes), max(1, num_bytes(format, width)), _dims(spec), nested)


def _dims(spec: Spec) -> int:
    """How many dims the codes have, without those of a stack."""
    return 1 if spec.format.flat and spec.format.bits == 4 else len(spec.shape)


def _in_one_pass(scale: Format) -> bool:
    """Whether csrc/kernels.c decodes scales of this format on the way; others are decoded before."""
    return scale.flat and scale.bits == 8 and scale.table is not None and bool(scale.block) and scale.scale is None


@lru_cache(maxsize=256)
def _table(format: Format) -> Tensor | None:
    return None if format.table is None else torch.tensor(format.table, dtype=torch.float32, device="cpu")
