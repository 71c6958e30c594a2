"""Lines of the GPU benchmark: what is wanted and predicted, and what a device measures, each by itself.

    items = [Item("dequantise nf4", "at least 0.85", predict=lambda: "0.88", measure=lambda: Result("0.91", True))]
    lines = run("Kernels", items, Session(device, minutes=9, out=path))

A command is a list of items. ``run`` asks each for its prediction and its measurement, one after another. Whatever
happens to one, the others are still measured: an exception is a line, with its traceback on stderr. After a fault that
the device keeps, such as an illegal access, or when the minutes are over, the rest is not measured, and says why.

Time on a device is short, so nothing waits for the end. A line is printed when it is there, and the file with the table
is written again after each. A killed command leaves all lines that it has got.

Without a device the table is the same, with predictions alone. So every command can be tried anywhere.
"""

import dataclasses
import fcntl
import subprocess
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import NamedTuple

import torch
from rich.box import SIMPLE_HEAD
from rich.table import Table

from fquant.io.safetensors import replacing
from tests.bench import report

ROOT = Path(__file__).parents[3]
NO_DEVICE = "not measured: no CUDA device"
OVER = "not measured: the minutes are over"
BROKEN = "not measured: the device failed before"
VERDICTS = {None: "", True: "met", False: "missed"}


