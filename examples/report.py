"""What a run shows: live progress, a line a step in metrics.jsonl, one table, a loss curve."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from examples.finetune import Result, Step
from fquant.io.safetensors import replacing

METRICS = "metrics.jsonl"


class Report:
    """Progress on the terminal and in ``folder``; on a rank that is not the first, nothing at all."""

    def __init__(self, folder: Path, first: bool, total: int, done: int) -> None:
        self.folder, self.first, self.total, self.done = folder, first, total, done
        self.console = Console(quiet=not first)
        self.every = max(1, total // 10)  # without a terminal, a line now and then instead of a bar
        shown = "loss {task.fields[loss]:.3f}  {task.fields[speed]:,.0f} tok/s  {task.fields[memory]:.0f} MiB a rank"
        self.progress = Progress(
            TextColumn(shown), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(),
            console=self.console, disable=not (first and self.console.is_terminal),
        )  # fmt: skip
        self.task = self.progress.add_task("", total=total, completed=done, loss=float("nan"), speed=0.0, memory=0.0)

    def __enter__(self) -> Report:
        if self.first:
            keep = _lines(self.folder / METRICS)[: self.done] if self.done else []
            with replacing(self.folder / METRICS) as file:
                file.write("".join(keep).encode())
            self.metrics = open(self.folder / METRICS, "a", buffering=1)
        self.progress.start()
        return self

    def step(self, x: Step) -> None:
        """Show and record one step."""
        if not self.first:
            return
        self.metrics.write(json.dumps(dataclasses.asdict(x)) + "\n")
        self.progress.update(
            self.task, completed=x.step + 1, loss=x.loss, speed=x.tokens_per_second, memory=x.memory / 2**20
        )
        if not self.console.is_terminal and ((x.step + 1) % self.every == 0 or x.step + 1 == self.total):
            self.console.print(
                f"step {x.step + 1:4d}/{self.total}  loss {x.loss:.4f}  lr {x.lr:.1e}  "
                f"{x.tokens_per_second:,.0f} tok/s  {x.memory / 2**20:.0f} MiB a rank"
            )

    def say(self, text: str) -> None:
        """A line about what is being done."""
        self.console.print(f"[dim]{text}[/]", highlight=False, soft_wrap=True)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.progress.stop()
        if self.first:
            self.metrics.close()


def table(result: Result, options: Any, ranks: int) -> Table:
    """The one table at the end."""
    out = Table(title=f"{options.model.name}: {options.format} base, rank {options.rank} adapters, {ranks} ranks")
    for name in ("", "bf16 base", "packed base", "packed + adapter"):
        out.add_column(name, justify="left" if not name else "right")
    ratio = result.bytes_bf16 / result.bytes_packed
    out.add_row("bytes of the base", f"{result.bytes_bf16:,}", f"{result.bytes_packed:,}", f"{ratio:.2f}x smaller")
    out.add_row("bytes a rank sends in a step", f"{result.wire_bf16:,}", f"{result.wire_packed:,}", "")
    perplexities = (result.perplexity_bf16, result.perplexity_packed, result.perplexity_adapted)
    out.add_row("held-out perplexity", *(f"{p:.2f}" for p in perplexities))
    return out


def curve(folder: Path, result: Result) -> Path:
    """Draw the loss of every step in metrics.jsonl to loss.png."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    steps = [json.loads(line) for line in _lines(folder / METRICS)]
    x, y = [s["step"] + 1 for s in steps], [s["loss"] for s in steps]
    mean = [sum(y[max(0, i - 4) : i + 1]) / len(y[max(0, i - 4) : i + 1]) for i in range(len(y))]
    figure, axes = plt.subplots(figsize=(8, 4.5), dpi=120)
    axes.plot(x, y, color="#9db8d2", linewidth=1, label="training loss of a step")
    axes.plot(x, mean, color="#1f4e79", linewidth=2, label="mean of five steps")
    axes.set(xlabel="step", ylabel="loss, nats a token")
    axes.set_title(
        "Low-rank adapters beside a frozen packed base\n"
        f"held-out perplexity: bf16 base {result.perplexity_bf16:.1f}, packed base {result.perplexity_packed:.1f}, "
        f"packed + adapter {result.perplexity_adapted:.1f}",
        loc="left", fontsize=10,
    )  # fmt: skip
    axes.legend(frameon=False, loc="upper right")
    axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    with replacing(folder / "loss.png") as file:
        figure.savefig(file, format="png")
    plt.close(figure)
    return folder / "loss.png"


def _lines(path: Path) -> list[str]:
    with open(path) as file:
        return file.readlines()
