"""The choice of a backend, the warning without one, and the errors of malformed calls."""

import re
import shutil
import sys
import warnings
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from fquant import dequantize, kernels, linear, quantize, tree
from fquant.format import INT8, NF4, NF4_DQ
from fquant.kernels import cpu, dispatch, packed_ops, reference
from fquant.kernels.cpu import library, threads
from fquant.kernels.spec import Spec
from tests.helpers.arrays import named
from tests.helpers.formats import ISAS, alike, built, draw, forced

SPEC = Spec(NF4_DQ, (24, 128), torch.bfloat16)
BUFFERS = draw(SPEC)
X = {"matmul": torch.ones(3, 128), "matmul_t": torch.ones(3, 24)}


@pytest.fixture
def fresh():
    """Clear the caches of the dispatch before and after the test."""
    of_kernels = dispatch._load, dispatch._backend, dispatch._warn_once
    caches = (*of_kernels, library.load, library.isas, library._index)
    for cached in caches:
        cached.cache_clear()
    yield
    for cached in caches:
        cached.cache_clear()


# --- who computes -----------------------------------------------------------------------------------------------------


def test_the_library_is_built_wherever_there_is_a_compiler():
    assert ISAS or not shutil.which("cc")


@built
def test_threads_are_those_that_torch_has():
    maps = Path("/proc/self/maps")
    if not maps.exists() or "gomp" not in maps.read_text():
        pytest.skip("this torch computes without GNU's OpenMP runtime, or the system does not list it")
    assert threads.openmp("GOMP_parallel") is not None


def test_the_table(monkeypatch):
    monkeypatch.delenv(dispatch.VARIABLE, raising=False)
    assert dispatch.backend("cpu") == ("cpu", cpu)
    assert dispatch.backend("xpu") == ("reference", reference)
    for name, module in (("reference", reference), ("cpu", cpu), (ISAS[0], cpu)):
        with forced(name):
            assert dispatch.backend("cpu") == (name.partition(":")[0], module)
    calls = []
    monkeypatch.setattr(cpu, "decode", lambda *args: calls.append("cpu"))
    monkeypatch.setattr(reference, "decode", lambda *args: calls.append("reference"))
    for name in ("cpu", "reference"):
        with forced(name):
            dispatch.backend("cpu")[1].decode()
    assert calls == ["cpu", "reference"]


FORCED = {
    "unknown": ("mine", "cpu", ValueError, "FQUANT_KERNELS is 'mine'; wanted one of reference, cpu, triton, or cpu:IS"),
    "empty": ("", "cpu", ValueError, r"FQUANT_KERNELS is ''; wanted one of reference"),
    "a detail of another": ("reference:avx2", "cpu", ValueError, r"FQUANT_KERNELS is 'reference:avx2'; wanted one of"),
    "cpu elsewhere": ("cpu", "cuda", ValueError, r"is 'cpu', but the tensors are on cuda; unset it or move them"),
    "no triton": ("triton", "cuda", RuntimeError, r"FQUANT_KERNELS is 'triton', but .*triton"),
}  # fmt: skip


@built
@pytest.mark.parametrize("name, device, error, message", FORCED.values(), ids=FORCED)
def test_a_backend_that_cannot_be_forced(name, device, error, message, monkeypatch, fresh):
    monkeypatch.setitem(sys.modules, "triton", None)
    for module in [m for m in sys.modules if m.startswith("fquant.kernels.triton")]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.delattr(kernels, "triton", raising=False)
    with forced(name), pytest.raises(error, match=message):
        dispatch.backend(device)
    if device == "cpu":
        with forced(name), pytest.raises(error, match=message):
            packed_ops.decode(BUFFERS, SPEC, torch.float32)


@built
def test_an_instruction_set_that_is_not_there():
    runs = ", ".join(isa.removeprefix("cpu:") for isa in ISAS)
    with forced("cpu:mmx"), pytest.raises(ValueError, match=f"FQUANT_KERNELS is 'cpu:mmx'; this machine runs {runs}"):
        packed_ops.decode(BUFFERS, SPEC, torch.float32)
    assert cpu.isas()[0] == "portable"


def no_library(path):
    pass


def no_file_of_a_library(path):
    path.write_bytes(b"not a library")


