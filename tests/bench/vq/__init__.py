"""A codebook's training step and k-means beside vector-quantize-pytorch and faiss, in one run.

    python -m tests.bench.vq                              # minutes, on one thread
    python -m tests.bench.vq --rows 4096 --codes 1024     # smaller
    python -m tests.bench.vq --only encode step

Rows, by the names that --only takes:

    encode    the nearest of all codes, without gradients
    update    encode and the moving average, without gradients: the part of a step with a frozen encoder
    step      the same with the gradient of the rows: straight-through and commitment
    memory    MiB that update holds at its peak beside its arguments and its results
    kmeans    k-means of rows from a mixture, of equally many iterations for all contestants
    objective the mean squared distance to the codes of k-means, on average over seeds; faiss starts where fquant does

and those of weights of learned vectors, ``tests/bench/vq/weights.py``.

Columns: fquant, vq (vector-quantize-pytorch), faiss, and decode, a product with the decoded weight. Contestants take
turns and are timed as in tests/bench/timing.py; in brackets is fquant's time over theirs. A missing library leaves its
column empty. The bounds are meant for 32768 rows of 64 dims and 8192 codes. This is no test: the exit status is 0 if
they are met or missed, and 2 for bad options.
"""

import sys
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import tyro
from torch import Tensor

from fquant import random, vq
from fquant.vq.codebook.update import drawn_rows
from tests.bench import peers, report, timing
from tests.bench.report import Row, at_most
from tests.bench.vq import weights

ROWS = ("encode", "update", "step", "memory", "kmeans", "objective", *weights.ROWS)
COLUMNS = ("fquant", "vq", "faiss", "decode")
FASTER, SMALLER = 1 / 6, 0.05  # of vector-quantize-pytorch's time and memory
WORSE = 1.002  # of faiss's objective from the same start; starts differ by more


@dataclass(frozen=True)
class Options:
    """Time a codebook beside vector-quantize-pytorch and faiss, in turns and in one run.

    Prints medians in milliseconds, in brackets fquant's over theirs, MiB, and the objective of k-means.
    """

    rows: int = 32768
    """Rows of a step."""
    dim: int = 64
    """Dims of a row."""
    codes: int = 8192
    """Codes of the book."""
    means: int = 512
    """Clusters of k-means."""
    iterations: int = 25
    """Iterations of k-means."""
    seeds: int = 4
    """Runs of k-means, each from rows of its own."""
    out: int = 256
    """Rows of the weight whose vectors are learned."""
    width: int = 1024
    """Columns of that weight."""
    threads: int = 1
    """Threads, for everybody."""
    repeats: int = 3
    """Turns of each contestant."""
    only: tuple[str, ...] = ()
    """Rows to measure; default: all."""
    json: Path | None = None
    """File to write the figures to."""

    def check(self) -> None:
        """Raise ValueError for options that cannot be measured."""
        for name in ("rows", "dim", "codes", "means", "iterations", "seeds", "out", "width", "repeats"):
            if getattr(self, name) < 1:
                raise ValueError(f"--{name} is {getattr(self, name)}; wanted at least 1")
        if self.means > self.rows:
            raise ValueError(f"--means is {self.means} for {self.rows} rows; wanted at most as many")
        for name in self.only:
            if name not in ROWS:
                raise ValueError(f"--only: there is no row {name!r}; wanted some of {', '.join(ROWS)}")
        timing.check_threads(self.threads)
        report.check_writable(self.json)


Contestants = dict[str, Callable[[], Any]]


