"""Captured programs as researchers write them: resident memory beside the prediction, time beside torch.compile.

    python -m tests.bench.programs                                     # all rows: half an hour on two cores
    python -m tests.bench.programs --only memory --programs maml lstm  # the memory of two programs

    memory   what a process grows by in each of the first calls, beside the prediction of ``fquant.cost``   (memory.py)
    time     a call on one thread, and the first call, beside the uncaptured program and torch.compile       (times.py)

The programs are those of learning.py, sequences.py, dynamics.py and networks.py. Each is measured in a process of its
own. In brackets behind the time of another is fquant's over it: below 1, fquant is faster. This is no test: the exit
status is 0 if bounds are met or missed, and 2 for bad options.
"""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
import tyro

from tests.bench import report, timing
from tests.bench.report import Row, Wanted, at_most

from . import memory, times
from .catalogue import PROGRAMS

MIB = 2**20
FIRST = 0.2  # of torch.compile's first call
MEMORY_COLUMNS = ("predicted", *(f"call {i + 1}" for i in range(memory.CALLS)))
TIME_COLUMNS = (times.OURS, times.EAGER, times.THEIRS, times.INDUCTOR)


@dataclass(frozen=True)
class Options:
    """Measure captured programs: resident memory beside the prediction, time beside torch.compile."""

    only: tuple[Literal["memory", "time"], ...] = ("memory", "time")
    """Tables."""
    programs: tuple[str, ...] = tuple(PROGRAMS)
    """Names of programs."""
    scale: float = 1.0
    """A factor for the sizes of the programs."""
    json: Path | None = None
    """A file for the figures."""

    def check(self) -> None:
        """Raise ValueError for options that cannot be measured."""
        if unknown := [name for name in self.programs if name not in PROGRAMS]:
            raise ValueError(f"--programs {', '.join(unknown)}; wanted some of {', '.join(PROGRAMS)}")
        if not 0 < self.scale <= 16:
            raise ValueError(f"--scale is {self.scale}; wanted a factor above 0, at most 16")
        report.check_writable(self.json)

    def size(self, size: int) -> int:
        """Return the size of a program."""
        return max(1, round(self.scale * size))


def memory_row(name: str, found: memory.Growth) -> Row:
    """Judge the growth of a program."""
    figures = dict(zip(MEMORY_COLUMNS, (found.predicted / MIB, *(n / MIB for n in found.calls)), strict=True))
    return Row(name, "MiB", figures, [at_most("of the prediction", max(found.calls) / found.predicted, memory.MOST)])


def time_rows(name: str, found: times.Times) -> list[Row]:
    """Judge a program's calls, and its first one: fquant's own graph, or Inductor's, is as fast as torch.compile."""
    ours, compiled, theirs = (found.call[each] for each in (times.OURS, times.INDUCTOR, times.THEIRS))
    best = Wanted("as fast as torch.compile", min(ours, compiled) <= theirs)
    first = at_most("of torch.compile's", found.first[times.OURS] / found.first[times.THEIRS], FIRST)
    scaled = [{each: 1e3 * seconds[each] for each in TIME_COLUMNS} for seconds in (found.call, found.first)]
    return [Row(name, "ms", scaled[0], [best]), Row(f"{name}, first", "ms", scaled[1], [first])]


def run(options: Options) -> None:
    """Measure, print the tables, write the figures."""
    timed = [name for name in options.programs if PROGRAMS[name].time is not None]
    tasks = [("memory", name) for name in options.programs if "memory" in options.only]
    tasks += [("time", name) for name in timed if "time" in options.only]
    rows: dict[str, list[Row]] = {kind: [] for kind in options.only}
    with timing.others() as others, report.progress() as bar:
        task = bar.add_task("programs", total=len(tasks))
        for kind, name in tasks:
            program = PROGRAMS[name]
            if kind == "memory":
                rows[kind].append(memory_row(name, memory.measure(name, options.size(program.memory))))
            else:
                rows[kind] += time_rows(name, times.measure(name, options.size(program.time or 0)))
            bar.advance(task)
    out = report.console()
    for kind, columns in (("memory", MEMORY_COLUMNS), ("time", TIME_COLUMNS)):
        if rows.get(kind):
            out.print(report.table(rows[kind], list(columns)))
    about = {"machine": timing.machine(), "torch": torch.__version__, "others": others()}
    out.print(f"{about['machine']}, torch {torch.__version__}; times on one thread", highlight=False)
    if options.json is not None:
        found = {kind: [row._asdict() | {"wanted": [one._asdict() for one in row.wanted]} for row in each]
                 for kind, each in rows.items()}  # fmt: skip
        report.write(options.json, {**about, "scale": options.scale, "rows": found})


def main(args: list[str] | None = None) -> int:
    """Run the command line ``args``; return 0, or 2 for bad options, which one line names."""
    options = tyro.cli(Options, args=sys.argv[1:] if args is None else args, prog="python -m tests.bench.programs")
    try:
        options.check()
    except ValueError as error:
        print(f"programs: {error}", file=sys.stderr)
        return 2
    run(options)
    return 0
