"""Format: the meaning of the codes of a quantised array, as a frozen value."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields, replace
from numbers import Real
from typing import Any, ClassVar

from ..device import is_integer
from ..tree import at, expect, value

CODES = 256  # vectors in a stage: the code of a vector is a byte
BITS = (2, 3, 4, 8)
BLOCKS = (16, 32, 64, 128, 256, 512, 1024, 2048, 4096)
FORMER_NAMES = {"vq2": "aq_2x8", "vq3": "aq_3x8"}  # renamed formats: the name in older files -> the name now
LARGEST = (2 - 2.0**-23) * 2.0**127  # of float32
LATER = ("zero", "shared", "mean", "power", "unit")  # fields that older files lack
NAMED: dict[str, Format] = {}  # formats by name, whose text is their name


@value
@dataclass(frozen=True)
class Vectors:
    """The sizes of learned vectors: ``dim`` elements along a row are the sum of ``stages`` vectors, each one of 256."""

    dim: int
    stages: int

    def __post_init__(self) -> None:
        for name in ("dim", "stages"):
            got = getattr(self, name)
            expect(is_integer(got), f"vectors: {name} is {got!r}; wanted an int", TypeError)
            object.__setattr__(self, name, int(got))
            expect(getattr(self, name) >= 1, f"vectors: {name} is {getattr(self, name)}; wanted at least 1")


@value
@dataclass(frozen=True)
class Format:
    """The meaning of the codes of a quantised array.

        name     lower-case letters, digits, spaces, ``_-.``; unique; used by command lines and files
        bits     2, 3, 4 or 8 bits a code; a row is a stream of bits, the first code in the highest bits of a byte
        block    elements along a row that share one scale; None: the whole row
        table    the value of every code, in units of the scale; None: int8 in units of scale / 127, or vectors
                 The codes that are no number have NaN.
        scale    the format of the scales; None: float32
        flat     blocks run over the flattened array and may straddle rows
        center   the mean is subtracted before quantising and kept as ``Packed.offset``
        vectors  the sizes of the vectors that are learned and kept as ``Packed.vectors``; None: there are none
        zero     a block has a zero point, kept as ``Packed.zero``, which is subtracted from the table's values
        shared   the array has one scale, which is kept for each block
        mean     the scale is the mean absolute value of a block, at least 1e-5, in place of absmax / unit
        power    scales are powers of two
        unit     the value in units of the scale which is the absmax of a block; None: 1 for a table of 4 or 8 bits with
                 the largest absolute value 1. For other tables None is the largest value that the table has with both
                 signs, so 7 for -8 to 7. Without values below zero None is the largest value
        text     the format as text, for :func:`read`: ``nf4_dq``, ``nf4:128``, or JSON if it has no name
        plain    this format with its scales in float32
        integers the first and the last value of a table of integers in steps of one, with NaN around; None: another
        levels   the table as integers in units of 1, or of 1/127; None: they are no such
        in_absmax  True if kernels encode it: 4 or 8 bits, and the scale of a block is its absmax, because the largest
                 value of the table is 1
        scale_first  True if codes are found with the scales as they are decoded: those of the array share a scale
        rows_alone  True if codes and scales of a row depend on that row alone, but for nested scales

    Raises ValueError for a field that the format cannot have, and TypeError for a value of another type. Numbers of
    NumPy become Python's.
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
    shared: bool = False
    mean: bool = False
    power: bool = False
    unit: float | None = None
    text: ClassVar[str]
    plain: ClassVar[Format]
    integers: ClassVar[tuple[int, int] | None]
    levels: ClassVar[tuple[int, ...] | None]
    in_absmax: ClassVar[bool]
    scale_first: ClassVar[bool]
    rows_alone: ClassVar[bool]

    def __post_init__(self) -> None:
        is_name = isinstance(self.name, str) and re.fullmatch(r"[a-z0-9_. -]+", self.name)
        fault = f"name: got {self.name!r}; wanted lower-case letters, digits, spaces, '_', '-' and '.', such as 'nf4'"
        expect(is_name, fault, ValueError if isinstance(self.name, str) else TypeError)
        object.__setattr__(self, "name", FORMER_NAMES.get(self.name, str(self.name)))
        with at(self.name):
            self._check_types()
            self._check()
        # Computed once, because torch.compile can read an attribute but cannot create such a value while tracing.
        object.__setattr__(self, "text", _spell(self))
        top = 1.0 if self.table is None else max(abs(x) for x in self.table if x == x)
        plain = not (self.zero or self.shared or self.mean or self.power or self.unit)
        object.__setattr__(self, "integers", _integers(self.table))
        object.__setattr__(self, "levels", _levels(self.table, self.integers))
        object.__setattr__(self, "in_absmax", top == 1.0 and self.bits >= 4 and plain)
        scale_first = self.scale is not None and self.scale.shared
        alone = not (self.flat or self.center or self.vectors or self.shared or scale_first)
        object.__setattr__(self, "scale_first", scale_first)
        object.__setattr__(self, "rows_alone", alone)
        object.__setattr__(self, "plain", self if self.scale is None else replace(self, scale=None))

    def _check_types(self) -> None:
        """Raise TypeError for fields of other types; take NumPy's numbers as Python's."""
        is_number = lambda x: isinstance(x, Real) and not isinstance(x, bool)
        for name, wanted in (("bits", "an int"), ("block", "an int, or None for the whole row")):
            got = getattr(self, name)
            is_known = is_integer(got) or (got is None and name == "block")
            expect(is_known, f"{name} is {got!r}; wanted {wanted}", TypeError)
            object.__setattr__(self, name, got if got is None else int(got))
        if (table := self.table) is not None:
            fix = "use tuple(table.tolist())" if hasattr(table, "tolist") else "use a tuple"
            fault = f"table: got {type(table).__name__}, wanted a tuple of numbers, one for each code; {fix}"
            expect(isinstance(table, tuple | list), fault, TypeError)
            odd = next((x for x in table if not is_number(x)), None)
            expect(all(map(is_number, table)), f"table: got {odd!r} among its values, wanted numbers", TypeError)
            object.__setattr__(self, "table", with_one_nan(map(_float, table)))
        for name, kind in (("scale", Format), ("vectors", Vectors)):
            got = getattr(self, name)
            wanted = f"a {kind.__name__}, or None" + (" for float32" if name == "scale" else "")
            expect(got is None or isinstance(got, kind), f"{name}: got {got!r}, wanted {wanted}", TypeError)
        for name in ("flat", "center", "zero", "shared", "mean", "power"):
            got = getattr(self, name)
            expect(isinstance(got, bool), f"{name} is {got!r}; wanted True or False")
        if self.unit is not None:
            expect(is_number(self.unit), f"unit is {self.unit!r}; wanted a number above 0, or None", TypeError)
            object.__setattr__(self, "unit", _float(self.unit))

    def _check(self) -> None:
        bits, block, table, blocks = self.bits, self.block, self.table, ", ".join(map(str, BLOCKS))
        expect(bits in BITS, f"bits is {bits}; wanted one of {', '.join(map(str, BITS))}")
        expect(block is None or block in BLOCKS, f"block is {block}; wanted one of {blocks}")
        if table is None:
            expect(bits == 8, f"codes without a table are int8, so bits is 8 and not {bits}")
        else:
            expect(len(table) == 2**bits, f"the table has {len(table)} values; {bits} bits need {2**bits}")
            expect(any(map(math.isfinite, table)), "the table has no number; wanted one for each code that has a value")
            odd = next((x for x in table if LARGEST < abs(x) < math.inf), 0)
            expect(odd == 0, f"the table has {odd}, which is infinite in float32; wanted at most {LARGEST:g}")
        for name in ("zero", "shared", "mean", "power"):
            fix = "use the integers 0 to 15, or 0 to 255" if name == "zero" else "give one"
            expect(not getattr(self, name) or table is not None, f"{name} needs a table; {fix}")
        for name in ("flat", "center", "vectors", "mean", "power", "unit") if self.zero else ():
            expect(not getattr(self, name), f"a zero point does not combine with {name}; leave one out")
        for name in ("table", "scale", "flat", "center") if self.vectors else ():
            expect(not getattr(self, name), f"learned vectors do not combine with {name}; leave it out")
        if self.vectors and block:
            fault = f"block is {block}; wanted whole vectors of {self.vectors.dim} elements"
            expect(block % self.vectors.dim == 0, fault)
        if self.unit is not None:
            expect(table is not None and not self.mean, "a unit needs a table, and does not combine with mean")
            fault = f"unit is {self.unit}; wanted a finite number above 0, in float32"
            expect(2.0**-149 <= self.unit <= LARGEST, fault)
        expect(not self.power or not (self.mean or self.unit), "power does not combine with mean or unit; leave it out")

    def __hash__(self) -> int:
        return hash(self.text)  # strings cache their hash; tuples, here of hundreds of values, do not

    def __repr__(self) -> str:
        return f"Format({self.name!r}, block={self.block})"


