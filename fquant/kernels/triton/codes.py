"""Codes in Triton: how a packed array reaches a kernel, and the parts of kernels that decode it.

A kernel gets a packed array as :class:`Rows`: rows of *units* beside rows of scales. A unit is a 32-bit word of 8 or 4
codes. Of codes of 2 bits it has 8 too, in 16 bits, so that tiles are those of 4 bits. In rows that are not aligned for
words, a unit is a byte. Eight codes of 3 bits are three bytes, which are loaded one by one, and not asynchronously: no
word holds whole codes. Rows without gaps are one long row.

* A look-up is ``tl.gather`` from shared memory: shift, mask, load. A tree of selects takes 19 instructions. For a load
  from global memory Triton 3.6 first moves the codes to other threads.
* Products keep shared memory busy with other things, so there the 16 values of 4 bits stay in registers
  (:func:`decode_words`). A byte permute (``prmt``) takes four codes of a word as they are packed, and gives a byte of
  each value. The values are first scaled and rounded, once for the 32 codes of four words. So no look-up reads shared
  memory.
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
from struct import pack
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
PAIRS = {torch.bfloat16: "bf16x2", torch.float16: "f16x2"}
REGISTERS = tl.constexpr(",".join(["=&r"] * 16 + ["r"] * 4 + ["f"] * 3))  # of the PTX of _permutes
PAIRS_OF_WORDS = tl.constexpr((tl.int32,) * 16)


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


def permutes(w: Rows) -> str | None:
    """Return the PTX with which :func:`decode_words` decodes ``w``; None for arrays that it does not decode.

    Those are in words of 4 bits and have a table, and blocks of whole fours of words. The interpreter runs no PTX.
    """
    format, pair = w.format, PAIRS.get(w.dtype)
    can = w.per == 8 and format.bits == 4 and (format.block or 32) % 32 == 0 and not INTERPRETED.value
    if not can or pair is None or format.table is None:
        return None
    return _permutes(format.table, pair, w.zero is not None, w.offset is not None)


@lru_cache(maxsize=256)
def _permutes(table: tuple[float, ...], pair: str, zero: bool, offset: bool) -> str:
    """Return PTX from four words $16 to $19 to pairs of values, of which word w has 4w to 4w + 3.

    $20 is their scale, $21 their zero point and $22 the offset of the array, as in :func:`scaled`.

    The bytes of the 16 scaled values are in eight registers: low and high ones, of four values each. A permute takes
    the lower three bits of a code, for codes below 8 (a) and others (b). Another takes one of both by the highest bit.
    """
    say = [".reg .f32 v<16>; .reg .b32 p<8>, low<4>, high<4>, below, top, a, b, l, h;"]
    for i, value in enumerate(table):
        say += [f"mov.b32 v{i}, 0x{pack('>f', value).hex()};", *([f"sub.rn.f32 v{i}, v{i}, $21;"] if zero else [])]
        say += [f"mul.rn.f32 v{i}, v{i}, $20;", *([f"add.rn.f32 v{i}, v{i}, $22;"] if offset else [])]
    say += [f"cvt.rn.{pair}.f32 p{i}, v{2 * i + 1}, v{2 * i};" for i in range(8)]
    for i in range(4):
        say += [
            f"prmt.b32 {to}{i}, p{2 * i}, p{2 * i + 1}, {at};" for to, at in (("low", "0x6420"), ("high", "0x7531"))
        ]
    for word in range(4):
        say += [f"and.b32 below, ${16 + word}, 0x77777777;", f"shr.u32 top, ${16 + word}, 1;"]
        say += ["lop3.b32 top, top, 0x44444444, 0x32103210, 0xEA;"]  # top & 0x44444444 | 0x32103210
        for half in range(2):
            if half:
                say += ["shr.u32 below, below, 16;", "shr.u32 top, top, 16;"]
            for of, to in (("low", "l"), ("high", "h")):
                say += [f"prmt.b32 a, {of}0, {of}1, below;", f"prmt.b32 b, {of}2, {of}3, below;"]
                say += [f"prmt.b32 {to}, a, b, top;"]
            at = 4 * word + 2 * half  # the first code of a byte is the higher one
            say += [f"prmt.b32 ${at}, l, h, 0x4051;", f"prmt.b32 ${at + 1}, l, h, 0x6273;"]
    return "{" + " ".join(say) + "}"


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
def decode_words(
    words, absmax, zero, offset, PTX: tl.constexpr, DTYPE: tl.constexpr, ROWS: tl.constexpr, FOURS: tl.constexpr
):
    """Return the values [rows fours 2 2 2 2 2] in DTYPE, in order, of words i32[rows 4·fours].

    Each four of words has one scale, and one zero point unless that is None: f32[rows fours]. PTX is that of
    :func:`permutes`.
    """
    even, odd = tl.split(tl.reshape(words, [ROWS, FOURS, 2, 2]))
    first, third = tl.split(even)
    second, fourth = tl.split(odd)
    zero = absmax if zero is None else zero  # not read
    offset = absmax if offset is None else tl.zeros_like(absmax) + tl.load(offset)
    t = tl.inline_asm_elementwise(
        PTX, REGISTERS, [first, second, third, fourth, absmax, zero, offset], PAIRS_OF_WORDS, is_pure=True, pack=1
    )
    a, b = _four(t[0], t[1], t[2], t[3]), _four(t[4], t[5], t[6], t[7])
    c, d = _four(t[8], t[9], t[10], t[11]), _four(t[12], t[13], t[14], t[15])
    pairs = tl.permute(_four(a, b, c, d), (0, 1, 4, 5, 2, 3))
    return tl.join((pairs & 0xFFFF).to(tl.uint16), (pairs >> 16).to(tl.uint16)).to(DTYPE, bitcast=True)


@triton.jit
def _four(a, b, c, d):
    """Return four tensors [...] as one [... 2 2]."""
    return tl.join(tl.join(a, c), tl.join(b, d))


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