def another_library(path):
    shutil.copy(torch._C.__file__, path)


MISSING = {
    "not built": (no_library, "its C kernels were not built; install a C compiler and install fquant again"),
    "broken": (no_file_of_a_library, r".*_kernels.*"),
    "of another version": (another_library, r".*_kernels.* was built from other sources; install fquant again"),
}


@pytest.mark.parametrize("make, message", MISSING.values(), ids=MISSING)
def test_without_the_library_all_works_and_one_warning_says_what_is_lost(make, message, monkeypatch, fresh, tmp_path):
    make(tmp_path / f"_kernels{EXTENSION_SUFFIXES[0]}")
    monkeypatch.setattr(library, "__file__", str(tmp_path / "cpu_library.py"))
    monkeypatch.delenv(dispatch.VARIABLE, raising=False)
    w, x = torch.randn(24, 128, generator=torch.Generator().manual_seed(0)), torch.ones(3, 128)
    with pytest.warns(
        RuntimeWarning, match=f"^fquant computes in plain torch, several times slower: {message}"
    ) as warned:
        p = quantize(w, NF4_DQ)
        got = [*tree.leaves(p), dequantize(p), linear(x, p)]
    assert len(warned) == 1
    with warnings.catch_warnings(action="error"):
        quantize(w, INT8)
    with forced("reference"):
        p = quantize(w, NF4_DQ)
        assert all(map(alike, got, [*tree.leaves(p), dequantize(p), linear(x, p)]))
    with forced("cpu"), pytest.raises(RuntimeError, match=f"FQUANT_KERNELS is 'cpu', but {message}"):
        quantize(w, NF4_DQ)


@built
def test_scratch_memory_that_cannot_be_had(monkeypatch):
    monkeypatch.setattr(library, "isa", lambda: 0)
    monkeypatch.setattr(library, "load", lambda: SimpleNamespace(fquant_decode=lambda *args: -1))
    with pytest.raises(MemoryError, match="decode could not allocate its scratch memory; free some"):
        library.call("decode")


# --- a malformed call -------------------------------------------------------------------------------------------------


def changed(i, f):
    return [f(b) if at == i else b for at, b in enumerate(BUFFERS)]


def larger(t):
    return torch.zeros([size + 1 for size in t.shape] or [1], dtype=t.dtype)


MALFORMED = {  # buffers, other changes of SPEC, error, message
    "no buffers": ([], {}, ValueError, "nf4_dq: got 0 buffers; wanted 4: codes, scale.codes, scale.scale, scale.offs"),
    "too few": (BUFFERS[:3], {}, ValueError, "nf4_dq: got 3 buffers; wanted 4"),
    "too many": (BUFFERS * 2, {}, ValueError, "nf4_dq: got 8 buffers; wanted 4"),
    "a stack of codes": (changed(0, lambda t: t[None]), {}, ValueError, "nf4_dq .* has shape .*; wanted"),
    "other format": (BUFFERS, dict(format=NF4.text), ValueError, "nf4: got 4 buffers; wanted 2: codes, scale"),
    "other block": (BUFFERS, dict(format="nf4_dq:32"), ValueError, r"scale.codes has shape \(24, 2\); wanted"),
    "other shape": (BUFFERS, dict(shape=(24, 130)), ValueError, r"codes has shape \(24, 64\); wanted \(24, 65\)"),
    "unknown format": (BUFFERS, dict(format="nf5"), ValueError, "format 'nf5' is unknown; wanted the text of a Format"),
    "impossible format": (BUFFERS, dict(format="nf4:48"), ValueError, "nf4: block is 48; wanted one of 16"),
    "half a format": (BUFFERS, dict(format="{}"), ValueError, "format '{}' is unknown; wanted the text of a Format"),
    "an array of integers": (BUFFERS, dict(dtype=torch.int32), TypeError, "the array is torch.int32; wanted f32, bf16"),
    "an array of float64": (BUFFERS, dict(dtype=torch.float64), TypeError, "the array is torch.float64; wanted f32, b"),
}  # fmt: skip


