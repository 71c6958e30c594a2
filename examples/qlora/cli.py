"""Fine-tune LoRA adapters beside a quantised decoder, on one process or sharded over several.

    python -m examples.qlora                                     # offline, on the model and data shipped here
    python -m examples.qlora --model DIR --data FILE --mesh dp=2,fsdp=2
    torchrun --nproc-per-node 4 -m examples.qlora --model DIR --data FILE
    python -m examples.qlora --model DIR --device cuda           # a rank on each CUDA device
    python -m examples.qlora --resume runs/qlora                 # continue, to the bit
    python -m examples.qlora --train full --format none          # every weight, sharded with its moments

Writes adapter/ for PEFT, or model/ for transformers, loss.png and the files of every run (examples/common/runs.py) to a
folder of its own. The training is in examples/qlora/train.py.
"""

import dataclasses
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from rich.table import Column, Table

import shard
from fquant.io import peft
from models import hf
from models.export.folder import copy_companions

from ..common import devices, run_folder, runs, terminal
from ..common.model_folders import companions
from ..common.objectives import ON_DOCUMENTS
from ..common.progress import METRICS, bar, draw, metrics, widen
from ..common.training_step import State
from ..data import dataset as data
from ..data import show as show_rows
from ..data import tokenizer as data_tokenizer
from ..data.options import Note
from ..data.store import Progress
from ..data.workers import Worker
from . import full_training, train
from .adapters import merged
from .measure import Judgement, Result, measure, validate
from .options import Options
from .train import Run, Step

ADAPTER, MERGED = "adapter", "merged"
BEST = "#c1592b"  # the colour of validations


def prepare(options: Options) -> bool:
    """Check all input, and show what was asked for; return True if that was all."""
    with read(options) as (note, progress):
        work = train.prepare(options, note, progress)
    return shown(options, work)


@contextmanager
def read(options: Options) -> Iterator[tuple[Note, Progress]]:
    """Open a bar of progress over the data, and give what takes notes and progress; rows as JSON have stdout alone."""
    console = terminal.console(stderr=options.json)
    console.print(f"reading {options.model} and the data", style="dim", highlight=False, soft_wrap=True)
    with bar(console, console.is_terminal) as progress:
        task = progress.add_task("tokenising", total=None, visible=False)
        update = lambda done, total: progress.update(task, completed=done, total=total, visible=True)
        yield lambda line: console.print(line, highlight=False, soft_wrap=True), update


def shown(options: Options, work: train.Work) -> bool:
    """Print the rows that ``--show-data`` asks for; return True if nothing is to be trained."""
    if not options.show_data:
        return False
    rows = data.take(work.train, torch.arange(min(options.show_data, len(work.train.rows))))
    with Worker(data_tokenizer.text(options.model, options.chat_template)) as tokenizer:
        if options.json:
            for line in show_rows.lines(rows, tokenizer, options.show_data):
                print(line)
            return True
        console = terminal.console()
        is_plain = console.no_color or console.color_system is None
        console.print(show_rows.text(rows, tokenizer, options.show_data, is_plain))
    return False


def title(run: Run) -> str:
    """Return the kind of base and adapters as one line."""
    options, adapters = run.options, f"{len(run.work.adapters)} adapters of rank {run.options.rank}"
    if run.setup.train is not None:
        wire = f", {options.wire} messages" if options.wire else ""
        kept = f"{run.setup.checkpoint} checkpointing, {options.dtype}"
        return f"{kept}; all {run.work.parameters:,} parameters are trained{wire}"
    far = [name for name, on in (("blocks", options.offload), ("activations", options.offload_activations)) if on]
    offload = f", {' and '.join(far)} offloaded" if far else ""
    return f"{run.setup.checkpoint} checkpointing{offload}, {options.dtype}; base in {options.format}, {adapters}"


def summary(x: Step) -> str:
    """Return the figures of a step as one line."""
    speed, memory = speed_text(x.tokens_per_second, x.share), devices.memory_text(x.memory, x.held)
    held = "" if x.validation is None else f"  held-out {x.validation:.4f}"
    return f"loss {x.loss:.4f}{held}  lr {x.lr:.1e}  {speed}  {memory}"


def speed_text(tokens_per_second: float, share: float | None) -> str:
    """Return the speed of a step, and its share of the limit if that is known, in words."""
    return f"{tokens_per_second:,.0f} tok/s" + ("" if share is None else f", {100 * share:.0f} % of the limit")


def publish(run: Run, state: State, folder: Path) -> None:
    """Write the adapter, or the model that was trained in full, to ``folder`` on rank 0; every rank calls it."""
    trained, is_full = state.trained, run.setup.train is not None
    if is_full:
        trained = shard.whole(trained, run.setup.mesh, run.setup.rules)
    if dist.get_rank():
        return
    if is_full:
        full_training.write(folder / full_training.MODEL, run.options.model, run.work.cfg, trained)
        return
    names, tied = partial(hf.module_name, cfg=run.work.cfg), hf.tied_modules(run.work.cfg)
    peft.save(folder / ADAPTER, trained, names, base_model=str(run.options.model), tied=tied)


def write_merged(run: Run, state: State, folder: Path) -> Path:
    """Write the packed weights with the adapters merged into them, as a folder in ``folder``; return its path."""
    out, work = folder / MERGED, run.work
    if out.exists():  # of fewer steps, before the run was extended
        shutil.rmtree(out)
    hf.save_packed(out, work.cfg, merged(work.packed, state.trained), companions(run.options.model))
    copy_companions(run.options.model, out)
    return out


