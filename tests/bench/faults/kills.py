"""Faults at random moments of a run that goes on afterwards, at other world sizes, and ends with the same adapter.

    rank        kill -9 of a rank               the launcher starts all ranks again (--restarts)
    launcher    kill -9 of the launcher         another command goes on, on another mesh (--elastic or --resume)
    all         kill -9 of every process        so too
    sigterm     SIGTERM to the launcher or to a rank: the run leaves with a checkpoint; so too
    freeze      SIGSTOP of a rank               the roll call finds it, and the launcher starts all ranks again

A quarter of the faults hit a start at any moment: of a launcher, or of its ranks after another fault. The others come
up to a second after a step that was saved. A freeze comes in steps alone: before ranks know each other there is no
roll call. A checkpoint is written every step, so faults hit writes of checkpoints too. A run that ends before all
faults have come is compared, and another begins.

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
SILENT = 60.0  # seconds after which a rank counts as not named

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
    unnamed: list[str] = field(default_factory=list)  # faults without that line, each with the last that there were
    gone: list[float] = field(default_factory=list)  # seconds from the death of a launcher to that of its last rank
    failures: list[str] = field(default_factory=list)


def measure(
    root: Path, count: int, seed: int, say: Say = print, kinds: Sequence[str] = KINDS,
    meshes: Sequence[str] = MESHES, steps: int = 200, within: float = WITHIN,
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
                _run(work, folder, todo, meant, draw, found, started, say, within)
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


@dataclass
class _Life:
    """A launcher with its ranks, from a start on."""

    running: Running
    ranks: dict[int, int]  # of the start before
    base: int  # steps that were saved before
    is_new: bool = True  # the launcher too, not its ranks alone
    began: float = field(default_factory=time.monotonic)
    hit: list[tuple[str, str]] = field(default_factory=list)  # the kind and the place of faults that led to it

    def goes_on(self, folder: Path) -> bool:
        """Return whether a step of this start is saved."""
        return job.ranks(folder) != self.ranks and job.newest(folder) > self.base


def _run(
    work: Job, folder: Path, todo: list[str], meshes: "itertools.cycle[str]", draw: random.Random, found: Found,
    started: list[Running], say: Say, within: float,
) -> None:  # fmt: skip
    """Take a run to its end, through the faults in ``todo`` that come in its time."""
    started.append(job.start(work, folder, next(meshes)))
    life, typical = _Life(started[-1], {}, 0), {True: 10.0, False: 2.0}  # seconds of a start, of a launcher or of ranks
    while (code := life.running.process.poll()) != 0:
        if code is not None:
            life = _start_again(work, folder, next(meshes), draw, found, life)
            started.append(life.running)
        if todo and todo[-1] != "freeze" and draw.random() < AT_START:
            moment = life.began + draw.uniform(0, typical[life.is_new])
            job.await_(life.running, lambda moment=moment: time.monotonic() >= moment)
        elif job.await_(life.running, lambda life=life: life.goes_on(folder)):
            if life.hit:
                typical[life.is_new] = time.monotonic() - life.began
            _resume(life, folder, found, say)
            if todo:
                time.sleep(draw.uniform(0, within))
            else:
                job.await_(life.running, lambda: False)
        if todo and (words := _hit(todo[-1], life.running, job.ranks(folder), draw)):
            life = _fault(todo.pop(), words, folder, found, life)
    _resume(life, folder, found, say)


def _fault(kind: str, words: str, folder: Path, found: Found, life: _Life) -> _Life:
    """Wait until the launcher or its ranks have ended; note when a rank was named; return what comes then."""
    at, before = time.monotonic(), job.ranks(folder)
    where = "steps" if life.goes_on(folder) else "a start"
    found.faults[kind] = found.faults.get(kind, 0) + 1
    if kind in NAMED:  # run.json is no sign of the next start: the one that was hit can still write it
        job.await_(life.running, lambda: job.seconds_to(life.running, words, at) or time.monotonic() > at + SILENT)
        seconds = job.seconds_to(life.running, words, at)
        if seconds is None:
            found.unnamed.append(f"{kind} in {where}, wanted {words!r}: {life.running.text()[-500:]}")
        else:
            found.named.setdefault(kind, []).append(seconds)
    else:
        job.await_(life.running, lambda: False)
    if kind == "launcher":
        seconds = job.ended(life.running)
        found.processes += seconds is None
        if seconds is not None:
            found.gone.append(time.monotonic() - at)
    return _Life(life.running, before, job.newest(folder), is_new=False, hit=[*life.hit, (kind, where)])


def _start_again(work: Job, folder: Path, mesh: str, draw: random.Random, found: Found, life: _Life) -> _Life:
    """Go on with a run whose launcher has ended because of a fault."""
    if not life.hit or life.hit[-1][0] in NAMED:
        what = f"after {', '.join(f'{kind} in {where}' for kind, where in life.hit)}: " if life.hit else ""
        raise Failed(f"{what}the run ended with status {life.running.process.poll()}: {life.running.text()[-500:]}")
    found.processes += job.ended(life.running) is None
    running = job.start(work, folder, mesh, resume=draw.random() < 0.5)
    return _Life(running, job.ranks(folder), job.newest(folder), hit=life.hit)


def _resume(life: _Life, folder: Path, found: Found, say: Say) -> None:
    """Count the faults after which the run goes on."""
    for kind, where in life.hit:
        found.resumed += 1
        say(f"{found.resumed}: {kind} in {where}, goes on from step {life.base} of {folder.name}")
    life.hit.clear()


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


def _compare(folder: Path, whole: Path, steps: int, found: Found) -> None:
    """Compare a run with the one that was not disturbed."""
    adapter = folder / job.ADAPTER
    found.identical += adapter.is_file() and adapter.read_bytes() == (whole / job.ADAPTER).read_bytes()
    wanted, got = job.steps(whole), job.steps(folder) if (folder / "metrics.jsonl").is_file() else []
    found.wrong_steps += sum(step not in got for step in wanted) + max(0, len(got) - steps)
    found.files += [str(path.relative_to(folder)) for path in folder.rglob("*.tmp")]
