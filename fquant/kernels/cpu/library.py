"""The C library of csrc/kernels.c: where it is, what its functions take, which instruction sets it has, whose threads it uses.

It has the instruction sets that the compiler could build; the best that runs here is used, or the one that
``FQUANT_KERNELS=cpu:avx2`` names. Its loops run on the threads of the OpenMP runtime that torch has loaded, as many as
``torch.get_num_threads()``, so that two pools never compete for the cores.
"""

from __future__ import annotations

import ctypes
import os
from functools import cache
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

import torch
from torch import Tensor

from ..ops.pointwise_program import PIECE
from .threads import num_threads

DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}

LARGE = 4 << 20  # bytes

Pointer, Long, Int, Double = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int, ctypes.c_double


_POINTERS = ("codes", "scale", "nested", "nested_table", "nested_bytes", "nested_offset", "offset", "table")


class Packed(ctypes.Structure):
    """``Packed`` of csrc/kernels.c."""

    _fields_ = [
        *((name, Pointer) for name in _POINTERS),
        *((name, Long) for name in ("rows", "width", "block", "nested_block")),
        *((name, ctypes.c_int32) for name in ("bits", "dtype")),
        ("least", ctypes.c_float),
    ]


class Encoding(ctypes.Structure):
    """``Encoding`` of csrc/kernels.c."""

    _fields_ = [
        *((name, Pointer) for name in ("middles", "order", "grid")),
        ("block", Long),
        ("bits", ctypes.c_int32),
        ("sorted", ctypes.c_int32),
    ]


DIMS = 6  # of what an elementwise program reads, once dims that lie as one are one
OPS = (
    "read", "write", "constant", "add", "sub", "mul", "div", "neg", "reciprocal", "to", "where", "turn", "decay",
    "silu", "silu_derivative",
)  # fmt: skip


class Step(ctypes.Structure):
    """``Step`` of csrc/kernels.c; its ``op`` is a place in ``OPS``."""

    _fields_ = [*((name, ctypes.c_int32) for name in ("op", "dtype", "to", "a", "b", "c")), ("value", ctypes.c_float)]


class Read(ctypes.Structure):
    """``Read`` of csrc/kernels.c."""

    _fields_ = [("stride", Long * DIMS), ("dtype", ctypes.c_int32), ("whole", ctypes.c_int32)]


class Pointwise(ctypes.Structure):
    """``Pointwise`` of csrc/kernels.c."""

    _fields_ = [
        *((name, Pointer) for name in ("steps", "reads", "at")),
        *((name, Long) for name in ("count", "total", "dims", "registers")),
        ("size", Long * DIMS),
    ]


class Attention(ctypes.Structure):
    """``Attention`` of csrc/kernels.c."""

    _fields_ = [
        *((name, Pointer) for name in ("q", "k", "v", "g", "y", "dq", "dk", "dv", "lse", "labels")),
        *((name, Long * 3) for name in ("qs", "ks", "vs", "gs", "ys", "dqs", "dks")),
        *((name, Long) for name in ("batch", "heads", "kv", "t", "e", "labelled", "parts")),
        ("scale", ctypes.c_float),
        *((name, ctypes.c_int32) for name in ("dtype", "half")),
    ]


