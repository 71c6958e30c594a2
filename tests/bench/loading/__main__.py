"""Time and memory of loading and quantising a checkpoint, beside reading the file and running the kernels.

    python -m tests.bench.loading                          # 1.1 B parameters in bf16, 2 GiB on disk, to NF4_DQ
    python -m tests.bench.loading --layers 2 --format int8 --json l.json

The program writes a checkpoint of random weights to a new folder under ``--folder``, and deletes it at the end. Rows:

    warm, cold    hf.lazy, quantize and lazy.read of the whole tree, with the file in the system's cache and without.
                  Beside it are reading the file in pieces into one buffer, and the kernels on weights in memory.
    processor     the same as warm in seconds of the processor, which other programs on the machine disturb less
    memory        of a new process: the most that was resident, over that before, beside the bytes of the result

Contestants take turns, and figures are medians. A cold file is one of which the system was asked to drop its pages,
which it may decline. The exit status is 0 for bounds met or missed, or 2 for bad options.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
import tyro

from fquant import lazy, quantize, tree
from fquant.format import FORMATS, Format
from fquant.kernels import packed_ops
from fquant.lazy import Lazy
from fquant.quantizers import round_to_nearest
from models import decoder, hf
from models.config import Config
from models.export import dense
from tests.bench import report, timing
from tests.bench.report import Row, at_most

Clock = Callable[[], float]
LINEARS = r"layers\.\d+\.(q|k|v|o|gate|up|down)"
PIECE = 16 << 20  # bytes read at a time
MIB = 2**20
WANTED_TIME, WANTED_MEMORY = 2.0, 1.2


@dataclass(frozen=True)
class Options:
    """Time and memory of loading and quantising a checkpoint of 1.1 B parameters."""

    dim: int = 2048
    """Width of the residual stream; layers are as TinyLlama's: 11/4 of it wide, one key head for eight."""
    layers: int = 22
    """Layers."""
    vocab: int = 32000
    """Rows of the embedding and of the head, which stay dense."""
    format: str = "nf4_dq"
    """How the linears of layers are packed."""
    repeats: int = 3
    """Samples of each contestant."""
    threads: int = 2
    """Threads of torch."""
    folder: Path = Path(tempfile.gettempdir())
    """Where the checkpoint is written."""
    json: Path | None = None
    """File to write the figures to."""

    def check(self) -> None:
        """Raise ValueError for options that cannot be measured."""
        for name, least in {"layers": 1, "vocab": 1, "repeats": 1}.items():
            if getattr(self, name) < least:
                raise ValueError(f"--{name} is {getattr(self, name)}; wanted at least {least}")
        if self.dim < 256 or self.dim % 256:
            raise ValueError(f"--dim is {self.dim}; wanted a multiple of 256")
        if self.format not in FORMATS:
            raise ValueError(f"--format is {self.format}; wanted one of {', '.join(FORMATS)}")
        if not self.folder.is_dir():
            raise ValueError(f"--folder {self.folder}: wanted a folder that exists")
        timing.check_threads(self.threads)
        report.check_writable(self.json)

    def config(self) -> Config:
        """Return the config of the model."""
        heads = self.dim // 64
        sizes = {"vocab": self.vocab, "dim": self.dim, "num_layers": self.layers, "hidden": self.dim * 11 // 4}
        more = {"num_heads": heads, "num_kv_heads": max(1, heads // 8), "head_dim": 64, "max_positions": 2048}
        return Config(**sizes, **more, norm_eps=1e-5, rope_theta=10000.0)


def write(folder: Path, cfg: Config) -> None:
    """Write a checkpoint of random weights in bf16, one tensor at a time."""
    generator = torch.Generator().manual_seed(0)
    draw = lambda like: torch.empty(like.shape, dtype=torch.float32).normal_(0, 0.02, generator=generator).bfloat16()
    leaf = lambda like: Lazy(partial(draw, like), like.to(torch.bfloat16))
    dense.save(folder, cfg, tree.map(leaf, decoder.shapes(cfg)))
    os.sync()  # pages that are not on disk yet cannot be dropped


def load(folder: Path, format: Format) -> Any:
    """Load and quantise, as users do."""
    _, params = hf.lazy(folder)
    return lazy.read(tree.map_at(LINEARS, partial(quantize, format=format), params))


def read_file(folder: Path) -> None:
    """Read the weights' file in pieces into one buffer."""
    piece = memoryview(bytearray(PIECE))
    with open(folder / hf.SINGLE, "rb", buffering=0) as file:
        while file.readinto(piece):
            pass


def kernels(folder: Path, format: Format, clock: Clock = time.perf_counter) -> float:
    """Return the seconds of the kernels alone, over all weights, of which one at a time is in memory."""
    _, params = hf.lazy(folder)
    seconds = 0.0

    def encode(w: Lazy) -> None:
        nonlocal seconds
        read = w.read()
        start = clock()
        if format.in_absmax and format.vectors is None:
            _, absmax = packed_ops.encode(read, format)
            if format.scale is not None:
                packed_ops.encode(absmax.reshape(1, -1), format.scale)
        else:
            round_to_nearest.codes(read, *round_to_nearest.scales(read, format), format)
        seconds += clock() - start

    tree.map_at(LINEARS, encode, params)
    return seconds


def drop(folder: Path) -> None:
    """Ask the system to drop the pages of the weights' file."""
    with open(folder / hf.SINGLE, "rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def seconds(call: Callable[[], object], clock: Clock) -> float:
    """Return the seconds of a call."""
    start = clock()
    call()
    return clock() - start


def times(folder: Path, options: Options, done: Callable[[str], None]) -> list[Row]:
    """Measure the rows of time, in turns."""
    format, rows = FORMATS[options.format], []
    load(folder, format)
    warm = lambda: read_file(folder)
    kinds: list[tuple[str, Callable[[], object], Clock]] = [
        ("warm", warm, time.perf_counter), ("cold", lambda: drop(folder), time.perf_counter),
        ("processor", warm, time.process_time),
    ]  # fmt: skip
    for kind, before, clock in kinds:
        samples: dict[str, list[float]] = {"load": [], "read": [], "kernels": []}
        for _ in range(options.repeats):
            before()
            samples["load"].append(seconds(lambda: load(folder, format), clock))
            before()
            samples["read"].append(seconds(lambda: read_file(folder), clock))
            samples["kernels"].append(kernels(folder, format, clock))
            done(kind)
        found = {name: median(some) for name, some in samples.items()}
        ratio = found["load"] / (found["read"] + found["kernels"])
        spins = clock is time.process_time and options.threads > 1  # threads that wait for each other
        wanted = [] if spins else [at_most("of reading and kernels", ratio, WANTED_TIME)]
        rows.append(Row(kind, "s", found, wanted))
    return rows


def memory(folder: Path, options: Options) -> Row:
    """Measure the memory of loading in a new process."""
    command = [sys.executable, "-m", "tests.bench.loading.resident", str(folder), options.format, str(options.threads)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    figures = {name: value / MIB for name, value in json.loads(done.stdout).items()}
    over = (figures["load"] - figures["result"]) / figures["largest tensor"]
    return Row("memory", "MiB", figures, [at_most("largest tensors over the result", over, WANTED_MEMORY)])


def measure(options: Options, done: Callable[[str], None] = lambda name: None) -> list[Row]:
    """Write the checkpoint, measure, and delete it."""
    with tempfile.TemporaryDirectory(dir=options.folder, prefix="fquant-loading-") as at:
        folder = Path(at) / "model"
        write(folder, options.config())
        done("written")
        with timing.threads(options.threads):
            return [*times(folder, options, done), memory(folder, options)]


def run(options: Options) -> None:
    """Measure, print the table, write the figures."""
    count = sum(t.numel() for t in tree.leaves(decoder.shapes(options.config())))
    with report.progress() as bar, timing.others() as elsewhere:
        task = bar.add_task("writing", total=3 * options.repeats + 1)
        rows = measure(options, lambda name: bar.update(task, advance=1, description=name))
    taken = elsewhere()
    title = f"{count / 1e9:.2f} B parameters in bf16 to {options.format}, {options.threads} threads, {timing.machine()}"
    title += "" if taken is None else f"; others took {taken:.2f} cores"
    out = report.console()
    out.print(title, highlight=False, markup=False, soft_wrap=True)
    for row in rows:
        out.print(report.table([row], list(row.figures), compare=False))
    if options.json is not None:
        figures = {"title": title, "options": asdict(options), "rows": [row._asdict() for row in rows]}
        report.write(options.json, figures)


def main(args: list[str] | None = None) -> int:
    """Run the command line ``args``; return 0, or 2 for bad options, which one line names."""
    options = tyro.cli(Options, args=sys.argv[1:] if args is None else args, prog="python -m tests.bench.loading")
    try:
        options.check()
    except ValueError as error:
        print(f"loading: {error}", file=sys.stderr)
        return 2
    run(options)
    return 0


if __name__ == "__main__":
    sys.exit(main())
