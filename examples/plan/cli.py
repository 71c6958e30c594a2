"""Predict memory, traffic and time of a training step of examples.qlora, without weights or GPUs.

    python -m examples.plan --model llama3-70b --mesh fsdp=1 fsdp=2 fsdp=4 fsdp=8 --device h100
    python -m examples.plan --model qwen3-8b --device rtx4090 --seq 4096 --batch 2
    python -m examples.plan --model DIR --mesh dp=2,fsdp=4 --json
    python -m examples.plan --model llama3-70b --device rtx4090 --offload block
    python -m examples.plan --model llama3-8b --train full --format none --mesh fsdp=8
    python -m examples.plan --model DIR --device cpu             # this machine, measured for half a second

The step is traced, not estimated (examples/common/pricing.py), as the device runs it. Two times are printed:

* *At least*: the longest of arithmetic, memory traffic and wire at the maker's peaks, as if they overlapped perfectly.
* *Predicted*: every kernel at the rates that kernels reach, one after another, with what is brought ahead beside them
  (fquant.compile.roofline). The share of the limit is defined in fquant/compile/roofline/prediction.py.
"""

import dataclasses
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from fquant import lazy, profiling
from fquant.compile.roofline import Device, named
from fquant.device import HOST
from fquant.io.files.reading import inside, json_object
from models import hf
from models.config import Config
from models.presets import PRESETS

from ..common import terminal
from ..common.command_line import (
    DTYPES,
    MOMENTS,
    FormatName,
    MomentsName,
    axes_in,
    check,
    check_least,
    command_line,
    parse_format,
    parse_targets,
    quantised,
)  # fmt: skip
from ..common.pricing import Job, Price, captured_step, price
from ..common.training_step import Checkpoint, Offload
from ..qlora import full_training
from . import plot, tables

GIB = 2**30


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
    """What a rank runs on: b200, h200, h100, a100 (or a100-80), a100-40, l40s, a10, l4, rtx5090, rtx4090, rtx3090,
    mi300x; cpu and cuda are those of this machine, whose rates are measured if they have no entry."""
    train: Literal["lora", "full"] = "lora"
    """full: every weight is trained, which takes --format none, or one of codes that are the only copy (int8_row)."""
    wire: Literal["int8", "fp8", "ternary"] | None = None
    """Of --train full: matrices of layers are quantised when they are gathered."""
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
    moments: MomentsName = "f32"
    """How AdamW stores its moments: in 32 bits, 8 or 4, beside a scale for each 256 or 128."""
    checkpoint: Checkpoint = "full"
    """Activations kept for the backward: full recomputes each block, selective recomputes cheap operations, none keeps
    all (examples.qlora takes the fastest that fits)."""
    offload: Offload | None = None
    """block: the host has the base, but for its embedding, and a rank fetches each block ahead of its use."""
    offload_activations: bool = False
    """Activations are stashed in the host's memory until the backward, as far as the link to it has time, and more if
    the step would not fit. All layers are traced then, which takes a minute for 32."""
    dtype: Literal["bf16", "f16", "f32"] = "bf16"
    """Of the residual stream, and so of all products with the base."""
    reserve: float = 1.0
    """GiB of the device that are not for tensors: the driver, libraries, fragmentation."""
    link: float | None = None
    """GB/s that a rank can send; default: the device's own link, which between machines the network replaces."""
    json: bool = False
    """Print a line of JSON for each mesh instead of tables."""
    plot: Path | None = None
    """Write the time and memory of each mesh as stacked bars to this PNG."""
    trace: Path | None = None
    """Write the predicted step of the first mesh into this folder, node by node: memory.png, and trace.json for
    ui.perfetto.dev. All layers are traced then, which takes a minute for 32."""

    def job(self) -> Job:
        """Return the job to price; raise ValueError for options out of range."""
        check_least(self, dict.fromkeys(("rank", "seq", "batch", "accumulate"), 1))
        cfg, weights, base = self.found()
        fmt = parse_format(self.format, self.block)
        check(cfg, fmt, self.seq, self.model)
        targets, dtypes = parse_targets(self.targets, cfg), None
        if self.train == "lora" and self.wire is not None:
            raise ValueError(f"--wire is {self.wire} with --train lora, whose base travels packed; leave it out")
        if self.train == "full":
            full_training.check_format(self.format, self.block, self.wire)
            if base is not None:
                raise ValueError(f"--train full of {self.model}, which is quantised; wanted a folder of dense weights")
            if (self.rank, self.targets, self.offload) != (16, "all", None):
                raise ValueError("--rank, --targets and --offload are of --train lora; leave them out")
            dtypes = full_training.precision(self)
        sizes = (self.rank, self.batch, self.seq, weights, DTYPES[self.dtype], self.accumulate)
        in_order = self.train == "lora" and named(self.device).type == HOST.type
        more = {"moments": MOMENTS[self.moments], "ordered": in_order}
        far = self.offload, self.offload_activations
        return Job(cfg, fmt, targets, *sizes, self.checkpoint, base, *far, dtypes, **more)

    def found(self) -> tuple[Config, torch.dtype, Any]:
        """Return the config of the model, the dtype of its weights, and its base if the folder holds it quantised."""
        if self.model in PRESETS:
            return PRESETS[self.model], torch.bfloat16, None
        if not inside(Path(self.model) / hf.CONFIG).exists():
            fix = f"wanted one or the other, presets are {', '.join(PRESETS)}"
            raise ValueError(f"--model {self.model}: no preset, and no folder with a {hf.CONFIG}; {fix}")
        cfg = hf.read_config(self.model)
        raw = json_object(Path(self.model) / hf.CONFIG)
        name = str(raw.get("dtype") or raw.get("torch_dtype") or "bfloat16").removeprefix("torch.")
        known = {str(dtype).removeprefix("torch."): dtype for dtype in DTYPES.values()}
        if name not in known:
            raise ValueError(f"{self.model}: torch_dtype = {name!r:.80}, want one of {', '.join(known)}; correct it")
        if raw.get("quantization_config") is None:
            return cfg, known[name], None
        base = lazy.like(hf.lazy(self.model)[1])
        return cfg, known[name], quantised(base, parse_format(self.format, self.block))

    def hardware(self) -> Device:
        """Return the device, with the link of --link if given."""
        device = named(self.device)
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
    """The figures of one mesh; tokens are those of all ranks."""

    mesh: str
    ranks: int
    price: Price
    bound: Bound
    fits: bool
    seconds: float  # predicted
    share: float  # of the limit
    tokens_per_second: float  # predicted
    tokens_per_second_limit: float
    tokens_per_second_bound: float