def show(run: Run, state: State, result: Result | Judgement) -> None:
    """Write the result and the loss curve, and print one table."""
    options, folder, console = run.options, run.options.folder(), terminal.console()
    run_folder.write(folder / runs.RESULT, dataclasses.asdict(result))
    if isinstance(result, Judgement):
        before, after = f"{result.loss_before:.4f}", f"{result.loss_after:.4f}"
        subtitle = f"held-out loss {before} before, {after} after; {100 * result.right_after:.1f} % judged right"
        console.print(f"{options.objective} on {options.model.name}: {subtitle}", highlight=False)
    else:
        dense = "" if result.perplexity_bf16 is None else f"bf16 base {result.perplexity_bf16:.1f}, "
        base = "base" if options.format == "none" else f"{options.format} base"
        with_what = "trained in full" if options.train == "full" else "with the adapter"
        after = f"{base} {result.perplexity_packed:.1f}, {with_what} {result.perplexity_adapted:.1f}"
        subtitle = f"held-out perplexity: {dense}{after}"
        console.print(table(result, options, dist.get_world_size()))
    if options.merge_aware:
        console.print(f"merged  {write_merged(run, state, folder)}", soft_wrap=True)
    is_full = options.train == "full"
    kind = "all weights" if is_full else f"adapters of rank {options.rank} beside a frozen base"
    name = f"{options.model.name}: {options.objective}, {kind}"
    drawn = curve(
        folder, f"{name}\n{subtitle}", "loss (nats a token)" if run.setup.objective.name in ON_DOCUMENTS else "loss"
    )
    what = f"model   {folder / full_training.MODEL}" if is_full else f"adapter {folder / ADAPTER}"
    console.print(f"{what}\nmetrics {folder / METRICS}\ncurve   {drawn}", soft_wrap=True)


def table(result: Result, options: Options, ranks: int) -> Table:
    """Return the one table at the end, with a column for each base that was measured."""
    packed = options.format != "none"
    base = options.format if packed else "unchanged"
    is_full = options.train == "full"
    kind = "trained in full" if is_full else f"rank {options.rank} adapters"
    title = f"{options.model.name}: {base} base, {kind}, {ranks} ranks"
    names = ("packed base", "packed + adapter") if packed else ("base", "trained" if is_full else "base + adapter")
    plain = result.perplexity_bf16
    sizes = f"{result.bytes_packed:,}", f"{result.bytes_bf16 / result.bytes_packed:.2f}x smaller" if packed else ""
    sent = f"{result.wire_packed:,}", ""
    perplexities = f"{result.perplexity_packed:.2f}", f"{result.perplexity_adapted:.2f}"
    if packed and plain is not None:
        names = ("bf16 base", *names)
        sizes, sent = (f"{result.bytes_bf16:,}", *sizes), (f"{result.wire_bf16:,}", *sent)
        perplexities = (f"{plain:.2f}", *perplexities)
    out = Table("", *(Column(name, justify="right") for name in names), title=title)
    out.add_row("bytes of the base", *sizes)
    out.add_row("bytes a rank sends in a step", *sent)
    out.add_row("held-out perplexity", *perplexities)
    blank = [""] * (len(names) - 2)
    if result.perplexity_teacher is not None:
        divergences = f"{result.divergence_packed:.4f}", f"{result.divergence_adapted:.4f}"
        out.add_row(f"divergence from a teacher of perplexity {result.perplexity_teacher:.2f}", *blank, *divergences)
    if result.perplexity_merged is not None:
        share = "" if result.survives is None else f"{result.survives:.3f}"
        out.add_row("merged, and its share of the gain", *blank, f"{result.perplexity_merged:.2f}", share)
    return out


def curve(folder: Path, title: str, label: str) -> Path:
    """Draw the loss of every step in metrics.jsonl, and the validations, to loss.png."""
    from matplotlib.figure import Figure

    steps = metrics(folder)
    x, y = [s["step"] + 1 for s in steps], [s["loss"] for s in steps]
    mean = [sum(last) / len(last) for last in (y[max(0, i - 4) : i + 1] for i in range(len(y)))]
    figure = Figure(figsize=(8, 4.5), dpi=100)
    axes = figure.subplots()
    axes.plot(x, y, color="#9db8d2", linewidth=1, label="training loss of a step")
    axes.plot(x, mean, color="#1f4e79", linewidth=2, label="mean of five steps")
    if held := [(s["step"] + 1, s["validation"]) for s in steps if s.get("validation") is not None]:
        at, best = min(held, key=lambda one: one[1])
        found = f"held-out loss, best {best:.3f} at step {at}"
        axes.plot(*zip(*held, strict=True), color=BEST, marker="o", markersize=4, label=found)
        axes.plot([at], [best], "o", markersize=11, markerfacecolor="none", markeredgecolor=BEST)
    widen(axes, mean)
    axes.set(xlabel="step", ylabel=label)
    axes.set_title(title, loc="left", fontsize=10)
    axes.legend(frameon=False, loc="upper right")
    axes.spines[["top", "right"]].set_visible(False)
    return draw(figure, folder / "loss.png")


PROGRAM = runs.Program(
    "qlora", Options(), prepare, train.start, train.take, measure, title, summary, show, train.placed, publish,
    validate, weights=train.weights,
)  # fmt: skip


def main(args: list[str] | None = None) -> int:
    """Run the command line ``args``; return 0, 1 if a rank failed, or 2 for bad input, which one line names."""
    return runs.command(PROGRAM, args)
