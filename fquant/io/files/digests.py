"""Digests of the tensors of a safetensors file, and of its header, in the file's own metadata.

    "fquant.digests": "sha256/16 of 1 MiB: <the header> <piece 0> <piece 1> ..."        without the blanks

A tensor is cut into pieces of 1 MiB, the last of which is shorter. The text has the first 16 bytes of the SHA-256 of
each piece, in hexadecimal digits, tensors in the order of the file. So a reader of some rows verifies them alone, and
an error names the damaged MiB. The text grows by 32 bytes a MiB. The digest of the header is that of all bytes before
the data, with zeros in its own place. So it covers names, dtypes, shapes, the structure of a tree, and the digests of
the pieces. A file has digests if the key is there, or a text with these first words, because one of the two may be
damaged. Other programs ignore the key, and files without it are read as they are.

The data come one tensor at a time, after the header. So the header is written with zeros for digests, and they are
filled in before the file gets its name. SHA-256 has instructions of its own on today's processors: on two cores of one,
a thread hashes 1.3 GiB/s, and 0.5 with BLAKE2b. Whole pieces are hashed by threads while others are read or written.
Pieces that are in memory already are hashed together (fquant/kernels/cpu/sha256.py).
"""

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor

from ...kernels.dispatch import empty, sha256
from ...tree import expect
from .. import staging

KEY = "fquant.digests"
FORM = "sha256/16 of 1 MiB: "
PIECE = 1 << 20  # bytes
WIDTH = 32  # digits of a digest
MOST_THREADS = 8
SHARE = 64 * PIECE  # of a thread that hashes pieces which are in memory
_FIX = f"the file is damaged, use a copy; or another program changed it and kept its metadata, remove {KEY!r} there"
_START = f'"{KEY}":"{FORM}'.encode()


class Digests:
    """The digests of the pieces of bytes that come in order; ``with`` ends its threads."""

    def __init__(self) -> None:
        self._pieces: list[Any] = []  # digests, or those to come
        self._begun, self._filled = hashlib.sha256(), 0  # the piece whose end has not come
        self._pool: ThreadPoolExecutor | None = None

    def __enter__(self) -> "Digests":
        return self

    def __exit__(self, *_: object) -> None:
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)

    def add(self, data: memoryview) -> None:
        """Hash ``data``, whose bytes must stay as they are until :meth:`wait` or :meth:`close`."""
        if self._pool is None and len(data) > 2 * PIECE:
            self._pool = ThreadPoolExecutor(min(MOST_THREADS, torch.get_num_threads()))
        start = 0
        while start < len(data):
            part = data[start : start + PIECE - self._filled]
            start += len(part)
            if len(part) == PIECE and self._pool is not None:
                self._pieces.append(self._pool.submit(_digest, part))
                continue
            self._begun.update(part)
            self._filled += len(part)
            if self._filled == PIECE:
                self._end()

    def wait(self) -> None:
        """Wait until all whole pieces are hashed."""
        self._pieces = [p.result() if isinstance(p, Future) else p for p in self._pieces]

    def close(self) -> list[str]:
        """Return the digests of all pieces."""
        if self._filled:
            self._end()
        self.wait()
        return self._pieces

    def _end(self) -> None:
        self._pieces.append(self._begun.hexdigest()[:WIDTH])
        self._begun, self._filled = hashlib.sha256(), 0


def _digest(data: memoryview) -> str:
    return hashlib.sha256(data).hexdigest()[:WIDTH]


