"""What each part of the capture is worth: the bench step of tests/bench/step with one part left out at a time.

    python -m tests.bench.ablation                              # the bench's shape, and one with a large vocabulary
    python -m tests.bench.ablation --dtype f32 --steps 3

Contestants take steps in turns, each in processes of its own, as in tests/bench/step. Shown are the median step and the
peak of resident memory over the loaded model, and both over those of the whole capture. A part stays if it saves 3 % of
the time or 5 % of the memory of either shape, or if a guarantee needs it. The transport between ranks of one machine
stays if it saves 5 % of the time of a step with gathers brought ahead. This is no test: the exit status is 0 unless a
contestant failed, then 1, or 2 for bad options.
"""

import os
import sys
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
import tyro
from rich.box import SIMPLE_HEAD
from rich.table import Table

from examples.common.command_line import DTYPES
from fquant.compile.memory import allocator
from fquant.compile.trace import Captured
from shard.transport import shared_memory
from tests.bench import report, timing
from tests.bench.step import Figures, measure
from tests.bench.step_sides import Shape, Side, Take, ours

SHAPES = {
    "8 x 1024, vocabulary 32,000": Shape(),
    "6 x 1536, vocabulary 50,000": Shape(layers=6, dim=1536, hidden=4096, vocab=50000),
}
WHOLE, ON_TWO = "the whole capture", "the whole capture, fsdp=2"
TIME, MEMORY, TRANSPORT = 0.03, 0.05, 0.05  # what a part has to save


def without(part: str, shape: Shape, dtype: torch.dtype, **axes: int) -> Take:
    """Make the step of ``shape`` without one part of the capture, in a process of its own."""
    options: dict[str, Any] = {}
    if part == "fusion":
        options["fuse"] = False
    elif part == "recomputation":
        options["recompute"] = False
    elif part == "fusion, with Inductor":
        options["compile"] = True
    elif part == "planned memory, and malloc as it is":
        os.environ[allocator.VARIABLE] = "system"
    elif part == "planned memory":
        setattr(Captured, "laid_out", lambda self: self)  # noqa: B010 (a type checker knows the method)
    elif part == "shared memory of ranks":
        setattr(shared_memory, "of_group", lambda group: None)  # noqa: B010
    else:
        assert part == WHOLE, part
    take = ours(shape, dtype=dtype, options=options, **axes)
    return lambda: take()  # without its facts, which Inductor's modules cannot give under a mode that counts


PARTS = {  # by what is left out: its ranks
    "fusion, with Inductor": 1, "fusion": 1, "recomputation": 1, "planned memory": 1,
    "planned memory, and malloc as it is": 1, "shared memory of ranks": 2,
}  # fmt: skip


def sides(dtype: torch.dtype) -> dict[str, Side]:
    """Return the contestants by name."""
    found = {WHOLE: Side(1, partial(without, WHOLE, dtype=dtype), True)}
    found[ON_TWO] = Side(2, partial(without, WHOLE, dtype=dtype, fsdp=2), True)
    for part, ranks in PARTS.items():
        axes = {"fsdp": ranks} if ranks > 1 else {}
        found[f"without {part}"] = Side(ranks, partial(without, part, dtype=dtype, **axes), True)
    return found


@dataclass(frozen=True)
class Options:
    """Time the captured step with one part of the capture left out at a time, for two shapes of a model."""

    steps: int = 5
    """Timed steps of each contestant, behind one that is not."""
    threads: int = 2
    """Threads on one process; each of two has half of them."""
    dtype: Literal["bf16", "f32"] = "bf16"
    """Of the residual stream."""
    layers: int | None = None
    """Layers, in place of those of the shapes."""
    json: Path | None = None
    """A file for the figures."""

    def check(self) -> None:
        """Raise ValueError for options that cannot be measured."""
        for name in ("steps", "layers"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise ValueError(f"--{name} is {value}; wanted at least 1")
        timing.check_threads(self.threads)
        report.check_writable(self.json)


def table(title: str, figures: dict[str, Figures]) -> Table:
    """Return a row for each contestant, with time and memory over those of the whole capture on as many ranks."""
    out = Table(title=title, title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
    for name in ("", "step, s", "over the whole", "peak over loaded, MiB", "over the whole", "first step, s", "worth"):
        out.add_column(name, justify="right" if name else "left")
    for name, f in figures.items():
        cells = [f"{f.step:.3f}", "", f"{f.over:.0f}", "", f"{f.first:.1f}", ""]
        if (whole := figures.get(whole_of(name))) is not None and whole is not f:
            cells[1], cells[3] = f"{f.step / whole.step:.2f}", f"{f.over / whole.over:.2f}"
            cells[5] = worth(name, f, whole)
        out.add_row(name, *cells)
    return out


def whole_of(name: str) -> str:
    """Return the contestant with all parts on as many ranks."""
    if name == ON_TWO:
        return ON_TWO
    return WHOLE if PARTS.get(name.removeprefix("without "), 1) == 1 else ON_TWO


def worth(name: str, left: Figures, whole: Figures) -> str:
    """Return what a part saves, in words: time, memory, both or neither."""
    time, least = left.step / whole.step, TRANSPORT if whole_of(name) == ON_TWO else TIME
    saves = ["time"] * (time > 1 + least) + ["memory"] * (left.over > (1 + MEMORY) * whole.over)
    return " and ".join(saves) or "neither"


def main(args: list[str] | None = None) -> int:
    """Run the command line ``args``; see the module's docstring."""
    options, console = tyro.cli(Options, args=args, description=Options.__doc__), report.console()
    found, failed = dict[str, dict[str, Figures]](), False
    try:
        options.check()
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    for title, shape in SHAPES.items():
        shape = replace(shape, layers=options.layers or shape.layers)
        found[title], missing = measure(sides(DTYPES[options.dtype]), shape, options.steps, options.threads)
        console.print(table(title, found[title]))
        for name, why in missing.items():
            console.print(f"{name}: {why}", markup=False)
        failed = failed or bool(missing)
    if options.json is not None:
        of = lambda f: {"step": f.step, "over": f.over, "first": f.first}
        named = {title: {name: of(f) for name, f in figures.items()} for title, figures in found.items()}
        report.write(options.json, named)
    return int(failed)
