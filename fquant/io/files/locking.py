"""A lock on what a process writes, which says who has it.

    with held(folder / ".lock"):     # else ValueError: ... is in use by host a, process 4711, since 2026-11-29 08:41:10
        ...

The lock is flock(2), which the system takes back when the process ends, however it ends. The file of a killed process
therefore locks nothing, and the next one takes it. Processes of several hosts exclude each other on file systems that
share locks between hosts, as NFS does by default on Linux. On one without locks a warning says so.
"""

import contextlib
import fcntl
import os
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from socket import gethostname
from typing import IO

POLL = 0.2  # seconds between two attempts


@contextlib.contextmanager
def held(path: Path, wait: float = 0.0) -> Iterator[None]:
    """Hold the lock of the file ``path`` inside of the block; make its folder, which goes again if it stays empty.

    Raises ValueError, which names the holder, if another process has it for longer than ``wait`` seconds. So it does
    for a place that cannot be written.
    """
    is_new = not path.parent.exists()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        locked = _locked(path, time.monotonic() + wait)
    except OSError as error:
        raise ValueError(f"{path}: cannot be made ({error.strerror}); choose a place that can be written") from None
    with locked as file:
        try:
            since = time.strftime("%Y-%m-%d %H:%M:%S")
            file.write(f"host {gethostname()}, process {os.getpid()}, since {since}".encode())
            file.truncate()
            file.flush()
            yield
        finally:
            if _is_at(file, path):  # and not in a folder that was removed and made again
                path.unlink()
            if is_new:
                with contextlib.suppress(OSError):
                    path.parent.rmdir()


def _locked(path: Path, deadline: float) -> IO[bytes]:
    while True:
        file = os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT, 0o666), "r+b")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = file.read(300).decode(errors="replace") or "another process"
            file.close()
            fault = f"{path}: is in use by {holder}; wait until it ends, or choose another place"
            if time.monotonic() >= deadline:
                raise ValueError(fault) from None
            time.sleep(POLL)
            continue
        except OSError as error:
            warnings.warn(f"{path}: cannot be locked ({error}), so a second process would not be noticed", stacklevel=3)
        if _is_at(file, path):
            return file
        file.close()  # its holder removed it before it was locked here


def _is_at(file: IO[bytes], path: Path) -> bool:
    with contextlib.suppress(FileNotFoundError):
        return os.path.samestat(path.stat(), os.fstat(file.fileno()))
    return False