@contextmanager
def alone(device: torch.device) -> Iterator[None]:
    """Time inside the block: of commands that run at once on this machine, one times at a time.

    Most of what a command takes is the host's: tracing and compiling. So several are started at once.
    """
    with open(Path(tempfile.gettempdir()) / f"fquant-bench-{device.type}.lock", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


class Result(NamedTuple):
    """A measurement in words; True if it meets what is wanted; and figures of others beside it, by column."""

    measured: str
    met: bool | None = None
    beside: dict[str, str] = {}


@dataclass(frozen=True)
class Item:
    """A line to be: its name, what is wanted, and functions that predict and measure it."""

    name: str
    wanted: str = ""
    measure: Callable[[], Result] = lambda: Result("")
    predict: Callable[[], str] = lambda: ""
    needs_device: bool = True
    minutes: float = 0.0  # that it may take: it is not begun when fewer are left


class Line(NamedTuple):
    """A line of the table."""

    name: str
    wanted: str
    predicted: str
    measured: str
    verdict: str
    beside: dict[str, str] = {}


@dataclass
class Session:
    """One run of a command: the device, or None, the minutes it has, and the file for its table."""

    device: torch.device | None
    minutes: float = 9.0
    out: Path | None = None
    began: float = field(default_factory=time.monotonic)
    is_broken: bool = False

    @property
    def left(self) -> float:
        """Return the seconds that are left."""
        return 60 * self.minutes - (time.monotonic() - self.began)


def run(title: str, items: Iterable[Item], session: Session) -> list[Line]:
    """Return the line of every item, after each was printed and the file was written."""
    console, about, found = report.console(), facts(session.device), list[Line]()
    say = lambda text: console.print(text, highlight=False, markup=False, soft_wrap=True)
    say(f"{title}: {about}")
    for item in items:
        line = judged(item, session)
        found.append(line)
        say(": ".join(filter(None, (line.name, line.measured, line.verdict))))
        if session.out is not None:
            with replacing(session.out) as file:
                file.write(markdown(title, about, found).encode())
    console.print(table(title, found))
    return found


def judged(item: Item, session: Session) -> Line:
    """Return the line of an item, whatever it raises."""
    try:
        predicted = item.predict()
    except Exception as error:
        predicted = failure(error)
    line = partial_line(item, predicted)
    if item.needs_device and session.device is None:
        return line(NO_DEVICE)
    if session.is_broken:
        return line(BROKEN)
    if session.left < 60 * item.minutes or session.left <= 0:
        return line(OVER)
    try:
        got = item.measure()
    except Exception as error:
        traceback.print_exc()
        session.is_broken = session.device is not None and is_broken(session.device)
        return line(failure(error), "missed")
    return line(got.measured, VERDICTS[got.met], got.beside)


def partial_line(item: Item, predicted: str) -> Callable[..., Line]:
    """Return a function from a measurement, a verdict and others beside it to the line of ``item``."""
    return lambda measured, verdict="", beside={}: Line(item.name, item.wanted, predicted, measured, verdict, beside)


def failure(error: Exception) -> str:
    """Return an exception as one line."""
    first = (str(error).splitlines() or [""])[0]
    return f"failed: {type(error).__name__}: {first:.160}"


def is_broken(device: torch.device) -> bool:
    """Return True if ``device`` fails even to wait, after a fault that it keeps."""
    if device.type != "cuda":
        return False
    try:
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()
    except RuntimeError:
        return True
    return False


def facts(device: torch.device | None) -> str:
    """Name the card, its driver, the releases, and the commit."""
    names = ["no CUDA device" if device is None else str(device)]
    if device is not None and device.type == "cuda":
        names = [torch.cuda.get_device_name(device), f"driver {driver()}", f"CUDA {torch.version.cuda}"]
    names += [f"{name} {found}" for name in ("torch", "triton") if (found := release(name))]
    return ", ".join([*names, f"commit {commit()}", time.strftime("%Y-%m-%d")])


def release(name: str) -> str:
    """Return the release of a library, or an empty text without it."""
    try:
        return version(name)
    except PackageNotFoundError:
        return ""


def driver() -> str:
    """Return the release of the NVIDIA driver, by nvidia-smi or the kernel's module."""
    try:
        command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        return subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout.split()[0]
    except (OSError, subprocess.SubprocessError, IndexError):
        known = Path("/sys/module/nvidia/version")
        return known.read_text().strip() if known.is_file() else "unknown"


def commit() -> str:
    """Return the commit of the sources, with a plus if they were changed; "unknown" outside of a checkout."""
    try:
        git = lambda *args: subprocess.run(
            ["git", "-C", str(ROOT), *args], capture_output=True, text=True, timeout=20, check=True
        ).stdout.strip()
        return git("rev-parse", "--short", "HEAD") + ("+" if git("status", "--porcelain", "-uno") else "")
    except (OSError, subprocess.SubprocessError):
        return "unknown"


def table(title: str, lines: Sequence[Line]) -> Table:
    """Return the lines as a table for the terminal."""
    colours = {"met": "green", "missed": "bold red"}
    out = Table(title=title, title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
    for name in columns(lines):
        out.add_column(name, overflow="fold")
    for line in lines:
        *cells, verdict = row(line, lines)
        out.add_row(*cells, f"[{colours[verdict]}]{verdict}[/]" if verdict else "")
    return out


def markdown(title: str, about: str, lines: Sequence[Line]) -> str:
    """Return the lines as a table in Markdown below a title and ``about``."""
    cells = [columns(lines), ["---"] * len(columns(lines)), *(row(line, lines) for line in lines)]
    return "\n".join([f"## {title}", "", about, "", *(f"| {' | '.join(each)} |" for each in cells), ""])


def columns(lines: Sequence[Line]) -> list[str]:
    """Return the names of the columns."""
    return ["", "wanted", "predicted", "measured", *others(lines), "verdict"]


def row(line: Line, lines: Sequence[Line]) -> list[str]:
    """Return the cells of a line."""
    beside = [line.beside.get(name, "") for name in others(lines)]
    return [line.name, line.wanted, line.predicted, line.measured, *beside, line.verdict]


def others(lines: Sequence[Line]) -> list[str]:
    """Return the names of what was measured beside some line, in the order of their first."""
    return list(dict.fromkeys(name for line in lines for name in line.beside))


def status(lines: Sequence[Line]) -> int:
    """Return the exit status of a command: 1 if a line failed, which missing a bound does not."""
    return int(any(line.measured.startswith("failed") for line in lines))


def at_most(got: float, most: float, what: str, number: str = "{:.2f}") -> Result:
    """Return the result of a figure that should not exceed ``most``."""
    return Result(f"{number.format(got)} {what}".strip(), got <= most)


def at_least(got: float, least: float, what: str, number: str = "{:.2f}") -> Result:
    """Return the result of a figure that should reach ``least``."""
    return Result(f"{number.format(got)} {what}".strip(), got >= least)


def with_beside(result: Result, **beside: str) -> Result:
    """Return ``result`` with figures of others."""
    return result._replace(beside=result.beside | beside)


def options_of(options: object) -> str:
    """Return the options of a command as its title shows them."""
    shown = {f.name: getattr(options, f.name) for f in dataclasses.fields(options)}  # type: ignore[arg-type]
    return ", ".join(f"{name} {value}" for name, value in shown.items() if name not in ("minutes", "out", "device"))
