"""Products with packed weights on CUDA, and those by slabs of the weight.

``cuda_plans.py`` has the plans and chooses by estimates. ``python -m tests.bench.gpu sweep`` measures all candidates.
Slabs are rows of the weight for ``x · Wᵀ`` and columns for ``g · W``, so each gives a complete part of the result.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from ..arguments import dense_rows, multiply_tiles
from ..cuda_plans import TENSOR_CORES, Few, Fused, Plan, Tiled, plan_for
from ..spec import Spec
from . import few_rows, mixed_gemm
from .codes import DTYPES, Rows, generation
from .dequantize import cut, decode_into, rows_of


def matmul(x: Tensor, buffers: Sequence[Tensor], spec: Spec, plan: Plan | None = None) -> Tensor:
    """Compute the op with another plan than that for x."""
    return _product(x, buffers, spec, plan, False)


def matmul_t(g: Tensor, buffers: Sequence[Tensor], spec: Spec, plan: Plan | None = None) -> Tensor:
    """Compute the op with another plan than that for g."""
    return _product(g, buffers, spec, plan, True)


def _product(x: Tensor, buffers: Sequence[Tensor], spec: Spec, plan: Plan | None, across: bool) -> Tensor:
    y = x.new_empty(*x.shape[:-1], spec.shape[1 if across else 0])
    if not x.numel() or not y.numel():
        return y.zero_()
    w, xs, ys = rows_of(buffers, spec), dense_rows(x.reshape(-1, *x.shape[-2:])), y.view(-1, *y.shape[-2:])
    can = w.in_words and w.width == spec.shape[1]
    plan = plan or plan_for(x.shape[-2], spec, x.dtype, across, can, generation(x.device))
    if isinstance(plan, Tiled):
        for i in range(len(xs)):
            _in_slabs(xs[i], _at(w, i), spec, ys[i], plan.size, across)
    elif isinstance(plan, Few) and can and x.dtype in DTYPES and not across:
        few_rows.multiply(xs, w, ys, plan)
    elif isinstance(plan, Fused) and can and x.dtype in TENSOR_CORES:
        mixed_gemm.multiply(xs, w, ys, plan, across)
    else:
        kinds = f"{'g · W' if across else 'x · Wᵀ'} in {x.dtype}, units of {w.codes.dtype}"
        wanted = "rows of whole 32-bit words; for Fused bf16 or f16; for Few x · Wᵀ in f32, bf16 or f16"
        raise ValueError(f"{plan} got {kinds}; wanted {wanted}; leave the plan out")
    return y


def _at(w: Rows, i: int) -> Rows:
    """Return the i-th array of a stack, as a stack of one."""
    at = slice(i, i + 1)
    nested = w.nested and (w.nested[0][at], w.nested[1][at], w.nested[2])
    offset = None if w.offset is None else w.offset[at]
    zero = None if w.zero is None else w.zero[at]
    return w._replace(codes=w.codes[at], scale=w.scale[at], nested=nested, offset=offset, zero=zero)


def _in_slabs(x: Tensor, w: Rows, spec: Spec, y: Tensor, size: int, across: bool) -> None:
    if across and w.width == spec.shape[1]:
        _by_columns(x, w, spec, y, size)
    else:  # if blocks straddle rows, no slab is columns: sum over slabs of rows, in float32 at least
        multiply_tiles(x, _row_slabs(w, spec, x.dtype, size), y, by_columns=across)


def _by_columns(g: Tensor, w: Rows, spec: Spec, y: Tensor, size: int) -> None:
    """Compute ``g · W`` into y, a slab of columns of the weight at a time."""
    out, width = spec.shape
    dtype = g.dtype if g.dtype in DTYPES else w.dtype
    unit = max(w.format.block or 0, 64)
    step = min(width, max(1, size // (out * dtype.itemsize) // unit) * unit)
    buffer = w.codes.new_empty(out * step, dtype=dtype)
    for start in range(0, width, step):
        stop = min(width, start + step)
        slab = buffer[: out * (stop - start)].view(out, stop - start)
        decode_into(cut(w, slice(0, out), slice(start, stop)), slab[None])
        torch.mm(g, slab.to(g.dtype), out=y[:, start:stop])


def _row_slabs(w: Rows, spec: Spec, wanted: torch.dtype, size: int) -> Iterator[tuple[int, int, Tensor]]:
    """Yield (start, stop, those rows in dtype ``wanted``); a slab is valid until the next."""
    out, width = spec.shape
    dtype = wanted if wanted in DTYPES else w.dtype
    step = max(1, size // (width * dtype.itemsize))
    step = min(out, step // 128 * 128 or step)
    block = w.format.block or 32
    buffer = w.codes.new_empty(step * width + block, dtype=dtype)
    for start in range(0, out, step):
        stop, skip = min(out, start + step), 0
        if w.width == width:
            part = cut(w, slice(start, stop))
        else:  # one long row: decode from the beginning of a block
            skip = start * width % block
            part = cut(w, slice(0, 1), slice(start * width - skip, stop * width))
        slab = buffer[: skip + (stop - start) * width]
        decode_into(part, slab.view(1, part.codes.shape[1], -1))
        yield start, stop, slab[skip:].view(-1, width).to(wanted)
