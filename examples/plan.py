"""Predict memory, traffic and time of a training step of examples.qlora, without weights or GPUs.

    python -m examples.plan --model llama3-70b --mesh fsdp=1 fsdp=2 fsdp=4 fsdp=8 --device h100
    python -m examples.plan --model qwen3-8b --device rtx4090 --seq 4096 --batch 2
    python -m examples.plan --model DIR --mesh dp=2,fsdp=4 --json

The step is traced, not estimated (examples/common/pricing.py). A time is a lower bound for the device: the longest of
arithmetic, memory traffic and wire, as if they overlapped perfectly.

A device is four figures a rank. Memory is the figure of ``nvidia-smi`` (``rocm-smi`` for the MI300X). Rates are the
makers' peaks: dense bfloat16 with float32 sums, and bytes in one direction, half of NVLink's advertised figure. Sources
are NVIDIA's data sheets, its white papers on GA102, AD102 and Blackwell, and AMD's data sheet of the MI300X.
"""

import dataclasses
import json
import math
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Column, Table
from rich.text import Text

from fquant import lazy
from models import hf
from models.config import Config
from models.presets import PRESETS

from .common.command_line import (
    DTYPES,
    FormatName,
    axes_in,
    check,
    check_least,
    command_line,
    parse_format,
    parse_targets,
    quantised,
)  # fmt: skip
from .common.pricing import Job, Price, price
from .common.training_step import Checkpoint

GIB, MIB = 2**30, 2**20
KINDS = {"base": "blue", "adapters": "magenta", "moments": "yellow", "gathered": "cyan", "activations": "green"}
WIDTH = 48  # of a bar, in characters


@dataclass(frozen=True)
class Device:
    """Bytes of memory, bytes a second from it, FLOPs a second, bytes a second to a neighbour."""

    memory: int
    bandwidth: float
    flops: float
    link: float


PCIE4, PCIE5 = 32e9, 64e9  # of 16 lanes

DEVICES: dict[str, Device] = {
    "b200": Device(183359 * MIB, 8.0e12, 2250e12, 900e9),
    "h200": Device(143771 * MIB, 4.8e12, 989e12, 450e9),
    "h100": Device(81559 * MIB, 3.35e12, 989e12, 450e9),
    "a100-80": Device(81920 * MIB, 2.039e12, 312e12, 300e9),
    "a100-40": Device(40960 * MIB, 1.555e12, 312e12, 300e9),
    "l40s": Device(46068 * MIB, 864e9, 362e12, PCIE4),
    "a10": Device(23028 * MIB, 600e9, 125e12, PCIE4),
    "l4": Device(23034 * MIB, 300e9, 121e12, PCIE4),
    "rtx5090": Device(32607 * MIB, 1.792e12, 209.5e12, PCIE5),
    "rtx4090": Device(24564 * MIB, 1.008e12, 165.2e12, PCIE4),
    "rtx3090": Device(24576 * MIB, 936e9, 71e12, PCIE4),
    "mi300x": Device(196592 * MIB, 5.3e12, 1307e12, 448e9),
}


