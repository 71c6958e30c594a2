"""Measure what of a LoRA's gain survives merging into 4 bits, trained as usual and merge-aware.

    python -m tests.bench.merge_aware [--steps 60] [--lr 1e-2] [--format nf4_dq]

The shipped model is quantised and fine-tuned on some of the standard library's source, as the first example of the
README does. The table has the mean loss in nats a token on rows that were held out: of the base, with the adapter
attached, merged into packed weights, and merged after merge-aware training. The share is (base - merged) / (base -
attached), with the gain of usual training below the line. Last it prints the time of a step of either kind.
"""

import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path

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


@dataclass(frozen=True)
class Options:
    """Measure what of a LoRA's gain survives merging."""

    steps: int = 60
    lr: float = 1e-2
    """Learning rate of both kinds of training."""
    aware_lr: float | None = None
    """Learning rate of merge-aware training, if it is another."""
    rank: int = 16
    alpha: float = 32.0
    format: str = "nf4_dq"
    batch: int = 8
    seq: int = 256
    characters: int = 1_500_000


def main(options: Options) -> None:
    """Train twice, merge, and print the tables."""
    cfg, params = hf.load(MODEL)
    base = tree.map_at(r"layers\.\d+\.(q|k|v|o|gate|up|down)", partial(quantize, format=parse(options.format)), params)
    tokenizer = data.tokenizer(MODEL)
    eos, bos = data.special(MODEL)
    corpus = data.encode(data.documents(None, tokenizer, options.characters), tokenizer, eos, bos)
    train, held = data.split(data.pack(corpus, options.seq), 32)

    @partial(jit)
    def measured(base, adapters, rows):
        params = lora.attach(base, adapters)
        return decoder.loss(params, rows.tokens, rows.targets, cfg, segments=rows.segments)

    losses = {"base": float(measured(base, {}, held))}
    table = Table("", "loss", "share of the gain", "step, s", box=SIMPLE_HEAD)
    start = lora.init(base, r"layers\.\d+\.(q|k|v|o|gate|up|down)", options.rank, options.alpha, key=0)
    seconds = {}
    for aware in (False, True):
        rate = options.aware_lr if aware and options.aware_lr else options.lr
        opt = optim.chain(optim.clip_by_global_norm(1.0), optim.adamw(optim.cosine(rate, options.steps, 6)))

        def loss(adapters, base, rows, aware=aware):
            params = lora.attach(base, adapters, merge_aware=aware)
            return decoder.loss(params, rows.tokens, rows.targets, cfg, segments=rows.segments)

        @partial(jit, donate=("adapters", "state"))
        def step(adapters, state, base, rows, loss=loss, opt=opt):
            grads, value = grad_and_value(loss)(adapters, base, rows)
            updates, state = opt.update(grads, state, adapters)
            return optim.apply_updates(adapters, updates), state, value

        adapters, times = tree.map(torch.clone, start), []
        state = opt.init(adapters)
        for i in range(options.steps):
            rows = data.batch(train, i, options.batch, 0)
            begin = time.perf_counter()
            adapters, state, _ = step(adapters, state, base, rows)
            times.append(time.perf_counter() - begin)
        seconds[aware] = sorted(times)[len(times) // 2]
        name = "merge-aware" if aware else "adapter"
        losses[f"{name} attached"] = float(measured(base, adapters, held))
        merged, _ = lora.merge_packed(base, adapters)
        losses[f"{name} merged"] = float(measured(merged, {}, held))
    gain = losses["base"] - losses["adapter attached"]
    for name, value in losses.items():
        time_of = f"{seconds[name.startswith('merge')]:.2f}" if name.endswith("attached") else ""
        table.add_row(name, f"{value:.4f}", f"{(losses['base'] - value) / gain:.3f}", time_of)
    Console().print(options, table)


if __name__ == "__main__":
    main(tyro.cli(Options))
