"""Faults at random moments of a run that goes on afterwards, at other world sizes, and ends with the same adapter.

    rank        kill -9 of a rank               the launcher starts all ranks again (--restarts)
    launcher    kill -9 of the launcher         another command goes on, on another mesh (--elastic or --resume)
    all         kill -9 of every process        so too
    sigterm     SIGTERM to the launcher or to a rank: the run leaves with a checkpoint; so too
    freeze      SIGSTOP of a rank               the roll call finds it, and the launcher starts all ranks again

A quarter of the faults hit a start at any moment, and the others come up to a second after a step that was saved. A
freeze comes in steps alone: before ranks know each other there is no roll call. A checkpoint is written every step, so
faults hit writes of checkpoints too. A run that ends before all faults have come is compared, and another begins.

The oracle is a run on one rank that is not disturbed: sums are ordered, so its adapter has the bits of any mesh.
"""

import itertools
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from signal import SIGKILL, SIGSTOP, SIGTERM

from . import job
from .job import Failed, Job, Running

KINDS = ("rank", "launcher", "all", "sigterm", "freeze")
MESHES = ("fsdp=4", "dp=3", "fsdp=5", "dp=2,fsdp=2", "fsdp=3", "dp=5")
AT_START = 0.25  # of the faults
WITHIN = 1.0  # seconds behind a step
NAMED = {"rank": 5.0, "freeze": 10.0}  # seconds wanted until the rank is named

Say = Callable[[str], object]


@dataclass
class Found:
    """What faults did: their number by kind, and all that went wrong."""

    faults: dict[str, int] = field(default_factory=dict)
    resumed: int = 0
    runs: int = 0
    identical: int = 0  # runs whose adapter is that of the undisturbed one
    wrong_steps: int = 0  # steps that are missing, there twice, or of another loss
    processes: int = 0  # ends of a launcher that left some
    files: list[str] = field(default_factory=list)  # temporary ones in folders of runs
    temporary: list[str] = field(default_factory=list)  # in the folder of temporary files of the system
    named: dict[str, list[float]] = field(default_factory=dict)  # seconds from a fault to the line with the rank
    unnamed: int = 0
    gone: list[float] = field(default_factory=list)  # seconds from the death of a launcher to that of its last rank
    failures: list[str] = field(default_factory=list)


def measure(
    root: Path, count: int, seed: int, say: Say = print, kinds: Sequence[str] = KINDS,
    meshes: Sequence[str] = MESHES, steps: int = 200,
) -> Found:  # fmt: skip
    """Let ``count`` faults hit runs in ``root``, which is a new folder; return what they did.

    Ctrl-C ends it early, without the run of that moment.
    """
    draw, found, meant = random.Random(seed), Found(), itertools.cycle(meshes)
    work, whole, started = job.prepare(root, steps), root / "whole", list[Running]()
    todo = [kinds[i % len(kinds)] for i in range(count)]
    draw.shuffle(todo)
    with job.killed_at_end(started):
        started.append(job.start(work, whole, "fsdp=1", restarts=0))
        if started[0].process.wait(job.LIMIT):
            raise Failed(f"the run that is not disturbed: {started[0].text()[-500:]}")
        while todo:
            folder = root / f"run-{found.runs}"
            try:
                _run(work, folder, todo, meant, draw, found, started, say)
            except Failed as error:
                found.failures.append(f"{folder.name}: {error}")
            except KeyboardInterrupt:
                todo.clear()
                job.kill(started[-1])
                continue
            found.runs += 1
            _compare(folder, whole, steps, found)
            say(f"{folder.name}: {found.identical} of {found.runs} adapters have the bytes of the undisturbed run")
        for each in started:
            found.processes += job.ended(each) is None
    found.temporary += [path.name for path in (root / "tmp").iterdir()]
    return found


