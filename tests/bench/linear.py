"""fquant's kernels on the CPU, timed beside bitsandbytes, torchao and dense bf16 weights in one run.

    python -m tests.bench.linear                                  # the comparison: minutes, on two cores
    python -m tests.bench.linear --only linear-1 train            # one row, and a family of rows
    python -m tests.bench.linear --all-formats                    # fquant only: every format in bf16, f32 and f16

Rows, by the names that --only takes, whole or up to a dash:

    quantise                   a weight
    dequantise-fresh, -warm    a weight, into memory that the system has to clear first, or that was used before
    linear-ROWS                y = x · Wᵀ for x [ROWS in], without gradients
    train-ROWS                 the same and the gradient of x
    grad-ROWS                  the gradient of x alone, y having been computed before
    memory-ROWS, -train-ROWS   MiB that these hold at their peak beside their inputs and their results

Columns: the contestants of tests/bench/peers.py, and ``read``, the floor. The floor is one call that reads the bytes of
a packed weight once. It uses the fastest of several ways to read memory, tried just before. Inputs are bf16.
Contestants take turns and are timed as in tests/bench/timing.py. In brackets is fquant's time over theirs: below 1,
fquant is faster.

The bounds are meant for 2 cores, 4096 x 4096 and NF4_DQ, and are judged for any options. This is no test: the exit
status is 0 if they are met or missed, and 2 for bad options.
"""

import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
import tyro
from torch import Tensor

import fquant
from fquant import Packed, tree
from fquant.format import FORMATS
from fquant.kernels import dispatch
from tests.bench import peers, report, timing
from tests.bench.peers import Contestant, Weights
from tests.bench.report import Row, Wanted, at_most

DIM = 4096
ROWS = (
    "quantise", "dequantise-fresh", "dequantise-warm",
    "linear-1", "linear-4", "linear-16", "linear-64", "linear-512", "linear-2048",
    "train-16", "train-512", "train-2048",
    "grad-1", "grad-16", "grad-512",
    "memory-1", "memory-16", "memory-512", "memory-train-512",
)  # fmt: skip
FORMAT_ROWS = ("linear-1", "linear-16", "linear-512")
DTYPES = {"bf16": torch.bfloat16, "f32": torch.float32, "f16": torch.float16}
BOUNDS = {  # fquant's time over another's is at most
    "quantise": {"bnb": 0.1},
    "dequantise-fresh": {"bnb": 1.0},
    "dequantise-warm": {"bnb": 1.0},
    "linear-1": {"bnb eval": 1.0, "read": 1.3},
    "linear-16": {"bf16": 1.0},
    "linear-512": {"bf16": 1.06},
    "train-512": {"bf16": 1.06},
}
MOST_MEMORY = 8.0  # MiB
COLUMNS = ("fquant", "bf16", "bnb", "bnb eval", "torchao", "read")


