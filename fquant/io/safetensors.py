"""The safetensors format: files of named tensors, and any tree as one such file.

    u64 n | n bytes of JSON: {"name": {"dtype", "shape", "data_offsets": [start, stop]}, "__metadata__": {...}} | data

All is little-endian. Offsets count from the end of the JSON, and the tensors cover the data without holes. (The format
is https://github.com/huggingface/safetensors; files are interchangeable.) :func:`save` and :func:`load` put a tree into
such a file: each leaf under its path, and the structure as JSON in the metadata (see fquant.io.tree_json). Nothing is
mapped, pickled or executed. Every file written here has digests of its header and of each MiB of its tensors, which are
verified when these are read (fquant/io/files/digests.py); files of other programs are read without.
"""

import collections
import dataclasses
import hashlib
import json
import math
import os
import struct
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..device import HOST, finish_writes, memory_of
from ..kernels.dispatch import empty
from ..lazy import Lazy
from ..tree import at, expect
from . import staging, tree_json
from .files import digests
from .files.replacing import replacing

DTYPES: dict[str, torch.dtype] = {
    "BOOL": torch.bool,
    "U8": torch.uint8, "U16": torch.uint16, "U32": torch.uint32, "U64": torch.uint64,
    "I8": torch.int8, "I16": torch.int16, "I32": torch.int32, "I64": torch.int64,
    "F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32, "F64": torch.float64, "C64": torch.complex64,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "F8_E8M0": torch.float8_e8m0fnu,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz, "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
}  # fmt: skip
NAMES = {dtype: name for name, dtype in DTYPES.items()}
# The order of dtypes in the reference implementation; a file begins with tensors of the last.
ORDER: Sequence[str] = """BOOL U8 I8 F8_E5M2 F8_E4M3 F8_E8M0 F8_E4M3FNUZ F8_E5M2FNUZ I16 U16 F16 BF16
    I32 U32 F32 C64 F64 I64 U64""".split()
TREE = "fquant.tree"  # the metadata key of a tree's structure
MOST_HEADER = 100_000_000  # bytes, as in the format's own reader
_counts = lambda x: isinstance(x, list) and all(type(n) is int and n >= 0 for n in x)