def _run(
    work: Job, folder: Path, todo: list[str], meshes: "itertools.cycle[str]", draw: random.Random, found: Found,
    started: list[Running], say: Say,
) -> None:  # fmt: skip
    """Take a run to its end, through the faults in ``todo`` that come in its time."""
    running = job.start(work, folder, next(meshes))
    started.append(running)
    typical = 10.0  # seconds of a start
    while todo:
        kind, base, before = todo[-1], job.newest(folder), job.ranks(folder)
        if kind != "freeze" and draw.random() < AT_START:
            moment, where = draw.uniform(0, typical), "a start"
            began = time.monotonic()
            job.await_(running, lambda began=began, moment=moment: time.monotonic() - began > moment)
        else:
            where = "steps"
            job.await_(running, lambda base=base: job.newest(folder) > base)
            typical = time.monotonic() - running.began
            time.sleep(draw.uniform(0, WITHIN))
        if running.process.poll() is not None:
            break
        before, at = job.ranks(folder), time.monotonic()
        if not (hit := _hit(kind, running, before, draw)):
            break
        todo.pop()
        found.faults[kind] = found.faults.get(kind, 0) + 1
        job.await_(running, lambda before=before: job.ranks(folder) != before)
        _note(kind, hit, running, at, found)
        code = running.process.poll()
        if code is not None and code != 0:
            if kind in NAMED:
                raise Failed(f"a fault of kind {kind} ended the run with status {code}: {running.text()[-500:]}")
            seconds = job.ended(running)
            found.processes += seconds is None
            if kind == "launcher" and seconds is not None:
                found.gone.append(time.monotonic() - at)
            running = job.start(work, folder, next(meshes), resume=draw.random() < 0.5)
            started.append(running)
            job.await_(running, lambda before=before: job.ranks(folder) != before)
        base = job.newest(folder)
        job.await_(running, lambda base=base: job.newest(folder) > base)
        if running.process.poll():
            raise Failed(f"after a fault of kind {kind}, in {where}: {running.text()[-500:]}")
        found.resumed += 1
        say(f"{sum(found.faults.values())}: {kind} in {where}, goes on from step {base}")
    job.await_(running, lambda: False)
    if running.process.returncode:
        raise Failed(f"the run ended with status {running.process.returncode}: {running.text()[-500:]}")


def _hit(kind: str, running: Running, ranks: dict[int, int], draw: random.Random) -> str:
    """Cause a fault; return the words by which its rank is named, or nothing if there was no process to hit."""
    launcher = running.process.pid
    alive = job.children(launcher)
    if kind == "freeze":
        rank = draw.randrange(len(ranks))
        return f"rank {rank} has not answered" if job.send(ranks[rank], SIGSTOP) else ""
    if kind == "rank":
        pid = draw.choice(alive) if alive else 0
        return f"(pid {pid}) was killed" if pid and job.send(pid, SIGKILL) else ""
    if kind == "sigterm":
        return "stopped" if job.send(draw.choice([launcher, *alive]), SIGTERM) else ""
    there = [launcher] if kind == "launcher" else sorted(job.processes(launcher))
    return kind if any([job.send(pid, SIGKILL) for pid in there]) else ""


def _note(kind: str, words: str, running: Running, at: float, found: Found) -> None:
    """Note when the rank was named, if a rank was hit."""
    if kind in NAMED:
        seconds = job.seconds_to(running, words, at)
        found.unnamed += seconds is None
        if seconds is not None:
            found.named.setdefault(kind, []).append(seconds)


def _compare(folder: Path, whole: Path, steps: int, found: Found) -> None:
    """Compare a run with the one that was not disturbed."""
    adapter = folder / job.ADAPTER
    found.identical += adapter.is_file() and adapter.read_bytes() == (whole / job.ADAPTER).read_bytes()
    wanted, got = job.steps(whole), job.steps(folder) if (folder / "metrics.jsonl").is_file() else []
    found.wrong_steps += sum(step not in got for step in wanted) + max(0, len(got) - steps)
    found.files += [str(path.relative_to(folder)) for path in folder.rglob("*.tmp")]
