"""Quantisation formats: the meaning of the codes of a quantised array, as frozen values.

A new format is a line in this file, and a variation is ``dataclasses.replace(NF4, block=128)``. Double quantisation is
a format whose ``scale`` is another format.

Sources: NF4 and double quantisation, Dettmers et al. 2023 (QLoRA); the dynamic 8-bit map, Dettmers et al. 2022 (8-bit
optimizers via block-wise quantization); INT8, the weight half of LLM.int8(), Dettmers et al. 2022. Tables equal those
of bitsandbytes bit for bit. Sums of learned vectors: Babenko & Lempitsky 2014; of weights, Egiazarian et al. 2024
(AQLM). Integers with a zero point: Jacob et al. 2018 (integer-arithmetic-only inference); GPTQ and AWQ store such.
MXFP4 and the E2M1 values: OCP Microscaling Formats v1.0, 2023. FP8's E4M3: Micikevicius et al. 2022.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields, replace
from functools import lru_cache
from typing import Any, ClassVar

import torch

from .device import HOST
from .tree import at, expect, value

CODES = 256  # vectors in a stage: the code of a vector is a byte
BLOCKS = (16, 32, 64, 128, 256, 512, 1024, 2048, 4096)
FORMER_NAMES = {"vq2": "aq_2x8", "vq3": "aq_3x8"}  # renamed formats: the name in older files -> the name now
_NAMES: dict[str, Format] = {}  # the formats of this file; their text is short


@value
@dataclass(frozen=True)
class Vectors:
    """The sizes of learned vectors: ``dim`` elements along a row are the sum of ``stages`` vectors, each one of 256."""

    dim: int
    stages: int

    def __post_init__(self) -> None:
        for name in ("dim", "stages"):
            expect(getattr(self, name) >= 1, f"vectors: {name} is {getattr(self, name)}; wanted at least 1")


@value
@dataclass(frozen=True)
class Format:
    """The meaning of the codes of a quantised array.

        name     lower case, unique; used by command lines and files
        bits     4 or 8 bits a code; two 4-bit codes share a byte, the first in the high half
        block    elements along a row that share one scale; None: the whole row
        table    the value of every code, in units of the scale; None: int8 in units of scale / 127, or vectors
                 The codes that are no number have NaN.
        scale    the format of the scales; None: float32
        flat     blocks run over the flattened array and may straddle rows
        center   the mean is subtracted before quantising and kept as ``Packed.offset``
        vectors  the sizes of the vectors that are learned and kept as ``Packed.vectors``; None: there are none
        zero     a block has a zero point, kept as ``Packed.zero``, which is subtracted from the table's values
        text     the format as text, for :func:`read`: ``nf4_dq``, ``nf4:128``, or JSON if it is not in this file
        plain    this format with its scales in float32
        in_absmax  True if the scale of a block is its absmax: the largest value of the table is 1
        rows_alone  True if codes and scales of a row depend on that row alone, but for nested scales

    Raises ValueError for a field that the format cannot have.
    """

    name: str
    bits: int
    block: int | None
    table: tuple[float, ...] | None = None
    scale: Format | None = None
    flat: bool = False
    center: bool = False
    vectors: Vectors | None = None
    zero: bool = False
    text: ClassVar[str]
    plain: ClassVar[Format]
    in_absmax: ClassVar[bool]
    rows_alone: ClassVar[bool]

    def __post_init__(self) -> None:
        object.__setattr__(self, "name", FORMER_NAMES.get(self.name, self.name))
        bits, block, table, blocks = self.bits, self.block, self.table, ", ".join(map(str, BLOCKS))
        with at(self.name):
            expect(bits in (4, 8), f"bits is {bits}; wanted 4 or 8")
            expect(block is None or block in BLOCKS, f"block is {block}; wanted one of {blocks}")
            if table is None:
                expect(bits == 8, f"codes without a table are int8, so bits is 8 and not {bits}")
            else:
                expect(len(table) == 2**bits, f"the table has {len(table)} values; {bits} bits need {2**bits}")
                object.__setattr__(self, "table", _with_one_nan(table))
            expect(isinstance(self.zero, bool), f"zero is {self.zero!r}; wanted True or False")
            if self.zero:
                expect(table is not None, "a zero point needs a table; use the integers 0 to 15, or 0 to 255")
            for name in ("flat", "center", "vectors") if self.zero else ():
                expect(not getattr(self, name), f"a zero point does not combine with {name}; leave one out")
            for name in ("table", "scale", "flat", "center") if self.vectors else ():
                expect(not getattr(self, name), f"learned vectors do not combine with {name}; leave it out")
            if self.vectors and block:
                fault = f"block is {block}; wanted whole vectors of {self.vectors.dim} elements"
                expect(block % self.vectors.dim == 0, fault)
        # Computed once, because torch.compile can read an attribute but cannot create such a value while tracing.
        object.__setattr__(self, "text", _spell(self))
        top = 1.0 if table is None else max(abs(x) for x in table if x == x)
        object.__setattr__(self, "in_absmax", top == 1.0 and not self.zero)
        object.__setattr__(self, "rows_alone", not (self.flat or self.center or self.vectors))
        object.__setattr__(self, "plain", self if self.scale is None else replace(self, scale=None))

    def __hash__(self) -> int:
        return hash(self.text)  # strings cache their hash; tuples, here of hundreds of values, do not

    def __repr__(self) -> str:
        return f"Format({self.name!r}, block={self.block})"


def _spell(format: Format) -> str:
    known = _NAMES.get(format.name)
    lost_block = known is not None and format.block is None and known.block is not None  # short text has no "none"
    rest = lambda x: [getattr(x, f.name) for f in fields(x) if f.name != "block"]
    if known is None or lost_block or rest(known) != rest(format):
        return json.dumps(_to_dict(format), separators=(",", ":"))
    return format.name if known.block == format.block else f"{format.name}:{format.block}"


def _to_dict(format: Format) -> dict[str, Any]:
    parts = asdict(format) | {"scale": format.scale and _to_dict(format.scale)}
    return parts if format.zero else {name: part for name, part in parts.items() if name != "zero"}  # as older files


def _with_one_nan(table: Iterable[float]) -> tuple[float, ...]:
    """Return the values as a tuple in which NaN is one object, because tuples compare NaN by identity."""
    return tuple(math.nan if x != x else x for x in table)


def _dynamic_map() -> tuple[float, ...]:
    """Return the signed dynamic map: each decade of 1e-6 .. 1 has twice as many values as the one before."""
    values = [0.0, 1.0]
    for i in range(7):
        edges = torch.linspace(0.1, 1, 2**i + 1, dtype=torch.float32, device=HOST)
        middles = 10.0 ** (i - 6) * ((edges[:-1] + edges[1:]) / 2.0)
        values += middles.tolist() + (-middles).tolist()
    return tuple(sorted(values))


# The quantiles of a normal distribution, scaled to [-1, 1]; literals, because recomputing changes the last digits.
_NF4 = (-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
        -0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725,
        0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941, 0.7229568362236023,
        1.0)  # fmt: skip

# Sign, two exponent bits, one mantissa bit, in the order of the bit pattern and so not sorted. Both zeros are +0.
_FP4_MAGNITUDE = tuple(x / 12 for x in (0, 0.0625, 8, 12, 4, 6, 2, 3))
_FP4 = _FP4_MAGNITUDE + tuple(0.0 - x for x in _FP4_MAGNITUDE)

# Sign, two exponent bits with bias 1, one mantissa bit: the values of four bits in MXFP4 and NVFP4, in their order.
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)


def _e4m3() -> tuple[float, ...]:
    """Return the value of each byte of torch.float8_e4m3fn; 0x7f and 0xff are NaN."""
    codes = torch.arange(256, dtype=torch.uint8, device=HOST)
    return _with_one_nan(codes.view(torch.float8_e4m3fn).double().tolist())


E4M3 = _e4m3()

DYNAMIC8 = Format("dynamic8", bits=8, block=256, table=_dynamic_map(), flat=True, center=True)
NF4 = Format("nf4", bits=4, block=64, table=_NF4)
NF4_DQ = replace(NF4, name="nf4_dq", scale=DYNAMIC8)
FP4 = Format("fp4", bits=4, block=64, table=_FP4)
INT8 = Format("int8", bits=8, block=None)
AQ_2X8 = Format("aq_2x8", bits=8, block=None, vectors=Vectors(dim=8, stages=2))
AQ_3X8 = Format("aq_3x8", bits=8, block=None, vectors=Vectors(dim=8, stages=3))
INT4 = Format("int4", bits=4, block=128, table=tuple(map(float, range(-8, 8))))
INT4_ZERO = Format("int4_zero", bits=4, block=128, table=tuple(map(float, range(16))), zero=True)
MXFP4 = Format("mxfp4", bits=4, block=32, table=E2M1)
FP8 = Format("fp8", bits=8, block=128, table=E4M3)

_KNOWN = (NF4, NF4_DQ, FP4, INT8, AQ_2X8, AQ_3X8, INT4, INT4_ZERO, MXFP4, FP8)
FORMATS = {format.name: format for format in _KNOWN}

_NAMES.update(FORMATS, dynamic8=DYNAMIC8)
for _format in _NAMES.values():
    object.__setattr__(_format, "text", _format.name)


@lru_cache(maxsize=256)
def read(text: str) -> Format:
    """Return the format whose ``text`` this is; raise ValueError for anything else."""
    name, colon, block = text.partition(":")
    name = FORMER_NAMES.get(name, name)
    if name in _NAMES and (not colon or (block.isascii() and block.isdecimal())):
        return replace(_NAMES[name], block=int(block)) if colon else _NAMES[name]
    try:
        return _from_dict(json.loads(text))
    except (json.JSONDecodeError, KeyError, TypeError):
        raise ValueError(f"format {text!r} is unknown; wanted the text of a Format") from None


def _from_dict(parts: dict[str, Any]) -> Format:
    table, scale, vectors = parts["table"], parts["scale"], parts["vectors"]
    nested: dict[str, Any] = {"scale": scale and _from_dict(scale), "vectors": vectors and Vectors(**vectors)}
    return Format(**parts | nested | dict[str, Any](table=table and tuple(table)))


def parse(name: str, block: int | None = None) -> Format:
    """Return the format called ``name``, with another ``block`` if given; raise ValueError if there is none such."""
    name = FORMER_NAMES.get(name, name)
    expect(name in FORMATS, f"format {name!r} is unknown; wanted one of {', '.join(FORMATS)}")
    return FORMATS[name] if block is None else replace(FORMATS[name], block=block)


def num_blocks(format: Format, width: int) -> int:
    """Return the number of scales of a row of ``width`` elements; the last block may be short."""
    return 1 if format.block is None else -(-width // format.block)


def num_bytes(format: Format, width: int) -> int:
    """Return the number of bytes of the codes of a row of ``width`` elements."""
    if format.vectors is not None:
        return -(-width // format.vectors.dim) * format.vectors.stages
    return -(-width * format.bits // 8)