@dataclasses.dataclass(frozen=True)
class Entry:
    """A tensor in a file, at bytes ``start`` to ``stop``."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    stop: int


@dataclasses.dataclass(frozen=True)
class Header:
    """The content of a file; ``digests`` are those of its tensors, if it has any."""

    path: Path
    tensors: dict[str, Entry]
    metadata: dict[str, str]
    digests: dict[str, str] = dataclasses.field(default_factory=dict, repr=False)


def header(path: str | Path) -> Header:
    """Read and check the header of a file, against its digest if it has one; a ValueError names file and fault."""
    path = Path(path)
    expect(path.is_file(), f"{path}: got no such file, wanted a safetensors file; check the name")
    size = path.stat().st_size
    with path.open("rb") as file, at(str(path)):
        expect(size >= 8, f"got {size} bytes, wanted at least 8; the file is cut short, fetch it again")
        head = file.read(8)
        (length,) = struct.unpack("<Q", head)
        got = f"got a header of {length} bytes, wanted at most the {size - 8} that follow"
        expect(length <= size - 8, f"{got}; the file is cut short or no safetensors file, fetch it again")
        got = f"got a header of {length} bytes, wanted at most {MOST_HEADER}"
        expect(length <= MOST_HEADER, f"{got} as the format has it; the file is damaged, fetch it again")
        head += file.read(length)
        with at("header"):
            content = tree_json.parse(head[8:], "safetensors")
        metadata = content.pop("__metadata__", {})
        is_text = isinstance(metadata, dict) and all(isinstance(text, str) for text in metadata.values())
        expect(is_text, f"__metadata__: got {metadata!r:.80}, wanted an object of strings")
        tensors = {name: _entry(name, item, 8 + length) for name, item in content.items()}
        sizes = _check_cover(tensors, 8 + length, size)
        found = digests.opened(head, metadata, sizes)
    return Header(path, tensors, metadata, found)


def read(header: Header, name: str, rows: slice | None = None, device: torch.device = HOST) -> Tensor:
    """Read the tensor ``name``, or its ``rows`` (a slice of dim 0 without step), to ``device``, and no other bytes.

    Of a file with digests all of each MiB of the tensor is read that has some of the rows. Raises ValueError for an
    unknown name, rows out of bounds, a file that became shorter, or bytes that differ from those that were written.
    """
    with at(str(header.path)):
        if name not in header.tensors:
            known = ", ".join(sorted(header.tensors)[:8])
            raise ValueError(f"got no tensor {name!r}, wanted one of the {len(header.tensors)} there: {known}")
        entry = header.tensors[name]
        shape, start = entry.shape, entry.start
        if rows is not None:
            expect(bool(shape), f"{name}: got rows of a scalar, wanted a tensor of at least one dim; leave rows out")
            first, last = rows.start or 0, shape[0] if rows.stop is None else rows.stop
            got = f"{name}: got rows {first}:{last}:{rows.step or 1}"
            fits = rows.step in (None, 1) and 0 <= first <= last <= shape[0]
            expect(fits, f"{got}, wanted rows within 0:{shape[0]} and no step")
            start += first * math.prod(shape[1:]) * entry.dtype.itemsize
            shape = (last - first, *shape[1:])
        _check_byte_order()
        out = empty(shape, entry.dtype, device)
        with header.path.open("rb", buffering=0) as file:
            with at(name):
                if name in header.digests:
                    span = entry.start, entry.stop
                    lacking = digests.fill(out, file, start, span, header.digests[name])
                else:
                    file.seek(start)
                    lacking = staging.fill(out, file)
            expect(not lacking, f"{name}: got {lacking} bytes too few; the file changed since it was opened")
        return out


def stamp(header: Header, name: str, windows: int = 8, size: int = 1024) -> str:
    """Return a digest of a tensor's dtype, shape and a few windows of its bytes, to identify it without reading all.

    The digests of the file, if it has any, are in it too, so that it stands for all bytes.
    """
    entry = header.tensors[name]
    found = hashlib.blake2b(f"{entry.dtype} {entry.shape}".encode(), digest_size=8)
    found.update(header.digests.get(name, "").encode())
    with open(header.path, "rb", buffering=0) as file:
        for i in range(windows):
            at = entry.start + max(0, entry.stop - entry.start - size) * i // max(1, windows - 1)
            found.update(os.pread(file.fileno(), min(size, entry.stop - at), at))
    return "sampled " + found.hexdigest()


def write(path: str | Path, tensors: Mapping[str, Tensor | Lazy], metadata: dict[str, str] | None = None) -> None:
    """Write ``tensors`` to ``path`` atomically: on an error the file keeps its old content.

    A Lazy is read when its turn comes, and not kept. Raises TypeError or ValueError, before anything is written, for
    tensors that the format cannot hold. Raises ValueError for a Lazy that does not read its ``like``.
    """
    for key, text in (metadata or {}).items():
        is_text = isinstance(key, str) and isinstance(text, str)
        expect(is_text, f"metadata {key!r}: got {text!r}, wanted a string; use json.dumps", TypeError)
        expect(key != digests.KEY, f"metadata {key!r}: got text for it, wanted none; it is made here, leave it out")
    likes: dict[str, Tensor] = {}  # of no memory, because a mapping may make its tensors when it is asked
    for name, t in tensors.items():
        like = t.like if isinstance(t, Lazy) else t
        check_writable(name, like, isinstance(t, Lazy))
        likes[name] = like.detach().to("meta")
    head, order = layout(likes, metadata)
    found: list[bytes] = []
    with replacing(path) as file:
        file.write(head)
        for name in order:  # one at a time on the host
            t = tensors[name]
            t = t.read() if isinstance(t, Lazy) else t
            check_like(name, t, likes[name])
            found.append(digests.write(file, bytes_of(t)))
        file.seek(digests.begin(head))
        file.write(b"".join(found))
        digests.seal(file, len(head))


def layout(likes: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None) -> tuple[bytes, dict[str, int]]:
    """Return the bytes before the data of a file, and where each tensor begins in the file, in the order there.

    ``likes`` may be meta tensors. Widest dtype first, as in the reference implementation, so that all are aligned.
    Digests are zeros, to be filled in.
    """
    room = digests.room(sum(digests.width(t.nbytes) for t in likes.values()))
    content: dict[str, Any] = {"__metadata__": {**(metadata or {}), digests.KEY: room}}
    starts: dict[str, int] = {}
    offset = 0
    for name in sorted(likes, key=lambda name: (-ORDER.index(NAMES[likes[name].dtype]), name)):
        t = likes[name]
        starts[name], stop = offset, offset + t.numel() * t.itemsize
        content[name] = {"dtype": NAMES[t.dtype], "shape": list(t.shape), "data_offsets": [offset, stop]}
        offset = stop
    text = json.dumps(content, ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode()
    text += b" " * (-len(text) % 8)
    head = struct.pack("<Q", len(text)) + text
    return head, {name: len(head) + start for name, start in starts.items()}


def check_like(name: str, t: Tensor, like: Tensor) -> None:
    """Raise ValueError unless ``t`` has the dtype and shape of ``like``."""
    got = f"{name}: got {t.dtype} {tuple(t.shape)}, wanted the announced {like.dtype} {tuple(like.shape)}"
    expect(t.dtype == like.dtype and t.shape == like.shape, f"{got}; correct the Lazy's like")


def bytes_of(t: Tensor) -> memoryview:
    """Return the bytes of a tensor on any device in the order of the file."""
    finish_writes(t)
    return _bytes(t.detach().cpu().resolve_conj().resolve_neg().contiguous())


def save(path: str | Path, tree: Any) -> None:
    """Write a tree of nodes, dicts with str keys, lists, tuples, tensors and plain scalars to one file.

    Raises TypeError, with the path, for anything else, and ValueError if two leaves have the same path.
    """
    text, tensors = tree_json.encode(tree)
    with at(str(path)):
        write(path, tensors, {"format": "pt", TREE: text})


def load(path: str | Path, device: torch.device = HOST) -> Any:
    """Read the tree that :func:`save` wrote, to ``device``; raise ValueError for any other file."""
    found = tree_header(path)
    return tree_json.decode(found.metadata[TREE], lambda name: read(found, name, device=device))


def tree_header(path: str | Path) -> Header:
    """Read the header of a tree's file, and check that it has the tensors of its structure; else raise ValueError."""
    found = header(path)
    names: list[str] = []
    with at(str(path)):
        fault = f"got no {TREE!r} in its metadata, wanted a file of fquant; use header and read instead"
        expect(TREE in found.metadata, fault)
        tree_json.decode(found.metadata[TREE], names.append)  # everything is checked before a tensor is read
        for name, count in collections.Counter(names).items():
            expect(count == 1, f"{name}: got {count} leaves of that path, wanted one; write the file again")
            expect(name in found.tensors, f"{name}: got no such tensor, wanted one; write the file again")
        for name in found.tensors.keys() - set(names):
            raise ValueError(f"{name}: got a tensor that the structure lacks, wanted none; write the file again")
    return found