def steps(x: Tensor, num_codes: int) -> dict[str, Contestants]:
    """Return the calls of each contestant for encode, update and step."""
    book = vq.init(0, num_codes, x.shape[-1])
    codes = x[torch.randperm(len(x), generator=torch.Generator().manual_seed(1))[:num_codes]]
    codes = torch.cat([codes, book.codes[len(codes) :]])
    book = replace(book, codes=codes, sums=codes.clone())

    def step() -> Any:
        def loss(x: Tensor) -> tuple[Tensor, vq.Quantized]:
            out = vq.apply(book, x, gradient=vq.straight_through)
            return out.x.sum() + vq.mean(out.losses["commitment"]), out

        dx, out = torch.func.grad(loss, has_aux=True)(x)
        return out.codes, dx, vq.ema(book, out.stats)

    found: dict[str, Contestants] = {
        "encode": {"fquant": lambda: vq.encode(book, x)},
        "update": {"fquant": lambda: vq.ema(book, vq.stats(book, x, vq.encode(book, x)))},
        "step": {"fquant": step},
    }
    them = _peer(x.shape[-1], num_codes, codes)
    if them is not None:
        found["encode"]["vq"] = lambda: _without(them.eval(), x)
        found["update"]["vq"] = lambda: _without(them.train(), x)
        found["step"]["vq"] = lambda: _with(them.train(), x)
    return found


def _peer(dim: int, num_codes: int, codes: Tensor) -> Any:
    try:
        with warnings.catch_warnings(action="ignore"), peers.quiet():
            from vector_quantize_pytorch import VectorQuantize
    except ImportError:
        return None
    them: Any = VectorQuantize(dim, num_codes, rotation_trick=False)
    them._codebook.embed.data.copy_(codes[None])
    them._codebook.embed_avg.data.copy_(codes[None])
    return them


def _without(them: Any, x: Tensor) -> Any:
    with torch.no_grad():
        return them(x[None])


def _with(them: Any, x: Tensor) -> Any:
    x = x.clone().requires_grad_()
    out, codes, loss = them(x[None])
    return codes, torch.autograd.grad((out.sum() + loss).reshape(()), x)


def clusters(
    x: Tensor, num_means: int, iterations: int, starts: Sequence[Tensor] = ()
) -> dict[str, Callable[[int], Tensor]]:
    """Return k-means of each contestant: from a seed to means. faiss takes its start from ``starts``, by the seed."""
    found: dict[str, Callable[[int], Tensor]] = {
        "fquant": lambda seed: vq.kmeans(vq.init(0, num_means, x.shape[-1]), x, random.key(seed), iterations).codes
    }
    try:
        with warnings.catch_warnings(action="ignore"):
            from vector_quantize_pytorch.vector_quantize_pytorch import kmeans

        def theirs(seed: int) -> Tensor:
            torch.manual_seed(seed)
            return kmeans(x[None], num_means, iterations)[0][0]

        found["vq"] = theirs
    except ImportError:
        pass
    try:
        import faiss

        def by_faiss(seed: int) -> Tensor:
            faiss.omp_set_num_threads(torch.get_num_threads())
            limits = {"min_points_per_centroid": 1, "max_points_per_centroid": len(x)}
            them: Any = faiss.Kmeans(x.shape[-1], num_means, niter=iterations, seed=seed + 1, **limits)
            them.train(x.numpy(), init_centroids=starts[seed].numpy() if starts else None)
            return torch.from_numpy(them.centroids.copy())

        found["faiss"] = by_faiss
    except ImportError:
        pass
    return found


def _start(x: Tensor, num_means: int, seed: int) -> Tensor:
    """Return the rows at which k-means of fquant starts."""
    no_codes = torch.zeros(len(x), dtype=torch.int64)
    key, book = random.fold(random.key(seed), "start"), vq.init(0, num_means, x.shape[-1])
    drawn, hit = drawn_rows(vq.stats(book, x, no_codes, key=key))
    assert hit.all()
    return drawn


def objective(means: Tensor, x: Tensor) -> float:
    """Return the mean squared distance of rows to the nearest of ``means``."""
    book = replace(vq.init(0, *means.shape), codes=means)
    return float((x - vq.decode(book, vq.encode(book, x))).square().sum(-1).double().mean())


