"""Codes in Triton: how a packed array reaches a kernel, and the parts of kernels that decode it.

A kernel gets a packed array as :class:`Rows`: rows of *units* beside rows of scales. A unit is a 32-bit word of 8 or 4
codes. Of codes of 2 bits it has 8 too, in 16 bits, so that tiles are those of 4 bits. In rows that are not aligned for
words, a unit is a byte. Eight codes of 3 bits are three bytes, which are loaded one by one, and not asynchronously: no
word holds whole codes. Rows without gaps are one long row.

* A look-up is ``tl.gather`` from shared memory: shift, mask, load. A tree of selects takes 19 instructions. For a load
  from global memory Triton 3.6 first moves the codes to other threads.
* Unpacking is ``tl.join`` of a word with itself shifted: codes come out in order, in registers of the same thread.

Values equal the reference to the bit: nothing is fused, denormals are not flushed, and float32 is rounded once to the
array's dtype. Triton's interpreter truncates to bfloat16 and loses its denormals, so :func:`narrow` (there) and
:func:`widen` (everywhere) use integers.
"""

# tl.constexpr is an annotation to Triton, and Any to a type checker:
# pyright: reportInvalidTypeForm=false
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache
from importlib import import_module
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...format import Format

triton: Any = import_module("triton")  # Any: Triton has no types for kernels or their calls
tl: Any = import_module("triton.language")

INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))
DTYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
EXACT = {"enable_fp_fusion": False}
MOST = 65535  # programs along the second axis of a grid


class Rows(NamedTuple):
    """A packed array as kernels read it; the dims of a stack are one dim, in front."""

    codes: Tensor  # [stack rows units]: i32 or i16 of 8 or 4 codes each, or bytes
    scale: Tensor  # [stack rows blocks]: f32, or the codes u8 of packed scales
    nested: tuple[Tensor, Tensor, Tensor] | None  # of packed scales: absmax f32[stack n], offset f32[stack], table
    offset: Tensor | None  # f32[stack]
    width: int  # elements in a row
    format: Format
    dtype: torch.dtype
    pitch: int  # scales in a row of the whole array, which number packed scales
    first: int = 0  # the number of the first scale here
    zero: Tensor | None = None  # [stack rows blocks]: f32

    @property
    def per(self) -> int:
        """Codes in a unit."""
        return 8 if self.format.bits == 3 else self.codes.itemsize * 8 // self.format.bits

    @property
    def in_words(self) -> bool:
        """True if rows are whole 32-bit words, and aligned unless bytes are loaded."""
        return self.codes.itemsize > 1 or (self.format.bits == 3 and self.codes.shape[-1] % 4 == 0)


def tensors(w: Rows) -> tuple[Any, ...]:
    """Return the run-time arguments of every kernel: tensors, their strides, the numbers of the scales."""
    absmax, mean, table = w.nested or (None, None, None)
    strides = *w.codes.stride()[:2], *w.scale.stride()[:2], absmax.stride(0) if absmax is not None else 0
    of_zero = w.zero.stride()[:2] if w.zero is not None else (0, 0)
    values = lookup(w.format, w.codes.device)
    return w.codes, w.scale, absmax, mean, table, w.offset, values, w.zero, *strides, *of_zero, w.pitch, w.first


def constants(w: Rows) -> tuple[Any, ...]:
    """Return the compile-time arguments: codes a unit, bits, block, block of packed scales, the array's dtype."""
    nested = w.format.scale.block if w.nested and w.format.scale else 0
    return w.per, w.format.bits, w.format.block or 0, nested, DTYPES[w.dtype]


@lru_cache(maxsize=256)
def lookup(format: Format, device: torch.device) -> Tensor | None:
    """Return the table of ``format`` on ``device``."""
    return None if format.table is None else torch.tensor(format.table, dtype=torch.float32, device=device)


def on(t: Tensor) -> AbstractContextManager[Any]:
    """Launch kernels on the device of ``t`` inside the context."""
    return torch.cuda.device(t.device) if t.is_cuda else nullcontext()