def _spell(format: Format) -> str:
    known = NAMED.get(format.name)
    lost_block = known is not None and format.block is None and known.block is not None  # short text has no "none"
    rest = lambda x: [getattr(x, f.name) for f in fields(x) if f.name != "block"]
    if known is None or lost_block or rest(known) != rest(format):
        return json.dumps(_to_dict(format), separators=(",", ":"))
    return format.name if known.block == format.block else f"{format.name}:{format.block}"


def _to_dict(format: Format) -> dict[str, Any]:
    parts = asdict(format) | {"scale": format.scale and _to_dict(format.scale)}
    return {name: part for name, part in parts.items() if name not in LATER or part}  # as older files


def _integers(table: tuple[float, ...] | None) -> tuple[int, int] | None:
    values = [x for x in table or () if x == x]
    steps = values and math.isfinite(values[0]) and values == [values[0] + i for i in range(len(values))]
    first = next((i for i, x in enumerate(table or ()) if x == x), 0)
    steps = steps and values == list(table or ())[first : first + len(values)]
    return (int(values[0]), int(values[-1])) if steps and values[0] == round(values[0]) else None


def _levels(table: tuple[float, ...] | None, integers: tuple[int, int] | None) -> tuple[int, ...] | None:
    if table is None:
        return None
    unit = 1 if integers else 127
    if any(math.isinf(x) for x in table):
        return None
    levels = tuple(0 if x != x else round(unit * x) for x in table)
    close = all(x != x or abs(unit * x - n) < 1e-6 for x, n in zip(table, levels, strict=True))
    return levels if close and max(map(abs, levels)) < 256 else None


