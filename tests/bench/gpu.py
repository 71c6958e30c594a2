"""fquant's kernels on a CUDA device: checked against the reference, then timed beside bf16 and bitsandbytes.

    python -m tests.bench.gpu --out table.md            # for tests/bench/RESULTS.md
    python -m tests.bench.gpu --sweep                   # candidate plans, by rows of x

All kernels are checked before any is timed (tests/bench/gpu_check.py): a wrong kernel ends the program.

A time is the median of replays of a graph that calls a kernel for each of several weights in turn, divided by their
number. Together the weights exceed the L2 cache four times. So a launch costs as much as in a captured step. Calls that
cannot be captured, such as quantising, run in a loop. Rows, and their bounds:

    dequantise    bytes read and written, as a share of a copy's on the device: at least 0.85
    linear-1      packed bytes, likewise: at least 0.75
    linear-ROWS   the time over that of bf16: at most 1 at 16 rows, 1.08 from 512 rows on
    grad-512      g · W, likewise: at most 1.08
    quantise      bytes read and written, likewise; bitsandbytes and fquant.quantize as their users call them

bitsandbytes takes part if it is installed and has the format. The exit status is 0 for bounds met or missed. It is 1 if
a kernel is wrong, and 2 for bad options or without a CUDA device.
"""

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from importlib.metadata import version
from itertools import product
from pathlib import Path
from statistics import median
from typing import Literal, NamedTuple

import torch
import tyro
from rich.box import SIMPLE_HEAD
from rich.table import Table

import fquant
from fquant import tree
from fquant.format import FORMATS, NF4, NF4_DQ, Format
from fquant.kernels.spec import Spec
from tests.bench import peers, report, timing

DEVICE = "cuda"
AT_LEAST = {"dequantise": 0.85, "linear-1": 0.75}  # of what a copy moves
AT_MOST = {"linear-16": 1.0, "linear-512": 1.08, "linear-2048": 1.08, "linear-4096": 1.08, "grad-512": 1.08}  # of bf16


@dataclass(frozen=True)
class Options:
    """Check fquant's CUDA kernels, then time them beside bf16 and bitsandbytes."""

    out_dim: int = 8192
    """Rows of a weight."""
    in_dim: int = 8192
    """Columns of a weight."""
    rows: tuple[int, ...] = (1, 16, 512, 2048, 4096)
    """Rows of x."""
    formats: tuple[Literal["nf4", "nf4_dq", "fp4", "int8"], ...] = ("nf4_dq", "nf4", "int8")
    """Formats to time; all kinds are checked."""
    repeats: int = 15
    """Replays, of which the median is taken."""
    sweep: bool = False
    """Instead of the comparison: every candidate plan."""
    seed: int | None = None
    """Of the random numbers; default: the time."""
    out: Path | None = None
    """File for the table in Markdown, with date, device and versions."""

    def check(self) -> None:
        """Raise ValueError for options that cannot be measured."""
        for name in ("out_dim", "in_dim"):
            if getattr(self, name) < 1 or getattr(self, name) % 128:
                raise ValueError(f"--{name.replace('_', '-')} is {getattr(self, name)}; wanted a multiple of 128")
        for name, numbers in (("repeats", [self.repeats]), ("rows", self.rows), ("formats", [len(self.formats)])):
            if min(numbers, default=0) < 1:
                raise ValueError(f"--{name} has {min(numbers, default=0)}; wanted at least 1")
        if self.out is not None and (self.out.is_dir() or not self.out.absolute().parent.is_dir()):
            raise ValueError(f"--out {self.out}: wanted a file, in a folder that exists")


class Line(NamedTuple):
    """A line of the table: ms by contestant, the figure of the first, and True if it meets its bound."""

    name: str
    times: dict[str, float]
    figure: str
    met: bool | None = None


class Weights:
    """Random weights in bf16 on the device, dense and packed; together they exceed the cache."""

    def __init__(self, shape: tuple[int, int], format: Format) -> None:
        self.spec = Spec(format, shape, torch.bfloat16)
        self.packed_bytes = tree.nbytes(fquant.quantize(torch.empty(shape, device="meta"), format))
        self.number = timing.num_weights(self.packed_bytes, cache_bytes())
        self.dense = [torch.randn(shape, device=DEVICE, dtype=torch.bfloat16) for _ in range(self.number)]
        self.packed = [tree.leaves(fquant.quantize(w, format)) for w in self.dense]
        self.bytes_moved = self.packed_bytes + self.dense[0].nbytes


def cache_bytes() -> int:
    """Return the size of the device's last cache."""
    return torch.cuda.get_device_properties(0).L2_cache_size


