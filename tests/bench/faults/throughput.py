"""Steps a second of a run of which a rank is killed every so many seconds, over those of a run that is not disturbed.

Both run on two ranks for as long, in turns, from their first step on, and the steps of whole checkpoints count. What is
kept is the median of the ratios of two turns that follow one another, because the speed of a machine drifts. For each
fault the time until the next step is split:

    named      from the death to the launcher's line that names the rank; the others are stopped then
    started    to run.json of the next start: processes, imports, the model, the data, and the base
    traced     to the next checkpoint: the first step is traced, and the state is loaded

``imports`` is the time in which a process imports the program and does nothing else.
"""

import math
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from signal import SIGKILL, SIGTERM
from statistics import median

from . import job
from .job import Job, Running

MESH = "fsdp=2"
FOREVER = 1_000_000  # steps
TURNS = 4  # of each run


@dataclass
class Found:
    """Steps a second without and with faults, and the seconds of each part of each fault."""

    alone: list[float] = field(default_factory=list)  # of each turn
    disturbed: list[float] = field(default_factory=list)
    imports: float = 0.0
    parts: dict[str, list[float]] = field(default_factory=dict)

    @property
    def kept(self) -> float:
        """Return the part of the steps that is left."""
        return median(disturbed / alone for disturbed, alone in zip(self.disturbed, self.alone, strict=True))

    def medians(self) -> dict[str, float]:
        """Return the median seconds of each part."""
        return {name: median(seconds) for name, seconds in self.parts.items()}


def measure(root: Path, seconds: float, every: float, say: Callable[[str], object] = print) -> Found:
    """Measure for ``seconds`` each, with a fault ``every`` so many; ``root`` is a new folder."""
    found, started, work = Found(), list[Running](), job.prepare(root, FOREVER)
    began = time.monotonic()
    subprocess.run([sys.executable, "-c", "import examples.qlora.cli"], cwd=job.ROOT, check=True)
    found.imports = time.monotonic() - began
    with job.killed_at_end(started):
        for turn in range(TURNS):
            for name, between, rates in (("alone", math.inf, found.alone), ("disturbed", every, found.disturbed)):
                rates.append(_take(work, root / f"{name}-{turn}", seconds / TURNS, between, started, found))
                say(f"{name}: {rates[-1]:.2f} steps a second")
    return found


def _take(
    work: Job, folder: Path, seconds: float, every: float, started: list[Running], found: Found
) -> float:  # fmt: skip
    """Run for ``seconds`` from the first step on, with a fault in the middle of ``every`` so many.

    Return the steps a second.
    """
    running = job.start(work, folder, MESH)
    started.append(running)
    job.await_(running, lambda: job.newest(folder) > 0)
    first, began = job.newest(folder), time.monotonic()
    due = began + every / 2
    while (now := time.monotonic()) < began + seconds:
        if now >= due:
            _fault(running, folder, found)
            due += every
        until = min(due, began + seconds)
        job.await_(running, lambda until=until: time.monotonic() >= until)
        if running.process.poll() is not None:
            raise job.Failed(f"the run ended: {running.text()[-500:]}")
    rate = (job.newest(folder) - first) / (time.monotonic() - began)
    job.send(running.process.pid, SIGTERM)
    job.ended(running)
    return rate


def _fault(running: Running, folder: Path, found: Found) -> None:
    """Kill a rank, and note the seconds of each part until the next checkpoint."""
    before, at = job.ranks(folder), time.monotonic()
    job.send(before[1], SIGKILL)
    job.await_(running, lambda: job.ranks(folder) != before)
    ready, base = time.monotonic(), job.newest(folder)
    job.await_(running, lambda: job.newest(folder) > base)
    named = job.seconds_to(running, f"(pid {before[1]}) was killed", at) or 0.0
    parts = {"named": named, "started": ready - at - named, "traced": time.monotonic() - ready}
    for name, seconds in parts.items():
        found.parts.setdefault(name, []).append(seconds)
