"""Tables of a benchmark: rows of figures, a column for each contestant, beside the bounds of ours.

    row = Row("linear-512", "ms", {"fquant": 41.0, "bf16": 39.0}, [at_most("of bf16", 41 / 39, 1.06)])
    console().print(table([row], ["fquant", "bf16"]))
    write(path, figures)

The first contestant of a row is ours. In brackets behind the time of another is ours over it: below 1, ours is faster.
"""

import json
from pathlib import Path
from typing import Any, NamedTuple

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from fquant.io.safetensors import replacing

WIDTH = 150  # columns of a table that is not written to a terminal


class Wanted(NamedTuple):
    """A judged bound: ``got`` of ``what`` should be ``at_most`` so much; without figures, ``what`` should hold."""

    what: str
    met: bool
    got: float | None = None
    at_most: float | None = None


class Row(NamedTuple):
    """A row: the figure of each contestant, and the bounds of the first."""

    name: str
    unit: str
    figures: dict[str, float]
    wanted: list[Wanted]


def at_most(what: str, got: float, most: float) -> Wanted:
    """Judge ``got`` against the bound ``most``."""
    return Wanted(what, got <= most, got, most)


def table(rows: list[Row], columns: list[str], compare: bool = True) -> Table:
    """Return the rows with a column for each of ``columns``; ``compare`` puts ratios behind times."""
    out = Table(box=SIMPLE_HEAD, pad_edge=False)
    out.add_column("", no_wrap=True)
    for name in columns:
        out.add_column(name, justify="right")
    judged = any(row.wanted for row in rows)
    if judged:
        out.add_column(f"wanted of {columns[0]}")
    for row in rows:
        cells = [_cell(row, name, compare) for name in columns]
        verdicts = ["\n".join(map(verdict, row.wanted))] if judged else []
        out.add_row(f"{row.name}, {row.unit}", *cells, *verdicts)
    return out


def _cell(row: Row, name: str, compare: bool) -> str:
    if name not in row.figures:
        return ""
    (_, ours), figure = next(iter(row.figures.items())), row.figures[name]
    text = f"{figure:.3f}" if figure < 10 else f"{figure:.1f}"
    if not compare or row.unit != "ms" or name == next(iter(row.figures)):
        return text
    return f"{text} ({ours / figure:.2f})"


def verdict(wanted: Wanted) -> str:
    """Format a bound, its figure and its verdict as markup."""
    mark = "[green]met[/]" if wanted.met else "[bold red]missed[/]"
    if wanted.got is None:
        return f"{wanted.what}: {mark}"
    return f"{wanted.got:.3g} {wanted.what}, at most {wanted.at_most:g}: {mark}"


def console() -> Console:
    """Return a console on stdout, wide enough for tables if it is no terminal."""
    out = Console()
    return out if out.is_terminal else Console(width=WIDTH)


def progress() -> Progress:
    """Return a bar on stderr, shown if that is a terminal."""
    err = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    return Progress(*columns, console=err, disable=not err.is_terminal, transient=True)


def check_writable(path: Path | None) -> None:
    """Raise ValueError for a file that cannot be written, before anything is measured."""
    if path is not None and (path.is_dir() or not path.absolute().parent.is_dir()):
        raise ValueError(f"--json {path}: wanted a file, in a folder that exists")


def write(path: Path, figures: dict[str, Any]) -> None:
    """Write ``figures`` as JSON to ``path``, all or nothing; an existing file is replaced."""
    with replacing(path) as file:
        file.write((json.dumps(figures, indent=2, allow_nan=False, default=str) + "\n").encode())
