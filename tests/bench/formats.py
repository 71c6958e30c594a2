"""Cost and loss of the formats: bits a weight beside errors of weights and of outputs, in one table.

    python -m tests.bench.formats                       # 1024 x 1024: minutes, on two cores
    python -m tests.bench.formats --dim 4096 --json f.json

Columns are formats; ``+i`` is one that learns vectors, given the mean squares of inputs as importance. Rows are of
weights of a normal distribution, and of one with heavy tails (Student's, of 4 degrees of freedom):

    bits         of all buffers of the packed weight, an element
    weights      |W - Q| / |W|, per cent, Frobenius norms
    outputs      |(W - Q)·X| / |W·X|, per cent, for inputs X whose columns have sizes that vary (log-normal, by a factor
                 of e up or down) and are correlated; importance comes from as many other inputs of the kind

Everything is a function of ``--seed``, and nothing is timed. The exit status is 0, or 2 for bad options.
"""

import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import tyro
from torch import Tensor

import fquant
from fquant import random, tree
from fquant.format import FORMATS
from tests.bench import report
from tests.bench.report import Row

AWARE = "+i"
COLUMNS = tuple(
    name + aware for name, format in FORMATS.items() for aware in ("", AWARE) if format.vectors or not aware
)
DEGREES = 4  # of freedom


@dataclass(frozen=True)
class Options:
    """Bits a weight, and errors of weights and of outputs, of every format."""

    dim: int = 1024
    """Rows and columns of a weight."""
    tokens: int = 2048
    """Inputs to measure errors on, and as many others for importance."""
    seed: int = 0
    """Of all that is random."""
    json: Path | None = None
    """File to write the figures to."""

    def check(self) -> None:
        """Raise ValueError for options that cannot be measured."""
        for name in ("dim", "tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"--{name} is {getattr(self, name)}; wanted at least 1")
        report.check_writable(self.json)


def normal(key: Tensor, dim: int) -> Tensor:
    """Draw weights of a normal distribution."""
    return random.normal(key, (dim, dim))


def heavy(key: Tensor, dim: int) -> Tensor:
    """Draw weights of a Student's distribution."""
    chi = random.normal(random.fold(key, "chi"), (DEGREES, dim, dim)).square().mean(0)
    return normal(key, dim) / chi.sqrt()


WEIGHTS: dict[str, Callable[[Tensor, int], Tensor]] = {"normal": normal, "heavy tails": heavy}


def inputs(key: Tensor, tokens: int, dim: int) -> tuple[Tensor, Tensor]:
    """Draw two sets of inputs [tokens dim] of one kind: one for importance, one for the errors."""
    mix = torch.eye(dim) + random.normal(random.fold(key, "mix"), (dim, dim)) * dim**-0.5
    size = random.normal(random.fold(key, "size"), (dim,)).exp()
    calibration, test = (random.normal(random.fold(key, name), (tokens, dim)) @ mix * size for name in ("seen", "held"))
    return calibration, test


def measure(kind: str, options: Options, done: Callable[[str], None] = lambda name: None) -> list[Row]:
    """Measure the rows of one kind of weights."""
    key = random.fold(random.key(options.seed), kind)
    w = WEIGHTS[kind](key, options.dim)
    calibration, test = inputs(random.fold(key, "inputs"), options.tokens, options.dim)
    units = {"bits": "bits", "weights": "%", "outputs": "%"}
    found: dict[str, dict[str, float]] = {name: {} for name in units}
    for name in COLUMNS:
        aware = name.endswith(AWARE)
        p = fquant.quantize(w, FORMATS[name.removesuffix(AWARE)], calibration.square().mean(0) if aware else None)
        lost = w - fquant.dequantize(p)
        found["bits"][name] = 8 * tree.nbytes(p) / w.numel()
        found["weights"][name] = 100 * (lost.norm() / w.norm()).item()
        found["outputs"][name] = 100 * ((test @ lost.mT).norm() / (test @ w.mT).norm()).item()
        done(name)
    return [Row(f"{kind}: {row}", unit, found[row], []) for row, unit in units.items()]


def run(options: Options) -> None:
    """Measure, print the table, write the figures."""
    rows: list[Row] = []
    with report.progress() as bar:
        task = bar.add_task("formats", total=len(WEIGHTS) * len(COLUMNS))
        for kind in WEIGHTS:
            rows += measure(kind, options, lambda name: bar.update(task, advance=1, description=name))
    title = f"weights {options.dim} x {options.dim}, {options.tokens} inputs, seed {options.seed}"
    out = report.console()
    out.print(title, highlight=False, markup=False, soft_wrap=True)
    out.print(report.table(rows, list(COLUMNS), compare=False))
    if options.json is not None:
        figures = {"title": title, "options": asdict(options), "rows": [row._asdict() for row in rows]}
        report.write(options.json, figures)


def main(args: list[str] | None = None) -> int:
    """Run the command line ``args``; return 0, or 2 for bad options, which one line names."""
    options = tyro.cli(Options, args=sys.argv[1:] if args is None else args, prog="python -m tests.bench.formats")
    try:
        options.check()
    except ValueError as error:
        print(f"formats: {error}", file=sys.stderr)
        return 2
    run(options)
    return 0


if __name__ == "__main__":
    sys.exit(main())
