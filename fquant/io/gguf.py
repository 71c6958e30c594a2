"""The GGUF format, version 3: named values and named tensors in one file, as llama.cpp reads it.

    "GGUF" | u32 3 | u64 tensors | u64 values | values | tensor infos | padding | data
    value        text key, u32 type, content            text         u64 bytes, UTF-8
    tensor info  text name, u32 dims, u64 size each, u32 kind, u64 offset in the data

All is little-endian. Sizes are in the reverse order of torch's: the width of a row is the first. Data start at the next
multiple of ``general.alignment`` (32), and each tensor at one of these. (The format is
https://github.com/ggml-org/ggml/blob/master/docs/gguf.md.) ``fquant.io.gguf_blocks`` has the kinds of tensors.

:func:`header` reads strictly: it refuses what the format does not allow, and allocates at most the bytes that the file
has. Nothing is mapped or executed. ``fquant.io.gguf_writer`` writes such files.
"""

import dataclasses
import math
import struct
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor

from ..device import HOST
from ..tree import at, expect
from . import staging
from .gguf_blocks import KINDS, check_width, decode

MAGIC, VERSION, ALIGNMENT = b"GGUF", 3, 32
MAX_DIMS, MAX_TEXT = 4, 1 << 26  # the first is ggml's GGML_MAX_DIMS
MAX_VALUES, MAX_TENSORS = 1 << 16, 1 << 20
TEXT, ARRAY, BOOL = 8, 9, 7
NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
NAMES = {kind.code: name for name, kind in KINDS.items()}


@dataclasses.dataclass(frozen=True)
class Entry:
    """A tensor in a file: its kind, its shape in torch's order, and its bytes ``start`` to ``stop``."""

    kind: str
    shape: tuple[int, ...]
    start: int
    stop: int


@dataclasses.dataclass(frozen=True)
class Header:
    """The content of a file."""

    path: Path
    values: dict[str, Any]
    tensors: dict[str, Entry]


def header(path: str | Path) -> Header:
    """Read and check the header of a file; raise ValueError that names the file and the fault."""
    path = Path(path)
    expect(path.is_file(), f"{path}: got no such file, wanted a GGUF; check the name")
    with path.open("rb") as file, at(str(path)):
        cursor = _Cursor(file, path.stat().st_size)
        expect(cursor.take(4) == MAGIC, "got another beginning than 'GGUF'; wanted a GGUF file, check the name")
        version = cursor.number("I")
        expect(version == VERSION, f"got version {version}; wanted {VERSION}, convert the file again")
        num_tensors, num_values = cursor.number("Q"), cursor.number("Q")
        expect(num_tensors <= MAX_TENSORS, f"got {num_tensors} tensors; wanted at most {MAX_TENSORS}")
        expect(num_values <= MAX_VALUES, f"got {num_values} values; wanted at most {MAX_VALUES}")
        values: dict[str, Any] = {}
        for _ in range(num_values):
            key = cursor.text("a key")
            expect(key and key not in values, f"got the key {key!r:.80} twice or empty; the file is damaged")
            with at(f"{key:.80}"):
                values[key] = cursor.value(cursor.number("I"))
        alignment = values.get("general.alignment", ALIGNMENT)
        fits = type(alignment) is int and 8 <= alignment <= 1 << 16 and alignment % 8 == 0
        expect(fits, f"general.alignment: got {alignment!r:.80}; wanted a multiple of 8 up to 65536")
        infos = [_info(cursor) for _ in range(num_tensors)]
        data = padded(cursor.position, alignment)
        return Header(path, values, _entries(infos, data, alignment, cursor.size))


def read_bytes(header: Header, name: str, rows: slice = slice(None)) -> Tensor:
    """Read the encoded ``rows`` (a slice of all dims but the last, flattened) of a tensor: u8[rows, bytes of a row]."""
    with at(str(header.path)):
        known = ", ".join(sorted(header.tensors)[:8])
        expect(name in header.tensors, f"got no tensor {name!r:.80}; wanted one of {len(header.tensors)}: {known}")
        entry = header.tensors[name]
        width, count = nbytes_of(entry.kind, entry.shape[-1:]), math.prod(entry.shape[:-1])
        first, last, step = rows.indices(count)
        expect(step == 1 and first <= last, f"{name}: got rows {rows}; wanted a slice without step of {count} rows")
        out = torch.empty((last - first, width), dtype=torch.uint8, device=HOST)
        with header.path.open("rb", buffering=0) as file:
            file.seek(entry.start + first * width)
            lacking = staging.fill(out, file)
        expect(not lacking, f"{name}: got {lacking} bytes too few; the file changed since it was opened")
        return out