@dataclass(frozen=True)
class Options:
    """Time fquant's CPU kernels beside bitsandbytes, torchao and dense bf16 weights, in turns and in one run.

    Prints medians in milliseconds, in brackets fquant's over theirs, and judges the bounds. The rows are:
    quantise; dequantise-fresh and -warm, into memory that was not, or was, used before; linear-ROWS, x · Wᵀ;
    train-ROWS, the same and the gradient of x; grad-ROWS, that gradient alone; memory-ROWS, MiB held beside
    inputs and results. Columns of peers that are not installed stay empty.
    """

    dim: int = DIM
    """Rows and columns of a weight."""
    out_dim: int | None = None
    """Rows of a weight, if not --dim."""
    in_dim: int | None = None
    """Columns of a weight, if not --dim."""
    threads: int = 2
    """Threads, for everybody."""
    repeats: int = 9
    """Turns of each contestant, of one or more samples; fewer than 9 are for trying out."""
    weights: int | None = None
    """Weights to use in turn; default: so many that packed they are 4 times the last-level cache."""
    only: tuple[str, ...] = ()
    """Rows to measure, as linear-16, or linear for all that begin so; default: all."""
    all_formats: bool = False
    """Instead of the comparison: fquant only, every format but those that learn their vectors (of the many weights here
    that takes minutes), x in bf16, f32 and f16 with 1, 16 and 512 rows."""
    formats: tuple[Literal["nf4", "nf4_dq", "fp4", "int8", "aq_2x8", "aq_3x8"], ...] = ()
    """The same for these formats only."""
    json: Path | None = None
    """File to write the figures to."""

    def check(self) -> None:
        """Raise ValueError for options that cannot be measured."""
        for name in ("dim", "out_dim", "in_dim"):
            size = getattr(self, name)
            if size is not None and (size < 1 or size % 128):
                raise ValueError(f"--{name.replace('_', '-')} is {size}; wanted a multiple of 128, as the peers need")
        if self.dim != DIM and self.out_dim is not None and self.in_dim is not None:
            raise ValueError(f"--dim {self.dim} is of no use beside --out-dim and --in-dim; leave one out")
        for name in ("repeats", "weights"):
            number = getattr(self, name)
            if number is not None and number < 1:
                raise ValueError(f"--{name} is {number}; wanted at least 1")
        if self.all_formats and self.formats:
            raise ValueError("--all-formats and --formats exclude each other; leave one out")
        timing.check_threads(self.threads)
        report.check_writable(self.json)
        self.rows()
        self.num_weights()

    def rows(self) -> tuple[str, ...]:
        """Return the rows of --only, or all; raise ValueError for an unknown name."""
        known = FORMAT_ROWS if self.is_alone() else ROWS
        for name in self.only:
            if not any(_is_in(row, name) for row in known):
                raise ValueError(f"--only: there is no row {name!r}; wanted some of {', '.join(known)}")
        return tuple(row for row in known if not self.only or any(_is_in(row, name) for name in self.only))

    def is_alone(self) -> bool:
        """Return True if fquant is measured alone."""
        return self.all_formats or bool(self.formats)

    def shape(self) -> tuple[int, int]:
        """Return rows and columns of a weight."""
        return self.out_dim or self.dim, self.in_dim or self.dim

    def num_weights(self) -> int:
        """Return the number of weights in turn; raise ValueError if it needs a cache size that cannot be read."""
        return self.weights or timing.num_weights(num_bytes(self.shape()), timing.last_level_cache())


def num_bytes(shape: tuple[int, int]) -> int:
    """Return the bytes of a weight in NF4_DQ."""
    return tree.nbytes(fquant.quantize(torch.empty(shape, device="meta"), fquant.NF4_DQ))


def measure(name: str, weights: Weights, repeats: int, read: timing.Call | None = None) -> Row:
    """Measure one row of the comparison; ``read`` reads as many bytes as a packed weight has."""
    family = name.partition("-")[0]
    if family == "memory":
        return _memory(name, weights)
    with torch.set_grad_enabled(family in ("train", "grad")):
        entries = {who: _call(name, who, weights) for who in weights.contestants}
        calls = {who: call for who, call in entries.items() if call is not None} | ({"read": read} if read else {})
        if family == "dequantise":
            with timing.memory("warm" if name.endswith("warm") else "fresh") as before:
                figures = timing.medians(calls, repeats, before)
        else:
            figures = timing.medians(calls, repeats)
    bounds = {other: most for other, most in BOUNDS.get(name, {}).items() if other in figures}
    wanted = [at_most(f"of {other}", figures["fquant"] / figures[other], most) for other, most in bounds.items()]
    if name == "dequantise-fresh" and "bnb" in figures:
        wanted.append(Wanted("bit-equal to bnb", _is_bit_equal(weights)))
    return Row(name, "ms", figures, wanted)


