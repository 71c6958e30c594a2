"""Measure what of a LoRA's gain survives merging into 4 bits, trained as usual and merge-aware.

    python -m tests.bench.merge_aware [--rates 3e-4 1e-3 4e-3 1e-2] [--steps 60] [--format nf4_dq]

The shipped model is quantised and fine-tuned on some of the standard library's source, as ``examples.qlora`` does. The
table has the mean loss in nats a token on rows that were held out, for each learning rate: with the adapter attached,
merged into packed weights, and merged after merge-aware training. A share is (base - merged) / (base - attached), with
the gain of usual training below the line. ``aware`` at one rate may be compared with ``attached`` at another: a code
changes only if an update reaches half a step, so merge-aware training wants a larger rate. The last columns are the
median seconds of a step of either kind.
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

from examples.common import data
from fquant import jit, lora, optim, quantize, tree
from fquant.format import parse
from models import decoder, hf

MODEL = Path(__file__).parents[3] / "examples" / "model"
WEIGHTS = r"layers\.\d+\.(q|k|v|o|gate|up|down)"


@dataclass(frozen=True)
class Options:
    """Measure what of a LoRA's gain survives merging."""

    rates: tuple[float, ...] = (3e-4, 1e-3, 4e-3, 1e-2)
    """Learning rates; both kinds of training take each."""
    steps: int = 60
    rank: int = 16
    alpha: float = 32.0
    format: str = "nf4_dq"
    batch: int = 8
    seq: int = 256
    characters: int = 1_500_000


def main(options: Options) -> None:
    """Train at every rate twice, merge, and print the table."""
    cfg, params = hf.load(MODEL)
    base = tree.map_at(WEIGHTS, partial(quantize, format=parse(options.format)), params)
    tokenizer = data.tokenizer(MODEL)
    eos, bos = data.special(MODEL)
    corpus = data.encode(data.documents(None, tokenizer, options.characters), tokenizer, eos, bos)
    train, held = data.split(data.pack(corpus, options.seq), 32)

    def loss(adapters: Any, base: Any, rows: data.Rows, aware: bool = False) -> torch.Tensor:
        params = lora.attach(base, adapters, merge_aware=aware)
        return decoder.loss(params, rows.tokens, rows.targets, cfg, segments=rows.segments)

    measured = jit(loss)
    before = float(measured({}, base, held))
    table = Table("rate", "attached", "merged", "share", "aware, merged", "share", "step, s", "aware", box=SIMPLE_HEAD)
    best = before
    for rate in options.rates:
        found = []
        for aware in (False, True):
            adapters, seconds = trained(options, rate, partial(loss, aware=aware), base, train)
            merged, _ = lora.merge_packed(base, adapters)
            found.append((float(measured(adapters, base, held)), float(measured({}, merged, held)), seconds))
        (attached, naive, slow), (_, kept, slow_aware) = found
        best = min(best, attached)
        share = lambda x, attached=attached: f"{(before - x) / (before - attached):.2f}"
        row = f"{attached:.4f}", f"{naive:.4f}", share(naive), f"{kept:.4f}", share(kept)
        table.add_row(f"{rate:g}", *row, f"{slow:.2f}", f"{slow_aware:.2f}")
    Console().print(options, f"base {before:.4f}, best attached {best:.4f}", table)


def trained(options: Options, rate: float, loss: Any, base: Any, train: data.Rows) -> tuple[lora.Adapters, float]:
    """Return adapters that were trained at a rate, and the median seconds of a step."""
    opt = optim.chain(optim.clip_by_global_norm(1.0), optim.adamw(optim.cosine(rate, options.steps, 6)))

    @partial(jit, donate=("adapters", "state"))
    def step(adapters: Any, state: Any, base: Any, rows: data.Rows) -> tuple[Any, Any]:
        grads, _ = grad_and_value(loss)(adapters, base, rows)
        updates, state = opt.update(grads, state, adapters)
        return optim.apply_updates(adapters, updates), state

    adapters, times = lora.init(base, WEIGHTS, options.rank, options.alpha, key=0), []
    state = opt.init(adapters)
    for i in range(options.steps):
        rows = data.batch(train, i, options.batch, 0)
        begin = time.perf_counter()
        adapters, state = step(adapters, state, base, rows)
        times.append(time.perf_counter() - begin)
    return adapters, sorted(times)[len(times) // 2]


if __name__ == "__main__":
    main(tyro.cli(Options))