def row(options: Options, device: Device, mesh: str, axes: dict[str, int], found: Price) -> Row:
    """Return the figures of the mesh of ``axes`` for the price of a step on it."""
    ranks, expected = math.prod(axes.values()), found.predicted
    assert expected is not None
    least = bound(device, found.flops, found.read + found.written, found.sent)
    fits = found.peak + options.reserve * GIB <= device.memory
    tokens = ranks * options.batch * options.accumulate * options.seq
    speeds = tokens / expected.seconds, tokens / expected.limit, tokens / least.seconds
    return Row(mesh, ranks, found, least, fits, expected.seconds, expected.share, *speeds)


def main(args: list[str] | None = None) -> int:
    """Run the command line ``args`` and return its exit status: 0, or 2 for bad input, which one line names."""
    try:
        options = command_line(Options("llama3-8b"), args, "python -m examples.plan")
        job, device = options.job(), options.hardware()
        meshes = {mesh: axes_in(mesh) for mesh in options.mesh}
        if options.link is not None and all(math.prod(axes.values()) == 1 for axes in meshes.values()):
            raise ValueError(f"--link is {options.link}, and one rank sends nothing; give a --mesh, or leave it out")
        if options.trace is not None and options.trace.exists() and not options.trace.is_dir():
            raise ValueError(f"--trace {options.trace}: is a file; wanted a folder")
        if options.plot is not None and (options.plot.is_dir() or not options.plot.parent.is_dir()):
            fault = "is a folder; wanted a file" if options.plot.is_dir() else "its folder does not exist; make it"
            raise ValueError(f"--plot {options.plot}: {fault}")
        console = terminal.console()
        rows = []
        columns = TextColumn("tracing [bold]{task.fields[mesh]}[/]"), BarColumn(), MofNCompleteColumn()
        with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
            task = progress.add_task("", total=2 * len(meshes), mesh="")
            for mesh, axes in meshes.items():
                progress.update(task, mesh=mesh)
                found = price(job, axes, lambda: progress.advance(task), device)
                rows.append(row(options, device, mesh, axes, found))
        if options.json:
            print(*(json.dumps(dataclasses.asdict(one)) for one in rows), sep="\n")
        else:
            tables.show(console, options, device, rows)
        if options.plot is not None:
            plot.draw_rows(options.plot, f"{options.model} on {options.device}", device, rows)
        if options.trace is not None:
            with (
                console.status("tracing all layers"),
                captured_step(job, meshes[options.mesh[0]], device, True) as step,
            ):
                written = profiling.predicted(step, device, options.model).save(options.trace)
            if not options.json:
                console.print(*written, sep="\n", highlight=False, soft_wrap=True)
    except (ValueError, OSError) as error:
        terminal.complain("plan", error)
        return 2
    return 0
