"""What a run shows while it is under way: a bar, or a line now and then without a terminal, and metrics.jsonl."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from fquant.io.safetensors import replacing

METRICS = "metrics.jsonl"
LINES = 10  # of a run that is not on a terminal


def bar(console: Console, shown: bool = True) -> Progress:
    """A bar behind what is told."""
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    return Progress(*columns, console=console, disable=not shown)


class Report:
    """Steps on the terminal and in ``folder``; on a rank that is not the first, nothing at all.

    A step is a dataclass whose ``step`` is its number, of ``total``; ``told`` says what it measured. The ``done`` steps
    of a run that is resumed keep their lines.
    """

    def __init__(self, folder: Path, first: bool, total: int, done: int, told: Callable[[Any], str]) -> None:
        self.folder, self.first, self.total, self.done, self.told = folder, first, total, done, told
        self.console = Console(quiet=not first)
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
        """Show and record one step."""
        if not self.first:
            return
        self.metrics.write(json.dumps(dataclasses.asdict(x)) + "\n")
        told, done = self.told(x), x.step + 1
        self.progress.update(self.task, completed=done, description=told)
        if not self.console.is_terminal and (done % self.every == 0 or done == self.total):
            self.console.print(f"step {done:4d}/{self.total}  {told}", highlight=False, soft_wrap=True)

    def say(self, text: str) -> None:
        """A line about what is being done."""
        self.console.print(f"[dim]{text}[/]", highlight=False, soft_wrap=True)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.progress.stop()
        if self.first:
            self.metrics.close()


def lines(folder: Path) -> list[str]:
    """Those of metrics.jsonl."""
    with open(folder / METRICS) as file:
        return file.readlines()


def metrics(folder: Path) -> list[dict[str, Any]]:
    """What metrics.jsonl holds of each step."""
    return [json.loads(line) for line in lines(folder)]
