"""Files that are written whole or not at all.

    state.safetensors                    the old file, until the new one is whole and on disk
    .state.safetensors.1f2e3d4c.tmp      the new file, while it is written

A process that is killed leaves its temporary file, which is as large as the file itself. A writer holds a lock
(flock(2)) on it, which the system takes back when the process ends. So :func:`remove_leftovers` tells the files of
dead writers from those of living ones, on any file system with locks.
"""

import contextlib
import errno
import fcntl
import os
import re
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import IO

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # no room on the disk, or for this user or process
LEFTOVER = re.compile(r"\..+\.[0-9a-f]{8}\.tmp")


@contextlib.contextmanager
def replacing(path: str | Path, is_last: bool = True) -> Iterator[IO[bytes]]:
    """Open a binary file that replaces ``path`` once all of it is on disk, and is deleted on an error.

    It can be read too. If it is not the last file of its folder, its name is not put on disk: the last one does that.
    An OSError, such as that of a full disk, names ``path``.
    """
    path = Path(path)
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    try:
        with naming(path), temporary.open("x+b") as file:
            with contextlib.suppress(OSError):  # a file system without locks
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            yield file
            file.flush()
            os.fsync(file.fileno())
            os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    if is_last:
        sync_folder(path.parent)


@contextlib.contextmanager
def naming(path: Path) -> Iterator[None]:
    """Add ``path`` to the error of a write inside of the block that finds no room; it names no file by itself."""
    try:
        yield
    except OSError as error:
        if error.errno in FULL and error.filename is None:
            error.filename = str(path)
        raise


def sync_folder(folder: Path) -> None:
    """Put on disk the names in ``folder``."""
    opened = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)


def is_leftover(path: Path) -> bool:
    """Return True for a plain file with the name of a temporary file of :func:`replacing`."""
    return LEFTOVER.fullmatch(path.name) is not None and path.is_file() and not path.is_symlink()


def remove_leftovers(folder: Path) -> list[Path]:
    """Remove the temporary files directly in ``folder`` whose writers are dead; return their paths.

    A file stays if a process has it locked, or if the file system has no locks.
    """
    removed: list[Path] = []
    for path in sorted(folder.iterdir()) if folder.is_dir() else []:
        if is_leftover(path):
            with contextlib.suppress(OSError), path.open("rb") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                path.unlink()
                removed.append(path)
    return removed