def measure(options: Options) -> list[Row]:
    """Measure the rows of --only, or all."""
    names = options.only or ROWS
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(options.rows, options.dim, generator=generator)
    out: list[Row] = []
    calls = steps(x, options.codes)
    for name in ("encode", "update", "step"):
        if name in names:
            figures = timing.medians({who: lambda _, f=f: f() for who, f in calls[name].items()}, options.repeats)
            wanted = [at_most("of vq", figures["fquant"] / figures["vq"], FASTER)] if "vq" in figures else []
            out.append(Row(name, "ms", figures, wanted if name != "encode" else []))
    if "memory" in names:
        figures = {who: timing.extra_bytes(f) / 2**20 for who, f in calls["update"].items()}
        wanted = [at_most("of vq", figures["fquant"] / figures["vq"], SMALLER)] if "vq" in figures else []
        out.append(Row("memory", "MiB", figures, wanted))
    if {"kmeans", "objective"} & set(names):
        out += _clustering(x, options, names, generator)
    return out + weights.rows(names, options.out, options.width, options.repeats)


def _clustering(x: Tensor, options: Options, names: tuple[str, ...], generator: torch.Generator) -> list[Row]:
    centres = 3 * torch.randn(options.means, options.dim, generator=generator)
    which = torch.randint(options.means, (len(x),), generator=generator)
    x = x + centres[which]
    out = list[Row]()
    if "kmeans" in names:
        found = clusters(x, options.means, options.iterations)
        figures = timing.medians({who: lambda i, f=f: f(i) for who, f in found.items()}, options.repeats)
        wanted = [at_most("of faiss", figures["fquant"] / figures["faiss"], 1.0)] if "faiss" in figures else []
        out.append(Row("kmeans", "ms", figures, wanted))
    if "objective" in names:
        starts = [_start(x, options.means, seed) for seed in range(options.seeds)]
        found = clusters(x, options.means, options.iterations, starts)
        means = {who: [objective(f(seed), x) for seed in range(options.seeds)] for who, f in found.items()}
        figures = {who: sum(each) / len(each) for who, each in means.items()}
        wanted = [at_most("of faiss", figures["fquant"] / figures["faiss"], WORSE)] if "faiss" in figures else []
        out.append(Row("objective", "distance²", figures, wanted))
    return out


def run(options: Options) -> None:
    """Measure, print the table, write the figures."""
    with timing.threads(options.threads), timing.others() as others:
        rows = measure(options)
    title = (
        f"{options.rows} x {options.dim} rows, {options.codes} codes; k-means: {options.means} means, "
        f"{options.iterations} iterations, {options.seeds} seeds; {options.threads} threads, "
        f"median of {options.repeats} or more"
    )
    out = report.console()
    say = partial(out.print, highlight=False, markup=False, soft_wrap=True)
    say(title)
    out.print(report.table(rows, [name for name in COLUMNS if any(name in row.figures for row in rows)]))
    about = {"machine": timing.machine(), "others": others(), "versions": versions()}
    say(", ".join([about["machine"], *map(" ".join, about["versions"].items())]))
    if others() is not None:
        say(f"other processes took the time of {others():.2f} cores meanwhile; for figures to keep that is near 0")
    if options.json is not None:
        row_dicts = [row._asdict() | {"wanted": [wanted._asdict() for wanted in row.wanted]} for row in rows]
        report.write(options.json, {"title": title, **about, "options": asdict(options), "rows": row_dicts})


def versions() -> dict[str, str]:
    """Return the releases of torch and of the installed contestants."""
    found = {}
    for name in ("torch", "vector-quantize-pytorch", "faiss-cpu"):
        try:
            found[name] = version(name)
        except ModuleNotFoundError:
            continue
    return found


def main(args: list[str] | None = None) -> int:
    """Run the command line ``args``; return 0, or 2 for bad options, which one line names."""
    options = tyro.cli(Options, args=sys.argv[1:] if args is None else args, prog="python -m tests.bench.vq")
    try:
        options.check()
    except ValueError as error:
        print(f"vq: {error}", file=sys.stderr)
        return 2
    run(options)
    return 0
