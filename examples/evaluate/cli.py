"""Compare formats and adapters of one model: perplexity of a text, and accuracy on multiple-choice questions.

    python -m examples.evaluate                                                # formats, on the model and text shipped
    python -m examples.evaluate --model DIR --data held_out.jsonl --formats none nf4_dq int8
    python -m examples.evaluate --model DIR --choices questions.jsonl --adapters RUN/adapter

Each format is measured without an adapter and with each of ``--adapters``; ``none`` is the base as it is in its folder.
The table and evaluation.png show what a format costs, and what an adapter gains beside it. Questions are described in
examples/evaluate/choices.py.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Literal

import torch
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Column, Table

from fquant.device import parse
from fquant.io import peft
from fquant.io.safetensors import replacing
from fquant.kernels.cpu import usable_cores
from fquant.lora import Adapters
from models import hf
from models.config import Config

from ..common import terminal
from ..common.command_line import (
    DTYPES,
    FormatName,
    Ignored,
    check,
    check_least,
    check_used,
    command_line,
    parse_format,
)
from ..common.devices import DeviceName, to
from ..common.progress import bar, draw, widen
from ..data import dataset, tokenizer
from ..data.workers import Worker, short
from ..qlora.options import SHIPPED
from . import choices
from .measure import Figures, Variant, measure

IGNORED: Ignored = {
    "chat_template": (lambda x: x.data is None, "is of chats, and no --data has any; give --data"),
    "rows": (lambda x: x.data is None and x.choices is not None, "is of texts, and --choices alone is measured"),
}


@dataclass(frozen=True)
class Options:
    """Compare formats and adapters of a model by perplexity and by accuracy on multiple-choice questions."""

    model: Path = SHIPPED
    """Folder of a decoder in Hugging Face layout: config.json, safetensors, tokenizer.json."""
    formats: tuple[FormatName, ...] = ("none", "int8", "nf4", "nf4_dq")
    """How base weights are packed; none: as they are in the folder."""
    adapters: tuple[Path, ...] = ()
    """PEFT folders, each measured beside every format."""
    data: str | None = None
    """Text or records to measure the perplexity of (of answers, where records have them); default: the standard
    library's source, unless --choices."""
    chat_template: str | None = None
    """Jinja template of chats in place of the tokenizer's: a file, chatml or zephyr."""
    choices: Path | None = None
    """JSONL file of questions: {"question": ..., "choices": [...], "answer": number or letter}."""
    rows: int | None = 64
    """Rows of text to measure, at even distances; None: all."""
    seq: int = 256
    """Tokens in a row of text, and at most in a question."""
    batch: int = 8
    """Rows at once."""
    dtype: Literal["bf16", "f32"] = "bf16"
    """Of the residual stream."""
    device: DeviceName = "auto"
    out: Path | None = None
    """Folder for evaluation.png and evaluation.json; default: none is written."""
    json: bool = False
    """Print one object a line instead of the table."""

    def check(self) -> None:
        """Raise ValueError for values out of range."""
        check_used(self, IGNORED)
        check_least(self, {"rows": 1, "seq": 2, "batch": 1})
        if self.out is not None and self.out.exists() and not self.out.is_dir():
            raise ValueError(f"--out {self.out}: is a file; wanted a folder")
        if len(set(self.adapters)) < len(self.adapters):
            raise ValueError(f"--adapters {' '.join(map(str, self.adapters))}: wanted each once")
        if not self.formats or len(set(self.formats)) < len(self.formats):
            raise ValueError(f"--formats {' '.join(self.formats)}: wanted at least one, and each once")


def main(args: list[str] | None = None) -> int:
    """Run the command line ``args`` and return its exit status: 0, or 2 for bad input, which one line names."""
    console = terminal.console()
    try:
        options = command_line(Options(), args, "python -m examples.evaluate")
        options.check()
        torch.set_num_threads(usable_cores(1))
        show(options, console, evaluate(options, console))
    except (ValueError, TypeError, OSError) as error:
        terminal.complain("evaluate", error)
        return 2
    return 0


def show(options: Options, console: Console, found: list[Figures]) -> None:
    """Print the figures, and write them to ``--out``."""
    for one in found if options.json else ():
        print(json.dumps(asdict(one)))
    if not options.json:
        console.print(f"{options.model}, {options.dtype}", highlight=False, soft_wrap=True)
        console.print(table(found))
    if options.out is not None:
        options.out.mkdir(parents=True, exist_ok=True)
        with replacing(options.out / "evaluation.json") as file:
            file.write((json.dumps([asdict(one) for one in found], indent=2) + "\n").encode())
        drawn = plot(options.out, f"{options.model.name}, {options.dtype}", found)
        if not options.json:
            console.print(f"plot    {drawn}", highlight=False, soft_wrap=True)


