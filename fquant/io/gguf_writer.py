"""Writing GGUF files, one tensor at a time; ``fquant.io.gguf`` describes and reads them.

    write("model.gguf", {"general.architecture": "llama"}, {"output.weight": Source("q4_k", (1000, 512), read)})

Each tensor's function is called when its turn comes, so one tensor is in memory at a time.
"""

import dataclasses
import math
import struct
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, TypeAlias

from torch import Tensor

from ..tree import at, expect
from .gguf import ARRAY, BOOL, MAGIC, MAX_DIMS, NUMBERS, TEXT, VERSION, nbytes_of, padded
from .gguf_blocks import KINDS, check_width, encode
from .partial import continued

MAX_NAME = 63  # ggml's GGML_MAX_NAME - 1
ROWS = 1 << 24  # elements that are encoded before they are written
SAMPLE = 4  # tensors of an interrupted file that are compared, at least

Value: TypeAlias = bool | int | float | str | Sequence[str] | Sequence[int] | Sequence[float]


@dataclasses.dataclass(frozen=True)
class Source:
    """A tensor to write: its kind, its shape, and a function that reads it as floats of that shape."""

    kind: str
    shape: tuple[int, ...]
    read: Callable[[], Tensor]


def write(
    path: str | Path,
    values: Mapping[str, Value],
    tensors: Mapping[str, Source],
    done: Callable[[str], None] = lambda name: None,
    resume: bool = False,
) -> None:
    """Write a file one tensor at a time; ``done(name)`` is called after each.

    A bool is written as such, a number as u32, i32, u64 or i64, whichever holds it first, and a float as f32. Arrays
    hold texts, floats (f32) or integers (i32). The file gets its name when it is whole (see ``fquant.io.partial``).
    With ``resume`` the tensors of an interrupted call are kept, once a sample of them is compared.

    Raises ValueError or TypeError for what the format cannot hold, and for a tensor that is not of its Source's shape
    or not finite. Raises ValueError for an interrupted file without ``resume``, and for one of something else.
    """
    out = [MAGIC, struct.pack("<IQQ", VERSION, len(tensors), len(values))]
    for key, item in values.items():
        with at(key):
            out += [_text(key), _value(item)]
    starts: dict[str, int] = {}
    end = 0
    for name, source in tensors.items():
        with at(name):
            _check_source(name, source)
            sizes = source.shape[::-1]
            info = struct.pack(f"<I{len(sizes)}QIQ", len(sizes), *sizes, KINDS[source.kind].code, end)
            out += [_text(name), info]
            starts[name], end = end, end + padded(nbytes_of(source.kind, source.shape))
    expect(sys.byteorder == "little", "got a big-endian machine, wanted a little-endian one, as the data are")
    head = b"".join(out)
    head = head.ljust(padded(len(head)), b"\0")
    with continued(path, head, tensors, resume) as part:
        kept = [name for name in tensors if name in part.finished]
        for name in kept[:: max(1, len(kept) // SAMPLE)]:
            rows, wanted = sample(tensors[name])
            part.file.seek(len(head) + starts[name] + rows.start * wanted.shape[-1])
            same = part.file.read(wanted.numel()) == wanted.numpy().tobytes()
            expect(same, f"{path}.part: {name} has other values than its source; remove the file and write it again")
        for name, source in tensors.items():
            if name not in part.finished:
                with at(name):
                    part.file.seek(len(head) + starts[name])
                    _write_data(part.file, source)
                part.finish(name, nbytes_of(source.kind, source.shape))
            done(name)


def sample(source: Source, count: int = 16) -> tuple[slice, Tensor]:
    """Return up to ``count`` rows from the middle of a tensor, and their encoded bytes, u8[rows, bytes of a row]."""
    w = source.read().reshape(-1, source.shape[-1])
    rows = slice(len(w) // 2, min(len(w), len(w) // 2 + count))
    return rows, encode(w[rows].cpu().float(), source.kind).contiguous()


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
    size = nbytes_of(source.kind, source.shape)
    file.write(b"\0" * (padded(size) - size))
