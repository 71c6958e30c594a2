"""Train many adapters over one base in one captured step, and choose: learning rates, ranks, seeds, data.

    python -m examples.sweep                                                    # rates and ranks, on the model shipped
    python -m examples.sweep --model DIR --data FILE --vary lr=1e-4,3e-4 rank=8,32 seed=0,1
    python -m examples.sweep --model DIR --vary data=a.jsonl,b.jsonl --validate-every 20

Each experiment has the bits of ``python -m examples.qlora`` with its options. RUN/NAME/adapter is the adapter of each,
for PEFT, and RUN/best that of the lowest validation. With --merge-aware RUN/merged has the packed weights with the best
adapter of the end. The other files are those of every run (examples/common/runs.py), and sweep.png shows the losses.
The training is in examples/sweep/train.py.
"""

import math
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Column, Table

from ..common import devices, run_folder, runs, terminal
from ..common.objectives import ON_DOCUMENTS
from ..common.progress import METRICS, draw, metrics, widen
from ..qlora import cli as qlora
from ..qlora.train import prepare_many
from . import train
from .options import Options, of
from .train import Result, Run, States, Step

BEST = "#c1592b"  # the colour of the best experiment


def title(run: Run) -> str:
    """Return the number of experiments and how they are stacked as one line."""
    groups = " + ".join(str(len(group)) for group in run.groups)
    return f"{len(run.runs)} experiments over one base in {run.options.format}, stacked {groups}"


def summary(x: Step) -> str:
    """Return the figures of a step as one line."""
    held = "" if x.validations is None else f"  held-out {min(x.validations):.4f} to {max(x.validations):.4f}"
    speed, memory = qlora.speed_text(x.tokens_per_second, x.share), devices.memory_text(x.memory, x.held)
    return f"loss {min(x.losses):.4f} to {max(x.losses):.4f}{held}  {speed}  {memory}"


def publish(run: Run, training: States, folder: Path) -> None:
    """Write the adapter of every experiment to a folder of its name."""
    for name, one, state in zip(run.options.names(), run.runs, training.many, strict=True):
        qlora.publish(one, state, folder / name)


def publish_best(run: Run, training: States, step: Step, folder: Path) -> None:
    """Write the adapter of the experiment with the lowest held-out loss."""
    assert step.validations is not None
    best = step.validations.index(min(step.validations))
    qlora.publish(run.runs[best], training.many[best], folder)


def show(run: Run, training: States, results: list[Result]) -> None:
    """Write the results and the plot, and print one table, the best first."""
    folder, console = run.options.folder(), terminal.console()
    run_folder.write(folder / runs.RESULT, {"experiments": [asdict(result) for result in results]})
    drawn = plot(folder, run, results)
    is_text = run.options.objective == "sft"
    names = ("held-out loss", "perplexity", "of the base") if is_text else ("held-out loss", "of the base")
    right = [Column(name, justify="right") for name in names]
    table = Table("experiment", *right, box=SIMPLE_HEAD, pad_edge=False)
    ordered = sorted(results, key=lambda result: result.loss)
    for x in ordered:
        more = (f"{math.exp(x.loss):.2f}", f"{math.exp(x.base):.2f}") if is_text else (f"{x.base:.4f}",)
        table.add_row(x.name, f"{x.loss:.4f}", *more)
    console.print(table)
    best = folder / ordered[0].name / qlora.ADAPTER
    if run.options.merge_aware:
        at = results.index(ordered[0])
        console.print(f"merged  {qlora.write_merged(run.runs[at], training.many[at], folder)}", soft_wrap=True)
    console.print(f"best    {best}\nmetrics {folder / METRICS}\nplot    {drawn}", highlight=False, soft_wrap=True)


def plot(folder: Path, run: Run, results: list[Result]) -> Path:
    """Draw the held-out loss over what varies first, a line for each combination of the others; and losses by step.

    Those are of the validations if there were several. Otherwise they are means of training losses.
    """
    from matplotlib import colormaps
    from matplotlib.figure import Figure

    names, experiments, (first, *others) = run.options.names(), run.options.experiments(), run.options.values()
    best = min(range(len(results)), key=lambda i: results[i].loss)
    figure = Figure(figsize=(11, 4.5), dpi=100)
    left, right = figure.subplots(1, 2)
    colour = lambda i, count: colormaps["viridis"](0.85 * i / max(1, count - 1))
    ticks = list(dict.fromkeys(of(one, first) for one in experiments))
    lines: dict[str, list[tuple[int, float]]] = {}
    for one, result in zip(experiments, results, strict=True):
        key = ", ".join(f"{name} {of(one, name)}" for name in others)
        lines.setdefault(key, []).append((ticks.index(of(one, first)), result.loss))
    for i, (key, points) in enumerate(lines.items()):
        left.plot(*zip(*points, strict=True), marker="o", color=colour(i, len(lines)), label=key or None)
    at = ticks.index(of(experiments[best], first))
    left.plot([at], [results[best].loss], "o", markersize=13, markerfacecolor="none", markeredgecolor=BEST)
    left.set_xticks(range(len(ticks)), ticks)
    left.set_title(f"best: {names[best]}, {results[best].loss:.3f}", loc="left", fontsize=10)
    if others:
        left.legend(frameon=False, fontsize=8)
    unit = " (nats a token)" if run.options.objective in ON_DOCUMENTS else ""
    label, x, losses = by_step(metrics(folder))
    for i, name in enumerate(names):
        style = {"color": BEST, "lw": 2.2} if i == best else {"color": colour(i, len(names)), "lw": 1}
        right.plot(x, [many[i] for many in losses], label=name, marker="o" if len(x) < 20 else "", ms=3, **style)
    widen(left, [result.loss for result in results])
    widen(right, [loss for many in losses for loss in many])
    left.set(xlabel=first, ylabel=f"held-out loss{unit}")
    right.set(xlabel="step", ylabel=f"{label}{unit}")
    right.legend(frameon=False, fontsize=7)
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
    return draw(figure, folder / "sweep.png")


def by_step(steps: Sequence[dict[str, Any]]) -> tuple[str, list[int], list[list[float]]]:
    """Return a label, numbers of steps, and the losses of every experiment after them."""
    held = [(s["step"] + 1, s["validations"]) for s in steps if s.get("validations") is not None]
    if len(held) > 1:
        return "held-out loss", [step for step, _ in held], [losses for _, losses in held]
    size = max(1, len(steps) // 12)  # of the window: experiments see equal batches, whose losses vary more
    windows = [steps[max(0, i - size + 1) : i + 1] for i in range(len(steps))]
    means = [[sum(each) / len(each) for each in zip(*(s["losses"] for s in w), strict=True)] for w in windows]
    return f"training loss, mean of {size} steps", [s["step"] + 1 for s in steps], means


def prepare(options: Options) -> bool:
    """Check all input, and show rows of the first experiment if asked for; return True if that was all."""
    with qlora.read(options) as (note, progress):
        first, *_ = prepare_many(options.experiments(), note, progress)
    return qlora.shown(options, first)


PROGRAM = runs.Program(
    "sweep", Options(), prepare, train.start, train.take, train.measure, title, summary, show, train.placed, publish,
    train.validate, publish_best, train.weights,
)  # fmt: skip


def main(args: list[str] | None = None) -> int:
    """Run the command line ``args``; return 0, 1 if a rank failed, or 2 for bad input, which one line names."""
    return runs.command(PROGRAM, args)
