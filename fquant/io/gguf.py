"""The GGUF format, version 3: named values and named tensors in one file, as llama.cpp reads it.

    "GGUF" | u32 3 | u64 tensors | u64 values | values | tensor infos | padding | data
    value        text key, u32 type, content            text         u64 bytes, UTF-8
    tensor info  text name, u32 dims, u64 size each, u32 kind, u64 offset in the data

All is little-endian. Sizes are in the reverse order of torch's: the width of a row is the first. Data start at the next
multiple of ``general.alignment`` (32), and each tensor at one of these. (The format is
https://github.com/ggml-org/ggml/blob/master/docs/gguf.md.) ``fquant.io.gguf_blocks`` has the kinds of tensors.

:func:`write` takes a function for each tensor and calls it when its turn comes, so that one tensor is in memory at a
time. :func:`header` reads strictly: it refuses what the format does not allow, and allocates at most the bytes that the
file has. Nothing is mapped or executed.
"""

import dataclasses
import math
import struct
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, TypeAlias

import torch
from torch import Tensor

from ..tree import at, expect
from .gguf_blocks import KINDS, check_width, decode, encode
from .safetensors import replacing

MAGIC, VERSION, ALIGNMENT = b"GGUF", 3, 32
MAX_DIMS, MAX_TEXT, MAX_NAME = 4, 1 << 26, 63  # ggml's GGML_MAX_DIMS and GGML_MAX_NAME - 1
MAX_VALUES, MAX_TENSORS = 1 << 16, 1 << 20
ROWS = 1 << 24  # elements that are encoded before they are written
TEXT, ARRAY, BOOL = 8, 9, 7
NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
NAMES = {kind.code: name for name, kind in KINDS.items()}

Value: TypeAlias = bool | int | float | str | Sequence[str] | Sequence[int] | Sequence[float]


@dataclasses.dataclass(frozen=True)
class Source:
    """A tensor to write: its kind, its shape, and a function that reads it as floats of that shape."""

    kind: str
    shape: tuple[int, ...]
    read: Callable[[], Tensor]


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


def write(
    path: str | Path,
    values: Mapping[str, Value],
    tensors: Mapping[str, Source],
    done: Callable[[str], None] = lambda name: None,
) -> None:
    """Write a file atomically, one tensor at a time; ``done(name)`` is called after each.

    A bool is written as such, a number as u32, i32, u64 or i64, whichever holds it first, and a float as f32. Arrays
    hold texts, floats (f32) or integers (i32). Raises ValueError or TypeError for what the format cannot hold, and for
    a tensor that is not of its Source's shape or not finite; the file then keeps its old content.
    """
    out = [MAGIC, struct.pack("<IQQ", VERSION, len(tensors), len(values))]
    for key, item in values.items():
        with at(key):
            out += [_text(key), _value(item)]
    start = 0
    for name, source in tensors.items():
        with at(name):
            _check_source(name, source)
            sizes = source.shape[::-1]
            info = struct.pack(f"<I{len(sizes)}QIQ", len(sizes), *sizes, KINDS[source.kind].code, start)
            out += [_text(name), info]
            start += _padded(_nbytes(source.kind, source.shape))
    expect(sys.byteorder == "little", "got a big-endian machine, wanted a little-endian one, as the data are")
    with replacing(path) as file:
        head = b"".join(out)
        file.write(head.ljust(_padded(len(head)), b"\0"))
        for name, source in tensors.items():
            with at(name):
                _write_data(file, source)
            done(name)


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
        data = _padded(cursor.position, alignment)
        return Header(path, values, _entries(infos, data, alignment, cursor.size))


def read_bytes(header: Header, name: str, rows: slice = slice(None)) -> Tensor:
    """Read the encoded ``rows`` (a slice of all dims but the last, flattened) of a tensor: u8[rows, bytes of a row]."""
    with at(str(header.path)):
        known = ", ".join(sorted(header.tensors)[:8])
        expect(name in header.tensors, f"got no tensor {name!r:.80}; wanted one of {len(header.tensors)}: {known}")
        entry = header.tensors[name]
        width, count = _nbytes(entry.kind, entry.shape[-1:]), math.prod(entry.shape[:-1])
        first, last, step = rows.indices(count)
        expect(step == 1 and first <= last, f"{name}: got rows {rows}; wanted a slice without step of {count} rows")
        out = torch.empty((last - first, width), dtype=torch.uint8, device="cpu")
        left = out.view(-1).numpy().data
        with header.path.open("rb", buffering=0) as file:
            file.seek(entry.start + first * width)
            while left and (got := file.readinto(left)):
                left = left[got:]
        expect(not left, f"{name}: got {len(left)} bytes too few; the file changed since it was opened")
        return out