def malformed_buffer(i, name):
    buffer = BUFFERS[i]
    bad = torch.int8 if buffer.dtype == torch.uint8 else torch.float64
    got, wanted = (re.escape(str(tuple(t.shape))) for t in (larger(buffer), buffer))
    yield f"dtype of {name}", changed(i, lambda t: t.to(bad)), TypeError, f"{name} is {bad}; wanted {buffer.dtype}"
    yield f"size of {name}", changed(i, larger), ValueError, f"{name} has shape {got}; wanted {wanted}"
    where = f"{name} is on meta, codes on cpu" if i else "scale.codes is on cpu, codes on meta"
    yield f"device of {name}", changed(i, lambda t: t.to("meta")), ValueError, f"nf4_dq: {where}; move one"


for i, name in enumerate(("codes", "scale.codes", "scale.scale", "scale.offset")):
    MALFORMED |= {case: (buffers, {}, *wanted) for case, buffers, *wanted in malformed_buffer(i, name)}


def call(op, buffers=BUFFERS, format="nf4_dq", shape=(24, 128), dtype=torch.bfloat16, x=None, out=torch.float32):
    args = buffers, format, shape, dtype
    ops = torch.ops.fquant
    return ops.decode(*args, out) if op == "decode" else getattr(ops, op)(X[op] if x is None else x, *args)


@named("op", ["decode", "matmul", "matmul_t"])
@pytest.mark.parametrize("buffers, rest, error, message", MALFORMED.values(), ids=MALFORMED)
def test_a_malformed_weight(op, buffers, rest, error, message, no_kernel):
    with pytest.raises(error, match=message):
        call(op, buffers, **rest)
    if len({b.device for b in buffers}) == 1:  # as in a trace
        with pytest.raises(error, match=message):
            call(op, [b.to("meta") for b in buffers], x=X[op].to("meta") if op in X else None, **rest)


MALFORMED_X = {  # of n columns, where n are wanted
    "last dim": (lambda n: torch.ones(3, n + 1), ValueError, r"x \(3, .*\) and a weight .*; x's last dim must be"),
    "integers": (lambda n: torch.ones(3, n, dtype=torch.int32), TypeError, r"got x torch.int32 \(3, .*\) and a weight"),
    "float8": (lambda n: torch.ones(3, n).to(torch.float8_e4m3fn), TypeError, r"got x torch.float8_e4m3fn \(3, "),
    "a vector": (torch.ones, TypeError, r"got x torch.float32 \(.*,\) and a weight .*; wanted f\[\*stack m n\]"),
    "a stack": (lambda n: torch.ones(2, 3, n), ValueError, r"codes has shape \(24, 64\); wanted \(2, 24, 64\)"),
    "meta": (lambda n: torch.ones(3, n, device="meta"), ValueError, "got x on meta and a weight on cpu; move one"),
}  # fmt: skip


@named("op", X)
@pytest.mark.parametrize("make, error, message", MALFORMED_X.values(), ids=MALFORMED_X)
def test_a_malformed_x(op, make, error, message, no_kernel):
    with pytest.raises(error, match=message):
        call(op, x=make(X[op].shape[1]))
    with pytest.raises(ValueError, match=f"{op} got x on cpu and a weight on meta; move one"):
        call(op, [b.to("meta") for b in BUFFERS])


def test_a_product_is_of_two_dims(no_kernel):
    spec = Spec(NF4, (2, 24, 128), torch.bfloat16)
    with pytest.raises(TypeError, match=r"matmul got x .* and a weight \(2, 24, 128\); wanted .* 2 dims"):
        packed_ops.matmul(torch.ones(3, 128), draw(spec), spec)


MALFORMED_ROWS = {
    "float64": (torch.ones(2, 64, dtype=torch.float64), "encode got torch.float64"),
    "integers": (torch.ones(2, 64, dtype=torch.int8), "encode got torch.int8"),
    "a scalar": (torch.tensor(1.0), r"encode got torch.float32 \(\); wanted f32, bf16 or f16 with at least one dim"),
}


@pytest.mark.parametrize("rows, message", MALFORMED_ROWS.values(), ids=MALFORMED_ROWS)
def test_malformed_rows(rows, message, no_kernel):
    for x in (rows, rows.to("meta")):
        with pytest.raises(TypeError, match=message):
            packed_ops.encode(x, NF4)


def test_what_is_decoded_is_a_float(no_kernel):
    with pytest.raises(TypeError, match="decode .*int64; wanted"):
        call("decode", out=torch.int64)