def words(t: Tensor, bits: int = 8) -> Tensor:
    """Return bytes [stack rows bytes] of codes of ``bits`` as larger units if rows are aligned words."""
    numbers = t.shape[-1], *t.stride()[:-1], t.data_ptr(), t.storage_offset()
    if bits == 3 or not t.numel() or any(n % 4 for n in numbers):
        return t
    return t.view(torch.int16 if bits == 2 else torch.int32)


def generation(device: torch.device) -> int:
    """Return the generation that kernels for ``device`` are made for, 80, 90 or 100."""
    if device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        arch = 10 * major + minor
    else:  # of tensors that are interpreted, or stand for those of a device
        arch = 90 if INTERPRETED.value else triton.runtime.driver.active.get_current_target().arch
    return {9: 90, 10: 100}.get(arch // 10, 80)  # sm_120 has the instructions of sm_80


@triton.jit
def narrow(x, DTYPE: tl.constexpr):
    """Round x f32 to DTYPE, to nearest even."""
    if INTERPRETED and DTYPE == tl.bfloat16:
        bits = x.to(tl.uint32, bitcast=True)
        bits = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        return bits.to(tl.uint16).to(tl.bfloat16, bitcast=True)
    else:
        return x.to(DTYPE)


@triton.jit
def widen(x):
    """Return x in f32."""
    if x.dtype == tl.bfloat16:
        return (x.to(tl.uint16, bitcast=True).to(tl.uint32) << 16).to(tl.float32, bitcast=True)
    else:
        return x.to(tl.float32)


@triton.jit
def unpack(units, PER: tl.constexpr, BITS: tl.constexpr):
    """Return the codes of units [...] in order, i32 [... PER]; PER > 2 gives dims of 2 instead, two or three."""
    if PER == 1:
        return units.to(tl.int32)
    elif BITS == 3:
        two = tl.join(units >> 12, units)
        four = tl.join(two >> 6, two)
        return tl.join(four >> 3, four) & 7
    elif BITS == 2:
        units = units.to(tl.int32)
        if PER == 8:
            units = tl.join(units, units >> 8)
        two = tl.join(units >> 4, units)
        return tl.join(two >> 2, two) & 3
    elif PER == 2:
        units = units.to(tl.int32)
        return tl.join(units >> 4, units) & 15
    else:
        two = tl.join(units, units >> 16)
        four = tl.join(two, two >> 8)
        if BITS == 8:
            return four & 255
        else:
            return tl.join(four >> 4, four) & 15


@triton.jit
def look_up(codes, table, COUNT: tl.constexpr, BITS: tl.constexpr):
    """Return the values f32[COUNT] of COUNT codes of any shape."""
    codes = tl.reshape(codes, [COUNT])
    if table is None:
        return ((codes << 24) >> 24).to(tl.float32)
    else:
        return tl.gather(tl.load(table + tl.arange(0, 1 << BITS)), codes, 0)


@triton.jit
def scaled(values, absmax, zero, offset, table):
    """Subtract zero points from the values of codes, scale them by absmax, and add the offset of a centred array."""
    if zero is not None:
        values = values - zero
    values = values * absmax
    if table is None:
        values = values * (1 / 127)
    if offset is not None:
        values = values + tl.load(offset)
    return values


@triton.jit
def load(at, mask, EVEN: tl.constexpr):
    """Load from ``at``, with 0 outside of the mask; EVEN says that the mask is all set."""
    if EVEN:
        return tl.load(at)
    else:
        return tl.load(at, mask=mask, other=0)


@triton.jit
def load_units(codes, at, units, EVEN: tl.constexpr, BITS: tl.constexpr):
    """Load the units ``at`` of a row, of ``units`` units, or bytes if codes have 3 bits; beyond them there is 0."""
    if BITS == 3:
        byte = at * 3
        first, second = load(codes + byte, byte < units, EVEN), load(codes + byte + 1, byte + 1 < units, EVEN)
        third = load(codes + byte + 2, byte + 2 < units, EVEN)
        return first.to(tl.int32) << 16 | second.to(tl.int32) << 8 | third.to(tl.int32)
    else:
        return load(codes + at, at < units, EVEN)


@triton.jit
def dot(a, b, acc):
    """Return acc + a · b, in float32."""
    if INTERPRETED:
        a, b = widen(a), widen(b)  # the interpreter multiplies the bits of bfloat16
    return tl.dot(a, b, acc, input_precision="ieee")
