"""The tables of a plan, 80 columns wide: memory, time at least, time as predicted, and where it goes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from fquant.compile.roofline import Device

if TYPE_CHECKING:
    from .cli import Options, Row

GIB = 2**30
MEMORY = {"base": "blue", "adapters": "magenta", "moments": "yellow", "gathered": "cyan", "activations": "green"}
TIME = {  # kinds of fquant.compile.roofline and of examples/common/pricing.py: title and colour
    "product": ("products", "blue"),
    "thin product": ("thin products", "bright_blue"),
    "decode": ("decoding", "cyan"),
    "attention": ("attention", "magenta"),
    "norm": ("norms", "bright_green"),
    "elementwise": ("elementwise", "green"),
    "loss": ("loss", "yellow"),
    "optimiser": ("optimiser", "bright_yellow"),
    "launch": ("launches", "white"),
    "collective": ("collectives, exposed", "red"),
    "copy": ("host copies, exposed", "bright_red"),
}
WIDTH = 48  # of a bar, in characters
ACROSS = 4  # meshes beside each other


def show(console: Console, options: Options, device: Device, rows: list[Row]) -> None:
    """Print the tables and an answer."""
    is_full = options.train == "full"
    trained = "all weights" if is_full else f"{options.format} base, rank {options.rank} adapters of {options.targets}"
    console.print(
        f"{options.model}, {trained}\n"
        f"{options.batch} x {options.seq} tokens a rank, {options.dtype} stream, {options.checkpoint} checkpointing\n",
        highlight=False,
    )
    found = [
        memory(rows, {"adapters": "trained"} if is_full else {}),
        memory_bars(options, device, rows),
        least(rows),
        predicted(options, device, rows),
    ]
    found += [offloaded(rows)] if any(x.price.host for x in rows) else []
    found += [kinds(rows[at : at + ACROSS]) for at in range(0, len(rows), ACROSS)]
    console.print(*found, answer(options, rows), highlight=False)


def memory(rows: list[Row], names: Mapping[str, str]) -> Table:
    """Return the bytes by kind, of which some have other names."""
    names = {"moments": "optimiser", **names}
    out = table("GiB of a rank at its peak", "mesh", *(names.get(kind, kind) for kind in MEMORY), "peak")
    for column, colour in zip(out.columns[1:], MEMORY.values(), strict=False):
        column.style = colour
    for x in rows:
        sizes = (getattr(x.price, kind) for kind in MEMORY)
        out.add_row(x.mesh, *(f"{size / GIB:.2f}" for size in sizes), f"{x.price.peak / GIB:.2f}")
    return out


def memory_bars(options: Options, device: Device, rows: list[Row]) -> Table:
    """Return the device's memory as bars, and what fits."""
    out = table(f"Of the {device.memory / GIB:.1f} GiB of {options.device}", "mesh", "", "%", "")
    for x in rows:
        verdict = Text("fits", "bold green") if x.fits else Text("too much", "bold red")
        parts = {colour: getattr(x.price, kind) for kind, colour in MEMORY.items()}
        out.add_row(x.mesh, bar(parts, device.memory), f"{100 * x.price.peak / device.memory:.0f}", verdict)
    return out


def least(rows: list[Row]) -> Table:
    """Return the least seconds of a step, and what they are of."""
    names = ("TFLOP", "moved", "sent", "compute", "memory", "wire", "limit", "tokens/s")
    out = table("A step of a rank, the seconds it takes at least, tokens of all", "mesh", *names)
    for x in rows:
        p, b = x.price, x.bound
        moved, sent = f"{(p.read + p.written) / 1e9:,.0f}", f"{p.sent / 1e9:,.1f}"
        seconds = [f"{s:.3f}" for s in (b.compute, b.memory, b.wire)]
        tokens = f"{x.tokens_per_second_bound:,.0f}"
        out.add_row(x.mesh, f"{p.flops / 1e12:,.0f}", moved, sent, *seconds, b.limit, tokens)
    return out