def _of_pieces(pieces: Sequence[memoryview]) -> list[str]:
    threads = min(MOST_THREADS, torch.get_num_threads(), sum(map(len, pieces)) // SHARE)
    if threads <= 1:
        return [digest.hex()[:WIDTH] for digest in sha256(pieces)]
    out = [""] * len(pieces)
    with ThreadPoolExecutor(threads) as pool:
        for i, found in enumerate(pool.map(sha256, [pieces[i::threads] for i in range(threads)])):
            out[i::threads] = [digest.hex()[:WIDTH] for digest in found]
    return out


def of_file(path: Path) -> str:
    """Return a digest of all bytes of a file."""
    with path.open("rb") as file, Digests() as found:
        while data := file.read(64 * PIECE):
            found.add(memoryview(data))
            found.wait()
        return hashlib.blake2b("".join(found.close()).encode(), digest_size=16).hexdigest()


def width(nbytes: int) -> int:
    """Return the length of the text for a tensor of ``nbytes``."""
    return -(-nbytes // PIECE) * WIDTH


def room(nbytes: int) -> str:
    """Return the text of a file whose tensors need ``nbytes`` of digests (:func:`width`), all of them zero."""
    return FORM + "0" * (WIDTH + nbytes)


def begin(head: bytes) -> int:
    """Return where in the file the digests of tensors begin."""
    return head.index(_START) + len(_START) + WIDTH


def places(head: bytes, sizes: Mapping[str, int]) -> dict[str, int]:
    """Return where in the file the digests of each tensor begin; ``sizes`` are their bytes, in the file's order."""
    out, place = {}, begin(head)
    for name, nbytes in sizes.items():
        out[name] = place
        place += width(nbytes)
    return out


def write(file: IO[bytes], data: memoryview) -> bytes:
    """Write ``data``, the bytes of a tensor, and return the text of its digests."""
    with Digests() as found:
        found.add(data)
        file.write(data)
        return "".join(found.close()).encode()


def seal(file: IO[bytes], length: int) -> None:
    """Write the digest of the header, the first ``length`` bytes of ``file``, which has all other digests."""
    file.seek(0)
    head = file.read(length)
    start = head.index(_START) + len(_START)
    file.seek(start)
    file.write(_of_header(head, start))


def filled(head: bytes, tensors: Iterable[memoryview]) -> bytes:
    """Return ``head`` with the digests of all ``tensors``, their bytes in the file's order, and with its own."""
    pieces = [data[i : i + PIECE] for data in tensors for i in range(0, len(data), PIECE)]
    text, start = "".join(_of_pieces(pieces)).encode(), begin(head)
    head = head[:start] + text + head[start + len(text) :]
    start -= WIDTH
    return head[:start] + _of_header(head, start) + head[start + WIDTH :]


def opened(head: bytes, metadata: dict[str, str], sizes: Mapping[str, int]) -> dict[str, str]:
    """Take the digests out of ``metadata``, verify the header, and return the text of each tensor; {} without digests.

    ``head`` has all bytes before the data, and ``sizes`` are the tensors' bytes in the file's order. Raises ValueError
    for a header that is damaged.
    """
    if KEY not in metadata and not any(text.startswith(FORM) for text in metadata.values()):
        return {}
    text, start = metadata.pop(KEY, ""), head.find(_START) + len(_START)
    total = sum(map(width, sizes.values()))
    is_whole = len(text) == len(FORM) + WIDTH + total and start >= len(_START)
    is_whole = is_whole and head[start : start + WIDTH] == _of_header(head, start)
    expect(is_whole, f"header: got other bytes than those that were written, by their digest; {_FIX}")
    out, start = {}, len(FORM) + WIDTH
    for name, nbytes in sizes.items():
        out[name] = text[start : start + width(nbytes)]
        start += width(nbytes)
    return out


def fill(out: Tensor, file: IO[bytes], start: int, span: tuple[int, int], wanted: str) -> int:
    """Read from byte ``start`` of ``file`` the contiguous ``out``, a part of the tensor at the bytes ``span``.

    All of each piece that has a byte of ``out`` is read. Returns how many bytes the file lacks; raises ValueError,
    which names the piece, for bytes of another digest than in ``wanted``, the text of the tensor.
    """
    stop = start + out.nbytes
    if start == stop:
        return 0
    first = (start - span[0]) // PIECE
    begin = span[0] + first * PIECE
    end = min(span[1], span[0] + -(-(stop - span[0]) // PIECE) * PIECE)
    file.seek(begin)
    with Digests() as found:
        for part in (_some(start - begin), out, _some(end - stop)):
            if lacking := staging.fill(part, file, found):
                return lacking
        got = found.close()
    for i, digest in enumerate(got):
        at = begin + i * PIECE
        is_same = digest == wanted[(first + i) * WIDTH :][:WIDTH]
        fault = f"got bytes {at} to {min(at + PIECE, end)} that differ from those that were written, by their digest"
        expect(is_same, f"{fault}; {_FIX}")
    return 0


def _some(nbytes: int) -> Tensor:
    return empty((nbytes,), torch.uint8)


def _of_header(head: bytes, start: int) -> bytes:
    return _digest(memoryview(head[:start] + b"0" * WIDTH + head[start + WIDTH :])).encode()