def _entry(name: str, item: Any, data: int) -> Entry:
    with at(name):
        is_entry = isinstance(item, dict) and item.keys() == {"dtype", "shape", "data_offsets"}
        expect(is_entry, f"got {item!r:.80}, wanted exactly dtype, shape and data_offsets")
        dtype, shape, offsets = item["dtype"], item["shape"], item["data_offsets"]
        is_known = isinstance(dtype, str) and dtype in DTYPES
        expect(is_known, f"got unknown dtype {dtype!r}, wanted one of {', '.join(DTYPES)}")
        expect(_counts(shape), f"got shape {shape!r:.80}, wanted a list of numbers of at least 0")
        expect(_counts(offsets) and len(offsets) == 2, f"got data_offsets {offsets!r:.80}, wanted [start, stop]")
        start, stop = offsets
        wanted = math.prod(shape) * DTYPES[dtype].itemsize
        fault = f"got bytes {start} to {stop}, wanted {wanted} bytes for {dtype} of shape {shape}; the file is damaged"
        expect(stop - start == wanted, fault)
        return Entry(DTYPES[dtype], tuple(shape), data + start, data + stop)


def _check_cover(tensors: dict[str, Entry], data: int, size: int) -> dict[str, int]:
    """Raise ValueError unless the tensors cover the data; return their bytes, in the order of the file."""
    end, sizes = data, dict[str, int]()
    for name, entry in sorted(tensors.items(), key=lambda item: (item[1].start, item[1].stop)):
        fault = "overlaps what is before it" if entry.start < end else "leaves a hole before it"
        got = f"{name}: got data at byte {entry.start}, wanted {end}"
        expect(entry.start == end, f"{got}, it {fault}; the file is damaged")
        end, sizes[name] = entry.stop, entry.stop - entry.start
    expect(end == size, f"got {size} bytes, wanted the {end} of its header; the file is damaged or cut short")
    return sizes


def check_writable(name: str, tensor: Tensor, may_be_meta: bool = False) -> None:
    """Raise TypeError or ValueError for a name or tensor that the format cannot hold."""
    kind, is_named = type(tensor), isinstance(name, str) and isinstance(tensor, Tensor)
    expect(is_named, f"{name!r}: got {kind.__name__}, wanted a tensor under a string", TypeError)
    with at(name):
        expect(name != "__metadata__", "got a tensor of that name, wanted another; the format reserves it")
        is_text = name.encode(errors="ignore").decode() == name  # without a lone surrogate
        expect(is_text, f"got a name that is no Unicode text ({name!r}), wanted one in UTF-8")
        fault = f"got a {kind.__name__}, wanted a plain tensor; collect it to one process first"
        expect(kind in (Tensor, torch.nn.Parameter), fault, TypeError)
        fault = f"got {tensor.dtype} {tensor.layout}, wanted a dense tensor of {', '.join(DTYPES)}"
        expect(tensor.dtype in NAMES and tensor.layout is torch.strided, fault, TypeError)
        expect(may_be_meta or not tensor.is_meta, "got a meta tensor, wanted one with values")


def _check_byte_order() -> None:
    expect(sys.byteorder == "little", "got a big-endian machine, wanted a little-endian one, as the data are")


def _bytes(tensor: Tensor) -> memoryview:
    """Return the memory of a contiguous CPU tensor."""
    _check_byte_order()
    return memory_of(tensor).numpy().data
