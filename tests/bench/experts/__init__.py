"""A layer of packed experts, timed beside the products of its active rows with dense bf16 weights.

    python -m tests.bench.experts                   # 64 experts, 4 a token, 512 tokens: a minute, on two cores

Rows, for each format:

    layer-FORMAT       the whole layer: router, sorting, products, activation and the weighted sum
    train-FORMAT       the same and the gradient of x
    memory-FORMAT      MiB that its products hold at their peak beside their inputs and their results

Columns: ``fquant``, the packed layer; ``products``, ``torch.mm`` of the rows of each expert with its bf16 weights, with
nothing between (for a train row with the gradients too); ``bf16``, our layer with the same dense weights. Contestants
take turns, as in ``tests/bench/timing.py``, with layers in turn that exceed the last-level cache. This is no test: the
exit status is 0 if bounds are met or missed, and 2 for bad options.
"""

import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any

import torch
import tyro
from torch import Tensor
from torch.func import vjp

import fquant
from fquant import grouped_linear, random, tree
from fquant.format import FORMATS
from fquant.kernels import dispatch
from models import experts
from models.config import Config
from tests.bench import report, timing
from tests.bench.report import Row, at_most

MOST, MOST_MEMORY = 1.2, 2.0  # of the products' time, and MiB: a decoded matrix
COLUMNS = ["fquant", "products", "bf16"]


@dataclass(frozen=True)
class Options:
    """Time a layer of packed experts beside the products of its active rows with dense bf16 weights."""

    experts: int = 64
    """Experts of the layer."""
    top: int = 4
    """Experts of a token."""
    tokens: int = 512
    """Tokens of a call."""
    dim: int = 1024
    """Width of a token."""
    hidden: int = 512
    """Width of an expert."""
    formats: tuple[str, ...] = ("nf4", "nf4_dq", "int4", "int8")
    """Formats of the packed experts."""
    threads: int = 2
    """Threads, for everybody."""
    repeats: int = 9
    """Turns of each contestant; fewer than 9 are for trying out."""
    layers: int | None = None
    """Layers to use in turn; default: so many that packed they are 4 times the last-level cache."""
    cpu_time: bool = False
    """Measure the time of one thread on its core instead of the clock's, on a machine that is not quiet."""
    json: Path | None = None
    """File to write the figures to."""

    def check(self) -> None:
        """Raise ValueError for options that cannot be measured."""
        for name in ("experts", "top", "tokens", "dim", "hidden", "repeats"):
            if getattr(self, name) < 1:
                raise ValueError(f"--{name} is {getattr(self, name)}; wanted at least 1")
        for name in self.formats:
            if name not in FORMATS:
                raise ValueError(f"--formats: {name!r} is unknown; wanted some of {', '.join(FORMATS)}")
        if self.cpu_time and self.threads != 1:
            raise ValueError(f"--cpu-time counts one thread, and --threads is {self.threads}; wanted --threads 1")
        timing.check_threads(self.threads)
        report.check_writable(self.json)

    def config(self) -> Config:
        """Return the config of a model of one such layer."""
        return Config(
            8, self.dim, 1, 1, 1, 2, self.hidden, num_experts=self.experts, experts_per_token=self.top,
            routing="renormalised",
        )  # fmt: skip


def layer(options: Options, seed: int) -> dict[str, Tensor]:
    """Draw the bf16 weights of a layer."""
    key = random.key(seed)
    draw = lambda name, *shape: 0.02 * random.normal(random.fold(key, name), shape)
    shapes = {"gate_up": (2 * options.hidden, options.dim), "down": (options.dim, options.hidden)}
    weights = {name: draw(name, options.experts, *shape).bfloat16() for name, shape in shapes.items()}
    return weights | {"router": draw("router", options.experts, options.dim).bfloat16()}


def packed(weights: dict[str, Tensor], format: str) -> dict[str, Any]:
    """Pack the experts of a layer, one matrix at a time."""
    pack = lambda w: tree.map(lambda *t: torch.stack(t), *[fquant.quantize(matrix, FORMATS[format]) for matrix in w])
    return weights | {name: pack(weights[name]) for name in ("gate_up", "down")}


def mixture(x: Tensor, weights: dict[str, Any], cfg: Config) -> Tensor:
    """Compute our layer."""
    absent = dict.fromkeys(("router_bias", "gate_up_bias", "down_bias"))
    return experts.mixture(x, SimpleNamespace(**absent, **weights), cfg)


