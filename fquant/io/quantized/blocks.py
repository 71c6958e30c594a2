"""Formats of foreign codes, and scales of foreign blocks as scales of our blocks.

A foreign scale covers a block of ``rows`` by ``columns`` elements, each a number or None for all of them. A Packed has
one scale for ``block`` elements along a row. So ``block`` is the largest block of ours that divides ``columns``, and
:func:`spread` repeats scales until each of our blocks has its own. Values do not change.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, TypeAlias

import torch
from torch import Tensor

from ...format import BLOCKS, INT4, INT4_ZERO, Format, num_blocks
from ...tree import expect
from .packing import code_bits

Entries: TypeAlias = Mapping[str, Any]  # tensors, or entries of a header: objects with .shape and .dtype
FLOATS = (torch.float16, torch.bfloat16, torch.float32)
E4M3, E8M0 = torch.float8_e4m3fn, torch.float8_e8m0fnu
NAN_CODES = (0x7F, 0xFF)  # of E4M3


@dataclass(frozen=True)
class Grid:
    """Blocks of ``rows`` by ``columns`` elements with one scale each; None is all of them."""

    rows: int | None
    columns: int | None

    def shape(self, weight: tuple[int, ...]) -> tuple[int, int]:
        """Return the shape of the scales of a weight [out in]; the last blocks may be short."""
        count = lambda n, size: 1 if n is None else -(-size // n)
        return count(self.rows, weight[0]), count(self.columns, weight[1])


TENSOR, ROW = Grid(None, None), Grid(1, None)


def integers(weight: str, bits: int, columns: int | None, width: int, zero: bool = False) -> Format:
    """Return the format of integers of ``bits`` 1 to 8 in blocks of ``columns`` elements of rows of ``width``.

    ``weight`` is its name. The value of code c is c - 2**(bits - 1), or c with a zero point. Codes have 4 or 8 bits.
    """
    return blocked(weight, _integers(bits, zero), columns, width)


def blocked(weight: str, format: Format, columns: int | None, width: int) -> Format:
    """Return the ``format`` with a block that never straddles two of ``columns`` elements; ValueError if none does."""
    return replace(format, block=_block(weight, columns, width))


@lru_cache(maxsize=64)
def _integers(bits: int, zero: bool) -> Format:
    if bits == 4:
        return INT4_ZERO if zero else INT4
    first, held = 0 if zero else -(2 ** (bits - 1)), code_bits(bits)
    table = tuple(float(first + code) for code in range(2**held))
    name = f"int{bits}_zero" if zero else f"int{bits}_plain"  # the Format int8 counts in scale / 127
    return Format(name, bits=held, block=None, table=table, zero=zero)


def _block(weight: str, columns: int | None, width: int) -> int | None:
    if columns is None or columns >= width:
        return None
    fits = [block for block in BLOCKS if columns % block == 0]
    fault = f"{weight}: blocks of {columns} elements; wanted a multiple of {BLOCKS[0]}"
    expect(fits, f"{fault}, or whole rows; dequantize it with its own library")
    return max(fits)


def spread(scale: Tensor, grid: Grid, format: Format, shape: tuple[int, ...]) -> Tensor:
    """Return the scales of our blocks, f32[out blocks], from those of the ``grid``, f32[rows columns]."""
    out, width = shape
    if grid.rows != 1:
        scale = scale[torch.arange(out, device=scale.device) // (grid.rows or out)]
    count = num_blocks(format, width)
    if count == scale.shape[1]:
        return scale.contiguous()
    starts = torch.arange(count, device=scale.device) * (format.block or width)
    return scale[:, starts // (grid.columns or width)].contiguous()


def expect_entry(entries: Entries, name: str, dtypes: Collection[torch.dtype], *shapes: tuple[int, ...]) -> Any:
    """Return the entry ``name``; raise ValueError that names it if it is missing or has no such dtype or shape."""
    wanted = f"{' or '.join(map(_name, dtypes))} {' or '.join(map(str, map(list, shapes)))}"
    expect(name in entries, f"{name}: missing, wanted {wanted}; fetch the checkpoint again")
    t = entries[name]
    fault = f"{name}: got {_name(t.dtype)} {list(t.shape)}, wanted {wanted}; check the config"
    expect(t.dtype in dtypes and tuple(t.shape) in shapes, fault)
    return t


def finite(name: str, t: Tensor) -> Tensor:
    """Return the floats or exponents ``t`` as finite f32; u8 and E8M0 are the exponents of powers of two."""
    if t.dtype in (torch.uint8, E8M0):
        t = exponents(t.view(torch.uint8))
    t = t.float()
    fault = f"{name}: got values that are NaN or infinite, wanted finite scales; fetch the checkpoint again"
    expect(t.isfinite().all(), fault)
    return t


def exponents(t: Tensor) -> Tensor:
    """Return 2**(t - 127) of u8, exactly, with infinity for 255."""
    bits = t.int() << 23
    return torch.where(t == 0, 2**22, bits).to(torch.int32).view(torch.float32)  # 2**-127 is subnormal


def e4m3_codes(name: str, t: Tensor) -> Tensor:
    """Return the bytes of E4M3 as codes of FP8; raise ValueError for a NaN."""
    codes = t.contiguous().view(torch.uint8)
    nan = (codes & 0x7F) == NAN_CODES[0]
    expect(not nan.any(), f"{name}: got {int(nan.sum())} values that are NaN, wanted none; fetch the checkpoint again")
    return codes


def signed_codes(name: str, t: Tensor, bits: int = 8) -> Tensor:
    """Return i8 as the codes of :func:`integers` of ``bits``, u8: -2**(bits - 1) is code 0."""
    codes = t.contiguous().view(torch.uint8) + 2 ** (bits - 1)
    if bits < 8:
        wrong = codes >= 2**bits
        expect(not wrong.any(), f"{name}: got {int(wrong.sum())} integers beyond {bits} bits; check the config")
    return codes


def module(weight: str) -> str:
    """Return the name of the module of a weight: "layers.0.q_proj.weight" -> "layers.0.q_proj"; other names remain."""
    return weight.removesuffix(".weight")


def _name(dtype: object) -> str:
    return str(dtype).removeprefix("torch.")
