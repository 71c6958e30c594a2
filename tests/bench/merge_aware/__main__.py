"""Measure what of a LoRA's gain survives merging into 4 bits, trained as usual and merge-aware.

    python -m tests.bench.merge_aware [--rates 2e-4 5e-4 1e-3 4e-3 1e-2] [--steps 60] [--format nf4_dq]

The shipped model is quantised and fine-tuned on some of the standard library's source, as ``examples.qlora`` does. The
table has the mean loss in nats a token on rows that were held out, for each learning rate: with the adapter attached,
merged into packed weights, and merged after merge-aware training, without and with dither (``lora.dither``). A share is
(base - merged) / (base - attached), with the gain of usual training below the line. The last columns are the median
seconds of a step of usual and of merge-aware training.
"""

import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import tyro
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from torch.func import grad_and_value

from examples.data import dataset as data
from fquant import jit, lora, optim, quantize, tree
from fquant.format import parse
from models import decoder, hf

MODEL = Path(__file__).parents[3] / "examples" / "model"
WEIGHTS = r"layers\.\d+\.(q|k|v|o|gate|up|down)"


@dataclass(frozen=True)
class Options:
    """Measure what of a LoRA's gain survives merging."""

    rates: tuple[float, ...] = (2e-4, 5e-4, 1e-3, 4e-3, 1e-2)
    """Learning rates; both kinds of training take each."""
    steps: int = 60
    rank: int = 16
    alpha: float = 32.0
    strength: float = 3.0
    """Of dither, in rounding errors."""
    format: str = "nf4_dq"
    batch: int = 8
    seq: int = 256
    characters: int = 1_500_000


def main(options: Options) -> None:
    """Train at every rate twice, merge, and print the table."""
    cfg, params = hf.load(MODEL)
    base = tree.map_at(WEIGHTS, partial(quantize, format=parse(options.format)), params)
    stored = data.prepare(None, MODEL, options.seq, characters=options.characters)
    train, held = data.split(stored, 32)

    def loss(adapters: Any, base: Any, rows: data.Rows, aware: bool = False) -> torch.Tensor:
        params = lora.attach(base, adapters, merge_aware=aware)
        return decoder.loss(params, rows.tokens, rows.targets, cfg, segments=rows.segments)

    measured = jit(loss)
    before = float(measured({}, base, held))
    names = "rate", "attached", "merged", "share", "aware", "share", "with dither", "share", "step, s", "aware"
    table = Table(*names, box=SIMPLE_HEAD)
    start = lora.init(base, WEIGHTS, options.rank, options.alpha, key=0)
    dithered = lora.dither(base, start, 1, options.strength)
    for rate in options.rates:
        after, seconds = [], []
        for adapters, aware in ((start, False), (start, True), (dithered, True)):
            adapters, median = trained(options, rate, partial(loss, aware=aware), base, train, adapters)
            after += [] if aware else [float(measured(adapters, base, held))]
            after.append(float(measured({}, lora.merge_packed(base, adapters)[0], held)))
            seconds.append(f"{median:.2f}")
        attached, *merged = after
        cells = [cell for x in merged for cell in (f"{x:.4f}", f"{(before - x) / (before - attached):.2f}")]
        table.add_row(f"{rate:g}", f"{attached:.4f}", *cells, *seconds[:2])
    Console().print(options, f"base {before:.4f}", table)


def trained(
    options: Options, rate: float, loss: Any, base: Any, train: data.Stored, adapters: lora.Adapters
) -> tuple[lora.Adapters, float]:
    """Return ``adapters`` after training at a rate, and the median seconds of a step."""
    opt = optim.chain(optim.clip_by_global_norm(1.0), optim.adamw(optim.cosine(rate, options.steps, 6)))

    @partial(jit, donate=("adapters", "state"))
    def step(adapters: Any, state: Any, base: Any, rows: data.Rows) -> tuple[Any, Any]:
        grads, _ = grad_and_value(loss)(adapters, base, rows)
        updates, state = opt.update(grads, state, adapters)
        return optim.apply_updates(adapters, updates), state

    adapters, times = tree.map(torch.clone, adapters), []
    state = opt.init(adapters)
    for i in range(options.steps):
        rows = data.batch(train, i, options.batch, 0)
        begin = time.perf_counter()
        adapters, state = step(adapters, state, base, rows)
        times.append(time.perf_counter() - begin)
    return adapters, sorted(times)[len(times) // 2]


if __name__ == "__main__":
    main(tyro.cli(Options))
