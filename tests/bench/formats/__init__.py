"""Formats compared: their errors, and the speed of computing and training in them, in one run.

    python -m tests.bench.formats                       # errors at 1024 x 1024, speeds at 4096 x 4096: minutes
    python -m tests.bench.formats --only errors --dim 4096 --json f.json

``errors.py`` has the table of errors, ``speeds.py`` the timed rows and their bounds. Contestants take turns, and
figures are ratios of medians. The exit status is 0 if bounds are met or missed, or 2 for bad options.
"""

import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

import tyro
from rich.box import SIMPLE_HEAD
from rich.table import Table

from tests.bench import report
from tests.bench.report import Row

from . import errors, speeds


@dataclass(frozen=True)
class Options:
    """Compare formats: errors of weights and of outputs, and the speed of computing and training in them."""

    only: Literal["errors", "speeds", "both"] = "both"
    """What to measure."""
    dim: int = 1024
    """Rows and columns of a weight whose errors are measured."""
    tokens: int = 2048
    """Inputs to measure errors on, and as many others for importance."""
    width: int = 4096
    """Rows and columns of a weight that is timed."""
    rows: int = 512
    """Rows of x that are timed."""
    repeats: int = 5
    """Samples of each timed call, at least."""
    seed: int = 0
    """Of all that is random."""
    json: Path | None = None
    """File to write the figures to."""

    def check(self) -> None:
        """Raise ValueError for options that cannot be measured."""
        for name in ("dim", "tokens", "width", "rows", "repeats"):
            if getattr(self, name) < 1:
                raise ValueError(f"--{name} is {getattr(self, name)}; wanted at least 1")
        if self.width % 128:
            raise ValueError(f"--width is {self.width}; wanted a multiple of 128")
        report.check_writable(self.json)


def _errors(options: Options) -> list[Row]:
    rows: list[Row] = []
    with report.progress() as bar:
        task = bar.add_task("errors", total=len(errors.WEIGHTS) * len(errors.COLUMNS))
        done = lambda name: bar.update(task, advance=1, description=name)
        for kind in errors.WEIGHTS:
            rows += errors.measure(kind, options.dim, options.tokens, options.seed, done)
    return rows


def _table(rows: list[Row]) -> Table:
    """Return a row for each format, and a column for each of ``rows``."""
    out = Table(box=SIMPLE_HEAD, pad_edge=False)
    out.add_column("format", no_wrap=True)
    for row in rows:
        out.add_column(f"{row.name}, {row.unit}", justify="right")
    for name in errors.COLUMNS:
        out.add_row(name, *(f"{row.figures[name]:.3f}" for row in rows))
    return out


def run(options: Options) -> None:
    """Measure, print the tables, write the figures."""
    out, rows = report.console(), list[Row]()
    title = f"weights {options.dim} x {options.dim}, {options.tokens} inputs, seed {options.seed}"
    if options.only != "speeds":
        rows += (found := _errors(options))
        out.print(title, highlight=False, markup=False, soft_wrap=True)
        out.print(_table(found))
    if options.only != "errors":
        for columns, found in speeds.measure(options.rows, options.width, options.repeats):
            rows += found
            out.print(report.table(found, columns))
    if options.json is not None:
        figures = {"title": title, "options": asdict(options), "rows": [row._asdict() for row in rows]}
        report.write(options.json, figures)


def main(args: list[str] | None = None) -> int:
    """Run the command line ``args``; return 0, or 2 for bad options, which one line names."""
    options = tyro.cli(Options, args=sys.argv[1:] if args is None else args, prog="python -m tests.bench.formats")
    try:
        options.check()
    except ValueError as error:
        print(f"formats: {error}", file=sys.stderr)
        return 2
    run(options)
    return 0
