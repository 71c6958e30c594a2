"""The job that faults hit: a run of examples.qlora on a tiny model, its processes, and what it has written.

    job = prepare(root, steps=60)                           # a model and a text; the same for every run
    running = start(job, root / "run", "fsdp=4")            # begins the run, or goes on with it
    await_(running, lambda: newest(root / "run") > 0)

A run is a launcher and its ranks, in a session of its own. So /proc tells which processes are left. Lines that it
prints are kept with the moment of their arrival. Its temporary files are in ``root``, where what is left is seen.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from threading import Thread

from examples.common import checkpoints
from tests.helpers.model_folders import TINY, tiny_model

ROOT = Path(__file__).parents[3]
LIMIT = 300.0  # seconds in which a run takes its next step, or ends
LEAVE = 30.0  # seconds in which the processes of a dead launcher end
ADAPTER = "adapter/adapter_model.safetensors"
SMALL = (
    "--rank 2 --targets q,v --seq 16 --batch 8 --holdout 4 --lr 0.01 --dtype f32 --checkpoint none --save-every 1"
).split()


@dataclass(frozen=True)
class Job:
    """The input of all runs, in the folder ``root``, and their number of steps."""

    root: Path
    steps: int


@dataclass
class Running:
    """A launcher and what it has printed, each line with the moment of its arrival."""

    process: subprocess.Popen[str]
    lines: list[tuple[float, str]] = field(default_factory=list)
    began: float = field(default_factory=time.monotonic)
    reader: Thread | None = None

    def text(self) -> str:
        """Return all that was printed."""
        return "\n".join(line for _, line in self.lines)


class Failed(Exception):
    """Raised if a run ends or hangs where it should go on."""


def prepare(root: Path, steps: int) -> Job:
    """Write the model and the text of the job to ``root``."""
    for name in ("model", "tmp", "cache"):
        (root / name).mkdir(parents=True)
    tiny_model(root / "model", replace(TINY, num_layers=1))
    (root / "text.txt").write_text("".join(f"def f{i}(x):\n    return x + {i}\n" for i in range(400)))
    return Job(root, steps)


def start(job: Job, folder: Path, mesh: str, resume: bool = False, restarts: int = 99) -> Running:
    """Begin the run in ``folder``, or go on with it, by ``--elastic``, or by ``--resume`` if it has begun.

    One rank without ``restarts`` needs no launcher.
    """
    where = ["--resume", folder] if resume and (folder / checkpoints.RUN).is_file() else ["--out", folder, "--elastic"]
    given = ["--model", job.root / "model", "--data", job.root / "text.txt", "--steps", job.steps, "--mesh", mesh]
    given += ["--restarts", restarts]
    more = {"TMPDIR": str(job.root / "tmp"), "XDG_CACHE_HOME": str(job.root / "cache"), "OMP_NUM_THREADS": "1"}
    more["TORCHINDUCTOR_CACHE_DIR"] = more["XDG_CACHE_HOME"]  # torch makes it, among the temporary files otherwise
    command = [sys.executable, "-m", "examples.qlora", *map(str, [*given, *SMALL, *where])]
    process = subprocess.Popen(
        command, cwd=ROOT, env=os.environ | more, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        start_new_session=True,
    )  # fmt: skip
    running = Running(process)
    running.reader = Thread(target=_read, args=(running,), daemon=True)
    running.reader.start()
    return running


def _read(running: Running) -> None:
    assert running.process.stdout is not None
    with running.process.stdout as printed:
        for line in printed:
            running.lines.append((time.monotonic(), line.rstrip()))


def await_(running: Running, condition: Callable[[], object], seconds: float = LIMIT) -> bool:
    """Wait until ``condition()``, or until the launcher has ended; return which. Raises Failed after ``seconds``."""
    began = time.monotonic()
    while not condition():
        if running.process.poll() is not None:
            return bool(condition())
        if time.monotonic() - began > seconds:
            raise Failed(f"nothing happened in {seconds:.0f} s; the last lines: {running.text()[-500:]}")
        time.sleep(0.01)
    return True


def newest(folder: Path) -> int:
    """Return the steps of the last whole checkpoint, 0 without one."""
    return checkpoints.newest(folder) or 0


def steps(folder: Path) -> list[tuple[int, float]]:
    """Return the number and the loss of each step in the folder's metrics.jsonl, in its order."""
    found = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [(step["step"], step["loss"]) for step in found]


def ranks(folder: Path) -> dict[int, int]:
    """Return the process of each rank in the folder's run.json, of the last start that got so far."""
    with contextlib.suppress(FileNotFoundError):
        return {rank["rank"]: rank["pid"] for rank in json.loads((folder / "run.json").read_text())["ranks"]}
    return {}


def processes(session: int) -> dict[int, int]:
    """Return the parent of each living process of a session, the pid of its launcher."""
    out = dict[int, int]()
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            state, parent, _, its, *_ = path.read_text().rpartition(")")[2].split()
            if int(its) == session and state != "Z":
                out[int(path.parent.name)] = int(parent)
    return out


def children(launcher: int) -> list[int]:
    """Return the processes of the ranks that a launcher has now, without torch's and Python's own.

    Ranks are forked by a server, or are children of the launcher where that cannot be. A single process of the server
    is no rank: with it the launcher waits for the server's imports.
    """
    parents = processes(launcher)
    commands = {pid: _command(pid) for pid, parent in parents.items() if parent == launcher}
    servers = {pid for pid, command in commands.items() if b"forkserver" in command}
    found = {pid for pid, command in commands.items() if b"spawn_main" in command}
    forked = {pid for pid, parent in parents.items() if parent in servers}
    return sorted(found | (forked if len(forked) > 1 else set()))


def _command(pid: int) -> bytes:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    return b""


def ended(running: Running) -> float | None:
    """Wait for the launcher and all its processes; return the seconds, None if some are left, which are killed."""
    began = time.monotonic()
    with contextlib.suppress(subprocess.TimeoutExpired):
        running.process.wait(LEAVE)
    while left := processes(running.process.pid):
        if time.monotonic() - began > LEAVE:
            for pid in left:
                send(pid, signal.SIGKILL)
            running.process.wait()
            return None
        time.sleep(0.01)
    return time.monotonic() - began


def send(pid: int, number: signal.Signals) -> bool:
    """Send a signal; return False if the process has ended."""
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return False
    return True


def seconds_to(running: Running, words: str, since: float) -> float | None:
    """Return the seconds from ``since`` to the first line with ``words``, None without one."""
    return next((at - since for at, line in list(running.lines) if at >= since and words in line), None)


@contextlib.contextmanager
def killed_at_end(running: list[Running]) -> Iterator[None]:
    """Kill what is left of all that was started, however the block ends."""
    try:
        yield
    finally:
        for each in running:
            kill(each)


def kill(running: Running) -> None:
    """Kill what is left of a run."""
    for pid in processes(running.process.pid):
        send(pid, signal.SIGKILL)
    running.process.wait()
    if running.reader is not None:
        running.reader.join()
