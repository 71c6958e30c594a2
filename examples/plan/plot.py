"""The picture of a plan: time and memory of each mesh as stacked bars, by kind."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fquant.compile.roofline import Device

from ..common.progress import draw
from .tables import GIB, MEMORY, TIME, by_kind

if TYPE_CHECKING:
    from .cli import Row

TIME_COLOURS = (
    "#1f4e79", "#6c9bc9", "#3aa6a6", "#8e5ea2", "#9bc37a", "#5b8c3a", "#e0b73f", "#b98a1e", "#9a9a9a", "#c1592b",
    "#e39a78",
)  # fmt: skip
MEMORY_COLOURS = "#1f4e79", "#8e5ea2", "#e0b73f", "#3aa6a6", "#5b8c3a"


def draw_rows(path: Path, title: str, device: Device, rows: list[Row]) -> Path:
    """Write a PNG with two panels, milliseconds and GiB of a rank, and return its path."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 1.9 + 0.5 * len(rows)), dpi=100)
    left, right = figure.subplots(1, 2, sharey=True)
    meshes = [x.mesh for x in rows]
    times = {name: [1e3 * by_kind(x)[kind] for x in rows] for kind, (name, _) in TIME.items()}
    sizes = {kind: [getattr(x.price, kind) / GIB for x in rows] for kind in MEMORY}
    stack(left, meshes, times, TIME_COLOURS)
    stack(right, meshes, sizes, MEMORY_COLOURS)
    for i, x in enumerate(rows):
        left.text(
            1e3 * x.seconds, i, f" {x.tokens_per_second:,.0f} tok/s, {100 * x.share:.0f} %", va="center", fontsize=8
        )
        right.text(x.price.peak / GIB, i, f" {x.price.peak / GIB:.1f}", va="center", fontsize=8)
    left.set(xlabel="predicted ms of a step; % of the limit", xlim=(0, 1.45e3 * max(x.seconds for x in rows)))
    right.set(xlabel=f"GiB of a rank at its peak, of {device.memory / GIB:.0f}")
    right.set_xlim(0, 1.15 * max(x.price.peak for x in rows) / GIB)
    left.invert_yaxis()
    left.set_title(title, loc="left", fontsize=10)
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False, fontsize=7, ncols=3, loc="upper center", bbox_to_anchor=(0.5, -0.32))
    return draw(figure, path)


def stack(axes: Any, names: list[str], parts: Mapping[str, list[float]], colours: tuple[str, ...]) -> None:
    """Draw a horizontal bar for each name: a stripe for each part that any of them has."""
    before = [0.0] * len(names)
    for (part, sizes), colour in zip(parts.items(), colours, strict=True):
        if any(sizes):
            axes.barh(names, sizes, left=before, color=colour, label=part, height=0.6)
            before = [a + b for a, b in zip(before, sizes, strict=True)]
