"""The C library of csrc/: its location, the structures and signatures of its functions, and its instruction sets.

The best instruction set that this machine has is used, or the one that ``FQUANT_KERNELS=cpu:avx2`` names. Loops run on
the threads of the OpenMP runtime that torch has loaded, because two thread pools would compete for the cores;
``threads.py`` says on how many.
"""

import ctypes
import os
from functools import cache
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from ..arguments import check_out
from ..ops.pointwise_program import PIECE
from .threads import num_threads, openmp

DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
LARGE = 4 << 20  # bytes of a result that wants pages of 2 MiB
MOST_DIM = 64  # elements of a learned vector that C adds
DIMS = 6  # of a tensor that an elementwise program reads, after dims with a common stride are merged
OPS = (
    "read", "write", "constant", "add", "sub", "mul", "div", "neg", "reciprocal", "to", "where", "turn", "decay",
    "silu", "silu_derivative", "root",
)  # fmt: skip
RULES = ("adamw", "adam", "lion", "sgd", "nesterov", "mean", "nesterov_mean")
Pointer, Long, Int, Float, Double = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32, ctypes.c_float, ctypes.c_double


def _fields(*kinds: tuple[type, str]) -> list[tuple[str, type]]:
    return [(name, kind) for kind, names in kinds for name in names.split()]


class Packed(ctypes.Structure):
    """``Packed`` of csrc/work.h."""

    _fields_ = _fields(
        (Pointer, "codes scale nested nested_table nested_bytes nested_offset offset table zero vectors"),
        (Long, "rows width block nested_block"), (Int, "stages dim bits dtype"), (Float, "least"), (Int, "plain"),
    )  # fmt: skip


class Encoding(ctypes.Structure):
    """``Encoding`` of csrc/work.h."""

    _fields_ = _fields((Pointer, "middles order grid"), (Long, "block"), (Int, "bits sorted"))


class Rounding(ctypes.Structure):
    """``Rounding`` of csrc/work.h."""

    _fields_ = _fields((Float, "first last unit"), (Int, "zero halves"))


class Step(ctypes.Structure):
    """An operation, ``op`` being an index into ``OPS``, on registers."""

    _fields_ = _fields((Int, "op dtype to a b c"), (Float, "value"))


class Read(ctypes.Structure):
    """``Read`` of csrc/work.h."""

    _fields_ = _fields((Long * DIMS, "stride"), (Int, "dtype whole"))


class Pointwise(ctypes.Structure):
    """``Pointwise`` of csrc/work.h."""

    _fields_ = _fields((Pointer, "steps reads at"), (Long, "count total dims registers"), (Long * DIMS, "size"))


class Attention(ctypes.Structure):
    """``Attention`` of csrc/work.h."""

    _fields_ = _fields(
        (Pointer, "q k v g y dq dk dv lse sinks labels"), (Long * 3, "qs ks vs gs ys dqs dks"),
        (Long, "batch heads kv t e labelled window parts"), (Float, "scale"), (Int, "dtype half causal"),
    )  # fmt: skip


class Moment(ctypes.Structure):
    """``Moment`` of csrc/work.h."""

    _fields_ = _fields(
        (Pointer, "table planes thresholds order segments cells"), (Long, "block"), (ctypes.c_uint32, "low high"),
        (Int, "bits has_sign grid"), (Float, "least top floor"),
    )  # fmt: skip


class State(ctypes.Structure):
    """``State`` of csrc/work.h."""

    _fields_ = _fields((Pointer, "codes scale new_codes new_scale"))


class Update(ctypes.Structure):
    """``Update`` of csrc/work.h."""

    _fields_ = _fields(
        (Pointer, "grad param out rates key active"), (Moment * 2, "moments"), (State * 2, "states"),
        (Long, "count n chunk first rows columns"),
        (Float, "b1 rest1 b2 rest2 eps decay"), (Int, "rule grad_dtype param_dtype apply"),
    )  # fmt: skip


