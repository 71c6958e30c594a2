"""Large files that are written piece by piece, and continued after an interruption.

    with partial.continued("model.gguf", head, starts, resume=True) as part:
        for name in starts.keys() - part.finished:
            part.file.seek(starts[name])
            part.file.write(...)
            part.finish(name, nbytes)

    model.gguf.part         the file so far
    model.gguf.part.log     a digest of its head, then the name of each finished piece, a line each

A piece is in the log once its bytes are on disk, so what the log has is there after a power failure too. The log is
written after each 64 MiB and at the end. An interruption, a full disk and the like leave both files. A new run that
ends in a ValueError or TypeError deletes them, because it would end so again.
"""

import contextlib
import hashlib
import json
import os
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import IO

from ..tree import expect
from .files.replacing import sync_folder

BETWEEN = 1 << 26  # bytes between two writes of the log


class Part:
    """An open file, positioned behind its head, and the names of the pieces that are finished."""

    def __init__(self, file: IO[bytes], log: IO[bytes], finished: frozenset[str]) -> None:
        self.file, self.finished = file, finished
        self.has_finished = False
        self._log, self._lines, self._nbytes = log, list[bytes](), 0

    def finish(self, name: str, nbytes: int) -> None:
        """Say that the piece ``name``, which has ``nbytes``, is written."""
        self.has_finished = True
        self._lines.append(_line(name))
        self._nbytes += nbytes
        if self._nbytes >= BETWEEN:
            self.sync()

    def sync(self) -> None:
        """Put on disk what is written, and then its names."""
        _sync(self.file)
        self._log.writelines(self._lines)
        _sync(self._log)
        self._lines, self._nbytes = [], 0


@contextlib.contextmanager
def continued(path: str | Path, head: bytes, names: Collection[str], resume: bool) -> Iterator[Part]:
    """Open the file that becomes ``path`` and begins with ``head``; with ``resume`` that of an interrupted call.

    ``names`` are those of all pieces. Raises ValueError if there is an interrupted call's and ``resume`` is False, or
    if it has another head.
    """
    path = Path(path)
    data, log = path.with_name(f"{path.name}.part"), path.with_name(f"{path.name}.part.log")
    lines = log.read_bytes().splitlines(keepends=True) if data.exists() and log.exists() else []
    lines = [line for line in lines if line.endswith(b"\n")]  # the last may be cut short
    digest = _line(hashlib.blake2b(head, digest_size=16).hexdigest())
    expect(resume or not lines, f"{data}: got the file of an interrupted run; resume that, or remove the file")
    fault = f"{data}: got a file with another beginning than the one to write"
    expect(not lines or lines[0] == digest, f"{fault}; use the options of the interrupted run, or remove the file")
    mode = "r+b" if lines else "w+b"
    with data.open(mode) as file, log.open(mode) as record:
        part = Part(file, record, frozenset(name for name in names if _line(name) in lines))
        record.writelines(lines or [digest])
        record.truncate()
        if part.finished:
            file.seek(len(head))  # a caller may have filled it in
        else:
            file.write(head)
        try:
            yield part
        except BaseException as error:
            if lines or (part.has_finished and not isinstance(error, ValueError | TypeError)):
                part.sync()
            else:
                data.unlink()
                log.unlink()
            raise
        part.sync()
    os.replace(data, path)
    log.unlink()
    sync_folder(path.parent)


def _line(name: str) -> bytes:
    return json.dumps(name).encode() + b"\n"


def _sync(file: IO[bytes]) -> None:
    file.flush()
    os.fsync(file.fileno())
