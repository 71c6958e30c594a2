"""Arrays whose codes stand for learned vectors, on every device: what is multiplied is looked up, a tile at a time.

    codes    u8[*stack ... groups·stages]    of each group of ``dim`` elements along a row those of all stages
    scale    f32[*stack ... blocks]
    vectors  f32[*stack stages·256·dim]      one list for the whole array

An element is the sum of its stages' vectors, the first stage first, in float32, times its scale, rounded once to the
array's dtype. The list is small, 16 KiB of two stages of 8 elements, and stays in a core's cache.

Rows are decoded ``TILE`` bytes of float32 at a time and torch multiplies: a dense weight is never made. Sums over tiles
are kept in float32 at least.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from ..format import CODES, Format
from .reference import times_scale
from .spec import Spec

TILE = 2 << 20  # bytes: with what looking up takes beside it, less than 8 MiB


def decode(buffers: Sequence[Tensor], spec: Spec, out: torch.dtype) -> Tensor:
    """See ``fquant.kernels.decode``."""
    codes, *_ = buffers
    stack, width = codes.shape[: codes.ndim - len(spec.shape)], spec.shape[-1]
    values = codes.new_empty(*stack, *spec.shape, dtype=out)
    into = values.view(math.prod(stack), math.prod(spec.shape[:-1]), width)
    for one, rows in zip(into, _stacked(buffers, len(stack)), strict=True):
        for start, stop, tile in _tiles(rows, spec, out):
            one[start:stop] = tile
    return values


def matmul(x: Tensor, buffers: Sequence[Tensor], spec: Spec, out: Tensor | None = None) -> Tensor:
    """See ``fquant.kernels.matmul``."""
    y = _result(out, x, spec.shape[0])
    for x_, y_, rows in zip(_matrices(x), _matrices(y), _stacked(buffers, x.ndim - 2), strict=True):
        for start, stop, tile in _tiles(rows, spec, x.dtype):
            torch.mm(x_, tile.mT, out=y_[:, start:stop])
    return y


def matmul_t(g: Tensor, buffers: Sequence[Tensor], spec: Spec, out: Tensor | None = None) -> Tensor:
    """See ``fquant.kernels.matmul_t``."""
    y = _result(out, g, spec.shape[1])
    wide = torch.promote_types(g.dtype, torch.float32)
    for g_, y_, rows in zip(_matrices(g), _matrices(y), _stacked(buffers, g.ndim - 2), strict=True):
        total = y_.new_zeros(y_.shape, dtype=wide)
        for start, stop, tile in _tiles(rows, spec, g.dtype):
            total.addmm_(g_[:, start:stop].to(wide), tile.to(wide))
        y_.copy_(total)
    return y


def look_up(codes: Tensor, vectors: Tensor, format: Format) -> Tensor:
    """The sums of vectors f32[stages·256·dim] that codes u8[... groups·stages] stand for, f32[... groups·dim]."""
    assert format.vectors is not None
    stages, dim = format.vectors.stages, format.vectors.dim
    tables = vectors.view(stages, CODES, dim)
    at = codes.unflatten(-1, (codes.shape[-1] // stages, stages)).int()  # [... groups stages]
    values = F.embedding(at[..., 0], tables[0])
    for stage in range(1, stages):
        values += F.embedding(at[..., stage], tables[stage])
    return values.flatten(-2)


def _tiles(rows: tuple[Tensor, ...], spec: Spec, dtype: torch.dtype) -> Iterator[tuple[int, int, Tensor]]:
    """(start, stop, the rows between them in ``dtype``) of codes [n bytes], scale [n blocks] and vectors."""
    codes, scale, vectors = rows
    width = spec.shape[-1]
    step = max(1, TILE // (4 * max(1, width)))
    for start in range(0, len(codes), step):
        some = slice(start, start + step)
        values = look_up(codes[some], vectors, spec.format)[:, :width]
        tile = times_scale(values, scale[some], spec.format, width).to(spec.dtype).to(dtype)
        yield start, start + len(tile), tile


def _stacked(buffers: Sequence[Tensor], dims: int) -> Iterator[tuple[Tensor, ...]]:
    """Codes [n bytes], scale [n blocks] and vectors of each array of a stack of so many dims."""
    codes, scale, vectors = buffers
    num, rows = math.prod(codes.shape[:dims]), math.prod(codes.shape[dims:-1])
    by_rows = (t.reshape(num, rows, t.shape[-1]) for t in (codes, scale))
    return zip(*by_rows, vectors.reshape(num, vectors.shape[-1]), strict=True)


def _matrices(t: Tensor) -> Tensor:
    """[*stack m n] with one dim for those of the stack."""
    return t.reshape(math.prod(t.shape[:-2]), *t.shape[-2:])


def _result(out: Tensor | None, x: Tensor, width: int) -> Tensor:
    if out is None:
        return x.new_empty(*x.shape[:-1], width)
    if out.shape != (*x.shape[:-1], width) or out.dtype is not x.dtype or not out.is_contiguous():
        got = f"{out.dtype} {tuple(out.shape)} of strides {out.stride()}"
        raise ValueError(f"a result was to go into {got}; wanted contiguous {x.dtype} {(*x.shape[:-1], width)}")
    return out