@dataclass(frozen=True)
class Options:
    """Predict memory, traffic and time of a step of examples.qlora from shapes alone, on machines you need not have.

    The smallest machine that trains Llama 3 70B: --model llama3-70b --mesh fsdp=1 fsdp=2 fsdp=4 fsdp=8 What one RTX
    4090 can do: --model qwen3-8b --device rtx4090 --seq 4096 --batch 2
    """

    model: str
    """A preset (llama3-8b, -70b, -405b; qwen3-0.6b, -1.7b, -4b, -8b, -14b, -32b), or a folder with a config.json."""
    mesh: tuple[str, ...] = ("fsdp=1",)
    """One or more, as in fsdp=8 or dp=2,fsdp=4: dp replicates the base, fsdp splits it; a row each."""
    device: str = "h200"
    """What a rank runs on: b200, h200, h100, a100-80, a100-40, l40s, a10, l4, rtx5090, rtx4090, rtx3090, mi300x."""
    format: FormatName = "nf4_dq"
    """How base weights are packed; none: left dense. aq_2x8 and aq_3x8 add 16 and 24 KiB of vectors to each weight."""
    block: int | None = None
    """Weights that share a scale; default: the format's own, of int8, aq_2x8 and aq_3x8 a row."""
    rank: int = 16
    """Rank of the adapters."""
    targets: str = "all"
    """Weights to adapt, comma-separated, of q k v o gate up down (of a Phi-3: qkv o gate_up down); or all of them."""
    seq: int = 2048
    """Tokens in a row."""
    batch: int = 1
    """Rows in a micro-batch, of each rank (examples.qlora counts those of all)."""
    accumulate: int = 1
    """Micro-batches in a step."""
    checkpoint: Checkpoint = "full"
    """Activations kept for the backward: full recomputes each block, selective recomputes cheap operations, none keeps
    all (examples.qlora takes the fastest that fits)."""
    dtype: Literal["bf16", "f16", "f32"] = "bf16"
    """Of the residual stream, and so of all products with the base."""
    reserve: float = 1.0
    """GiB of the device that are not for tensors: the driver, libraries, fragmentation."""
    link: float | None = None
    """GB/s that a rank can send; default: the device's own link, which between machines the network replaces."""
    json: bool = False
    """Print a line of JSON for each mesh instead of tables."""

    def job(self) -> Job:
        """Return the job to price; raise ValueError for options out of range."""
        check_least(self, dict.fromkeys(("rank", "seq", "batch", "accumulate"), 1))
        cfg, weights, base = self.found()
        fmt = parse_format(self.format, self.block)
        check(cfg, fmt, self.seq, self.model)
        targets = parse_targets(self.targets, cfg)
        sizes = (self.rank, self.batch, self.seq, weights, DTYPES[self.dtype], self.accumulate)
        return Job(cfg, fmt, targets, *sizes, self.checkpoint, base)

    def found(self) -> tuple[Config, torch.dtype, Any]:
        """Return the config of the model, the dtype of its weights, and its base if the folder holds it quantised."""
        if self.model in PRESETS:
            return PRESETS[self.model], torch.bfloat16, None
        if not (Path(self.model) / hf.CONFIG).is_file():
            fix = f"wanted one or the other, presets are {', '.join(PRESETS)}"
            raise ValueError(f"--model {self.model}: no preset, and no folder with a {hf.CONFIG}; {fix}")
        cfg = hf.read_config(self.model)
        raw = json.loads((Path(self.model) / hf.CONFIG).read_bytes())
        name = raw.get("dtype") or raw.get("torch_dtype") or "bfloat16"
        known = {str(dtype).removeprefix("torch."): dtype for dtype in DTYPES.values()}
        if name not in known:
            raise ValueError(f"{self.model}: torch_dtype = {name!r}, want one of {', '.join(known)}; correct it")
        if raw.get("quantization_config") is None:
            return cfg, known[name], None
        base = lazy.like(hf.lazy(self.model)[1])
        quantised(base, parse_format(self.format, self.block))  # refuses to quantise it again
        return cfg, known[name], base

    def hardware(self) -> Device:
        """Return the device, with the link of --link if given."""
        if self.device not in DEVICES:
            raise ValueError(f"--device {self.device} is unknown; wanted one of {', '.join(DEVICES)}")
        device = DEVICES[self.device]
        if not 0 <= self.reserve * GIB < device.memory:
            raise ValueError(f"--reserve is {self.reserve}; wanted 0 to the {device.memory / GIB:.0f} GiB there are")
        if self.link is not None and not 0 < self.link < math.inf:
            raise ValueError(f"--link is {self.link}; wanted GB/s above 0")
        return device if self.link is None else dataclasses.replace(device, link=self.link * 1e9)


@dataclass(frozen=True)
class Bound:
    """Lower bounds of a step in seconds: arithmetic, memory traffic and sends, which may overlap."""

    compute: float
    memory: float
    wire: float

    @property
    def seconds(self) -> float:
        """Return the longest of the three."""
        return max(self.compute, self.memory, self.wire)

    @property
    def limit(self) -> str:
        """Return the name of the longest."""
        return next(name for name in ("compute", "memory", "wire") if getattr(self, name) == self.seconds)


def bound(device: Device, flops: int, moved: int, sent: int) -> Bound:
    """Return the times of ``device`` for ``flops`` FLOPs, ``moved`` bytes of memory traffic and ``sent`` bytes."""
    return Bound(flops / device.flops, moved / device.bandwidth, sent / device.link)


@dataclass(frozen=True)
class Row:
    """The figures of one mesh."""

    mesh: str
    ranks: int
    price: Price
    bound: Bound
    fits: bool
    tokens_per_second: float  # of all ranks, upper bound


