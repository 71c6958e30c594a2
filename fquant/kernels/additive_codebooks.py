"""Arrays of learned vectors (additive quantisation) in plain torch: rows are decoded a tile at a time.

    codes    u8[*stack ... groups·stages]    for each group of ``dim`` elements along a row, a code of each stage
    scale    f32[*stack ... blocks]
    vectors  f32[*stack stages·256·dim]      one list for the whole array

An element is the sum of its stages' vectors, the first stage first, in float32, times its scale, rounded once to the
array's dtype. A product decodes ``TILE`` bytes of float32 rows and lets torch multiply, so a dense weight never exists.
C has the same bits and products of its own (``cpu/csrc/additive.h``).
"""

import math
from collections.abc import Iterator, Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from ..format import CODES, Format
from .arguments import check_out, multiply_tiles
from .reference import times_scale
from .spec import Spec, stack

TILE = 2 << 20  # bytes: less than 8 MiB with the temporaries of a look-up


def decode(buffers: Sequence[Tensor], spec: Spec, out: torch.dtype) -> Tensor:
    outer = stack(spec, buffers)
    values = buffers[0].new_empty(*outer, *spec.shape, dtype=out)
    arrays = values.view(math.prod(outer), math.prod(spec.shape[:-1]), spec.shape[-1])
    for array, rows in zip(arrays, _stacked(buffers, len(outer)), strict=True):
        for start, stop, tile in _tiles(rows, spec, out):
            array[start:stop] = tile
    return values


def _product(by_columns: bool, x: Tensor, buffers: Sequence[Tensor], spec: Spec, out: Tensor | None = None) -> Tensor:
    shape = (*x.shape[:-1], spec.shape[by_columns])
    y = x.new_empty(shape) if out is None else check_out(out, shape, x.dtype)
    matrices = (t.reshape(math.prod(t.shape[:-2]), *t.shape[-2:]) for t in (x, y))
    for x_, y_, rows in zip(*matrices, _stacked(buffers, x.ndim - 2), strict=True):
        multiply_tiles(x_, _tiles(rows, spec, x.dtype), y_, by_columns)
    return y


matmul, matmul_t = partial(_product, False), partial(_product, True)


def look_up(codes: Tensor, vectors: Tensor, format: Format) -> Tensor:
    """Return the sums f32[... groups·dim] of the vectors f32[stages·256·dim] at codes u8[... groups·stages]."""
    assert format.vectors is not None
    stages, dim = format.vectors.stages, format.vectors.dim
    tables = vectors.view(stages, CODES, dim)
    at = codes.unflatten(-1, (codes.shape[-1] // stages, stages)).int()  # [... groups stages]
    values = F.embedding(at[..., 0], tables[0])
    for stage in range(1, stages):
        values += F.embedding(at[..., stage], tables[stage])
    return values.flatten(-2)


def _tiles(rows: tuple[Tensor, ...], spec: Spec, dtype: torch.dtype) -> Iterator[tuple[int, int, Tensor]]:
    """Yield (start, stop, those rows in ``dtype``) of codes [n bytes], scale [n blocks] and vectors."""
    codes, scale, vectors = rows
    width = spec.shape[-1]
    step = max(1, TILE // (4 * max(1, width)))
    for start in range(0, len(codes), step):
        some = slice(start, start + step)
        values = look_up(codes[some], vectors, spec.format)[:, :width]
        tile = times_scale(values, scale[some], spec.format, width).to(spec.dtype).to(dtype)
        yield start, start + len(tile), tile


def _stacked(buffers: Sequence[Tensor], dims: int) -> Iterator[tuple[Tensor, ...]]:
    """Yield codes [n bytes], scale [n blocks] and vectors of each array of a stack with ``dims`` dims."""
    codes, scale, vectors = buffers
    num, rows = math.prod(codes.shape[:dims]), math.prod(codes.shape[dims:-1])
    by_rows = (t.reshape(num, rows, t.shape[-1]) for t in (codes, scale))
    return zip(*by_rows, vectors.reshape(num, vectors.shape[-1]), strict=True)
