"""What a captured program grows by; its process prints JSON in bytes.

A process of its own measures one program, with the allocator at its default. It keeps no result from call to call. A
prediction beforehand has imported what a trace needs. Linux keeps the peak, and resets it on request.
"""

import json
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import torch

from fquant import cost, jit
from tests.bench.loading.resident import resident

from .catalogue import CHILD, PROGRAMS

CALLS = 3
MOST = 1.15  # of the prediction


class Growth(NamedTuple):
    """Bytes beside the arguments: predicted, and the peak of each of the first calls."""

    predicted: int
    calls: list[int]


def measure(name: str, size: int) -> Growth:
    """Return the growth of a process that runs the program of ``name``."""
    command = [sys.executable, "-m", CHILD, "memory", name, str(size)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{name} of size {size} ended with status {done.returncode}:\n{done.stderr}")
    return Growth(**json.loads(done.stdout))


def main(name: str, size: int) -> None:
    """Run one program, and print its figures."""
    torch.manual_seed(0)
    fn, args = PROGRAMS[name].make(size)
    price = cost(fn, *args)
    captured, before, calls = jit(fn), resident("VmRSS"), list[int]()
    for _ in range(CALLS):
        Path("/proc/self/clear_refs").write_text("5")
        captured(*args)
        calls.append(resident("VmHWM") - before)
    print(json.dumps({"predicted": price.peak - price.arguments + price.scratch, "calls": calls}))