def products(inputs: list[tuple[Tensor, ...]], weights: dict[str, Tensor], train: bool) -> list[Tensor]:
    """Multiply the rows of each expert with its weights, and their gradients with the transposed weights."""
    out = []
    for e, (x, h, g, dh) in enumerate(inputs):
        up, down = weights["gate_up"][e], weights["down"][e]
        out += [torch.mm(x, up.mT), torch.mm(h, down.mT)]
        out += [torch.mm(g, down), torch.mm(dh, up)] if train else []
    return out


def rows_of_experts(x: Tensor, weights: dict[str, Tensor], cfg: Config) -> list[tuple[Tensor, ...]]:
    """Return random inputs of every product of each expert, as many rows as the router sends there."""
    _, chosen = experts.route(x, weights["router"], None, cfg)
    counts = torch.bincount(chosen.flatten(), minlength=cfg.num_experts).tolist()
    draw = lambda *shape: random.normal(random.key(7), shape).bfloat16()
    return [(draw(n, cfg.dim), draw(n, cfg.hidden), draw(n, cfg.dim), draw(n, 2 * cfg.hidden)) for n in counts]


def measure(options: Options) -> list[Row]:
    """Measure all rows."""
    cfg, first = options.config(), layer(options, 0)
    num_bytes = tree.nbytes(packed(first, options.formats[0]))
    number = options.layers or timing.num_weights(num_bytes, timing.last_level_cache())
    layers = [first, *(layer(options, seed) for seed in range(1, number))]
    x = random.normal(random.key(1), (options.tokens, options.dim)).bfloat16()
    inputs = rows_of_experts(x, first, cfg)
    forward = lambda weights: mixture(x, weights, cfg)
    train = lambda weights: vjp(lambda x: mixture(x, weights, cfg), x)[1](x)
    turns = lambda f, every: lambda i: f(every[i % number])
    clock = time.thread_time if options.cpu_time else time.perf_counter
    rows: list[Row] = []
    with report.progress() as bar, torch.no_grad():
        task = bar.add_task("formats", total=len(options.formats))
        for name in options.formats:
            every = [packed(weights, name) for weights in layers]
            for kind, f in (("layer", forward), ("train", train)):
                alone: Callable[[Any], object] = partial(products, inputs, train=kind == "train")
                calls = {"fquant": turns(f, every), "products": turns(alone, layers), "bf16": turns(f, layers)}
                samples = timing.interleave(calls, options.repeats, clock=clock)
                figures = {who: median(times) * 1e3 for who, times in samples.items()}
                judged = at_most("of products", figures["fquant"] / figures["products"], MOST)
                rows.append(Row(f"{kind}-{name}", "ms", figures, [judged] if kind == "layer" else []))
            rows.append(_memory(name, every[0], inputs))
            bar.advance(task)
    return rows


def _memory(name: str, weights: dict[str, Any], inputs: list[tuple[Tensor, ...]]) -> Row:
    counts = torch.tensor([len(x) for x, *_ in inputs])
    x, h, *_ = (torch.cat(parts) for parts in zip(*inputs, strict=True))
    both = ((x, weights["gate_up"]), (h, weights["down"]))
    most = max(timing.extra_bytes(lambda x=x, w=w: (grouped_linear(x, w, counts),)) for x, w in both) / 2**20
    return Row(f"memory-{name}", "MiB", {"fquant": most}, [at_most("MiB", most, MOST_MEMORY)])


def run(options: Options) -> None:
    """Measure, print the table, write the figures."""
    with timing.threads(options.threads), timing.others() as others:
        rows = measure(options)
    size = f"{options.experts} experts of {2 * options.hidden} x {options.dim} and {options.dim} x {options.hidden}"
    title = f"{size}, top {options.top}, {options.tokens} tokens, {options.threads} threads"
    title += ", CPU time" if options.cpu_time else ""
    out = report.console()
    say = partial(out.print, highlight=False, markup=False, soft_wrap=True)
    say(title)
    out.print(report.table(rows, COLUMNS))
    about = {"machine": timing.machine(), "kernels": dispatch.backend("cpu")[0], "others": others()}
    say(f"{about['machine']}, torch {torch.__version__}, kernels {about['kernels']}")
    if others() is not None:
        say(f"other processes took the time of {others():.2f} cores meanwhile; for figures to keep that is near 0")
    if options.json is not None:
        figures = [row._asdict() | {"wanted": [one._asdict() for one in row.wanted]} for row in rows]
        report.write(options.json, {"title": title, **about, "options": asdict(options), "rows": figures})


def main(args: list[str] | None = None) -> int:
    """Run the command line ``args``; return 0, or 2 for bad options, which one line names."""
    options = tyro.cli(Options, args=sys.argv[1:] if args is None else args, prog="python -m tests.bench.experts")
    try:
        options.check()
    except ValueError as error:
        print(f"experts: {error}", file=sys.stderr)
        return 2
    run(options)
    return 0
