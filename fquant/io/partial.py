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

A writer holds a lock on the file, as those of ``files/replacing.py`` do. So a second writer is refused while the first
one lives. What a dead one has left is continued with ``resume``, and written over if no piece of it was finished. No
other program removes it.
"""

import contextlib
import fcntl
import hashlib
import json
import os
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import IO

from ..tree import expect
from .files.replacing import naming, sync_folder

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

    ``names`` are those of all pieces. Raises ValueError if there is an interrupted call's and ``resume`` is False, if
    it has another head, or if another process writes it.
    """
    path = Path(path)
    data, log = path.with_name(f"{path.name}.part"), path.with_name(f"{path.name}.part.log")
    with naming(data), _locked(data) as file:
        has_more = os.fstat(file.fileno()).st_size > 0
        lines = log.read_bytes().splitlines(keepends=True) if has_more and log.exists() else []
        lines = [line for line in lines if line.endswith(b"\n")]  # the last may be cut short
        digest = _line(hashlib.blake2b(head, digest_size=16).hexdigest())
        expect(resume or not lines, f"{data}: got the file of an interrupted run; resume that, or remove the file")
        fault = f"{data}: got a file with another beginning than the one to write"
        expect(not lines or lines[0] == digest, f"{fault}; use the options of the interrupted run, or remove the file")
        if not lines:
            file.truncate(0)
        with log.open("r+b" if lines else "w+b") as record:
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
        os.replace(data, path)  # the lock is held until the file has its name
    log.unlink()
    sync_folder(path.parent)


def _locked(data: Path) -> IO[bytes]:
    """Open the file, which is made if it is not there, and lock it; raise ValueError if another process has it."""
    while True:
        file = os.fdopen(os.open(data, os.O_RDWR | os.O_CREAT, 0o666), "r+b")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.close()
            raise ValueError(f"{data}: another process is writing it; wait for that, or choose another name") from None
        except OSError:  # a file system without locks
            return file
        if data.exists() and os.path.samestat(data.stat(), os.fstat(file.fileno())):
            return file
        file.close()  # it got its final name, or was removed, before it was locked


def _line(name: str) -> bytes:
    return json.dumps(name).encode() + b"\n"


def _sync(file: IO[bytes]) -> None:
    file.flush()
    os.fsync(file.fileno())
