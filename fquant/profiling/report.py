"""The table of a profile: a row for each line of the source, those that take most time first."""

from collections import defaultdict
from io import StringIO
from pathlib import Path

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from .record import COMPUTE, Profile, peak, share

ROWS = 20


def table(found: Profile, rows: int = ROWS) -> Table:
    """Return the table of the ``rows`` lines that take most time, one for the rest, and one for the whole.

    ``roofline`` is the time that arithmetic or memory traffic needs over the time taken, and empty if that cannot
    be right (``record.share``). ``held`` are the bytes, of results that the line made, which are live at the peak of
    the step's memory.
    """
    time, limit, calls, held = (defaultdict[tuple[str, bool], float](float) for _ in range(4))
    for event in found.events:
        if event.track == COMPUTE:
            key = event.line, event.backward
            time[key] += event.seconds
            limit[key] += event.roofline
            calls[key] += 1
    at = peak(found)
    backward = {event.place: event.backward for event in found.events}
    for buffer in found.buffers:
        if buffer.line and buffer.first <= at <= buffer.last:
            held[buffer.line, backward.get(buffer.first, False)] += buffer.nbytes
    total = sum(time.values())
    kind = "measured" if found.is_measured else "predicted"
    title = (
        f"{found.name} on {found.device}, {kind}: {1e3 * found.seconds:,.2f} ms, {_mib(found.cost.peak)} MiB at most"
    )
    out = Table(title=title, title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
    out.add_column("line")
    for name in ("calls", "ms", "%", "roofline", "held, MiB"):
        out.add_column(name, justify="right")

    def add(name: str, keys: list[tuple[str, bool]]) -> None:
        spent, least = sum(time[key] for key in keys), sum(limit[key] for key in keys)
        part, reached = (f"{100 * spent / total:.1f}" if total else ""), share(least, spent)
        of = "" if reached is None else f"{reached:.2f}"
        bytes_held = sum(held[key] for key in keys)
        out.add_row(name, f"{sum(calls[key] for key in keys):.0f}", f"{1e3 * spent:,.2f}", part, of, _mib(bytes_held))

    ordered = sorted({*time, *held}, key=lambda key: -time[key])
    for key in ordered[:rows]:
        add(short(key[0]) + (", backward" if key[1] else ""), [key])
    if len(ordered) > rows:
        add(f"{len(ordered) - rows} more lines", ordered[rows:])
    out.add_section()
    add("all nodes", ordered)
    return out


def text(found: Profile, rows: int = ROWS) -> str:
    """Return the table as plain text."""
    console = Console(file=StringIO(), width=140, no_color=True)
    console.print(table(found, rows))
    return console.file.getvalue()  # type: ignore[attr-defined]


def short(line: str) -> str:
    """Return ``name (file:line)`` with the last two parts of the file's path."""
    name, opened, rest = line.partition(" (")
    path, _, number = rest.rstrip(")").rpartition(":")
    return f"{name} ({'/'.join(Path(path).parts[-2:])}:{number})" if opened and number.isdigit() else line


def _mib(nbytes: float) -> str:
    return f"{nbytes / 2**20:,.1f}"