def main(args: list[str] | None = None) -> int:
    """Run the command line ``args`` and return its exit status: 0, or 2 for bad input, which one line names."""
    try:
        options = command_line(Options("llama3-8b"), args, "python -m examples.plan")
        job, device = options.job(), options.hardware()
        meshes = {mesh: axes_in(mesh) for mesh in options.mesh}
    except ValueError as error:
        print(f"plan: {error}", file=sys.stderr)
        return 2
    console = Console()
    rows = []
    columns = TextColumn("tracing [bold]{task.fields[mesh]}[/]"), BarColumn(), MofNCompleteColumn()
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("", total=2 * len(meshes), mesh="")
        for mesh, axes in meshes.items():
            progress.update(task, mesh=mesh)
            found, ranks = price(job, axes, lambda: progress.advance(task)), math.prod(axes.values())
            least = bound(device, found.flops, found.read + found.written, found.sent)
            fits = found.peak + options.reserve * GIB <= device.memory
            tokens = ranks * options.batch * options.accumulate * options.seq
            rows.append(Row(mesh, ranks, found, least, fits, tokens / least.seconds))
    if options.json:
        print(*(json.dumps(dataclasses.asdict(one)) for one in rows), sep="\n")
    else:
        show(console, options, device, rows)
    return 0


def show(console: Console, options: Options, device: Device, rows: list[Row]) -> None:
    """Print three tables and an answer, 80 columns wide."""
    kinds = (kind.replace("moments", "optimiser") for kind in KINDS)
    memory = table("GiB of a rank at its peak", "mesh", *kinds, "peak")
    for column, colour in zip(memory.columns[1:], KINDS.values(), strict=False):
        column.style = colour
    bars = table(f"Of the {device.memory / GIB:.1f} GiB of {options.device}", "mesh", "", "%", "")
    names = ("TFLOP", "moved", "sent", "compute", "memory", "wire", "limit", "tokens/s")
    time = table("A step of a rank, the seconds it takes at least, tokens of all", "mesh", *names)
    for x in rows:
        p, b = x.price, x.bound
        memory.add_row(x.mesh, *(f"{getattr(p, kind) / GIB:.2f}" for kind in KINDS), f"{p.peak / GIB:.2f}")
        verdict = Text("fits", "bold green") if x.fits else Text("too much", "bold red")
        bars.add_row(x.mesh, bar(p, device), f"{100 * p.peak / device.memory:.0f}", verdict)
        moved, sent = f"{(p.read + p.written) / 1e9:,.0f}", f"{p.sent / 1e9:,.1f}"
        seconds = [f"{s:.3f}" for s in (b.compute, b.memory, b.wire)]
        time.add_row(x.mesh, f"{p.flops / 1e12:,.0f}", moved, sent, *seconds, b.limit, f"{x.tokens_per_second:,.0f}")
    console.print(
        f"{options.model}, {options.format} base, rank {options.rank} adapters of {options.targets}\n"
        f"{options.batch} x {options.seq} tokens a rank, {options.dtype} stream, {options.checkpoint} checkpointing\n",
        highlight=False,
    )
    console.print(memory, bars, time, answer(options, rows), highlight=False)


def table(title: str, *names: str) -> Table:
    """Return an empty table; all columns but the first are numbers."""
    words = names[0], "", "limit"
    columns = (Column(name, justify="left" if name in words else "right", no_wrap=True) for name in names)
    return Table(*columns, title=title, title_justify="left", box=SIMPLE_HEAD, pad_edge=False, collapse_padding=True)


def bar(found: Price, device: Device) -> Text:
    """Return the memory of the device as a bar: a stripe for each kind of tensor, dots for free memory."""
    out, edge, used = Text(), 0, 0
    for kind, colour in KINDS.items():
        used += getattr(found, kind)
        until = min(WIDTH, round(WIDTH * used / device.memory))
        out.append("█" * (until - edge), colour)
        edge = until
    return out.append("·" * (WIDTH - edge), "dim")


def answer(options: Options, rows: list[Row]) -> str:
    """Return a sentence that names the smallest mesh that fits."""
    fitting = [x for x in rows if x.fits]
    if not fitting:
        least = min(rows, key=lambda x: x.price.peak)
        most = max(KINDS, key=lambda kind: getattr(least.price, kind))
        fix = "use more fsdp" if most == "base" else "use a smaller --batch or --seq"
        none = "None of these fits" if len(rows) > 1 else "It does not fit"
        return f"{none}: {least.mesh} needs {least.price.peak / GIB:.2f} GiB a rank; {fix}"
    best = min(fitting, key=lambda x: (x.ranks, x.bound.seconds))
    found = "Smallest that fits" if len(rows) > 1 else "It fits"
    memory = f"{best.price.peak / GIB:.2f} GiB a rank, at its peak in the {best.price.phase}"
    return f"{found}: {best.mesh}, {best.ranks} x {options.device}; {memory}"


if __name__ == "__main__":
    sys.exit(main())
