"""Fine-tune LoRA adapters beside a quantised decoder, on one process or sharded over several.

    python -m examples.qlora                                     # offline, on the model and data shipped here
    python -m examples.qlora --model DIR --data FILE --mesh dp=2,fsdp=2
    torchrun --nproc-per-node 4 -m examples.qlora --model DIR --data FILE
    python -m examples.qlora --resume runs/qlora                 # continue, to the bit

Writes adapter/ for PEFT, loss.png and the files of every run (examples/common/runs.py) to a folder of its own. The
training is in examples/qlora/train.py.
"""

import dataclasses
from functools import partial
from pathlib import Path

import torch.distributed as dist
from rich.console import Console
from rich.table import Column, Table

from fquant.io import peft
from models import hf

from ..common import runs
from ..common.progress import METRICS, draw, metrics
from ..common.training_step import State
from . import train
from .options import Options
from .train import Result, Run, Step

ADAPTER = "adapter"


def prepare(options: Options) -> None:
    """Check all input."""
    console = Console()
    console.print(f"[dim]reading {options.model} and the text[/]", highlight=False, soft_wrap=True)
    train.prepare(options, lambda line: console.print(line, markup=False, highlight=False, soft_wrap=True))


def title(run: Run) -> str:
    """Return the kind of base and adapters as one line."""
    options, adapters = run.options, f"{len(run.work.adapters)} adapters of rank {run.options.rank}"
    return f"{run.setup.checkpoint} checkpointing, {options.dtype}; base in {options.format}, {adapters}"


def summary(x: Step) -> str:
    """Return the figures of a step as one line."""
    speed, memory = f"{x.tokens_per_second:,.0f} tok/s", f"{x.memory / 2**20:.0f} MiB a rank"
    return f"loss {x.loss:.4f}  lr {x.lr:.1e}  {speed}  {memory}"


def show(run: Run, state: State, result: Result) -> None:
    """Write the adapter, the result and the loss curve, and print one table."""
    options, folder, console = run.options, run.options.folder(), Console()
    names = partial(hf.module_name, cfg=run.work.cfg)
    tied = hf.tied_modules(run.work.cfg)
    peft.save(folder / ADAPTER, state.adapters, names, base_model=str(options.model), tied=tied)
    runs.write(folder / runs.RESULT, dataclasses.asdict(result))
    drawn = curve(folder, result)
    console.print(table(result, options, dist.get_world_size()))
    console.print(f"adapter {folder / ADAPTER}\nmetrics {folder / METRICS}\ncurve   {drawn}", soft_wrap=True)


def table(result: Result, options: Options, ranks: int) -> Table:
    """Return the one table at the end; a base as it is (--format none) has two columns instead of three."""
    packed = options.format != "none"
    base = options.format if packed else "unchanged"
    title = f"{options.model.name}: {base} base, rank {options.rank} adapters, {ranks} ranks"
    names = ("bf16 base", "packed base", "packed + adapter") if packed else ("base", "base + adapter")
    out = Table("", *(Column(name, justify="right") for name in names), title=title)
    smaller = f"{result.bytes_bf16 / result.bytes_packed:.2f}x smaller" if packed else ""
    perplexities = result.perplexity_bf16, result.perplexity_packed, result.perplexity_adapted
    rows = {
        "bytes of the base": (f"{result.bytes_bf16:,}", f"{result.bytes_packed:,}", smaller),
        "bytes a rank sends in a step": (f"{result.wire_bf16:,}", f"{result.wire_packed:,}", ""),
        "held-out perplexity": tuple(f"{p:.2f}" for p in perplexities),
    }
    for name, cells in rows.items():
        out.add_row(name, *(cells if packed else cells[::2]))
    return out


def curve(folder: Path, result: Result) -> Path:
    """Draw the loss of every step in metrics.jsonl to loss.png."""
    from matplotlib.figure import Figure

    steps = metrics(folder)
    x, y = [s["step"] + 1 for s in steps], [s["loss"] for s in steps]
    mean = [sum(last) / len(last) for last in (y[max(0, i - 4) : i + 1] for i in range(len(y)))]
    figure = Figure(figsize=(8, 4.5), dpi=120)
    axes = figure.subplots()
    axes.plot(x, y, color="#9db8d2", linewidth=1, label="training loss of a step")
    axes.plot(x, mean, color="#1f4e79", linewidth=2, label="mean of five steps")
    axes.set(xlabel="step", ylabel="loss, nats a token")
    axes.set_title(
        "Low-rank adapters beside a frozen packed base\n"
        f"held-out perplexity: bf16 base {result.perplexity_bf16:.1f}, as trained {result.perplexity_packed:.1f}, "
        f"with the adapter {result.perplexity_adapted:.1f}",
        loc="left", fontsize=10,
    )  # fmt: skip
    axes.legend(frameon=False, loc="upper right")
    axes.spines[["top", "right"]].set_visible(False)
    return draw(figure, folder / "loss.png")


PROGRAM = runs.Program("qlora", Options(), prepare, train.start, train.take, train.measure, title, summary, show)


def main(args: list[str] | None = None) -> int:
    """Run the command line ``args``; return 0, 1 if a rank failed, or 2 for bad input, which one line names."""
    return runs.command(PROGRAM, args)
