"""heap: the memory of a replay stays with the process, for the replay that comes next.

What is freed and wanted again a moment later is better kept: the system finds, clears and maps pages for it once more,
a few KiB at a time. Of a QLoRA step of 1.1 seconds that was a tenth, and more where gathered weights come and go.

Most results of a captured graph lie in one piece of memory, where ``fquant.compile.memory.plan`` has laid them out; ``take`` gives it
to all of them. Other tensors are allocated as torch does it, by malloc. The C library of Linux, glibc, gives large
ones pages of their own and returns these when they are freed, and the end of its heap too once much of that is free. So
the first replay on a CPU tells glibc to keep what is freed, for the whole process and from then on: the end of the heap
is not returned, and pages of their own have only tensors of 32 MiB and more, which is the most that glibc can be told,
and keeps a heap of a few huge tensors from falling to pieces. Other C libraries, and allocators that are loaded in
place of malloc, do not have these options and are left alone.

What is resident stays at its highest, which a step reaches in any case; ``release`` returns what is free.
``FQUANT_ALLOCATOR=system`` leaves all of this: results are then tensors like any other, and the C library is as it is.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import platform
import threading
from functools import cache

VARIABLE = "FQUANT_ALLOCATOR"
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # of mallopt, in malloc.h
_PAGE = 2 << 20  # bytes
_memory: mmap.mmap | None = None  # in which replays compute
USED = threading.Lock()  # held while one does


def is_kept() -> bool:
    """Whether memory is to be kept; ValueError where ``FQUANT_ALLOCATOR`` is something else than reuse or system."""
    asked = os.environ.get(VARIABLE, "reuse")
    if asked not in ("reuse", "system"):
        raise ValueError(f"{VARIABLE} is {asked!r}; wanted reuse or system")
    return asked == "reuse"


def keep() -> bool:
    """Keep freed memory in the process from now on; False where nothing is done, or ``FQUANT_ALLOCATOR=system`` forbids it.

    Raises what :func:`is_kept` does.
    """
    return is_kept() and _kept()


def take(nbytes: int) -> mmap.mmap:
    """Memory for a replay, of at least so many bytes, in pages of 2 MiB where the system has them.

    It is the same for all replays of the process, and another where a larger one is asked for. Who takes it holds
    ``USED`` until done.
    """
    global _memory
    if _memory is None or len(_memory) < nbytes:
        _forget()
        _memory = _mapped(-(-nbytes // _PAGE) * _PAGE)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            with contextlib.suppress(OSError):  # a kernel without them
                _memory.madvise(mmap.MADV_HUGEPAGE)
    return _memory


def release() -> bool:
    """Return the memory that is free now to the system; whether there was any. What comes next is kept again.

    Waits for a replay that another thread is in.
    """
    with USED:
        libc, taken = _libc(), _forget()
    return bool(libc is not None and libc.malloc_trim(0)) or taken


def _mapped(nbytes: int) -> mmap.mmap:
    """Memory of this process alone, as Python's would be one that a forked process writes into as well."""
    if not hasattr(mmap, "MAP_PRIVATE"):
        return mmap.mmap(-1, nbytes)  # a system without fork
    return mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)


def _forget() -> bool:
    """Return the pages of the memory of replays, in which nothing is alive between them."""
    if _memory is None or not hasattr(mmap, "MADV_DONTNEED"):
        return False
    _memory.madvise(mmap.MADV_DONTNEED)
    return True


@cache
def _kept() -> bool:
    libc = _libc()
    return libc is not None and all(libc.mallopt(option, value) for option, value in _OPTIONS)


@cache
def _libc() -> ctypes.CDLL | None:
    return ctypes.CDLL(None) if platform.libc_ver()[0] == "glibc" else None


_OPTIONS = ((_TRIM_THRESHOLD, -1), (_MMAP_THRESHOLD, 32 * 2**20))