def _float(x: Any) -> float:
    """Return ``x`` as a float; an integer beyond all floats is one that float32 cannot have either."""
    try:
        return float(x)
    except OverflowError:
        return 2 * LARGEST if x > 0 else -2 * LARGEST


def with_one_nan(table: Iterable[float]) -> tuple[float, ...]:
    """Return the values as a tuple in which NaN is one object, because tuples compare NaN by identity."""
    return tuple(math.nan if x != x else x for x in table)


def named(*formats: Format) -> dict[str, Format]:
    """Let the text of ``formats`` be their names, in this process; return them by name.

    Raises ValueError for a name that another format has.
    """
    for format in formats:
        known = NAMED.setdefault(format.name, format)
        expect(
            _to_dict(known) == _to_dict(format), f"the name {format.name!r} is that of another format; choose another"
        )
        object.__setattr__(known, "text", format.name)
        object.__setattr__(format, "text", format.name)
    return {format.name: format for format in formats}


def num_blocks(format: Format, width: int) -> int:
    """Return the number of scales of a row of ``width`` elements; the last block may be short."""
    return 1 if format.block is None else -(-width // format.block)


def num_bytes(format: Format, width: int) -> int:
    """Return the number of bytes of the codes of a row of ``width`` elements."""
    if format.vectors is not None:
        return -(-width // format.vectors.dim) * format.vectors.stages
    return -(-width * format.bits // 8)