def measure_formats(name: str, packed: dict[str, dict[str, list[Packed]]], repeats: int) -> list[Row]:
    """Measure a row for each format, all in turns; ``packed`` holds weights [out in] by names of format and dtype."""
    calls: dict[tuple[str, str], timing.Call] = {}
    generator = torch.Generator().manual_seed(0)
    for form, of_dtype in packed.items():
        for dtype, weights in of_dtype.items():
            x = torch.randn(int(name.rpartition("-")[2]), weights[0].shape[1], generator=generator).to(DTYPES[dtype])
            calls[form, dtype] = _rotating(partial(fquant.linear, x), weights)
    with torch.no_grad():
        figures = timing.medians(calls, repeats)
    return [Row(f"{name} {form}", "ms", {dtype: figures[form, dtype] for dtype in DTYPES}, []) for form in packed]


def _rotating(f: Callable[[Any], object], weights: list[Any]) -> timing.Call:
    return lambda i: f(weights[i % len(weights)])


def _call(name: str, who: str, weights: Weights) -> timing.Call | None:
    """Return the call of a contestant in a row, or None if it takes no part."""
    (family, _, rest), it = name.partition("-"), weights.contestants[who]
    if family == "quantise":
        return _rotating(it.pack, weights.dense) if it.dequantise else None
    if family == "dequantise":
        return _rotating(it.dequantise, weights.packed(who)) if it.dequantise else None
    rows = int(rest)
    x = weights.normal(rows, weights.shape[1])
    if family == "linear":
        return _rotating(partial(it.linear, x), weights.packed(who))
    if not it.trains:
        return None
    x.requires_grad_()
    g = weights.normal(rows, weights.shape[0])
    if family == "train":
        return _rotating(lambda w: torch.autograd.grad(it.linear(x, w), x, g), weights.packed(who))
    ys = [it.linear(x, w) for w in weights.packed(who)]
    return _rotating(lambda y: torch.autograd.grad(y, x, g, retain_graph=True), ys)


def _memory(name: str, weights: Weights) -> Row:
    trains, rows = name.startswith("memory-train"), int(name.rpartition("-")[2])
    figures = {}
    for who, it in weights.contestants.items():
        if trains and not it.trains:
            continue
        x = weights.normal(rows, weights.shape[1]).requires_grad_(trains)
        g = weights.normal(rows, weights.shape[0])
        with torch.set_grad_enabled(trains):
            figures[who] = timing.extra_bytes(partial(_results, it, x, weights.packed(who)[0], g)) / 2**20
    return Row(name, "MiB", figures, [at_most("MiB", figures["fquant"], MOST_MEMORY)])


def _results(it: Contestant, x: Tensor, w: Any, g: Tensor) -> tuple[Tensor, ...]:
    y = it.linear(x, w)
    return (y, *torch.autograd.grad(y, x, g)) if x.requires_grad else (y,)


def _is_bit_equal(weights: Weights) -> bool:
    ours, theirs = (weights.contestants[who].dequantise for who in ("fquant", "bnb"))
    assert ours is not None and theirs is not None
    pairs = zip(weights.packed("fquant"), weights.packed("bnb"), strict=True)
    return all(torch.equal(ours(a).view(torch.int16), theirs(b).view(torch.int16)) for a, b in pairs)


def _is_in(row: str, name: str) -> bool:
    return row == name or row.startswith(f"{name}-")


def compare(options: Options) -> tuple[list[Row], dict[str, Any]]:
    """Measure the rows of the comparison; return them with versions, missing peers and the speeds of reading."""
    names = options.rows()
    found, missing = peers.contestants()
    about: dict[str, Any] = {"versions": peers.versions(found), "missing": missing}
    rows: list[Row] = []
    with report.progress() as bar:
        task = bar.add_task("weights", total=len(names))
        weights = Weights(found, options.shape(), options.num_weights())
        for name in names:
            bar.update(task, description=name)
            read = None
            if name == "linear-1":
                best, read, speeds = timing.fastest_read(num_bytes(weights.shape), weights.number, options.repeats)
                about["read"] = {"by": best, "GB/s": speeds}
            rows.append(measure(name, weights, options.repeats, read))
            bar.advance(task)
    return rows, about


