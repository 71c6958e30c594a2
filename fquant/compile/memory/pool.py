"""The pool of replays: the memory of large tensors that ops allocate themselves, on threads that replay.

These are the results of a replay, what an op takes while it runs, and results of ops that cannot compute into given
memory. From malloc they would fragment the heap, in which an aligned block that is freed is too small for the next of
its size. ``csrc/pool.h`` serves torch's allocations instead. A plan can set places aside, which the next allocations of
their sizes take. So results of torch's own ops are in planned memory whether or not they have an out variant. Ops of
others may keep a result, so theirs stay in the pool until they are freed.

The pool is the one part of fquant that replaces a function of torch: ``c10::SetCPUAllocator``, for the whole process.
Threads that do not replay are served by torch as before.
"""

import ctypes
import os
import sys
import warnings
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch.fx import Node

LEAST = 64 << 10  # bytes of a tensor that is in the pool
_SYMBOLS = (
    "_ZN3c1015GetCPUAllocatorEv", "_ZN3c1015SetCPUAllocatorEPNS_9AllocatorEh", "_ZTVN3c1019DefaultCPUAllocatorE",
    "_ZNK3c109Allocator18is_simple_data_ptrERKNS_7DataPtrE",
)  # fmt: skip


class Place(ctypes.Structure):
    """``Place`` of csrc/pool.h."""

    _fields_ = [("size", ctypes.c_int64), ("at", ctypes.c_void_p)]


@cache
def install() -> ctypes.CDLL | None:
    """Return the library of the pool, from which torch allocates from now on; None if that is impossible.

    The library may not be built. On Linux any other reason is a warning. Torch may have another allocator, or another
    layout than the library knows. A system may refuse a range of addresses as large as its memory.
    """
    from ...kernels.cpu import library

    try:
        loaded = library.load()
    except (ImportError, OSError):
        return None
    try:
        theirs = ctypes.CDLL(torch._C.__file__)
        symbols = [ctypes.cast(getattr(theirs, name), ctypes.c_void_p) for name in _SYMBOLS]
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        is_installed = loaded.fquant_pool_install(*symbols, memory, LEAST)
    except (AttributeError, OSError, ValueError):
        is_installed = False
    if not is_installed and sys.platform == "linux":
        fault = f"the memory pool of captured functions does not fit the allocator of torch {torch.__version__}"
        effect = "results are the same, but a process may grow by twice what fquant.cost predicts"
        warnings.warn(f"{fault}; {effect}. Use a tested version of torch, or report this one", RuntimeWarning, 2)
    return loaded if is_installed else None


def is_served(node: Node) -> bool:
    """Return True for a node of an op of torch, whose results nothing keeps but the graph."""
    return isinstance(node.target, torch._ops.OpOverload) and node.target.namespace == "aten"


def places_of(slots: Sequence[Any]) -> "ctypes.Array[Place]":
    """Return places for tensors like those of ``slots``, without addresses."""
    sizes = [slot.like.untyped_storage().nbytes() for slot in slots]
    return (Place * len(sizes))(*[(size, None) for size in sizes])


def with_places(op: Callable[..., Any], places: "ctypes.Array[Place]") -> Callable[..., Any]:
    """Return ``op`` so that what it allocates takes ``places`` of equal sizes."""
    library = install()
    assert library is not None
    set_places = library.fquant_pool_places

    def call(*args: Any, **kwargs: Any) -> Any:
        set_places(places, len(places))
        try:
            return op(*args, **kwargs)
        finally:
            set_places(None, 0)

    call.__name__ = str(op).replace(".", "_")
    return call