def milliseconds(call: Callable[[int], object], number: int, repeats: int, capture: bool = True) -> float:
    """Return the median time of ``call(i)``, for i in turn below ``number``."""

    def turn() -> None:
        for i in range(number):
            call(i)

    turn()  # compiles, allocates, picks algorithms
    torch.cuda.synchronize()
    replay: Callable[[], object] = turn
    if capture:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            turn()
        replay = graph.replay
        replay()
    times = []
    for _ in range(repeats):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        replay()
        stop.record()
        stop.synchronize()
        times.append(start.elapsed_time(stop))
    return median(times) / number


def copied(repeats: int) -> float:
    """Return the bytes that a copy on the device reads and writes in a millisecond."""
    pairs = [(torch.randn(1 << 28, device=DEVICE), torch.empty(1 << 28, device=DEVICE)) for _ in range(2)]
    return 2 * pairs[0][0].nbytes / milliseconds(lambda i: pairs[i][1].copy_(pairs[i][0]), 2, repeats)


def compare(weights: Weights, rows: Sequence[int], copy: float, repeats: int) -> list[Line]:
    """Measure the lines of one format."""
    from fquant.kernels import triton

    spec, dense, packed = weights.spec, weights.dense, weights.packed
    bnb, lines = _bitsandbytes(spec.format), []
    theirs = [bnb.pack(w) for w in dense] if bnb else []
    timed = partial(milliseconds, number=weights.number, repeats=repeats)

    def add(row: str, ours: Callable, bf16: Callable | None, peer: Callable | None, num_bytes: int = 0) -> None:
        capture = row != "quantise"  # it reads values, so it cannot be captured
        times = {"fquant": timed(ours, capture=capture)}
        if bf16:
            times["bf16"] = timed(bf16)
        if peer:
            try:
                times["bnb"] = timed(peer, capture=capture)
            except RuntimeError:  # it could not be captured
                times["bnb"] = timed(peer, capture=False)
        lines.append(judged(f"{row} {spec.format.name}", times, num_bytes / copy, num_bytes))

    add(
        "quantise", lambda i: fquant.quantize(dense[i], spec.format), None,
        bnb and (lambda i: bnb.pack(dense[i])), weights.bytes_moved,
    )  # fmt: skip
    decode = bnb and bnb.dequantise
    add(
        "dequantise", lambda i: triton.decode(packed[i], spec, spec.dtype), None,
        decode and (lambda i: decode(theirs[i])), weights.bytes_moved,
    )  # fmt: skip
    for m in rows:
        x = torch.randn(m, spec.shape[1], device=DEVICE, dtype=spec.dtype)
        add(
            f"linear-{m}", lambda i, x=x: triton.matmul(x, packed[i], spec), lambda i, x=x: x @ dense[i].mT,
            bnb and (lambda i, x=x: bnb.linear(x, theirs[i])), weights.packed_bytes if m == 1 else 0,
        )  # fmt: skip
    g = torch.randn(512, spec.shape[0], device=DEVICE, dtype=spec.dtype)
    add("grad-512", lambda i: triton.matmul_t(g, packed[i], spec), lambda i: g @ dense[i], None)
    return lines


def sweep(weights: Weights, rows: Sequence[int], copy: float, repeats: int) -> list[Line]:
    """Measure decoding for every tile and number of warps, and products for every number of rows and plan."""
    from fquant.kernels import triton
    from fquant.kernels.triton import dequantize, gemm

    spec, packed, lines = weights.spec, weights.packed, []
    timed = partial(milliseconds, number=weights.number, repeats=repeats)

    def add(name: str, call: Callable, num_bytes: int = 0) -> None:
        try:
            lines.append(judged(name, {"fquant": timed(call)}, num_bytes / copy, num_bytes))
        except Exception as error:  # OutOfResources, of a plan that wants more shared memory than there is
            if type(error).__name__ != "OutOfResources":
                raise
            lines.append(Line(name, {}, "too big for the device"))

    out, views = (
        torch.empty(spec.shape, device=DEVICE, dtype=spec.dtype),
        [dequantize.rows_of(p, spec) for p in packed],
    )
    for tile, warps in product((1024, 2048, 4096, 8192), (2, 4, 8)):
        decode = lambda i, tile=tile, warps=warps: dequantize.decode_into(views[i], out[None], tile, warps)
        add(f"dequantise {spec.format.name}, tile {tile}, {warps} warps", decode, weights.bytes_moved)
    for m, plan in product(rows, gemm.CANDIDATES):
        if isinstance(plan, gemm.Few) and not m / 8 <= plan.rows <= max(8, 2 * m):
            continue  # many passes over the weight, or mostly padding
        x = torch.randn(m, spec.shape[1], device=DEVICE, dtype=spec.dtype)
        call = lambda i, x=x, plan=plan: triton.matmul(x, packed[i], spec, plan)
        add(f"linear-{m} {spec.format.name}, {plan}", call, weights.packed_bytes if m == 1 else 0)
    return lines