def alone(options: Options) -> tuple[list[Row], dict[str, Any]]:
    """Measure the rows of fquant alone."""
    names, shape, number = options.rows(), options.shape(), options.num_weights()
    generator, formats = (
        torch.Generator().manual_seed(0),
        options.formats or tuple(f.name for f in FORMATS.values() if not f.vectors),
    )
    rows: list[Row] = []
    with report.progress() as bar:
        task = bar.add_task("weights", total=len(names))
        packed = {
            form: {
                name: [
                    fquant.quantize(torch.randn(shape, generator=generator).to(dtype), FORMATS[form])
                    for _ in range(number)
                ]
                for name, dtype in DTYPES.items()
            }
            for form in formats
        }
        for name in names:
            bar.update(task, description=name)
            rows += measure_formats(name, packed, options.repeats)
            bar.advance(task)
    return rows, {"versions": peers.versions({}), "missing": {}}


def run(options: Options) -> None:
    """Measure, print the table, write the figures."""
    shape, number = options.shape(), options.num_weights()
    with timing.threads(options.threads), timing.others() as others:
        rows, details = (alone if options.is_alone() else compare)(options)
    title = (
        f"{'every format' if options.is_alone() else 'NF4_DQ'}, {shape[0]} x {shape[1]}, {options.threads} threads, "
        f"{number} weights in turn ({number * num_bytes(shape) / 2**20:.0f} MiB in NF4_DQ), "
        f"median of {options.repeats} or more"
    )
    shown = {name for row in rows for name in row.figures} | set(details["missing"])
    columns = [name for name in (DTYPES if options.is_alone() else COLUMNS) if name in shown]
    out = report.console()
    say = partial(out.print, highlight=False, markup=False, soft_wrap=True)
    say(title)
    out.print(report.table(rows, columns, compare=not options.is_alone()))
    about = {"machine": timing.machine(), "kernels": dispatch.backend("cpu")[0], "others": others(), **details}
    say(", ".join([about["machine"], *map(" ".join, about["versions"].items()), f"kernels {about['kernels']}"]))
    if others() is not None:
        say(f"other processes took the time of {others():.2f} cores meanwhile; for figures to keep that is near 0")
    for row in rows:
        if "read" in row.figures:
            by, speed = about["read"]["by"], num_bytes(shape) / row.figures["read"] / 1e6
            say(f"read: {by}, {speed:.1f} GB/s; before that {_speeds(about['read']['GB/s'])}")
    if not timing.has_memory() and any(row.name.startswith("dequantise") for row in rows):
        say("dequantise: the C library is not glibc, so memory is fresh or warm as it comes")
    for who, reason in about["missing"].items():
        say(f"{who} is missing: {reason}")
    if options.json is not None:
        figures = {"title": title, **about, "options": asdict(options), "weights": number}
        report.write(options.json, figures | {"rows": [_as_dict(row) for row in rows]})


def _speeds(speeds: dict[str, float]) -> str:
    return ", ".join(f"{name} {speed:.1f}" for name, speed in speeds.items())


def _as_dict(row: Row) -> dict[str, Any]:
    return row._asdict() | {"wanted": [wanted._asdict() for wanted in row.wanted]}


def main(args: list[str] | None = None) -> int:
    """Run the command line ``args``; return 0, or 2 for bad options, which one line names."""
    options = tyro.cli(Options, args=sys.argv[1:] if args is None else args, prog="python -m tests.bench.linear")
    try:
        options.check()
    except ValueError as error:
        print(f"linear: {error}", file=sys.stderr)
        return 2
    run(options)
    return 0


if __name__ == "__main__":
    sys.exit(main())
