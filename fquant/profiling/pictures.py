"""Pictures of a profile: memory over the step, coloured by what holds it, and a trace of its events.

The trace is a file of JSON in the format of Chrome's trace viewer ("Trace Event Format", Google 2016), which
https://ui.perfetto.dev opens: a row for computation, one for collectives, one for copies, and a counter of live bytes.
"""

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ..io.safetensors import replacing
from .record import COLLECTIVES, COMPUTE, COPIES, Buffer, Profile, live, peak, share
from .report import short

MOST = 9  # holders with a colour of their own
ARGUMENT, OTHERS = "argument ", "others"
TRACKS = (COMPUTE, COLLECTIVES, COPIES)
COLOURS = (
    "#1f4e79", "#6c9bc9", "#3aa6a6", "#8e5ea2", "#9bc37a", "#5b8c3a", "#e0b73f", "#b98a1e", "#c1592b", "#b0b0b0",
)  # fmt: skip


def memory(found: Profile, path: Path) -> Path:
    """Write a PNG of the live bytes over the time of the step, by what holds them, and return its path.

    An argument is held under the name of the parameter, a result under the line that made it. The largest at the peak
    have a colour of their own, arguments below results.
    """
    import matplotlib  # late, because it takes memory of every rank
    from matplotlib.figure import Figure

    times, at = _times(found), peak(found)
    sizes = Counter[str]()
    for buffer in found.buffers:
        sizes[holder(buffer)] += buffer.nbytes if buffer.first <= at <= buffer.last else 0
    large = [name for name, nbytes in sizes.most_common(MOST) if 100 * nbytes > found.cost.peak]
    names = sorted(large, key=lambda name: not name.startswith(ARGUMENT))
    rows = {name: [0.0] * (len(times) + 1) for name in (*names, OTHERS)}
    for buffer in found.buffers:
        row = rows[holder(buffer) if holder(buffer) in rows else OTHERS]
        row[buffer.first] += buffer.nbytes / 2**20
        row[min(buffer.last, len(times) - 1) + 1] -= buffer.nbytes / 2**20
    for row in rows.values():
        for place in range(1, len(row)):
            row[place] += row[place - 1]
    figure = Figure(figsize=(10, 5.5), dpi=110)
    axes = figure.subplots()
    stacked = [row[:-1] for row in rows.values()]
    labels = [f"{name}, {sizes[name] / 2**20:,.0f} MiB" if name in names else name for name in rows]
    areas = axes.stackplot([1e3 * t for t in times], stacked, colors=COLOURS, step="post", linewidth=0)
    axes.axvline(1e3 * times[at], color="#444444", linewidth=0.6, linestyle=":")
    axes.set(xlabel="ms of the step", ylabel="MiB", xlim=(0, 1e3 * times[-1] or 1))
    axes.set_title(
        f"{found.name} on {found.device}: {max(live(found)) / 2**20:,.0f} MiB at most", loc="left", fontsize=10
    )
    axes.spines[["top", "right"]].set_visible(False)
    # Names are given here, because those of artists that begin with an underscore have no entry.
    axes.legend(areas, labels, frameon=False, fontsize=7, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    figure.tight_layout()
    with replacing(path) as file, matplotlib.rc_context({"savefig.dpi": "figure"}):
        figure.savefig(file, format="png")
    return path


def holder(buffer: Buffer) -> str:
    """Return what holds a buffer: the parameter of an argument, or the line that made a result."""
    return short(buffer.line) if buffer.line else f"{ARGUMENT}{buffer.by.partition('.')[0].partition('[')[0]}"


def trace(found: Profile, path: Path) -> Path:
    """Write the trace, and return its path."""
    with replacing(path) as file:
        file.write(json.dumps({"traceEvents": [*_entries(found)], "displayTimeUnit": "ms"}).encode())
    return path


def _entries(found: Profile) -> Iterator[dict[str, Any]]:
    """Yield the entries of the trace; times are in microseconds."""
    here = {"pid": 0}
    yield here | {"ph": "M", "name": "process_name", "args": {"name": f"{found.name} on {found.device}"}}
    for i, track in enumerate(TRACKS):
        yield here | {"ph": "M", "name": "thread_name", "tid": i, "args": {"name": track}}
    for event in found.events:
        reached = share(event.roofline, event.seconds)
        about = {"line": event.line, "backward": event.backward, "kind": event.kind}
        about |= {} if reached is None else {"roofline": round(reached, 3)}
        span = {"ts": 1e6 * event.start, "dur": 1e6 * event.seconds, "tid": TRACKS.index(event.track)}
        yield here | span | {"ph": "X", "name": event.op, "cat": event.kind, "args": about | {"node": event.node}}
    for time, nbytes in zip(_times(found), live(found), strict=False):
        yield here | {"ph": "C", "name": "live bytes", "ts": 1e6 * time, "args": {"bytes": nbytes}}


def _times(found: Profile) -> list[float]:
    """Return the time at which each node of the graph begins, by its index, and the end of the last."""
    starts = {event.place: event.start for event in found.events if event.track == COMPUTE}
    now, out = 0.0, list[float]()
    for place in range(len(live(found))):
        now = starts.get(place, now)
        out.append(now)
    ends = [event.start + event.seconds for event in found.events]
    return out[:-1] + [max(ends, default=now)] if out else [0.0]
