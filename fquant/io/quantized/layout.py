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


from ...format import BLOCKS, Format, num_blocks
from ...tree import expect
from .packing import code_bits

Entries: TypeAlias = Mapping[str, Any]  # tensors, or entries of a header: objects with .shape and .dtype
FLOATS = (torch.float16, torch.bfloat16, torch.float32)
E4M3, E8M0 = torch.float8_e4m3fn, torch.float8_e8m0fnu
NAN_CODES = (0x7F, 0xFF)  # of E4M3
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


@dataclass(frozen=True)
class Grid:
    """Blocks of ``rows`` by ``columns`` elements with one scale each; None is all of them."""

    rows: int | None
    columns: int | None

    def shape(self, weight: tuple[int, ...]) -> tuple[int, int]:
        """Return the shape of the scales of a weight [out in]; the last blocks may be short."""
        return tuple(1 if n is None else -(-size // n) for n, size in zip((self.rows, self.columns), weight, strict=True))


TENSOR, ROW = Grid(None, None), Grid(1, None)


def integers(bits: int, columns: int | None, width: int, zero: bool = False) -> Format:
    """Return the format of integers of ``bits`` 1 to 8 in blocks of ``columns`` elements of rows of ``width``.

    The value of code c is c - 2**(bits - 1), or c with a zero point. Codes have 4 or 8 bits.
    """
    return blocked(_integers(bits, zero), columns, width)


def blocked(format: Format, columns: int | None, width: int) -> Format:
    """Return the ``format`` with a block that never straddles two of ``columns`` elements; ValueError if none does."""
    return replace(format, block=_block(columns, width, format.bits))


@lru_cache(maxsize=64)
def _integers(bits: int, zero: bool) -> Format:
    first, held = 0 if zero else -(2 ** (bits - 1)), code_bits(bits)
    table = tuple(float(first + code) for code in range(2**held))
    more: dict[str, Any] = {"zero": True} if zero else {}
    return Format(f"{'uint' if zero else 'sint'}{bits}", bits=held, block=BLOCKS[0], table=table, **more)


@lru_cache(maxsize=1)
def e2m1() -> Format:
    """Return the format of 4-bit floats of the OCP MX specification; the first 8 codes are positive."""
    return Format("e2m1", bits=4, block=32, table=_E2M1 + tuple(-x for x in _E2M1))


@lru_cache(maxsize=1)
def e4m3() -> Format:
    """Return the format of torch.float8_e4m3fn; its two codes of NaN have the value 0 and must not occur."""
    values = torch.arange(256, dtype=torch.uint8, device="cpu").view(E4M3).float().nan_to_num(nan=0.0)
    return Format("e4m3", bits=8, block=None, table=tuple(values.tolist()))


def _block(columns: int | None, width: int, bits: int) -> int | None:
    if columns is None or columns >= width:
        return None if bits == 8 else min((b for b in BLOCKS if b >= width), default=BLOCKS[-1])
    fits = [b for b in BLOCKS if columns % b == 0]
    fault = f"blocks of {columns} elements; wanted a multiple of {BLOCKS[0]}"
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
    return scale[:, starts // (grid.columns or width)]


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
    """Return the bytes of E4M3 as codes of :func:`e4m3`; raise ValueError for a NaN."""
    codes = t.contiguous().view(torch.uint8)
    nan = (codes & 0x7F) == NAN_CODES[0]
    expect(not nan.any(), f"{name}: got {int(nan.sum())} values that are NaN, wanted none; fetch the checkpoint again")
    return codes


def signed_codes(t: Tensor) -> Tensor:
    """Return i8 as the codes of 8-bit :func:`integers`: -128 is code 0."""
    return t.contiguous().view(torch.uint8) ^ 0x80


def module(weight: str) -> str:
    """Return the name of the module of a weight: "layers.0.q_proj.weight" -> "layers.0.q_proj"; other names remain."""
    return weight.removesuffix(".weight")


def _name(dtype: object) -> str:
    return str(dtype).removeprefix("torch.")