def evaluate(options: Options, console: Console) -> list[Figures]:
    """Return the figures of every format, without an adapter and with each."""
    device = parse(options.device)
    cfg, dense = hf.lazy(options.model, device)
    formats = {name: parse_format(name, None) for name in options.formats}
    check(cfg, None, options.seq, options.model)
    adapters: dict[str, Adapters] = {"": {}} | {str(at): to(opened(at, cfg), device) for at in options.adapters}
    its = tokenizer.text(options.model, options.chat_template)
    questions = choices.read(options.choices) if options.choices else None
    task = None
    if questions:
        with Worker(its, limits=short(its.path)) as worker:
            task = choices.task(questions, worker, its.begin, options.seq)
    text = None
    if options.data is not None or task is None:
        note = terminal.console(stderr=True).print
        stored = dataset.prepare(options.data, options.model, options.seq, template=options.chat_template, note=note)
        is_part = options.rows is not None and options.rows < len(stored.rows)
        stored = dataset.divide(stored, options.rows or 1)[1] if is_part else stored
        text = dataset.take(stored, torch.arange(len(stored.rows)))
    variants = [Variant(fmt, name, at, found) for name, fmt in formats.items() for at, found in adapters.items()]
    batches = sum(-(-len(rows.tokens) // options.batch) for rows in (text, task and task.rows) if rows is not None)
    with bar(console, console.is_terminal and not options.json) as progress:
        shown = progress.add_task("", total=batches * len(variants))
        found = []
        for variant in variants:
            progress.update(shown, description=f"{variant.format_name} {Path(variant.adapter_name).name}".strip())
            step, dtype = partial(progress.advance, shown), DTYPES[options.dtype]
            found.append(measure(cfg, dense, variant, text, task, options.batch, dtype, step))
    return found


def opened(folder: Path, cfg: Config) -> Adapters:
    """Return the adapters of a PEFT folder."""
    return peft.load(folder, partial(hf.path_of, cfg=cfg), hf.tied_modules(cfg))


def table(found: Sequence[Figures]) -> Table:
    """Return a row for each variant."""
    names = ["MiB", "bits", *(["perplexity"] if found[0].perplexity else [])]
    names += ["accuracy", "by bytes"] if found[0].accuracy is not None else []
    out = Table("format", "adapter", *(Column(n, justify="right") for n in names), box=SIMPLE_HEAD, pad_edge=False)
    for x in found:
        cells = [f"{x.nbytes / 2**20:,.1f}", f"{x.bits:.2f}"]
        cells += [f"{x.perplexity:.2f}"] if x.perplexity else []
        cells += [f"{100 * share:.1f} %" for share in (x.accuracy, x.accuracy_by_bytes) if share is not None]
        out.add_row(x.format, x.adapter, *cells)
    return out


def plot(folder: Path, title: str, found: Sequence[Figures]) -> Path:
    """Draw what was measured of each format, from few to many bits of a weight, with a line for each adapter."""
    from matplotlib.figure import Figure

    kinds = {name: [getattr(x, name) for x in found] for name in ("perplexity", "accuracy")}
    drawn = {name: values for name, values in kinds.items() if values[0] is not None}
    formats = sorted({x.format: x.bits for x in found}.items(), key=lambda item: item[1])
    places = {name: i for i, (name, _) in enumerate(formats)}
    width = max(6, len(formats))  # inches
    figure = Figure(figsize=(width * len(drawn), 4.5), dpi=100)
    for i, (name, values) in enumerate(drawn.items()):
        axes = figure.add_subplot(1, len(drawn), i + 1)
        for j, adapter in enumerate(dict.fromkeys(x.adapter for x in found)):
            points = sorted((places[x.format], y) for x, y in zip(found, values, strict=True) if x.adapter == adapter)
            label = str(Path(*Path(adapter).parts[-3:])) if adapter else "base"
            axes.plot(*zip(*points, strict=True), marker="o", color=f"C{j}", label=label)
        if name == "perplexity":
            widen(axes, values)
        axes.set_xticks(range(len(formats)), [f"{name}\n{bits:.2f}" for name, bits in formats])
        axes.set(xlabel="format, and bits of a weight", ylabel=name)
        axes.set_title(title, loc="left", fontsize=10)
        axes.margins(0.1, 0.15)
        axes.legend(frameon=False)
        axes.spines[["top", "right"]].set_visible(False)
    return draw(figure, folder / "evaluation.png")
