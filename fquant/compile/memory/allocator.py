"""The memory of replays: what one replay frees stays in the process for the next.

The system finds, clears and maps freed pages anew, a few KiB at a time. Of a QLoRA step of 1.1 seconds that was a
tenth, and more if gathered weights come and go. There are three kinds of memory:

* Planned results (``plan.py``) are in one private mapping, as large as the largest plan. All captured functions of the
  process share it, because nothing in it is live between replays.
* Other large tensors are in the pool (``pool.py``), if the C library was built.
* Everything else comes from malloc. glibc unmaps large ones when they are freed, and returns the free end of its heap.
  ``enable_reuse`` turns this off for the whole process, except for tensors of 32 MiB and more. glibc takes no higher
  threshold, and a few huge tensors would fragment the heap. Other allocators lack these options and stay as they are.

A replay takes the mapping only if it is free. While another thread replays, the unplanned graph runs, whose bits are
the same. It also runs under a dispatch mode, e.g. one that counts memory, which has to see tensors allocated.

Resident memory stays at its highest, which a step reaches in any case; ``release`` returns the free part.
``FQUANT_ALLOCATOR=system`` turns all of this off: results are ordinary tensors, and malloc is not configured.
"""

import contextlib
import ctypes
import mmap
import os
import platform
import threading
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.fx.node import map_arg

from ...device import HOST
from ...kernels import dispatch
from .. import graph as graphs
from . import pool
from .plan import MemoryPlan, Slot

VARIABLE = "FQUANT_ALLOCATOR"
Interpret = Callable[[Any], Callable[..., Any]]  # what runs a module, given that
IN_USE = threading.Lock()  # held by the replay that computes in the mapping
_replays = threading.local()  # its attribute holds_memory is true on the thread of that replay
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # of mallopt, in malloc.h
_OPTIONS = ((_TRIM_THRESHOLD, -1), (_MMAP_THRESHOLD, 32 * 2**20))
_PAGE = 2 << 20  # bytes
_memory: mmap.mmap | None = None  # the mapping


def _unlock() -> None:
    """Release in a forked process the lock of a replay on a thread that the process does not have."""
    if not getattr(_replays, "holds_memory", False):
        IN_USE._at_fork_reinit()  # type: ignore[attr-defined]


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_unlock)


def reuses_memory() -> bool:
    """Return True unless ``FQUANT_ALLOCATOR`` is system; raise ValueError if it is neither reuse nor system."""
    asked = os.environ.get(VARIABLE, "reuse")
    if asked not in ("reuse", "system"):
        raise ValueError(f"{VARIABLE} is {asked!r}; wanted reuse or system")
    return asked == "reuse"


def enable_reuse() -> bool:
    """Let malloc keep freed memory from now on; return False if ``FQUANT_ALLOCATOR=system`` or malloc cannot.

    Raises the ValueError of :func:`reuses_memory`.
    """
    libc = _glibc() if reuses_memory() else None
    return libc is not None and all(libc.mallopt(option, value) for option, value in _OPTIONS)


def run_planned(
    plan: MemoryPlan | None, module: Callable[..., Any], tensors: Sequence[Tensor], interpret: Interpret
) -> Any:
    """Run the memory-planned graph; run ``module`` if a dispatch mode is active or the memory is in use."""
    if plan is None or torch._C._len_torch_dispatch_stack() or not IN_USE.acquire(blocking=False):
        return interpret(module)(*tensors)
    library = pool.install() if plan.is_large else None
    was_open = library.fquant_pool_open(True) if library else False
    _replays.holds_memory = True
    try:
        memory = acquire(plan.nbytes)
        if plan.memory is not memory:
            _bind(plan, memory)
        dispatch.settle()
        return interpret(plan.module)(*tensors)
    finally:
        if library:
            library.fquant_pool_open(was_open)
        _replays.holds_memory = False
        IN_USE.release()


def _bind(plan: MemoryPlan, memory: mmap.mmap) -> None:
    """Make the tensors of a plan in ``memory``."""
    bound = dict[str, Any]()
    with torch.inference_mode(False), torch.no_grad():  # an inference tensor could not be written outside of the mode
        for name, value in plan.tensors.items():
            if isinstance(value, Slot) and not graphs.nbytes(t := value.like):
                bound[name] = torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=HOST)
            elif isinstance(value, Slot):
                raw = torch.frombuffer(memory, dtype=torch.uint8, count=graphs.nbytes(t), offset=value.offset)
                bound[name] = raw.view(t.dtype).as_strided(t.shape, t.stride())
            else:
                args, kwargs = map_arg((value.args, value.kwargs), lambda node: bound[str(node.target)])
                bound[name] = value.target(*args, **kwargs)
    start = ctypes.addressof(ctypes.c_char.from_buffer(memory)) if plan.places else 0
    for places, slots in plan.places:
        for place, slot in zip(places, slots, strict=True):
            place.at = start + slot.offset
    plan.module.__dict__.update(bound)
    plan.memory = memory


def acquire(nbytes: int) -> mmap.mmap:
    """Return the mapping of all replays, of ``nbytes`` bytes or more; the caller holds ``IN_USE`` while it computes."""
    global _memory
    if _memory is None or len(_memory) < nbytes:
        _drop_pages()
        # Python's default is a shared mapping, which a forked process writes too. A system without fork has no flags.
        private = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if hasattr(mmap, "MAP_PRIVATE") else {}
        _memory = mmap.mmap(-1, -(-nbytes // _PAGE) * _PAGE, **private)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            with contextlib.suppress(OSError):  # a kernel without huge pages
                _memory.madvise(mmap.MADV_HUGEPAGE)
    return _memory


def release() -> bool:
    """Return free memory to the system, after a replay of another thread; return True if there was any.

    Inside a replay of this thread, such as in an op that calls a captured function, nothing is returned.
    """
    if getattr(_replays, "holds_memory", False):
        return False
    with IN_USE:
        libc, dropped, library = _glibc(), _drop_pages(), pool.install() if reuses_memory() else None
        if library:
            library.fquant_pool_release()
    return bool(libc is not None and libc.malloc_trim(0)) or dropped


def _drop_pages() -> bool:
    """Return the pages of the mapping, in which nothing is live between replays."""
    if _memory is None or not hasattr(mmap, "MADV_DONTNEED"):
        return False
    _memory.madvise(mmap.MADV_DONTNEED)
    return True


@cache
def _glibc() -> ctypes.CDLL | None:
    return ctypes.CDLL(None) if platform.libc_ver()[0] == "glibc" else None
