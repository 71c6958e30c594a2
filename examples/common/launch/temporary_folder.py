"""One folder for all temporary files of this process and of the libraries in it.

    fquant-3f9a2c1d/        locked (flock(2)) by its process, and removed at its end

A process that is killed cannot remove its folder, but the system takes back its lock. The next process that makes a
folder here removes those without a lock.
"""

import contextlib
import fcntl
import os
import re
import secrets
import shutil
import tempfile
from collections.abc import Iterator
from functools import cache
from multiprocessing import util
from pathlib import Path

NAME = re.compile(r"fquant-[0-9a-f]{8}")
LAST = -200  # the priority at the end of the process; multiprocessing removes its own folder, in this one, at -100


@contextlib.contextmanager
def used() -> Iterator[Path]:
    """Give this process's folder; the temporary files that others make inside of the block are made there too."""
    before = tempfile.tempdir
    tempfile.tempdir = str(_made())
    try:
        yield Path(tempfile.tempdir)
    finally:
        tempfile.tempdir = before


@cache
def _made() -> Path:
    """Remove the folders of dead processes, and make that of this one."""
    where = Path(tempfile.gettempdir())
    for old in where.iterdir():
        if NAME.fullmatch(old.name):
            _remove_if_unused(old)
    name = f"fquant-{secrets.token_hex(4)}"
    new, folder = where / f".{name}", where / name  # it is named when it is locked; before, others would remove it
    new.mkdir(mode=0o700)
    with contextlib.suppress(OSError):  # a file system without locks
        fcntl.flock(_opened(new), fcntl.LOCK_EX | fcntl.LOCK_NB)
    new.rename(folder)
    util.Finalize(None, shutil.rmtree, (folder, True), exitpriority=LAST)
    return folder


def _remove_if_unused(folder: Path) -> None:
    """Remove the folder, unless a living process has it, or it is another user's, or locks do not exist here."""
    with contextlib.suppress(OSError):
        opened = _opened(folder)
        try:
            fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder, ignore_errors=True)
        finally:
            os.close(opened)


def _opened(folder: Path) -> int:
    return os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
