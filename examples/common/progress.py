"""Progress of a run: a bar on a terminal, a few lines elsewhere, and a line a step in metrics.jsonl."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from fquant.io.files.replacing import naming
from fquant.io.safetensors import replacing

from . import terminal
from .tracking import NOTHING, Tracking

METRICS = "metrics.jsonl"
LINES = 10  # of progress in a run without a terminal


def bar(console: Console, shown: bool = True) -> Progress:
    """Return a progress bar behind a description."""
    columns = TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    return Progress(*columns, console=console, disable=not shown)


class Report:
    """The steps of a run, dataclasses with a ``step``, on the terminal and in ``folder``; silent but on the first rank.

    ``summary`` makes a line of a step, and ``tracking`` gets its figures. A resumed run keeps the lines of its first
    ``done`` steps.
    """

    def __init__(
        self,
        folder: Path,
        first: bool,
        total: int,
        done: int,
        summary: Callable[[Any], str],
        tracking: Tracking = NOTHING,
    ) -> None:
        self.folder, self.first, self.total, self.done, self.summary = folder, first, total, done, summary
        self.tracking = tracking
        self.console = terminal.console(quiet=not first)
        self.every = max(1, total // LINES)
        self.progress = bar(self.console, first and self.console.is_terminal)
        self.task = self.progress.add_task("", total=total, completed=done)

    def __enter__(self) -> Report:
        if self.first:
            keep = lines(self.folder)[: self.done] if self.done else []
            with replacing(self.folder / METRICS) as file:
                file.write("".join(keep).encode())
            self.metrics = open(self.folder / METRICS, "a", buffering=1)
        self.progress.start()
        return self

    def step(self, x: Any) -> None:
        """Show and record one step; raises OSError, with the name of the file, on a full disk."""
        if not self.first:
            return
        figures = dataclasses.asdict(x)
        with naming(self.folder / METRICS):
            self.metrics.write(json.dumps(figures) + "\n")
        with naming(self.folder):
            self.tracking.log(x.step + 1, figures)
        line, done = self.summary(x), x.step + 1
        self.progress.update(self.task, completed=done, description=line)
        is_said = done % self.every == 0 or done == self.total or getattr(x, "validation", None) is not None
        if not self.console.is_terminal and is_said:
            self.console.print(f"step {done:4d}/{self.total}  {line}", highlight=False, soft_wrap=True)

    def say(self, text: str) -> None:
        """Print a line about the phase of the run."""
        self.console.print(text, style="dim", highlight=False, soft_wrap=True)

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.progress.stop()
        if self.first:
            with naming(self.folder / METRICS) if kind is None else suppress(OSError):  # that of a full disk is known
                self.metrics.close()
            with naming(self.folder) if kind is None else suppress(OSError):
                self.tracking.close()


def lines(folder: Path) -> list[str]:
    """Return the lines of metrics.jsonl."""
    return (folder / METRICS).read_text().splitlines(keepends=True)


def metrics(folder: Path) -> list[dict[str, Any]]:
    """Return the figures of each step in metrics.jsonl."""
    return [json.loads(line) for line in lines(folder)]


def widen(axes: Any, values: Iterable[float]) -> None:
    """Make the vertical axis logarithmic, with plain numbers, if the ``values`` are positive and span a factor of 5."""
    from matplotlib.ticker import LogLocator

    low, high = min(values := list(values)), max(values)
    if 0 < 5 * low < high:
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_major_formatter("{x:g}")
        axes.yaxis.set_minor_formatter("")


def draw(figure: Any, path: Path) -> Path:
    """Write the Figure of matplotlib as a PNG and return its path."""
    import matplotlib  # late, because it takes memory of every rank

    figure.tight_layout()
    with replacing(path) as file, matplotlib.rc_context({"savefig.dpi": "figure"}):
        figure.savefig(file, format="png")
    return path
