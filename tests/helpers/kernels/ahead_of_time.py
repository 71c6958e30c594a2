"""Kernels compiled ahead of time for a GPU that is not there, with the resources that they take.

    with compiled_for(90) as reports:          # 80: A100, 90: H100 and H200, 100: B200
        triton.matmul(x, buffers, spec)        # compiles what it would launch; nothing runs
    assert [r.name for r in reports] == ["_few"]
    for report in reports:
        assert_fits(report)                    # no spills, no local memory, shared memory within the limit
        assert_exact(report)                   # of a kernel that has to equal the reference to the bit

Use tensors on the ``meta`` device, of the real shapes: their pointers count as aligned, and torch's own products cost
nothing. Tensors on the CPU work too. A kernel that a call launches twice is reported twice. Needs Triton, and a process
without its interpreter.

``registers``, ``spills`` and ``stack`` are what ``ptxas -v`` prints for the PTX; ``shared`` adds its static shared
memory to what Triton asks for at launch. :func:`uses` finds an instruction in the PTX, and :func:`longest_loop` counts
the machine's instructions, for estimates of time.
"""

import re
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import pytest

TARGETS = (80, 90, 100)
SHARED = {80: 163 << 10, 90: 227 << 10, 100: 227 << 10}  # bytes that a block can have
REGISTERS = 65536  # of a multiprocessor
TENSOR_CORES = {80: "mma.sync", 90: "wgmma.mma_async", 100: "tcgen05.mma"}  # the products of a generation
INEXACT = r"\bfma\.|\.ftz|\.approx|div\.full"


class Report(NamedTuple):
    """A compiled kernel."""

    name: str
    target: int
    warps: int
    registers: int  # of a thread
    spills: int  # bytes
    stack: int  # bytes of local memory of a thread
    shared: int  # bytes of a block
    ptx: str
    cubin: bytes


class _Driver:
    """A driver of a GPU that is not there."""

    def __init__(self, target: int) -> None:
        self.target = target

    def get_current_target(self) -> Any:
        return import_module("triton.backends.compiler").GPUTarget("cuda", self.target, 32)

    def get_current_device(self) -> int:
        return -self.target  # Triton keeps a cache of kernels for each device

    def get_current_stream(self, device: int = 0) -> int:
        return 0


@contextmanager
def compiled_for(target: int) -> Iterator[list[Report]]:
    """Compile kernels for ``target`` instead of launching them, and list their reports."""
    driver, jit = (import_module(f"triton.runtime.{name}") for name in ("driver", "jit"))
    launch, reports = jit.JITFunction.run, list[Report]()

    def listed(kernel: Any, *args: Any, **options: Any) -> Any:
        compiled = launch(kernel, *args, **options | {"warmup": True})
        reports.append(report(compiled, target))
        return compiled

    with tempfile.TemporaryDirectory() as cache, pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_CACHE_DIR", cache)
        patch.setattr(jit.JITFunction, "run", listed)
        patch.setattr(driver.driver, "_active", _Driver(target))
        yield reports


def report(kernel: Any, target: int) -> Report:
    """Return the report of a compiled kernel."""
    ptx, metadata = kernel.asm["ptx"], kernel.metadata
    log = _assembled(ptx, target, metadata.enable_fp_fusion)
    numbers = {
        word: int(found[1]) if (found := re.search(pattern, log)) else 0
        for word, pattern in {
            "registers": r"Used (\d+) registers", "spills": r"(\d+) bytes spill stores",
            "stack": r"(\d+) bytes stack frame", "static": r"(\d+) bytes smem",
        }.items()
    }  # fmt: skip
    assert numbers["registers"], f"ptxas named no registers: {log}"
    shared = metadata.shared + numbers.pop("static")
    return Report(kernel.name, target, metadata.num_warps, **numbers, shared=shared, ptx=ptx, cubin=kernel.asm["cubin"])


def assert_fits(report: Report) -> None:
    """Check that no registers spill, no local memory is used, and a multiprocessor has room for a block."""
    name, target, warps, registers, spills, stack, shared, *_ = report
    assert not spills and not stack, f"{name} for sm_{target} spills {spills} bytes, {stack} bytes of local memory"
    assert ".local" not in report.ptx, f"{name} for sm_{target} uses local memory"
    assert shared <= SHARED[target], f"{name} for sm_{target} wants {shared} bytes of shared memory"
    assert registers * warps * 32 <= REGISTERS, f"{name} for sm_{target} wants {registers} registers x {warps} warps"


def assert_exact(report: Report) -> None:
    """Check that no products and sums are fused, no denormals flushed, no quotients or roots approximated."""
    found = re.search(INEXACT, report.ptx)
    assert not found, f"{report.name} for sm_{report.target} has {found and found[0]} in its PTX"


def uses(report: Report, *instructions: str) -> bool:
    """Return True if one of the ``instructions`` is in the PTX; listing the machine code takes as long as compiling."""
    names = "|".join(map(re.escape, instructions))
    return bool(re.search(rf"^\s*(?:@!?%\w+ +)?(?:{names})\b", report.ptx, re.MULTILINE))


def longest_loop(report: Report) -> int:
    """Return the instructions of the machine code's longest loop."""
    return max((length for length, *_ in _loops(_listing(report))), default=0)


def loop_of_products(report: Report) -> int:
    """Return the instructions of the shortest loop with the last product of tensor cores.

    Waits that are out of line jump back too, over more than the loop.
    """
    code = _listing(report)
    last = max(int(at, 16) for at, text in code if re.search(r"MMA\b", text))
    return min(length for length, start, stop in _loops(code) if start <= last <= stop)


def _listing(report: Report) -> list[tuple[str, str]]:
    """Return the address and the text of each machine instruction."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        Path(file.name).write_bytes(report.cubin)
        listing = _run(_tool("cuobjdump"), "-sass", file.name)
    return re.findall(r"^\s+/\*([0-9a-f]{4,})\*/\s+(.*)", listing, re.MULTILINE)


def _loops(code: list[tuple[str, str]]) -> list[tuple[int, int, int]]:
    """Return the instructions, the first and the last address of each span that a jump goes back over."""
    jumps = [(int(at, 16), re.search(r"\bBRA\b.*?0x([0-9a-f]+)", text)) for at, text in code]
    spans = [(int(to[1], 16), at) for at, to in jumps if to]
    return [((stop - start) // 16 + 1, start, stop) for start, stop in spans if start < stop]  # of 16 bytes each


def _assembled(ptx: str, target: int, fused: bool) -> str:
    """Return what ptxas says about a program."""
    exact = [] if fused else ["--fmad=false"]
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
        file.write(ptx)
        file.flush()
        arch = f"--gpu-name=sm_{target}{'a' if target >= 90 else ''}"
        ptxas = import_module("triton.backends.nvidia.compiler").get_ptxas(target).path
        return _run(ptxas, "-v", *exact, arch, file.name, "-o", "/dev/null")


def _tool(name: str) -> str:
    return getattr(import_module("triton").knobs.nvidia, name).path


def _run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, f"{command[0]} failed: {done.stderr}"
    return done.stdout + done.stderr