def read(header: Header, name: str) -> Tensor:
    """Read and decode the tensor ``name`` to float32 in its shape, on the CPU; raise ValueError for an unknown name."""
    rows = read_bytes(header, name)
    entry = header.tensors[name]
    return decode(rows, entry.kind).reshape(entry.shape)


def padded(size: int, alignment: int = ALIGNMENT) -> int:
    """Return the next multiple of ``alignment``."""
    return -(-size // alignment) * alignment


def nbytes_of(kind: str, shape: tuple[int, ...]) -> int:
    """Return the bytes of a tensor in a file, without padding."""
    return math.prod(shape) // KINDS[kind].elements * KINDS[kind].nbytes


class _Cursor:
    """A place in a header; it refuses to read more than the file has."""

    def __init__(self, file: IO[bytes], size: int) -> None:
        self.file, self.size, self.position = file, size, 0

    def take(self, count: int) -> bytes:
        left = self.size - self.position
        fault = f"got a header that wants {count} bytes at byte {self.position}, wanted at most the {left} left"
        expect(count <= left, f"{fault}; the file is cut short or damaged")
        self.position += count
        return self.file.read(count)

    def number(self, letter: str) -> Any:
        return struct.unpack(f"<{letter}", self.take(struct.calcsize(f"<{letter}")))[0]

    def text(self, what: str) -> str:
        length = self.number("Q")
        expect(length <= MAX_TEXT, f"got {what} of {length} bytes; wanted at most {MAX_TEXT}, the file is damaged")
        try:
            return self.take(length).decode()
        except UnicodeDecodeError:
            raise ValueError(f"got {what} that is no UTF-8; the file is damaged") from None

    def value(self, code: int) -> Any:
        if code == TEXT:
            return self.text("a text")
        if code != ARRAY:
            expect(code in NUMBERS, f"got a value of type {code}; wanted 0 to 12, the file is damaged")
            letter = "B" if code == BOOL else NUMBERS[code]
            number = self.number(letter)
            expect(code != BOOL or number < 2, f"got the truth value {number}; wanted 0 or 1, the file is damaged")
            return bool(number) if code == BOOL else number
        code, count = self.number("I"), self.number("Q")
        expect(code in (TEXT, *NUMBERS), f"got an array of type {code}; wanted numbers or texts")
        least = 8 if code == TEXT else struct.calcsize(f"<{NUMBERS[code]}")
        left = (self.size - self.position) // least
        fault = f"got an array of {count} elements, wanted at most the {left} that fit"
        expect(count <= left, f"{fault}; the file is cut short or damaged")
        if code == TEXT:
            return [self.text("a text") for _ in range(count)]
        return list(struct.unpack(f"<{count}{NUMBERS[code]}", self.take(count * least)))


def _info(cursor: _Cursor) -> tuple[str, str, tuple[int, ...], int]:
    """Read name, kind, shape and offset of a tensor."""
    name = cursor.text("a name")
    with at(f"{name:.80}"):
        dims = cursor.number("I")
        expect(1 <= dims <= MAX_DIMS, f"got {dims} dims; wanted 1 to {MAX_DIMS}")
        shape = tuple(cursor.number("Q") for _ in range(dims))[::-1]
        code = cursor.number("I")
        expect(code in NAMES, f"got tensors of type {code}; wanted {', '.join(f'{c} ({n})' for c, n in NAMES.items())}")
        fits = all(shape) and math.prod(shape) < 1 << 62
        expect(fits, f"got shape {shape}; wanted at least one and less than 2^62 elements")
        check_width(shape, NAMES[code])
        return name, NAMES[code], shape, cursor.number("Q")


def _entries(infos: list[Any], data: int, alignment: int, size: int) -> dict[str, Entry]:
    """Return the tensors by name, in the order of the file, if they cover the data."""
    out: dict[str, Entry] = {}
    end = stop = data
    for name, kind, shape, offset in infos:
        with at(f"{name:.80}"):
            expect(name not in out, "got two tensors of that name; the file is damaged")
            expect(data + offset == end, f"got data at byte {data + offset}, wanted {end}; the file is damaged")
            stop = end + nbytes_of(kind, shape)
            expect(stop <= size, f"got data up to byte {stop}, wanted at most {size}; the file is cut short")
            out[name] = Entry(kind, shape, end, stop)
            end = padded(stop, alignment)
    fits = size in (end, stop) or (not infos and size <= end)  # padding at the end is optional
    expect(fits, f"got {size} bytes, wanted {end}; the file is damaged")
    return out