def predicted(options: Options, device: Device, rows: list[Row]) -> Table:
    """Return the predicted seconds as bars by kind, and the share of the limit."""
    out = table(f"A step as predicted on {options.device}", "mesh", "", "s", "tokens/s", "of limit")
    most = max(x.seconds for x in rows)
    for x in rows:
        parts = {colour: by_kind(x)[kind] for kind, (_, colour) in TIME.items()}
        figures = f"{x.seconds:.3f}", f"{x.tokens_per_second:,.0f}", f"{100 * x.share:.0f} %"
        out.add_row(x.mesh, bar(parts, most, WIDTH // 2, free=" "), *figures)
    return out


def offloaded(rows: list[Row]) -> Table:
    """Return what the host holds, what travels, the milliseconds of the link, and how many of them other work hides."""
    names = ("GiB", "fetched", "stashed", "link ms", "exposed", "hidden")
    out = table("The host's memory for a rank, GB of a step, and the link", "mesh", *names)
    for x in rows:
        p, time = x.price, x.price.predicted
        assert time is not None
        sizes = f"{p.host / GIB:.2f}", f"{p.fetched / 1e9:.2f}", f"{p.stashed / 1e9:.2f}"
        spent = f"{1e3 * time.copying:,.1f}", f"{1e3 * by_kind(x)['copy']:,.1f}", f"{100 * time.overlapped:.0f} %"
        out.add_row(x.mesh, *sizes, *spent)
    return out


def kinds(rows: list[Row]) -> Table:
    """Return the milliseconds of each kind that any mesh has."""
    out = table("Where its time goes, ms", "", *(x.mesh for x in rows))
    for kind, (title, colour) in TIME.items():
        times = [by_kind(x)[kind] for x in rows]
        if any(times):
            out.add_row(Text(title, colour), *(f"{1e3 * time:,.1f}" for time in times))
    return out


def by_kind(x: Row) -> Mapping[str, float]:
    """Return the seconds of every kind, 0 of those that a step does not have."""
    assert x.price.predicted is not None
    return dict.fromkeys(TIME, 0.0) | dict(x.price.predicted.by_kind)


def table(title: str, *names: str) -> Table:
    """Return an empty table; all columns but the first are numbers."""
    words = names[0], "", "limit"
    columns = (Column(name, justify="left" if name in words else "right", no_wrap=True) for name in names)
    return Table(*columns, title=title, title_justify="left", box=SIMPLE_HEAD, pad_edge=False, collapse_padding=True)


def bar(parts: Mapping[str, float], whole: float, width: int = WIDTH, free: str = "·") -> Text:
    """Return a bar of the ``whole``: a stripe for each part, by colour, and what is ``free``."""
    out, edge, used = Text(), 0, 0.0
    for colour, size in parts.items():
        used += size
        until = min(width, round(width * used / whole))
        out.append("█" * (until - edge), colour)
        edge = until
    return out.append(free * (width - edge), "dim")


def answer(options: Options, rows: list[Row]) -> str:
    """Return a sentence that names the smallest mesh that fits."""
    fitting = [x for x in rows if x.fits]
    if not fitting:
        smallest = min(rows, key=lambda x: x.price.peak)
        most = max(MEMORY, key=lambda kind: getattr(smallest.price, kind))
        fix = _fix(options) if most == "base" else "use a smaller --batch or --seq"
        none = "None of these fits" if len(rows) > 1 else "It does not fit"
        return f"{none}: {smallest.mesh} needs {smallest.price.peak / GIB:.2f} GiB a rank; {fix}"
    best = min(fitting, key=lambda x: (x.ranks, x.seconds))
    found = "Smallest that fits" if len(rows) > 1 else "It fits"
    size = f"{best.price.peak / GIB:.2f} GiB a rank, at its peak in the {best.price.phase}"
    return f"{found}: {best.mesh}, {best.ranks} x {options.device}; {size}"


def _fix(options: Options) -> str:
    return "use more fsdp" if options.offload else "use more fsdp, or --offload block"