def read(header: Header, name: str) -> Tensor:
    """Read and decode the tensor ``name`` to float32 in its shape, on the CPU; raise ValueError for an unknown name."""
    rows = read_bytes(header, name)
    entry = header.tensors[name]
    return decode(rows, entry.kind).reshape(entry.shape)


def _padded(size: int, alignment: int = ALIGNMENT) -> int:
    return -(-size // alignment) * alignment


def _nbytes(kind: str, shape: tuple[int, ...]) -> int:
    return math.prod(shape) // KINDS[kind].elements * KINDS[kind].nbytes


def _text(text: str) -> bytes:
    try:
        raw = text.encode()
    except UnicodeEncodeError:
        raise ValueError(f"got {text!r:.80}, which is no Unicode text; wanted UTF-8") from None
    return struct.pack("<Q", len(raw)) + raw


def _number_type(item: Any) -> int:
    """Return the type of a number in a file."""
    if isinstance(item, bool):
        return BOOL
    if isinstance(item, float):
        expect(math.isfinite(item), f"got {item}; wanted a finite number")
        return 6
    fits = {4: (0, 1 << 32), 5: (-1 << 31, 1 << 31), 10: (0, 1 << 64), 11: (-1 << 63, 1 << 63)}
    found = [code for code, (low, high) in fits.items() if isinstance(item, int) and low <= item < high]
    expect(found, f"got {item!r:.80}; wanted a bool, a number of 64 bits, a text or a list of these", TypeError)
    return found[0]


def _value(item: Value) -> bytes:
    if isinstance(item, str):
        return struct.pack("<I", TEXT) + _text(item)
    if not isinstance(item, Sequence):
        code = _number_type(item)
        return struct.pack(f"<I{NUMBERS[code]}", code, item)
    expect(len(item) > 0, "got an empty list; leave the key out")
    if all(isinstance(one, str) for one in item):
        return struct.pack("<IIQ", ARRAY, TEXT, len(item)) + b"".join(map(_text, item))  # type: ignore[arg-type]
    code = 6 if all(type(one) is float for one in item) else 5
    fits = code == 6 or all(type(one) is int and -1 << 31 <= one < 1 << 31 for one in item)
    expect(fits, "got a list that is not all texts, floats or integers of 32 bits", TypeError)
    return struct.pack(f"<IIQ{len(item)}{NUMBERS[code]}", ARRAY, code, len(item), *item)


def _check_source(name: str, source: Source) -> None:
    expect(source.kind in KINDS, f"got kind {source.kind!r}; wanted one of {', '.join(KINDS)}")
    expect(0 < len(name.encode()) <= MAX_NAME, f"got a name of {len(name)} letters; wanted 1 to {MAX_NAME} bytes")
    fits = 1 <= len(source.shape) <= MAX_DIMS and all(size > 0 for size in source.shape)
    expect(fits, f"got shape {source.shape}; wanted 1 to {MAX_DIMS} dims, none empty")
    check_width(source.shape, source.kind)


def _write_data(file: IO[bytes], source: Source) -> None:
    tensor = source.read()
    fits = tensor.shape == source.shape and tensor.is_floating_point()
    expect(fits, f"got {tensor.dtype} {tuple(tensor.shape)}; wanted floats {source.shape}")
    rows = tensor.detach().cpu().reshape(-1, source.shape[-1])
    for part in rows.split(max(1, ROWS // source.shape[-1])):
        file.write(encode(part.float(), source.kind).contiguous().numpy().data)
    size = _nbytes(source.kind, source.shape)
    file.write(b"\0" * (_padded(size) - size))


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
            stop = end + _nbytes(kind, shape)
            expect(stop <= size, f"got data up to byte {stop}, wanted at most {size}; the file is cut short")
            out[name] = Entry(kind, shape, end, stop)
            end = _padded(stop, alignment)
    fits = size in (end, stop) or (not infos and size <= end)  # padding at the end is optional
    expect(fits, f"got {size} bytes, wanted {end}; the file is damaged")
    return out
