"""Quantisation in Triton.

A program holds whole blocks of a row. If the row is the block, it reads the row twice. A 4-bit code is found by a
binary search among the 15 midpoints of the table's values: some 40 instructions an element in all, where comparing with
each of the 15 took 70. The absmax is the greatest bit pattern of ``|x|`` as an integer, so NaN exceeds infinity.
Nothing is fused and denormals are kept, so codes equal the reference's.
"""

# pyright: reportInvalidTypeForm=false
from functools import lru_cache

import torch
from torch import Tensor

from ...format import Format, num_blocks, num_bytes
from .. import reference
from ..arguments import dense_rows
from ..spec import code_dtype
from .codes import EXACT, MOST, on, tl, triton, widen

SIZE = 4096  # elements that a program holds
TINY = tl.constexpr(int(torch.tensor(reference.TINY, dtype=torch.float32, device="cpu").view(torch.int32)))  # its bits


def encode(rows: Tensor, format: Format) -> tuple[Tensor, Tensor]:
    *outer, width = rows.shape
    codes = rows.new_empty(*outer, num_bytes(format, width), dtype=code_dtype(format))
    absmax = rows.new_empty(*outer, num_blocks(format, width), dtype=torch.float32)
    if not rows.numel():
        return codes, absmax
    x = dense_rows(rows.reshape(-1, width))
    if format.block and width % format.block == 0 and x.is_contiguous():
        x = x.view(1, -1)  # no block is short, so all rows are one
    num, width = x.shape
    block = format.block or min(SIZE, triton.next_power_of_2(width))
    blocks = max(1, SIZE // block) if format.block else 1
    grid = (triton.cdiv(width, block * blocks) if format.block else 1, min(num, MOST))
    sizes = num, width, x.stride(0), num_bytes(format, width), num_blocks(format, width), format.bits, block, blocks
    by_row, short = format.block is None, format.block is not None and width % block > 0
    with on(x):
        _encode[grid](x, codes, absmax, *_tables(format, x.device), *sizes, by_row, short, num_warps=8, **EXACT)
    return codes, absmax


@lru_cache(maxsize=256)
def _tables(format: Format, device: torch.device) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Return the codes in the order of their values and a search tree of the midpoints (4 bits), or the grid (8 bits).

    The children of node i of the tree are 2i and 2i + 1.
    """
    if format.table is None:
        return None, None, None
    if format.bits == 8:
        return None, None, reference.grid(format).to(device)
    order, middles = reference.midpoints(format)
    codes = None if order == list(range(len(order))) else torch.tensor(order, dtype=torch.int32, device=device)
    tree = [0] + [(2 * k + 1) * 8 // 2**level - 1 for level in range(4) for k in range(2**level)]
    return codes, middles[tree].to(device), None


@triton.jit
def _magnitude(x, at, mask, HALF: tl.constexpr):
    """Return x f32 and the bits of |x|, whose order is that of |x| with NaN above infinity."""
    x = widen(tl.load(x + at, mask=mask, other=0))
    if HALF:
        x = x.to(tl.float16).to(tl.float32)
    return x, x.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def _codes_of(x, top, last, order, tree, points, COUNT: tl.constexpr, SHORT: tl.constexpr):
    """Return the codes i32 of x [NUM C], whose blocks have the absmax ``top`` [NUM 1]; ``last`` marks a short one."""
    if tree is None and points is None:
        inverse = tl.div_rn(1.0, tl.where(top > 0, top, 1.0))
        x = tl.where(top > 0, x * (inverse * 127.0), 0.0)
        return ((x + 12582912.0) - 12582912.0).to(tl.int32)  # adding 1.5 · 2^23 rounds to nearest even
    else:
        part = x * tl.div_rn(1.0, top)
        if SHORT:
            part = tl.where(last, tl.div_rn(x, tl.broadcast_to(top, x.shape)), part)
        part = tl.where(part > -1.0, tl.minimum(part, 1.0), -1.0)  # NaN becomes -1, which can be looked up
        if tree is None:
            return tl.load(points + ((part + 1.0) * 0.5 * 65535.0 + 0.5).to(tl.int32)).to(tl.int32)
        else:
            part = tl.reshape(part, [COUNT])
            middles, node = tl.load(tree + tl.arange(0, 16)), tl.full([COUNT], 1, tl.int32)
            for _ in tl.static_range(4):
                node = 2 * node + (part > tl.gather(middles, node, 0)).to(tl.int32)
            if order is None:
                node -= 16
            else:
                node = tl.gather(tl.load(order + tl.arange(0, 16)), node - 16, 0)
            return tl.reshape(node, x.shape)


@triton.jit
def _encode(
    x, codes, absmax, order, tree, points, num_rows, width, x_row, codes_row, blocks,
    BITS: tl.constexpr, C: tl.constexpr, NUM: tl.constexpr, BY_ROW: tl.constexpr, SHORT: tl.constexpr,
):  # fmt: skip
    """Encode NUM blocks of C elements of each row of ``program_id(1)``; if BY_ROW, a row C elements at a time."""
    num = tl.program_id(0).to(tl.int64) * NUM + tl.arange(0, NUM)[:, None]  # [NUM 1]
    column = num * C + tl.arange(0, C)[None, :]
    byte = num * (C * BITS // 8) + tl.arange(0, C * BITS // 8)[None, :]
    last = num * C + C > width
    HALF: tl.constexpr = tree is None and points is None
    for i in range(tl.program_id(1), num_rows, tl.num_programs(1)):
        r = tl.cast(i, tl.int64)
        row = x + r * x_row
        values, bits = _magnitude(row, column, column < width, HALF)
        for k in range(C, width if BY_ROW else 0, C):
            bits = tl.maximum(bits, _magnitude(row, column + k, column + k < width, HALF)[1])
        top = tl.max(bits, 1)[:, None]
        if SHORT and not HALF:
            top = tl.where(last, tl.maximum(top, TINY), top)
        tl.store(absmax + r * blocks + num, top.to(tl.float32, bitcast=True), mask=num < blocks)
        if not HALF:
            top = tl.maximum(top, TINY)
        top = top.to(tl.float32, bitcast=True)
        for k in range(0, width if BY_ROW else C, C):
            if BY_ROW:
                values = _magnitude(row, column + k, column + k < width, HALF)[0]
            index = _codes_of(values, top, last, order, tree, points, NUM * C, SHORT)
            if BITS == 4:
                high, low = tl.split(tl.reshape(index, [NUM, C // 2, 2]))
                index = high << 4 | low
            at = byte + k
            tl.store(codes + r * codes_row + at, index.to(codes.dtype.element_ty), mask=at < codes_row)
