"""Products with packed weights on the CPU, by csrc/gemv.h and csrc/gemm.h, or tile by tile by torch."""

from collections.abc import Iterator, Sequence
from functools import partial

import torch
from torch import Tensor

from ..arguments import multiply_tiles
from ..spec import Spec
from .codec import packed_array
from .library import DTYPES, Packed, call, result

TILE = 2 << 20  # bytes of a decoded tile
ALIGNED = 32  # columns: a decoded part starts at a multiple of this


def _product(name: str, x: Tensor, buffers: Sequence[Tensor], spec: Spec, out: Tensor | None = None) -> Tensor:
    *stack, rows, _ = x.shape
    y = result(out, *stack, rows, spec.shape[name == "matmul_t"], dtype=x.dtype)
    if not x.numel() or not y.numel():
        return y.zero_()
    if stack:
        flat = [b.flatten(0, len(stack) - 1) for b in buffers]
        for i, (x_, y_) in enumerate(zip(x.flatten(0, -3), y.flatten(0, -3), strict=True)):
            _product(name, x_, [b[i] for b in flat], spec, y_)
        return y
    w, keep = packed_array(buffers, spec)
    if x.dtype in DTYPES and w.width == spec.shape[1]:
        x = x.contiguous()
        args = (w, x.data_ptr(), rows, y.data_ptr(), DTYPES[x.dtype])
        if size := call(name, *args, None):
            room = torch.empty(size, dtype=torch.uint8, device="cpu")
            call(name, *args, room.data_ptr())
    else:
        multiply_tiles(x, _tiles(w, spec, x.dtype), y, name == "matmul_t")
    del keep
    return y


matmul, matmul_t = partial(_product, "matmul"), partial(_product, "matmul_t")


def _tiles(w: Packed, spec: Spec, dtype: torch.dtype) -> Iterator[tuple[int, int, Tensor]]:
    """Yield (start, stop, those rows in ``dtype``); a tile is valid until the next."""
    out, width = spec.shape
    decoded = dtype if dtype in DTYPES else spec.dtype
    step = min(out, max(1, TILE // (width * max(decoded.itemsize, dtype.itemsize))))
    tile = torch.empty(step * width + ALIGNED, dtype=decoded, device="cpu")
    for start in range(0, out, step):
        stop = min(out, start + step)
        if w.width == width:
            skip, where = 0, (start, stop - start, 0, width)
        else:  # one long row: decode from the aligned column before the tile
            skip = start * width % ALIGNED
            where = (0, 1, start * width - skip, (stop - start) * width + skip)
        call("decode", w, *where, DTYPES[decoded], tile.data_ptr(), where[3])
        yield start, stop, tile[skip : skip + (stop - start) * width].view(-1, width).to(dtype)
