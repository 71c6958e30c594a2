"""How fast a program runs on one thread; its process prints JSON in seconds.

Contestants are the program as it is, captured, captured with ``compile=True``, and under ``torch.compile``. They take
turns in a process of their own. Compiled code that earlier processes have left on disk is not used.
"""

import json
import os
import subprocess
import sys
import time
from statistics import median
from typing import NamedTuple

import torch

from fquant import jit
from tests.bench.timing import interleave

from .catalogue import CHILD, PROGRAMS

REPEATS = 15
EAGER, OURS, INDUCTOR, THEIRS = "uncaptured", "fquant", "compile=True", "torch.compile"
FRESH = {"TORCHINDUCTOR_FORCE_DISABLE_CACHES": "1"}


class Times(NamedTuple):
    """Seconds of each contestant: its first call, and the median of later ones."""

    first: dict[str, float]
    call: dict[str, float]


def measure(name: str, size: int) -> Times:
    """Return the times of the program of ``name``."""
    command = [sys.executable, "-m", CHILD, "times", name, str(size)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=os.environ | FRESH)
    if done.returncode:
        raise RuntimeError(f"{name} of size {size} ended with status {done.returncode}:\n{done.stderr}")
    return Times(**json.loads(done.stdout.splitlines()[-1]))


def main(name: str, size: int) -> None:
    """Run one program, and print its figures."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    fn, args = PROGRAMS[name].make(size)
    for small in (jit(torch.sin), jit(torch.cos, compile=True), torch.compile(torch.tan)):  # what first calls import
        small(torch.ones(3))
    fns = {OURS: jit(fn), THEIRS: torch.compile(fn), INDUCTOR: jit(fn, compile=True), EAGER: fn}
    first = dict[str, float]()
    for each in (EAGER, OURS, INDUCTOR, THEIRS):
        start = time.perf_counter()
        fns[each](*args)
        first[each] = time.perf_counter() - start
    samples = interleave({each: lambda _, f=f: f(*args) for each, f in fns.items()}, REPEATS)
    print(json.dumps({"first": first, "call": {each: median(seconds) for each, seconds in samples.items()}}))