@cache
def load() -> ctypes.CDLL:
    """Return the library; raise ImportError if it was not built, or from other sources."""
    path = Path(__file__).with_name(f"_kernels{EXTENSION_SUFFIXES[0]}")
    if not path.exists():
        raise ImportError("its C kernels were not built; install a C compiler and install fquant again")
    library = ctypes.CDLL(str(path))
    packed = ctypes.POINTER(Packed)
    functions = {  # they return 0, the bytes of room that they need, a fault, or lanes; below 0, memory ran out
        "encode": [Pointer, Int, Long, Long, ctypes.POINTER(Encoding), Pointer, Pointer],
        "decode": [packed, Long, Long, Long, Long, Int, Pointer, Long],
        **dict.fromkeys(("matmul", "matmul_t"), [packed, Pointer, Long, Pointer, Int, Pointer]),
        "ordered_matmul": [Int, Int, Long, Pointer, Long, Long, Pointer, Long, Long, Long, Pointer, Long, Int, Pointer],
        "integer_matmul": [packed, Pointer, Int, Int, ctypes.POINTER(Rounding), Pointer, Long, Pointer, Int, Pointer],
        "integer_mm": [
            *(Pointer, Long, Long, ctypes.POINTER(Rounding)) * 2,
            Long,
            Pointer,
            Int,
            Pointer,
        ],
        "fold": [Pointer, Pointer, Long, Pointer],
        "bits": [Pointer, Long, Long, Pointer],
        "bernoulli": [Pointer, Long, Long, Long, Pointer],
        "nll": [Pointer, Int, Long, Long, Long, Pointer, Long, Pointer, Pointer, Pointer],
        "rms_norm": [Pointer, Int, Long, Long, Long, Pointer, Double, Pointer, Long, Pointer, Pointer],
        "pointwise": [ctypes.POINTER(Pointwise), Pointer],
        "attention": [ctypes.POINTER(Attention)],
        "cached_attention": [*[Pointer] * 6, *[Long] * 5, Double, Double, Int],
        "dense_matmul": [*[Pointer] * 3, Long, Long, Long, Int],
        "nearest": [*[Pointer] * 3, *[Long] * 5, Pointer, Pointer],
        "beam_search": [*[Pointer] * 5, *[Long] * 4, Pointer],
        "stage_sums": [*[Pointer] * 4, *[Long] * 5, Pointer],
        "sums_by_code": [*[Pointer] * 2, *[Long] * 4, *[Pointer] * 2],
        "update": [ctypes.POINTER(Update)],
        "sha256": [Pointer, Pointer, Long, Pointer],
    }
    structures = (Packed, Encoding, Pointwise, Step, Read, Attention, Rounding, Moment, Update)
    wanted = [*map(ctypes.sizeof, structures), len(OPS), PIECE, MOST_DIM]
    sizes = getattr(library, "fquant_sizes", lambda which: 0)
    complete = all(hasattr(library, f"fquant_{name}") for name in (*functions, "pool_install"))
    if not complete or [sizes(i) for i in range(len(wanted))] != wanted:
        raise ImportError(f"{path.name} was built from other sources; install fquant again")
    library.fquant_isa.restype, library.fquant_isa.argtypes = ctypes.c_char_p, [Int]
    library.fquant_team.restype, library.fquant_team.argtypes = None, [Pointer, Pointer]
    for name, rest in functions.items():
        function = getattr(library, f"fquant_{name}")
        function.restype, function.argtypes = Long, [Int, Int, *rest]
    library.fquant_large_pages.restype, library.fquant_large_pages.argtypes = None, [Pointer, ctypes.c_size_t]
    library.fquant_pool_install.argtypes = [Pointer] * 4 + [ctypes.c_size_t, Long]
    library.fquant_pool_places.restype, library.fquant_pool_places.argtypes = None, [Pointer, Long]
    library.fquant_pool_open.argtypes, library.fquant_pool_release.restype = [Int], None
    runtime = (openmp(name) for name in ("GOMP_parallel", "omp_pause_resource_all"))
    library.fquant_team(*(ctypes.cast(function, Pointer) for function in runtime))
    return library


@cache
def isas() -> tuple[str, ...]:
    """Return the instruction sets that this machine has, from plain to best."""
    library, names = load(), []
    while name := library.fquant_isa(len(names)):
        names.append(name.decode())
    return tuple(names)


def empty(*shape: int, dtype: torch.dtype) -> Tensor:
    """Allocate as ``torch.empty`` on the CPU; a large tensor in pages of 2 MiB if the system has them."""
    t = torch.empty(shape, dtype=dtype, device="cpu")
    if t.nbytes >= LARGE:
        load().fquant_large_pages(t.data_ptr(), t.nbytes)
    return t


def result(out: Tensor | None, *shape: int, dtype: torch.dtype) -> Tensor:
    """Return ``out``, checked, or a new tensor for a result; ValueError if ``out`` does not fit."""
    return empty(*shape, dtype=dtype) if out is None else check_out(out, shape, dtype)


class Settings(NamedTuple):
    """The first two arguments of every function of the library."""

    isa: int
    threads: int


def settings() -> Settings:
    """Return the present settings."""
    return Settings(isa(), num_threads())


def call(name: str, *args: object) -> int:
    """Call ``fquant_name`` of the library with the present settings. Tensors are passed by address."""
    return compute(name, settings(), *[a.data_ptr() if isinstance(a, Tensor) else a for a in args])


def compute(name: str, where: Settings, *args: object) -> int:
    """Call ``fquant_name`` of the library with these settings; return the bytes of room that it needs."""
    status = getattr(load(), f"fquant_{name}")(*where, *args)
    if status < 0:
        raise MemoryError(f"{name} could not allocate its scratch memory; free some")
    return status


def isa() -> int:
    """Return the index of the instruction set that FQUANT_KERNELS names, or of the best."""
    return _index(os.environ.get("FQUANT_KERNELS"))


@cache
def _index(forced: str | None) -> int:
    name = (forced or "").partition(":")[2]
    if not name:
        return len(isas()) - 1
    if name not in isas():
        raise ValueError(f"FQUANT_KERNELS is {forced!r}; this machine runs {', '.join(isas())}")
    return isas().index(name)