def judged(name: str, times: dict[str, float], share_ms: float, num_bytes: int) -> Line:
    """Judge a line against a copy, which takes ``share_ms`` for ``num_bytes``, or without bytes against bf16's time."""
    row, ours = name.partition(" ")[0], times["fquant"]
    if num_bytes:
        figure = f"{num_bytes / ours / 1e6:.0f} GB/s, {share_ms / ours:.2f} of a copy"
        return Line(name, times, figure, share_ms / ours >= AT_LEAST[row] if row in AT_LEAST else None)
    if "bf16" not in times:
        return Line(name, times, "")
    ratio = ours / times["bf16"]
    return Line(name, times, f"{ratio:.2f} of bf16", ratio <= AT_MOST[row] if row in AT_MOST else None)


def table(lines: Sequence[Line]) -> Table:
    """Return the lines as a table for the terminal."""
    out = Table(box=SIMPLE_HEAD, pad_edge=False)
    head, _, *rows = _cells(lines)
    for name in head:
        out.add_column(name, no_wrap=True, justify="right" if name.endswith("ms") else "left")
    for row in rows:
        out.add_row(*row)
    return out


def markdown(lines: Sequence[Line], about: Sequence[str]) -> str:
    """Return the table in Markdown below the lines ``about`` it."""
    return "\n".join([*about, "", *(f"| {' | '.join(row)} |" for row in _cells(lines)), ""])


def _cells(lines: Sequence[Line]) -> list[list[str]]:
    columns = [name for name in ("fquant", "bf16", "bnb") if any(name in line.times for line in lines)]
    cells = [["", *(f"{name}, ms" for name in columns), "fquant", "wanted"]]
    cells.append(["---", *["---:"] * len(columns), "---", "---"])
    for line in lines:
        times = [f"{line.times[name]:.4f}" if name in line.times else "" for name in columns]
        cells.append([line.name, *times, line.figure, {None: "", True: "met", False: "missed"}[line.met]])
    return cells


@cache
def _peers() -> tuple[dict[str, peers.Contestant], dict[str, str]]:
    return peers.contestants()


def _bitsandbytes(format: Format) -> peers.Contestant | None:
    """Return bitsandbytes if it is installed and has the format."""
    found = _peers()[0].get("bnb")
    if found is None or format not in (NF4, NF4_DQ):
        return None
    import bitsandbytes.functional as F

    nested = format == NF4_DQ
    pack = partial(F.quantize_4bit, quant_type="nf4", compress_statistics=nested, blocksize=64)
    return found._replace(pack=pack)


def run(options: Options) -> None:
    """Check, measure, print the table, write it."""
    from tests.bench import gpu_check

    out = report.console()
    say = partial(out.print, highlight=False, markup=False, soft_wrap=True)
    seed = time.time_ns() % 2**31 if options.seed is None else options.seed
    torch.manual_seed(seed)
    counts = gpu_check.check(DEVICE, seed)
    torch.cuda.empty_cache()
    say(f"right: {', '.join(f'{n} {what}' for what, n in counts.items())} (seed {seed})")
    copy, found, missing = copied(options.repeats), *_peers()
    versions = peers.versions(found) | {"triton": version("triton")}
    about = [
        f"{time.strftime('%Y-%m-%d')}, {torch.cuda.get_device_name()}, {', '.join(map(' '.join, versions.items()))}. "
        f"Weights {options.out_dim} x {options.in_dim}, x in bf16, median of {options.repeats}; a copy moves "
        f"{copy / 1e6:.0f} GB/s."
    ]
    about += [f"bitsandbytes took no part: {missing['bnb']}."] if "bnb" in missing else []
    lines: list[Line] = []
    with report.progress() as bar:
        task = bar.add_task("formats", total=len(options.formats))
        for name in options.formats:
            weights = Weights((options.out_dim, options.in_dim), FORMATS[name])
            lines += (sweep if options.sweep else compare)(weights, options.rows, copy, options.repeats)
            del weights
            torch.cuda.empty_cache()
            bar.advance(task)
    out.print(table(lines))
    for line in about:
        say(line)
    if options.out is not None:
        options.out.write_text(markdown(lines, about), "utf-8")


def main(args: list[str] | None = None) -> int:
    """Run the command line ``args``; return 0, 1 for a wrong kernel, or 2 if nothing can be measured."""
    options = tyro.cli(Options, args=sys.argv[1:] if args is None else args, prog="python -m tests.bench.gpu")
    try:
        options.check()
        if not torch.cuda.is_available():
            raise ValueError("there is no CUDA device that this torch can use; run it on a machine with one")
        run(options)
    except ValueError as error:
        print(f"gpu: {error}", file=sys.stderr)
        return 2
    except AssertionError as error:
        print(f"gpu: a kernel is wrong: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