@cache
def load() -> ctypes.CDLL:
    """The library; ImportError if it was not built."""
    path = Path(__file__).with_name(f"_kernels{EXTENSION_SUFFIXES[0]}")
    if not path.exists():
        raise ImportError("its C kernels were not built; install a C compiler and install fquant again")
    library = ctypes.CDLL(str(path))
    packed, encoding = ctypes.POINTER(Packed), ctypes.POINTER(Encoding)
    functions = {  # all give 0, or the bytes of room that they have to be given; below 0 memory ran out
        "encode": [Pointer, Int, Long, Long, encoding, Pointer, Pointer],
        "decode": [packed, Long, Long, Long, Long, Int, Pointer, Long],
        "matmul": [packed, Pointer, Long, Pointer, Int, Pointer],
        "matmul_t": [packed, Pointer, Long, Pointer, Int, Pointer],
        "fold": [Pointer, Pointer, Long, Pointer],
        "bits": [Pointer, Long, Long, Pointer],
        "bernoulli": [Pointer, Long, Long, Long, Pointer],
        "nll": [Pointer, Int, Long, Long, Long, Pointer, Long, Pointer, Pointer, Pointer],
        "norm": [Pointer, Int, Long, Long, Long, Pointer, Double, Pointer, Pointer],
        "norm_backward": [Pointer, Int, Long, Long, Long, Pointer, Pointer, Pointer, Long, Pointer],
        "pointwise": [ctypes.POINTER(Pointwise), Pointer],
        "attention": [ctypes.POINTER(Attention)],
    }
    agreed = [*map(ctypes.sizeof, (Packed, Encoding, Pointwise, Step, Read, Attention)), len(OPS), PIECE]
    sizes = getattr(library, "fquant_sizes", lambda which: 0)
    known = all(hasattr(library, f"fquant_{name}") for name in functions)
    if not known or [sizes(i) for i in range(len(agreed))] != agreed:
        raise ImportError(f"{path.name} was built from other sources; install fquant again")
    library.fquant_isa.restype, library.fquant_isa.argtypes = ctypes.c_char_p, [Int]
    library.fquant_team.restype, library.fquant_team.argtypes = None, [Pointer]
    for name, rest in functions.items():
        function = getattr(library, f"fquant_{name}")
        function.restype, function.argtypes = Long, [Int, Int, *rest]
    library.fquant_large_pages.restype, library.fquant_large_pages.argtypes = None, [Pointer, ctypes.c_size_t]
    library.fquant_team(_team())
    return library


@cache
def isas() -> tuple[str, ...]:
    """The instruction sets that run here, from plain to best."""
    library, names = load(), []
    while name := library.fquant_isa(len(names)):
        names.append(name.decode())
    return tuple(names)


def empty(*shape: int, dtype: torch.dtype) -> Tensor:
    """``torch.empty`` on the CPU, in pages of 2 MiB where it is large and the system gives them."""
    t = torch.empty(shape, dtype=dtype, device="cpu")
    if t.nbytes >= LARGE:
        load().fquant_large_pages(t.data_ptr(), t.nbytes)
    return t


def result(out: Tensor | None, *shape: int, dtype: torch.dtype) -> Tensor:
    """Where a result goes: :func:`empty`, or ``out``; ValueError for one that it does not fit into."""
    if out is None:
        return empty(*shape, dtype=dtype)
    if out.shape != shape or out.dtype is not dtype or not out.is_contiguous():
        got = f"{out.dtype} {tuple(out.shape)} of strides {out.stride()}"
        raise ValueError(f"a result was to go into {got}; wanted contiguous {dtype} {shape}")
    return out


def call(name: str, *args: object) -> int:
    """What function ``fquant_name`` of the library returns, given the instruction set and the threads to be used."""
    result = getattr(load(), f"fquant_{name}")(isa(), num_threads(), *args)
    if result < 0:
        raise MemoryError(f"{name} could not allocate its scratch memory; free some")
    return result


def isa() -> int:
    """The index of the instruction set that is asked for, or of the best."""
    return _index(os.environ.get("FQUANT_KERNELS"))


@cache
def _index(asked: str | None) -> int:
    name = (asked or "").partition(":")[2]
    if not name:
        return len(isas()) - 1
    if name not in isas():
        raise ValueError(f"FQUANT_KERNELS is {asked!r}; this machine runs {', '.join(isas())}")
    return isas().index(name)


def _team() -> int | None:
    """Where the OpenMP runtime that torch has loaded starts its threads; None if it has none.

    It is looked for among what torch itself needs: not every build shows it to the whole process.
    """
    try:
        return ctypes.cast(ctypes.CDLL(torch._C.__file__).GOMP_parallel, ctypes.c_void_p).value
    except (AttributeError, OSError):
        return None
