"""heap: the memory that a replay frees stays with the process, for the replay that comes next.

A captured step frees every tensor at its last use and makes the next one a moment later. The C library of Linux, glibc,
gives large tensors pages of their own and returns these when they are freed, and the end of its heap too once much of
that is free; the system then finds, clears and maps other pages for the next tensor, a few KiB at a time. Of a QLoRA
step of 1.1 seconds that was a tenth, and more where gathered weights come and go.

So the first replay on a CPU tells glibc to keep what is freed, for the whole process and from then on: the end of the
heap is not returned, and pages of their own have only tensors of 32 MiB and more, which is the most that glibc can be
told, and keeps a heap of a few huge tensors from falling to pieces. What is resident stays at its highest, which a step
reaches in any case; ``release`` returns what is free. ``FQUANT_HEAP=system`` leaves the C library as it is. Other C
libraries, and allocators that are loaded in place of malloc, do not have these options and are left alone.
"""

from __future__ import annotations

import ctypes
import os
import platform
from functools import cache

VARIABLE = "FQUANT_HEAP"
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # of mallopt, in malloc.h


def keep() -> bool:
    """Keep freed memory in the process from now on; False where nothing is done, or ``FQUANT_HEAP=system`` forbids it.

    Raises ValueError where the variable is something else than keep or system.
    """
    asked = os.environ.get(VARIABLE, "keep")
    if asked not in ("keep", "system"):
        raise ValueError(f"{VARIABLE} is {asked!r}; wanted keep or system")
    return asked == "keep" and _kept()


def release() -> bool:
    """Return the memory that is free now to the system; whether there was any. What comes next is kept again."""
    libc = _libc()
    return libc is not None and bool(libc.malloc_trim(0))


@cache
def _kept() -> bool:
    libc = _libc()
    return libc is not None and all(libc.mallopt(option, value) for option, value in _OPTIONS)


@cache
def _libc() -> ctypes.CDLL | None:
    return ctypes.CDLL(None) if platform.libc_ver()[0] == "glibc" else None


_OPTIONS = ((_TRIM_THRESHOLD, -1), (_MMAP_THRESHOLD, 32 * 2**20))
